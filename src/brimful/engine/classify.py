"""Classifying texts with a saved model: the packed forward pass of training, and what its outputs mean."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from brimful.core.errors import ModelError, printable
from brimful.core.listener import Listener
from brimful.core.options import ClassifyOptions
from brimful.core.records import LabelSpace, TaskName
from brimful.data.examples import has_text
from brimful.data.tokens import Encoder, Tokens, tokenize
from brimful.engine.build import make_layout
from brimful.engine.predict import chunks, predict_logits
from brimful.engine.prepare import longest_sequence
from brimful.hardware.probe import choose_device
from brimful.models.execution import has_token_types
from brimful.models.intake import ModelFacts, inspect_model, load_tokenizer
from brimful.models.load import load_model
from brimful.models.proof import prove
from brimful.techniques.attention import choose_kernels
from brimful.techniques.packing import Packing
from brimful.techniques.precision import Precision, choose_precision

#: Most texts laid out in one micro-batch.
_MOST_TEXTS = 512
#: Most tokens of a micro-batch unless --token-budget says otherwise.
_DEFAULT_BUDGET = 8192
#: Batches looked at, about, to choose the shapes of micro-batches.
_LOOKED_AT = 2000


@dataclass(frozen=True, kw_only=True)
class Answers:
    """What a classifier said of N texts.

    scores_NC: probabilities, or the numbers themselves for regression; NaN in the rows of texts without an answer.
    always_scored: a model of one output without a stated task: its one score is given whatever it is.
    num_empty: texts without an answer: null, blank, or without a token that the model knows. num_truncated: texts that
    were cut. num_not_finite: texts that the model gave no number for.
    packed: how it ran. reason: why so.
    """

    space: LabelSpace
    scores_NC: npt.NDArray[np.float64]
    always_scored: bool
    num_empty: int
    num_truncated: int
    num_not_finite: int
    packed: bool
    reason: str

    def table(self, threshold: float = 0.5) -> pa.Table:
        """Columns `label` and `score` of all texts, named as transformers' pipeline names them; null without an answer.

        single_label: the likeliest and its probability. multi_label: lists of those from `threshold` on, the likeliest
        first. regression: no label; the number, or a list of them in the order of the outputs.
        """
        absent_N = np.asarray(~np.isfinite(self.scores_NC).all(axis=1))
        scores_NC = _shortest(np.nan_to_num(self.scores_NC, posinf=0.0, neginf=0.0))
        if self.space.task == "regression":
            several = scores_NC.shape[1] > 1
            return pa.table({"score": _column(scores_NC if several else scores_NC[:, 0], absent_N)})
        names = pa.array(self.space.names, pa.large_string())
        if self.space.task == "single_label" or self.always_scored:
            top_N = scores_NC.argmax(axis=1)
            labels = names.take(pa.array(top_N, mask=absent_N))
            return pa.table({"label": labels, "score": _column(scores_NC.max(axis=1), absent_N)})
        order_NC = np.argsort(-scores_NC, axis=1, kind="stable")
        given = [
            None if absent else o[s[o] >= threshold] for o, s, absent in zip(order_NC, scores_NC, absent_N, strict=True)
        ]
        labels = [None if g is None else [self.space.names[i] for i in g] for g in given]
        scores = [None if g is None else s[g].tolist() for g, s in zip(given, scores_NC, strict=True)]
        kinds = pa.large_list(pa.large_string()), pa.large_list(pa.float64())
        return pa.table({"label": pa.array(labels, kinds[0]), "score": pa.array(scores, kinds[1])})


def classify_texts(
    options: ClassifyOptions, texts: pa.ChunkedArray, pairs: pa.ChunkedArray | None, listener: Listener
) -> Answers:
    """Scores of every text (or pair), in order. texts, pairs: (N,) large_string; null and blank ones get no answer.

    Raises: InputError for a model without a classification head, or anything else that cannot be done.
    """
    precision = choose_precision(options.precision, choose_device(options.device))
    facts = inspect_model(options.model, trust_remote_code=options.trust_remote_code, allow_pickle=options.allow_pickle)
    if not facts.has_head:
        raise ModelError(
            f"{printable(options.model)} has no classification head: {facts.head_note}",
            hint="fine-tune it first: brimful train",
        )
    max_length = longest_sequence(options.max_length, facts, options.model)
    encoder = Encoder.from_tokenizer(load_tokenizer(facts), max_length, with_types=has_token_types(facts.config))
    given_N = has_text(texts) if pairs is None else pc.and_(has_text(texts), has_text(pairs))
    some, their_pairs = texts.filter(given_N), None if pairs is None else pairs.filter(given_N)
    listener.stage(f"tokenising {len(some):,} texts")
    tokens = tokenize(
        encoder, some, their_pairs, progress=lambda done: listener.count(done, len(some)), may_be_empty=True
    )
    space = _space(facts.config)
    logits_MC, packing = _logits(options, facts, space, tokens, max_length, precision, listener)
    scores_NC = np.full((len(texts), len(space.names)), np.nan)
    scores_NC[given_N.to_numpy()] = _scores(logits_MC, space.task)
    with_tokens_M = tokens.lengths > 0
    return Answers(
        space=space,
        scores_NC=scores_NC,
        always_scored=facts.config.problem_type is None and len(space.names) == 1,
        num_empty=len(texts) - int(np.count_nonzero(with_tokens_M)),
        num_truncated=tokens.num_truncated,
        num_not_finite=int(np.count_nonzero(~np.isfinite(logits_MC[with_tokens_M]).all(axis=1))),
        packed=packing.packed,
        reason=packing.supports().because,
    )


def _logits(
    options: ClassifyOptions,
    facts: ModelFacts,
    space: LabelSpace,
    tokens: Tokens,
    max_length: int,
    precision: Precision,
    listener: Listener,
) -> tuple[npt.NDArray[np.float32], Packing]:
    """(M, C) of the tokenised texts, NaN for one without tokens, and how they ran."""
    listener.stage("loading the model")
    model = load_model(facts, space, head="kept", seed=0)
    with precision.apply():
        typical_length = round(float(tokens.lengths.mean())) if len(tokens) else 0
        proof = prove(
            model,
            max_length=max_length,
            device=precision.device,
            precision=precision.value,
            typical_length=typical_length,
        )
        packing = Packing(proof=proof, wanted=options.packing == "auto")
        execution = packing.apply(model.to(precision.device).eval())
        # Where rows influence one another, a text's answer must not depend on its neighbours: each is a batch.
        most_rows = _MOST_TEXTS if proof.independent else 1
        budget = options.token_budget or _DEFAULT_BUDGET
        batches = [tokens.lengths[rows] for rows in chunks(tokens.lengths, budget, most_rows)]
        layout, _ = make_layout(
            packing,
            choose_kernels(facts.config, precision, typical_length),
            precision,
            facts.config,
            batches=batches[:: 1 + len(batches) // _LOOKED_AT] or [np.array([1])],
            batch_size=most_rows,
            max_length=max_length,
            token_budget=budget,
        )
        listener.stage(f"classifying {len(tokens):,} texts")
        logits_MC = predict_logits(
            execution,
            tokens,
            layout,
            precision,
            batch_tokens=budget,
            most_rows=most_rows,
            progress=lambda done: listener.count(done, len(tokens)),
        )
    return logits_MC, packing


def _space(config: Any) -> LabelSpace:
    """What the model's outputs mean, by its configuration, as transformers' pipeline reads it."""
    names = tuple(str(config.id2label.get(i, f"LABEL_{i}")) for i in range(config.num_labels))
    task: TaskName = "single_label"
    if config.problem_type == "regression":
        task = "regression"
    elif config.problem_type == "multi_label_classification" or len(names) == 1:
        task = "multi_label"
    return LabelSpace(
        task=task, names=names, values={} if task == "regression" else {n: i for i, n in enumerate(names)}
    )


def _scores(logits_NC: np.ndarray, task: TaskName) -> npt.NDArray[np.float64]:
    """Softmax, sigmoid or the logits themselves, in fp64."""
    exact_NC = logits_NC.astype(np.float64)
    if task == "regression":
        return exact_NC
    with np.errstate(invalid="ignore"):  # not finite in, not finite out
        if task == "multi_label":
            return np.asarray(np.exp(-np.logaddexp(0, -exact_NC)))
        powers_NC = np.exp(exact_NC - exact_NC.max(-1, keepdims=True))
        return np.asarray(powers_NC / powers_NC.sum(-1, keepdims=True))


def _shortest(numbers: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Each number with only the digits that tell it from its neighbours in fp32: 0.98765 for 0.98765002."""
    return numbers.astype(np.float32).astype(np.str_).astype(np.float64)


def _column(numbers: npt.NDArray[np.float64], absent_N: npt.NDArray[np.bool_]) -> pa.Array:
    """(N,) numbers, or (N, C) as lists of numbers; null where absent."""
    if numbers.ndim == 1:
        return pa.array(numbers, mask=absent_N)
    rows = [None if absent else row.tolist() for row, absent in zip(numbers, absent_N, strict=True)]
    return pa.array(rows, pa.large_list(pa.float64()))

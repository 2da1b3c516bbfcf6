"""Classifying texts with a saved model: the packed forward pass of training, and what its outputs mean."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from brimful.core.errors import ModelError
from brimful.core.listener import Listener
from brimful.core.options import ClassifyOptions
from brimful.core.records import LabelSpace, TaskName
from brimful.data.tokens import Encoder, tokenize
from brimful.engine.build import make_layout
from brimful.engine.predict import predict_logits
from brimful.engine.prepare import longest_sequence
from brimful.hardware.probe import choose_device
from brimful.models.execution import has_token_types
from brimful.models.intake import inspect_model, load_tokenizer
from brimful.models.load import load_model
from brimful.models.proof import prove
from brimful.techniques.attention import choose_kernels
from brimful.techniques.packing import Packing
from brimful.techniques.precision import choose_precision

#: Most texts laid out in one micro-batch.
_MOST_TEXTS = 512


@dataclass(frozen=True, kw_only=True)
class Answers:
    """What a classifier said of N texts.

    scores_NC: probabilities, or the numbers themselves for regression.
    num_truncated: texts that were cut. packed: how it ran. reason: why so.
    """

    space: LabelSpace
    scores_NC: np.ndarray
    num_truncated: int
    packed: bool
    reason: str

    def best(self, row: int, threshold: float = 0.5) -> dict[str, Any]:
        """Label and score of one text as transformers' pipeline names them; a list of labels for multi-label."""
        scores = self.scores_NC[row]
        if self.space.task == "regression":
            values = [round(float(score), 6) for score in scores]
            return {"score": values[0] if len(values) == 1 else values}
        if self.space.task == "multi_label":
            given = [i for i in np.argsort(-scores) if scores[i] >= threshold]
            return {"label": [self.space.names[i] for i in given], "score": [float(scores[i]) for i in given]}
        top = int(scores.argmax())
        return {"label": self.space.names[top], "score": float(scores[top])}


def classify_texts(
    options: ClassifyOptions, texts: pa.ChunkedArray, pairs: pa.ChunkedArray | None, listener: Listener
) -> Answers:
    """Scores of every text (or pair), in order.

    Raises: InputError for a model without a classification head, or anything else that cannot be done.
    """
    facts = inspect_model(options.model, trust_remote_code=options.trust_remote_code, allow_pickle=options.allow_pickle)
    if not facts.has_head:
        raise ModelError(
            f"{options.model} has no classification head: {facts.head_note}", hint="fine-tune it first: brimful train"
        )
    precision = choose_precision(options.precision, choose_device(options.device))
    max_length = longest_sequence(options.max_length, facts, options.model)
    space = _space(facts.config)
    encoder = Encoder.from_tokenizer(load_tokenizer(facts), max_length, with_types=has_token_types(facts.config))
    listener.stage(f"tokenising {len(texts):,} texts")
    tokens = tokenize(encoder, texts, pairs, progress=lambda done: listener.count(done, len(texts)))
    listener.stage("loading the model")
    model = load_model(facts, space, head="kept", seed=0)
    typical_length = round(float(tokens.lengths.mean()))
    with precision.apply():
        proof = prove(
            model,
            max_length=max_length,
            device=precision.device,
            precision=precision.value,
            typical_length=typical_length,
        )
        packing = Packing(proof=proof, wanted=options.packing == "auto")
        execution = packing.apply(model.to(precision.device).eval())
        budget = options.token_budget or 8192
        layout, _ = make_layout(
            packing,
            choose_kernels(facts.config, precision, typical_length),
            precision,
            facts.config,
            batches=[np.array([max(budget, max_length)])],
            batch_size=_MOST_TEXTS,
            max_length=max_length,
            token_budget=budget,
        )
        listener.stage(f"classifying {len(texts):,} texts")
        logits_NC = predict_logits(
            execution,
            tokens,
            layout,
            precision,
            batch_tokens=budget,
            most_rows=_MOST_TEXTS,
            progress=lambda done: listener.count(done, len(texts)),
        )
    return Answers(
        space=space,
        scores_NC=_scores(logits_NC, space.task),
        num_truncated=tokens.num_truncated,
        packed=packing.packed,
        reason=packing.supports().because,
    )


def _space(config: Any) -> LabelSpace:
    """What the model's outputs mean, by its configuration, as transformers' pipeline reads it."""
    names = tuple(config.id2label[i] for i in range(config.num_labels))
    by_type: dict[str, TaskName] = {
        "multi_label_classification": "multi_label",
        "regression": "regression",
        "single_label_classification": "single_label",
    }
    task = by_type.get(config.problem_type or "", "multi_label" if len(names) == 1 else "single_label")
    return LabelSpace(
        task=task, names=names, values={} if task == "regression" else {n: i for i, n in enumerate(names)}
    )


def _scores(logits_NC: np.ndarray, task: TaskName) -> np.ndarray:
    """Softmax, sigmoid or the logits themselves, in fp64."""
    logits_NC = logits_NC.astype(np.float64)
    if task == "regression":
        return logits_NC
    if task == "multi_label":
        sigmoid_NC: np.ndarray = 1 / (1 + np.exp(-logits_NC))
        return sigmoid_NC
    powers_NC = np.exp(logits_NC - logits_NC.max(-1, keepdims=True))
    softmax_NC: np.ndarray = powers_NC / powers_NC.sum(-1, keepdims=True)
    return softmax_NC

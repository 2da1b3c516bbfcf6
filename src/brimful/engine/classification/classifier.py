"""A saved classifier as a function from texts to answers, called as transformers' pipeline is and answering as it does.

Texts go through the same stages as a file's rows, so that a long list is tokenised while the device computes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Literal, Self

import numpy as np
import pyarrow as pa

from brimful.core.callbacks import Callbacks
from brimful.core.classification import AnswerEquivalence
from brimful.core.cores import num_cores
from brimful.core.errors import DataError, OptionError, encodes, printable
from brimful.core.options.classify import ClassifyOptions
from brimful.core.records import LabelSpace, Recipe
from brimful.data.readers.in_memory import is_table
from brimful.data.tokens.encoder import OTHER_TOKENIZER, Encoder
from brimful.data.tokens.token_stream import TokenStream, choose_workers
from brimful.engine.classification.request import (
    Asked,
    Request,
    TextRequest,
    Texts,
    make_zero_shot,
    zero_shot_encoder,
)
from brimful.engine.classification.runner import Runner, check_model
from brimful.engine.classification.stages import Busy, Stages, run_stages
from brimful.engine.classification.verify import Logits, compare, plain_logits, rows_to_compare, verified_runner
from brimful.engine.classification.windows import WindowSize
from brimful.hardware.probe import choose_device
from brimful.levers.precision import choose_forward_precision
from brimful.tasks.answers import answer_form, check_objects, objects
from brimful.tasks.candidates import Candidates, parse_labels
from brimful.tasks.zero_shot import DEFAULT_TEMPLATE, zero_shot_form

#: First texts of the first call, by whose lengths kernels are chosen.
_SAMPLE = 2048

Text = str | None
Given = Text | Mapping[str, Text] | Sequence[Text] | Sequence[Mapping[str, Text]]
_Shape = Literal["list", "text", "pair"]
#: Candidate labels of all texts, also as text in which commas part them; or those of each text.
Labels = Sequence[str] | str | Sequence[Sequence[str]]
#: Arguments of transformers' pipelines that calls here have under another name, or need not have.
_PIPELINES = {
    "batch_size": "batches are made of tokens: give Classifier a token_budget",
    "candidate_labels": "here they are labels",
    "max_length": "give it to Classifier",
    "padding": "rows are packed: leave it out",
    "return_all_scores": "use top_k=None",
    "truncation": "texts are cut at Classifier's max_length: leave it out",
}


class ModelClassifier:
    """One model on its device. Calls of several threads take turns. `close`, or a `with` block, ends what tokenises; a
    later call starts it again. How it runs is chosen by the texts of the first call: `execution="compiled"` where that
    is a small one and large ones follow.

    Raises: InputError for a model that is missing, torn or no classifier. Weights are read by the first call.
    """

    def __init__(self, options: ClassifyOptions, callbacks: Callbacks) -> None:
        self._options, self._callbacks = options, callbacks
        self._precision = choose_forward_precision(options.precision, choose_device(options.device))
        self._checked = check_model(options)
        self._runner: Runner | None = None
        self._warned_of_pairs = False
        self._tokens = _KeptTokens(lambda: self._checked.encoder, callbacks)
        self._zero_shot_tokens = _KeptTokens(lambda: self._pair_encoder.without_special_tokens(), callbacks)
        self._equivalence: AnswerEquivalence | None = None
        self._fallback: str | None = None
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the threads and processes that tokenise, once no call is under way."""
        with self._lock:
            self._tokens.close()
            self._zero_shot_tokens.close()

    @property
    def labels(self) -> LabelSpace:
        """Task and output names of the model."""
        return self._checked.space

    @property
    def recipe(self) -> Recipe | None:
        """The recipe; None before the first call."""
        return None if self._runner is None else self._runner.recipe

    @property
    def equivalence(self) -> AnswerEquivalence | None:
        """Comparison of the first texts' answers with those of the plain model; None before the first call."""
        return self._equivalence

    @property
    def fallback(self) -> str | None:
        """The reason why a slower path runs, where answers of a faster one differed."""
        return self._fallback

    def __call__(
        self,
        texts: Given,
        *second: Any,
        pairs: Sequence[Text] | Text = None,
        labels: Labels | None = None,
        multi_label: bool = False,
        hypothesis_template: str = DEFAULT_TEMPLATE,
        top_k: int | Literal[""] | None = "",
        function_to_apply: str | None = None,
        **unknown: Any,
    ) -> list[Any] | dict[str, Any]:
        """Answers in the order of the texts, of the shape that transformers' pipelines give them.

        texts: one, or a list of them; pairs as {"text": ..., "text_pair": ...}, or with their second texts as `pairs`.
        A text that is None, or that cannot be encoded, has no label: {"label": None, "score": None}.
        labels: candidates for zero-shot, or a list of them for each text, which may be empty: such a text has no
        answer. With `multi_label` each label is true or not by itself. top_k: labels of each text,
        None for all. function_to_apply: sigmoid, softmax or none instead of the task's own.
        Raises: OptionError for what is no text, for a second argument without a name (transformers' pipelines take
        candidate labels for it, cross-encoders second texts), and for an argument that there is not.
        """
        if second:
            raise OptionError(
                "a classifier takes one argument without a name, the texts",
                hint="give candidate labels as labels=..., second texts as pairs=...",
            )
        if unknown:
            name, otherwise = next(iter(unknown)), "help(brimful.Classifier.__call__) shows what it is called with"
            raise OptionError(
                f"a classifier is not called with {printable(name)}", hint=_PIPELINES.get(name, otherwise)
            )
        if labels is None:
            if multi_label:
                raise OptionError("multi_label is for zero-shot", hint="give labels, or top_k=None for all scores")
            if hypothesis_template != DEFAULT_TEMPLATE:
                raise OptionError("hypothesis_template is for zero-shot", hint="give labels, or leave it out")
            check_objects(top_k=top_k, function_to_apply=function_to_apply)
        elif top_k != "" or function_to_apply is not None:
            raise OptionError("top_k and function_to_apply are not for zero-shot", hint="it gives all labels, ranked")
        window, given, originals = _window(texts, pairs, self._callbacks)
        if labels is None:
            self._compare_with_training(window)
        with self._lock:
            if labels is not None:
                return self._zero_shot(window, given, originals, labels, multi_label, hypothesis_template)
            return self._answers(window, given, top_k=top_k, function_to_apply=function_to_apply)

    def _compare_with_training(self, window: Texts) -> None:
        """Warn once of pairs where the model was trained on single texts, or the other way round."""
        inputs = self._checked.facts.inputs
        if inputs is None or self._warned_of_pairs or (inputs.pair_column is None) == (window.pairs is None):
            return
        self._warned_of_pairs = True
        if inputs.pair_column is None:
            self._callbacks.warning("the model was trained on single texts, and pairs are given")
            return
        named = f"{printable(inputs.text_column)!r} with {printable(inputs.pair_column)!r}"
        self._callbacks.warning(f"the model was trained on pairs, {named}, and single texts are given: use pairs=...")

    def logits(self, texts: Given, pairs: Sequence[Text] | Text = None) -> Logits:
        """(N, C) the model's raw outputs, in the order of its labels; NaN for a text that is None."""
        window = _window(texts, pairs, self._callbacks)[0]
        with self._lock:
            return self._logits(window)

    def verify(self, texts: Given, pairs: Sequence[Text] | Text = None) -> AnswerEquivalence:
        """Compare the answers on these texts with those of the plain model in fp32, which is loaded for it."""
        window, _, _ = _window(texts, pairs, self._callbacks)
        if window.texts.null_count == len(window):
            raise OptionError("there is no text to compare", hint="give some that the model is meant for")
        with self._lock:
            request = self._text_request(window)
            asked = request.submit(window, Busy())()
            plain_PC = plain_logits(self._checked, self._options, self._precision, asked, self._callbacks)
            return compare(self._ready_runner(request, window), request, asked, plain_PC)

    def _answers(self, window: Texts, given: _Shape, **form: Any) -> list[Any] | dict[str, Any]:
        if given != "list":
            return objects(self.labels, self._logits(window), given=given, **form)
        answers: list[Any] = []

        def answer(_: Asked, logits_NC: Logits) -> None:
            answers.extend(objects(self.labels, logits_NC, **form))

        self._run(self._text_request(window), window, answer)
        return answers

    def _logits(self, window: Texts) -> Logits:
        found = [np.zeros((0, self.labels.num_outputs), np.float32)]
        self._run(self._text_request(window), window, lambda _, logits_NC: found.append(logits_NC))
        return np.concatenate(found)

    def _text_request(self, window: Texts) -> TextRequest:
        return TextRequest(answer_form(self._checked.facts.config), self._tokens.stream(self._num_workers(window)))

    def _zero_shot(
        self, window: Texts, given: _Shape, originals: list[Text], labels: Labels, multi_label: bool, template: str,
    ) -> list[Any] | dict[str, Any]:  # fmt: skip
        if window.pairs is not None:
            raise OptionError("zero-shot reads one text at a time, and pairs were given", hint="give texts or labels")
        form = zero_shot_form(self._checked.facts.config, multi_label=multi_label, template=template)
        tokens = self._zero_shot_tokens.stream(self._num_workers(window))
        window = replace(window, labels=_labels_of_each(labels, len(window)))
        request = make_zero_shot(form, self._pair_encoder, tokens, labels, window.slice(0, _SAMPLE), self._callbacks)
        found: list[Any] = []

        def answer(asked: Asked, logits_PC: Logits) -> None:
            assert asked.candidates is not None
            rows = originals[len(found) : len(found) + len(asked.num_tokens_N)]
            found.extend(form.objects(logits_PC, asked.candidates, rows))

        self._run(request, window, answer)
        return found if given == "list" else found[0]

    @cached_property
    def _pair_encoder(self) -> Encoder:
        return zero_shot_encoder(self._checked)

    def _run(self, request: Request, window: Texts, keep: Callable[[Asked, Logits], None]) -> None:
        """Hands what was asked and answered to `keep`, part by part in order, in another thread."""
        if not len(window):
            return
        runner, stages, num_truncated, num_done = self._ready_runner(request, window), Stages(), 0, 0
        num_lost = 0

        def write(_: Texts, asked: Asked, logits: Logits) -> None:
            nonlocal num_truncated, num_done, num_lost
            for row, said in asked.faults.items():
                raise DataError(f"texts[{num_done + row}]: {said}", hint=OTHER_TOKENIZER)
            num_done += len(asked.num_tokens_N)
            num_truncated += int(asked.truncated_N.sum())
            num_lost += _num_lost(request, asked, logits)
            keep(asked, logits)

        size = WindowSize.on(self._precision.device.type, sequences_per_row=request.sequences_per_row)
        run_stages(
            size.cut(window),
            tokenise=lambda part: request.submit(part, stages.tokenise),
            compute=lambda asked: runner.submit(asked.sequences),
            write=write,
            stages=stages,
            stop=lambda: False,
        )
        if num_truncated:
            self._tell_of_cut(num_truncated, len(window))
        if num_lost:
            have = "has" if num_lost == 1 else "have"
            self._callbacks.warning(
                f"{num_lost:,} of {len(window):,} texts {have} no answer, as the model's scores are not finite"
            )

    def _tell_of_cut(self, num_truncated: int, num_texts: int) -> None:
        """A warning; where the length was asked for, a note."""
        longest = self._checked.longest
        tell = self._callbacks.note if longest.asked else self._callbacks.warning
        tell(
            f"{num_truncated:,} of {num_texts:,} texts {'was' if num_truncated == 1 else 'were'} longer than"
            f" {longest.tokens:,} tokens ({longest.reason}), and cut there; max_length sets another length"
        )

    def _ready_runner(self, request: Request, window: Texts) -> Runner:
        """The one of all calls, made by the first texts of the first one."""
        if self._runner is None:
            sample = request.submit(window.slice(0, _SAMPLE), Busy())()
            first, mean_tokens = window.slice(0, _SAMPLE), float(sample.num_tokens_N.mean())
            num_tokens, on = mean_tokens * len(window), self._precision.device.type
            num_compared = rows_to_compare(self._options.verify, on, num_tokens, mean_tokens)
            made = verified_runner(
                *(self._checked, self._options, self._precision, request, first),
                asked=sample,
                num_compared=num_compared if first.asked_N().any() else 0,
                num_tokens=int(num_tokens),
                callbacks=self._callbacks,
            )
            self._runner, self._equivalence, self._fallback = made.runner, made.equivalence, made.fallback
        return self._runner

    def _num_workers(self, window: Texts) -> int:
        """Processes that should tokenise these texts."""
        if self._options.num_workers is not None:
            return self._options.num_workers
        return choose_workers(window.num_bytes, self._precision.device.type, num_cores() or 1)


def _num_lost(request: Request, asked: Asked, logits: Logits) -> int:
    """Texts that were read and have no answer, as a score of the model is not finite."""
    if np.isfinite(logits).all():
        return 0
    scores = request.form.columns(logits, asked.candidates)["score"]
    return int((scores.is_null().to_numpy(zero_copy_only=False) & (asked.num_tokens_N > 0)).sum())


class _KeptTokens:
    """A token stream that is kept for later calls; another one, with processes, when the first long list comes.

    encoder: called for each.
    """

    def __init__(self, encoder: Callable[[], Encoder], callbacks: Callbacks) -> None:
        self._encoder, self._callbacks = encoder, callbacks
        self._stream: TokenStream | None = None
        self._num_workers = 0

    def stream(self, num_workers: int) -> TokenStream:
        """One with at least so many processes."""
        if self._stream is None or self._stream.failed or num_workers > self._num_workers:
            self.close()
            self._num_workers = num_workers
            self._stream = TokenStream(self._encoder(), num_workers=num_workers, warn=self._callbacks.warning)
        return self._stream

    def close(self) -> None:
        """Ends threads and processes. The next call begins anew."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None


def _labels_of_each(labels: Labels, num_texts: int) -> Candidates | None:
    """Each text's own candidate labels, None where all have the same. Raises: OptionError."""
    found = [] if isinstance(labels, str) else list(labels)
    if any(isinstance(each, str) or not isinstance(each, Sequence | np.ndarray) for each in found):
        return None
    if not found and (isinstance(labels, str) or num_texts):
        return None
    if len(found) != num_texts:
        raise OptionError(f"{num_texts:,} texts have {len(found):,} lists of labels", hint="give one to each text")
    own = [parse_labels(list(each)) if len(each) else () for each in found]
    return Candidates.from_column(pa.array(own, pa.large_list(pa.large_string())))


def _window(texts: Any, pairs: Any, callbacks: Callbacks) -> tuple[Texts, _Shape, list[Text]]:
    """Given texts as columns, their form, and the texts themselves."""
    given: _Shape = "list"
    if isinstance(texts, str | None):
        if not isinstance(pairs, str | None):
            raise OptionError("one text was given and several pairs", hint="give a list of texts")
        texts, pairs, given = [texts], None if pairs is None else [pairs], "text"
    elif isinstance(texts, Mapping):
        texts, given = [texts], "pair"
    elif isinstance(pairs, str):
        raise OptionError("several texts were given and one pair", hint="give a list of pairs, one for each text")
    firsts = _listed("texts", texts)
    seconds: list[Text] | None = None if pairs is None else _listed("pairs", pairs)
    if firsts and isinstance(firsts[0], Mapping):
        firsts, seconds = _of_mappings(firsts)
    return _columns(firsts, seconds, callbacks), given, firsts


def _listed(name: str, texts: Any) -> list[Any]:
    if isinstance(texts, pa.Array | pa.ChunkedArray):
        return list(texts.to_pylist())
    if isinstance(texts, bytes | Mapping) or not hasattr(texts, "__iter__"):
        raise OptionError(f"{name} is {type(texts).__name__}: it must be a list of texts", hint="classifier([text])")
    if is_table(texts):  # a table would give the names of its columns
        hint = "give the column of its texts, or the whole to brimful.classify(model, table)"
        raise OptionError(f"{name} is a table of {len(texts.columns)} columns: it must be a list of texts", hint=hint)
    return list(texts)


def _of_mappings(given: Sequence[Any]) -> tuple[list[Text], list[Text] | None]:
    """First and second texts of [{"text": ..., "text_pair": ...}]."""
    keys = {"text", "text_pair"} if "text_pair" in given[0] else {"text"}
    wrong = next((i for i, each in enumerate(given) if not isinstance(each, Mapping) or set(each) != keys), None)
    if wrong is not None:
        raise OptionError(
            f"texts[{wrong}] is {printable(repr(given[wrong]))}",
            hint='each is {"text": ..., "text_pair": ...}, or each is {"text": ...}',
        )
    firsts = [each["text"] for each in given]
    seconds = [each.get("text_pair") for each in given]
    return firsts, seconds if any(second is not None for second in seconds) else None


def _columns(firsts: list[Text], seconds: list[Text] | None, callbacks: Callbacks) -> Texts:
    if seconds is not None and len(firsts) != len(seconds):
        raise OptionError(
            f"there are {len(firsts):,} texts and {len(seconds):,} pairs",
            hint="give each text its pair, in the same order",
        )
    first = _column("texts", firsts, callbacks)
    if seconds is None:
        return Texts(texts=first)
    second = _column("pairs", seconds, callbacks)
    there = pa.compute.and_(first.is_valid(), second.is_valid())
    return Texts(texts=pa.compute.if_else(there, first, None), pairs=pa.compute.if_else(there, second, None))


def _column(name: str, texts: list[Text], callbacks: Callbacks) -> pa.Array:
    try:
        return pa.array(texts, pa.large_string(), from_pandas=True)  # whose NaN is None
    except UnicodeEncodeError:
        kept = [text if not isinstance(text, str) or encodes(text) else None for text in texts]
        lost = sum(text is None for text in kept) - sum(text is None for text in texts)
        callbacks.warning(f"{lost:,} of {len(texts):,} {name} cannot be encoded (half a surrogate pair): no answer")
        return pa.array(kept, pa.large_string(), from_pandas=True)
    except (TypeError, ValueError, pa.ArrowException) as error:
        wrong = next((i for i, text in enumerate(texts) if not isinstance(text, str | None)), None)
        said = f"{name} must be a list of texts" if wrong is None else f"{name}[{wrong}] is no text"
        kind = printable(error) if wrong is None else f"it is of type {type(texts[wrong]).__name__}"
        raise OptionError(f"{said}: {kind}", hint="each is a str, or None for no text") from error

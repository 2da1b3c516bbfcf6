"""A saved classifier as a function from texts to answers, called as transformers' pipeline is and answering as it does.

Texts go through the same stages as a file's rows, so that a long list is tokenised while the device computes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from brimful.core.classification import Parity
from brimful.core.errors import OptionError, printable
from brimful.core.listener import Listener
from brimful.core.options import ClassifyOptions
from brimful.core.records import LabelSpace, Recipe
from brimful.data.token_stream import TokenStream, choose_workers
from brimful.engine.question import Asked, Question, TextQuestion, Texts, make_zero_shot
from brimful.engine.runner import Runner, check_model, make_runner
from brimful.engine.stream import Busy, Stages, run_stages
from brimful.engine.trust import parity_of
from brimful.engine.windows import WindowSize
from brimful.hardware.probe import choose_device, num_cores
from brimful.tasks.answers import answer_form, objects
from brimful.tasks.zero_shot import Candidates, zero_shot_form
from brimful.techniques.precision import choose_forward_precision

#: First texts of the first call, by whose lengths kernels are chosen.
_SAMPLE = 2048

Text = str | None
Given = Text | Mapping[str, Text] | Sequence[Text] | Sequence[Mapping[str, Text]]
Logits = npt.NDArray[np.float32]


class ModelClassifier:
    """One model on its device. Calls of several threads take turns. `close`, or a `with` block, ends what tokenises; a
    later call starts it again. How it runs is chosen by the texts of the first call: `execution="compiled"` where that
    is a small one and large ones follow.

    Raises: InputError for a model that is missing, torn or no classifier. Weights are read by the first call.
    """

    def __init__(self, options: ClassifyOptions, listener: Listener) -> None:
        self._options, self._listener = options, listener
        self._precision = choose_forward_precision(options.precision, choose_device(options.device))
        self._checked = check_model(options)
        self._stack = ExitStack()
        self._runner: Runner | None = None
        self._tokens: TokenStream | None = None
        self._workers = 0
        self._lock = threading.RLock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the threads and processes that tokenise."""
        self._stack.close()
        self._tokens = None

    @property
    def labels(self) -> LabelSpace:
        """What the model's outputs mean."""
        return self._checked.space

    @property
    def recipe(self) -> Recipe | None:
        """How it runs; None before the first call."""
        return None if self._runner is None else self._runner.recipe

    def __call__(
        self,
        texts: Given,
        pairs: Sequence[Text] | Text = None,
        *,
        labels: Sequence[str] | str | None = None,
        multi_label: bool = False,
        hypothesis_template: str = ClassifyOptions.hypothesis_template,
        top_k: int | Literal[""] | None = "",
        function_to_apply: str | None = None,
    ) -> list[Any] | dict[str, Any]:
        """Answers in the order of the texts, of the shape that transformers' pipelines give them.

        texts: one, or a list of them; pairs as {"text": ..., "text_pair": ...}, or with their second texts as `pairs`.
        A text that is None, or that cannot be encoded, has no label: {"label": None, "score": None}.
        labels: candidates for zero-shot; with `multi_label` each is true or not by itself. top_k: labels of each text,
        None for all. function_to_apply: sigmoid, softmax or none instead of the task's own.
        Raises: OptionError for what is no text.
        """
        window, given, originals = _window(texts, pairs, self._listener)
        if labels is None and multi_label:
            raise OptionError("multi_label is for zero-shot", hint="give labels, or top_k=None for all scores")
        if labels is not None and (top_k != "" or function_to_apply is not None):
            raise OptionError("top_k and function_to_apply are not for zero-shot", hint="it gives all labels, ranked")
        with self._lock:
            if labels is not None:
                return self._zero_shot(window, given, originals, labels, multi_label, hypothesis_template)
            if given != "list":
                logits_1C = self._logits(window)
                return objects(self.labels, logits_1C, top_k=top_k, function_to_apply=function_to_apply, given=given)
            answers: list[Any] = objects(  # of no text, but what is asked for is checked
                self.labels, np.zeros((0, self.labels.num_outputs), np.float32), top_k=top_k,
                function_to_apply=function_to_apply,
            )  # type: ignore[assignment]  # fmt: skip

            def answer(_: Asked, logits_NC: Logits) -> None:
                answers.extend(objects(self.labels, logits_NC, top_k=top_k, function_to_apply=function_to_apply))

            self._run(self._text_question(window), window, answer)
            return answers

    def logits(self, texts: Given, pairs: Sequence[Text] | Text = None) -> Logits:
        """(N, C) the model's raw outputs, in the order of its labels; NaN for a text that is None."""
        window = _window(texts, pairs, self._listener)[0]
        with self._lock:
            return self._logits(window)

    def verify(self, texts: Given, pairs: Sequence[Text] | Text = None) -> Parity:
        """How the answers on these texts compare with those of the plain model in fp32, which is loaded for it."""
        window, _, _ = _window(texts, pairs, self._listener)
        if window.texts.null_count == len(window):
            raise OptionError("there is no text to compare", hint="give some that the model is meant for")
        with self._lock:
            question = self._text_question(window)
            asked = question.submit(window, Busy())()
            runner = self._made_runner(asked)
            with self._precision.apply():
                return parity_of(self._checked, self._options, runner, question, asked, self._listener)

    def _text_question(self, window: Texts) -> TextQuestion:
        return TextQuestion(answer_form(self._checked.facts.config), self._token_stream(len(window)))

    def _logits(self, window: Texts) -> Logits:
        found = [np.zeros((0, self.labels.num_outputs), np.float32)]
        self._run(self._text_question(window), window, lambda _, logits_NC: found.append(logits_NC))
        return np.concatenate(found)

    def _zero_shot(
        self, window: Texts, given: str, originals: list[Text], labels: Sequence[str] | str, multi_label: bool,
        template: str,
    ) -> list[Any] | dict[str, Any]:  # fmt: skip
        if window.pairs is not None:
            raise OptionError("zero-shot reads one text at a time, and pairs were given", hint="give texts or labels")
        form = zero_shot_form(self._checked.facts.config, multi_label=multi_label, template=template)
        with ExitStack() as stack:
            workers = self._wanted_workers(len(window))
            question = make_zero_shot(
                self._checked, labels, form, window.first(_SAMPLE), workers, stack, self._listener
            )
            found: list[Any] = []

            def answer(asked: Asked, logits_PC: Logits) -> None:
                assert isinstance(asked.candidates, Candidates)
                rows = originals[len(found) : len(found) + len(asked.num_tokens_N)]
                found.extend(form.objects(logits_PC, asked.candidates, rows))

            self._run(question, window, answer, each=len(question.labels or ()))
        return found if given == "list" else found[0]

    def _run(self, question: Question, window: Texts, keep: Callable[[Asked, Logits], None], each: int = 1) -> None:
        """Hands what was asked and answered to `keep`, part by part in order, in another thread."""
        if len(window):
            with self._lock:
                self._run_alone(question, window, keep, each)

    def _run_alone(self, question: Question, window: Texts, keep: Callable[[Asked, Logits], None], each: int) -> None:
        runner = self._made_runner(None if self._runner else question.submit(window.first(_SAMPLE), Busy())(), window)
        stages = Stages()
        with self._precision.apply():
            run_stages(
                WindowSize.on(self._precision.device.type, sequences_per_row=each).cut(window),
                tokenise=lambda part: question.submit(part, stages.tokenise),
                compute=lambda asked: runner.submit(asked.sequences),
                write=lambda _, asked, logits: keep(asked, logits),
                stages=stages,
                stop=lambda: False,
            )

    def _made_runner(self, asked: Asked | None, window: Texts | None = None) -> Runner:
        if self._runner is None:
            assert asked is not None
            tokens = asked.sequences
            mean = float(asked.num_tokens_N.mean()) if len(asked.num_tokens_N) else 0.0
            with self._precision.apply():
                self._runner = make_runner(
                    self._checked,
                    self._options,
                    self._precision,
                    sample=tokens,
                    num_tokens=int(mean * len(window)) if window is not None else len(tokens.ids),
                    packing_wanted=self._options.packing == "auto",
                    listener=self._listener,
                )
        return self._runner

    def _token_stream(self, num_texts: int) -> TokenStream:
        """One for all calls; another one with processes when the first long list comes."""
        workers = self._wanted_workers(num_texts)
        if self._tokens is None or workers > self._workers:
            self._stack.close()
            self._tokens = self._stack.enter_context(
                TokenStream(self._checked.encoder, num_workers=workers, warn=self._listener.warning)
            )
            self._workers = workers
        return self._tokens

    def _wanted_workers(self, num_texts: int) -> int:
        if self._options.num_workers is not None:
            return self._options.num_workers
        return choose_workers(num_texts, self._precision.device.type, num_cores() or 1)


def _window(texts: Any, pairs: Any, listener: Listener) -> tuple[Texts, Literal["list", "text", "pair"], list[Text]]:
    """What was given as columns, what it was, and the texts themselves."""
    given: Literal["list", "text", "pair"] = "list"
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
    return _columns(firsts, seconds, listener), given, firsts


def _listed(name: str, texts: Any) -> list[Any]:
    if isinstance(texts, pa.Array | pa.ChunkedArray):
        return list(texts.to_pylist())
    if isinstance(texts, bytes | Mapping) or not hasattr(texts, "__iter__"):
        raise OptionError(f"{name} is {type(texts).__name__}: it must be a list of texts", hint="classifier([text])")
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


def _columns(firsts: list[Text], seconds: list[Text] | None, listener: Listener) -> Texts:
    if seconds is not None and len(firsts) != len(seconds):
        raise OptionError(
            f"there are {len(firsts):,} texts and {len(seconds):,} pairs",
            hint="give each text its pair, in the same order",
        )
    first = _column("texts", firsts, listener)
    if seconds is None:
        return Texts(texts=first)
    second = _column("pairs", seconds, listener)
    there = pa.compute.and_(first.is_valid(), second.is_valid())
    return Texts(texts=pa.compute.if_else(there, first, None), pairs=pa.compute.if_else(there, second, None))


def _column(name: str, texts: list[Text], listener: Listener) -> pa.Array:
    try:
        return pa.array(texts, pa.large_string())
    except UnicodeEncodeError:
        kept = [text if text is None or _encodes(text) else None for text in texts]
        lost = sum(text is None for text in kept) - sum(text is None for text in texts)
        listener.warning(f"{lost:,} of {len(texts):,} {name} cannot be encoded (half a surrogate pair): no answer")
        return pa.array(kept, pa.large_string())
    except (TypeError, ValueError, pa.ArrowException) as error:
        wrong = next((i for i, text in enumerate(texts) if not isinstance(text, str | None)), None)
        said = f"{name} must be a list of texts" if wrong is None else f"{name}[{wrong}] is no text"
        raise OptionError(f"{said}: {printable(error)}", hint="each is a str, or None for no text") from error


def _encodes(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True

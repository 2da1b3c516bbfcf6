"""transformers' pipelines of text classifiers, computed by `brimful.Classifier`.

    from brimful import pipeline  # was: from transformers import pipeline

Calls take what transformers' take, and return what they return. What is not a text classifier, or is asked for in a way
that has no form here, is handed to transformers, with a warning that says why.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import GeneratorType
from typing import Any, cast

import torch
from torch.utils.data import Dataset

from brimful.api import Classifier
from brimful.core.callbacks import PythonWarnings, warn_caller
from brimful.core.errors import ArgumentError, printable
from brimful.data.readers.in_memory import is_table
from brimful.drop_in.model_files import Parts, model_folder, tokenizer_settings
from brimful.drop_in.models_in_memory import NotHere, model_state
from brimful.drop_in.pipeline_calls import (
    Answers,
    Cut,
    arguments_of_tokenizers,
    as_pairs,
    given_cut,
    given_labels,
    refusing,
    require_room,
)
from brimful.engine.sequence_lengths import MOST_READ
from brimful.hardware.probe import choose_device
from brimful.models.hub.inspection import ModelFacts, inspect_model, load_tokenizer
from brimful.models.hub.load import load_model
from brimful.tasks.answers import label_space
from brimful.tasks.zero_shot import DEFAULT_TEMPLATE, entailment_of, zero_shot_form

TEXT, ZERO_SHOT = "text-classification", "zero-shot-classification"
_TASKS = {TEXT: TEXT, "sentiment-analysis": TEXT, ZERO_SHOT: ZERO_SHOT}
_PRECISIONS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
#: Options of `Classifier` that a pipeline takes besides transformers' own.
_OURS = frozenset({"allow_pickle", "execution", "packing", "token_budget", "verify"})
#: Attributes of transformers' pipelines that are those of one with the same model and tokenizer.
_THEIRS = frozenset(
    {"save_pretrained", "push_to_hub", "preprocess", "forward", "postprocess", "ensure_tensor_on_device"}
    | {"binary_output", "function_to_apply", "feature_extractor", "image_processor", "processor"}
)
#: Texts of a stream that are answered together at most.
_MOST_TOGETHER = 1024


def pipeline(
    task: str | None = None,
    model: Any = None,
    config: Any = None,
    tokenizer: Any = None,
    feature_extractor: Any = None,
    image_processor: Any = None,
    video_processor: Any = None,
    processor: Any = None,
    revision: str | None = None,
    use_fast: bool = True,
    token: str | bool | None = None,
    device: Any = None,
    device_map: Any = None,
    dtype: Any = "auto",
    trust_remote_code: bool | None = None,
    model_kwargs: dict[str, Any] | None = None,
    pipeline_class: Any | None = None,
    **kwargs: Any,
) -> Any:
    """Make a pipeline of a text classifier, called as transformers' pipeline is and answering as it does.

    task: `text-classification`, `sentiment-analysis` or `zero-shot-classification`; None for that of the model. dtype:
    as transformers has it, by default the checkpoint's; bfloat16 is the fastest on a GPU. kwargs: arguments of calls,
    and of `Classifier`: `verify`, `packing`, `execution`, `token_budget`, `allow_pickle`.
    Other tasks, and models that only transformers can load as asked, get transformers' own pipeline, with a warning.
    Raises: BrimfulError; ArgumentError, a ValueError, for an argument that there is not.
    """
    others = {name: value for name, value in locals().items() if name not in ("kwargs", "task")}
    try:
        unused = {"config": config, "revision": revision, "token": token, "device_map": device_map}
        unused |= {"feature_extractor": feature_extractor, "image_processor": image_processor}
        unused |= {"video_processor": video_processor, "processor": processor, "pipeline_class": pipeline_class}
        if (other := next((name for name, value in unused.items() if value is not None), None)) is not None:
            raise NotHere(f"{other} is given")
        if task is not None and task not in _TASKS:
            raise NotHere(f"its task is {printable(task)}")
        if model is None:
            raise NotHere("no model is named, and it has one of its own for the task")
        if isinstance(dtype, str) and dtype == "auto" and kwargs.get("torch_dtype") is not None:
            dtype = kwargs["torch_dtype"]  # its name of before
        settings = dict(model_kwargs or {})
        dtype = settings.pop("dtype", settings.pop("torch_dtype", dtype))
        settings.pop("attn_implementation", None)  # ours is chosen, and checked against the plain one
        if settings:
            raise NotHere(f"model_kwargs has {printable(next(iter(settings)))}")
        given = {name: value for name, value in kwargs.items() if name != "torch_dtype"}
        return _made(task, model, tokenizer, device, dtype, bool(trust_remote_code), given)
    except NotHere as reason:
        import transformers

        warnings.warn(f"transformers' own pipeline runs: {reason}", stacklevel=2)
        ours = [name for name in kwargs if name in _OURS]
        return transformers.pipeline(task, **others, **{n: v for n, v in kwargs.items() if n not in ours})


def _made(
    task: str | None, model: Any, tokenizer: Any, device: Any, dtype: Any, trust: bool, kwargs: Mapping[str, Any]
) -> TextPipeline | ZeroShotPipeline:
    given = {name: value for name, value in kwargs.items() if name not in _OURS}
    kind = {TEXT: TextPipeline, ZERO_SHOT: ZeroShotPipeline}[_TASKS[task or TEXT]]
    if (of_tokenizers := next(arguments_of_tokenizers(given, kind.takes), None)) is not None:
        raise NotHere(f"{of_tokenizers} is given")
    parts = model_folder(model, tokenizer, trust_remote_code=trust)
    options = {name: value for name, value in kwargs.items() if name in _OURS}
    options |= {"device": _device(device), "trust_remote_code": trust}
    name, pickles = str(parts.path), bool(options.get("allow_pickle"))
    facts = inspect_model(name, trust_remote_code=trust, allow_pickle=pickles)
    if task is None and not facts.has_head:
        raise NotHere("the model is no text classifier")
    options["precision"] = _precision(dtype, facts)
    made = cast(TextPipeline | ZeroShotPipeline, kind(parts, facts, options, given))
    made.task = task or made.task
    return made


def _device(device: Any) -> str:
    """`auto`, `cpu` or `cuda`, of a number, a name or a device."""
    if device is None:
        return "auto"
    if isinstance(device, int) and not isinstance(device, bool):
        device = "cpu" if device < 0 else f"cuda:{device}"
    found = torch.device(device)
    if found.type not in ("cpu", "cuda") or found.index not in (None, 0):
        raise NotHere(f"its device is {found}")
    return found.type


def _precision(dtype: Any, facts: ModelFacts) -> str:
    if dtype is None or dtype == "auto":
        dtype = getattr(facts.config, "dtype", None) or torch.float32
    found = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    if found not in _PRECISIONS:
        raise NotHere(f"its dtype is {printable(dtype)}")
    return _PRECISIONS[found]


class _TellsOfCuts(PythonWarnings):
    """Warnings, also of texts that are cut at the model's end: nobody asked for that."""

    def note(self, text: str) -> None:
        if "longer than" in text:
            self.warning(text)


class _Pipeline:
    """A pipeline of one model. kwargs: arguments of calls, where those have no other. call_count: calls so far."""

    task: str
    #: Arguments of a call by name.
    takes: frozenset[str]

    def __init__(self, parts: Parts, facts: ModelFacts, options: Mapping[str, Any], kwargs: Mapping[str, Any]) -> None:
        self._parts, self._facts, self._options = parts, facts, dict(options)
        self._given = self._checked(kwargs)
        self._classifier: Classifier | None = None
        self._made_for: Any = None  # where it cuts texts, and settings of the tokenizer
        self._parts_of_now: Parts | None = None  # once the tokenizer is not that of `parts` any more
        self._model_source: Any = facts.source
        self._model_written: Any = None  # the plain model's state that answers are of, once it was asked for
        self._said = set[str]()
        self.call_count = 0
        self._tokenizer = parts.tokenizer
        self._written = None if parts.tokenizer is None else tokenizer_settings(parts.tokenizer)
        self.device = choose_device(options["device"])

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer, or the one that was given. Its settings may be changed: later calls follow them."""
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(self._facts)
            self._written = tokenizer_settings(self._tokenizer)
        return self._tokenizer

    @tokenizer.setter
    def tokenizer(self, tokenizer: Any) -> None:
        self._tokenizer, self._written = tokenizer, None

    @cached_property
    def model(self) -> Any:
        """The plain model, loaded when it is asked for, on the CPU: answers come from another one.

        An adapter is merged into it. Its configuration and weights may be changed: later calls follow them.
        """
        made = self._plain_model()
        self._model_written = model_state(made)
        return made

    @property
    def dtype(self) -> torch.dtype:
        """The precision that it answers in."""
        return next(dtype for dtype, name in _PRECISIONS.items() if name == self._options["precision"])

    torch_dtype = dtype

    def __getattr__(self, name: str) -> Any:
        """Return what callers of transformers' pipelines use besides calls, of one with the plain model."""
        if name not in _THEIRS:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
        return getattr(self._stock(), name)

    def _stock(self, device: Any = "cpu", **given: Any) -> Any:
        """transformers' own pipeline of the plain model."""
        import transformers

        return transformers.pipeline(self.task, model=self.model, tokenizer=self.tokenizer, device=device, **given)

    def _plain_model(self) -> Any:
        from transformers import AutoModelForSequenceClassification

        if self._facts.adapter is not None:
            return load_model(self._facts, label_space(self._facts.config), head="kept", seed=0)
        trust = self._options["trust_remote_code"]
        return AutoModelForSequenceClassification.from_pretrained(self._facts.folder, trust_remote_code=trust)

    def predict(self, X: Any) -> Any:
        """Call it, as scikit-learn would."""
        return cast(Any, self)(X)

    transform = predict

    def _checked(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        if unknown := sorted(set(kwargs) - self.takes):
            raise ArgumentError(
                f"{self.task} takes no {printable(unknown[0])}", hint="it takes " + ", ".join(sorted(self.takes))
            )
        return dict(kwargs)

    def _answered(self, inputs: Any, together: int | None, answer: Any) -> Any:
        """Answers to a list, or one after another to a generator or a data set. answer: a function of a list."""
        if isinstance(inputs, GeneratorType | Dataset):
            return Answers(inputs, answer, together=_MOST_TOGETHER if together != 1 else 1)
        if isinstance(inputs, Mapping) or not hasattr(inputs, "__iter__"):
            raise ArgumentError(f"inputs are {type(inputs).__name__}", hint="give a text, or a list of them")
        if is_table(inputs):  # it would give the names of its columns
            raise ArgumentError(f"inputs is a table of {len(inputs.columns)} columns", hint="give that of its texts")
        return answer(list(inputs))

    def _classifier_for(self, cut: Cut) -> Classifier:
        """The one of all calls, or another where texts are cut elsewhere than before, tokenised differently, or where
        the plain model was changed.

        Raises: NotHere where it was changed to what no file holds.
        """
        self.call_count += 1
        self._follow_model()
        limit, asked = self._facts.max_positions, MOST_READ if cut.longest is None else cut.longest
        longest = asked if limit is None else min(asked, limit)
        wanted = (longest, cut.longest is None, tokenizer_settings(self.tokenizer))
        if self._classifier is None or wanted != self._made_for:
            if self._classifier is not None:
                self._classifier.close()
            callbacks = _TellsOfCuts() if cut.longest is None else None
            made = Classifier(self._folder(), max_length=longest, callbacks=callbacks, **self._options)
            self._classifier, self._made_for = made, wanted
        return self._classifier

    def _follow_model(self) -> None:
        """Take the plain model as whoever asked for it has left it."""
        model = vars(self).get("model")
        now = None if model is None else model_state(model)
        if now == self._model_written:
            return
        self._model_source = model
        self._save_parts()
        assert self._parts_of_now is not None
        trust, pickles = self._options["trust_remote_code"], bool(self._options.get("allow_pickle"))
        name = str(self._parts_of_now.path)
        self._facts = inspect_model(name, trust_remote_code=trust, allow_pickle=pickles)
        self._model_written, self._made_for = now, None

    def _save_parts(self) -> None:
        trust = self._options["trust_remote_code"]
        self._parts_of_now = model_folder(self._model_source, self.tokenizer, trust_remote_code=trust)
        self._written = tokenizer_settings(self.tokenizer)

    def _by_transformers(self, reason: str, inputs: Any, kwargs: Mapping[str, Any]) -> Any:
        """The answer of transformers' own pipeline of the plain model to one call. reason: said once."""
        if reason not in self._said:
            self._said.add(reason)
            warn_caller(f"transformers' own pipeline answers such calls: {reason}")
        return self._stock(self.device, **self._given)(inputs, **kwargs)

    def _folder(self) -> Path | str:
        """The model's folder, with the tokenizer as it is now."""
        if tokenizer_settings(self.tokenizer) != self._written:
            self._save_parts()
        return self._facts.source if self._parts_of_now is None else self._parts_of_now.path


class TextPipeline(_Pipeline):
    """`text-classification`: labels of texts and of pairs of texts, as transformers' TextClassificationPipeline."""

    task = TEXT
    takes = frozenset(
        {"top_k", "function_to_apply", "truncation", "max_length", "padding", "batch_size", "num_workers"}
    )

    def __call__(self, inputs: Any, **kwargs: Any) -> Any:
        """Classify what transformers' pipeline classifies; return what it returns.

        inputs: a text, a pair as {"text": ..., "text_pair": ...}, or a list, a generator or a data set of these.
        top_k, function_to_apply: as there. truncation, max_length: where texts are cut; without, at the model's end,
        with a warning. padding, batch_size, num_workers: accepted; rows are packed.
        """
        given = self._given | self._checked(kwargs)
        form = {"top_k": given.get("top_k", ""), "function_to_apply": given.get("function_to_apply")}
        cut = given_cut(given, self.tokenizer)
        require_room(cut, self.tokenizer, pairs=False)
        last: int | None = None
        if isinstance(form["top_k"], int) and form["top_k"] < 0:  # all but so many, as a slice has it
            form["top_k"], last = None, form["top_k"]
        try:
            classifier = self._classifier_for(cut)
        except NotHere as reason:
            return self._by_transformers(f"{reason}", inputs, kwargs)

        def answer(each: Sequence[Any]) -> list[Any]:
            texts, pairs = as_pairs(each)
            if any(pairs):
                require_room(cut, self.tokenizer, pairs=True)
            found: list[Any] = [None] * len(each)
            for rows in ([i for i, pair in enumerate(pairs) if pair is None], [i for i, p in enumerate(pairs) if p]):
                if rows:
                    seconds = None if pairs[rows[0]] is None else [pairs[i] for i in rows]
                    with refusing():
                        answers = classifier([texts[i] for i in rows], pairs=seconds, **form)
                    if last is not None:
                        answers = [said[:last] for said in answers]
                    for row, said in zip(rows, answers, strict=True):
                        found[row] = said
            return found

        if isinstance(inputs, str):
            [said] = answer([inputs])
            return [said] if "top_k" not in kwargs else said
        if isinstance(inputs, Mapping):
            return answer([inputs])[0]
        return self._answered(inputs, given.get("batch_size"), answer)

    def _checked(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments but for those that ask for nothing, as transformers reads them: any other top_k stays."""
        given = super()._checked(kwargs)
        if not isinstance(given.get("top_k"), int | None):
            del given["top_k"]
        if given.get("function_to_apply") is None:
            given.pop("function_to_apply", None)
        return given


class ZeroShotPipeline(_Pipeline):
    """`zero-shot-classification`: candidate labels by a model of natural-language inference."""

    task = ZERO_SHOT
    takes = frozenset(
        {"candidate_labels", "hypothesis_template", "multi_label", "truncation", "max_length", "padding"}
        | {"batch_size", "num_workers"}
    )

    def __call__(self, sequences: Any, *labels: Any, **kwargs: Any) -> Any:
        """Rank candidate labels of a text, or of each of a list, a generator or a data set of texts.

        labels: candidate_labels, as a list or with commas between them. hypothesis_template, multi_label: as in
        transformers. Others are accepted, and change nothing there either: the text is cut where it is too long.
        """
        if len(labels) > 1 or (labels and "candidate_labels" in kwargs):
            raise ArgumentError("there are several candidate labels", hint="give them once, as a list")
        given = self._given | self._checked(kwargs) | ({"candidate_labels": labels[0]} if labels else {})
        asked = given_labels(given.get("candidate_labels"))
        form = {
            "multi_label": bool(given.get("multi_label", False)),
            "hypothesis_template": given.get("hypothesis_template", DEFAULT_TEMPLATE),
        }
        call = {"candidate_labels": asked, **form}
        if any(isinstance(label, int) for label in asked) or len(set(map(str, asked))) < len(asked):
            return self._by_transformers("labels are numbers, or one is there twice", sequences, call)
        try:
            classifier = self._classifier_for(given_cut({"truncation": True}, self.tokenizer))
        except NotHere as reason:
            return self._by_transformers(f"{reason}", sequences, call)
        with refusing():
            zero_shot_form(self._facts.config, template=form["hypothesis_template"])

        def answer(texts: Sequence[Any]) -> list[Any]:
            try:
                with refusing():
                    return cast(list[Any], classifier(texts, labels=asked, **form))
            except ArgumentError:
                if not self._leave_no_room(texts, asked, form["hypothesis_template"]):
                    raise
            said = "a label leaves no room for its text, and is read whole as the text is"
            return cast(list[Any], self._by_transformers(said, list(texts), call))

        if isinstance(sequences, str):
            return answer([sequences])[0]
        return self._answered(sequences, given.get("batch_size"), answer)

    @property
    def entailment_id(self) -> int:
        """Output that says that a hypothesis follows; -1 for the last one, where none is named so."""
        return entailment_of(self._facts.config)

    def _leave_no_room(self, texts: Sequence[Any], labels: Sequence[Any], template: str) -> bool:
        """True where a label is as long as the tokenizer cuts pairs, and the model can read each pair whole."""
        limit, most = given_cut({"truncation": True}, self.tokenizer).longest, self._facts.max_positions
        if limit is None or not all(isinstance(each, str) for each in (*texts, *labels)):
            return False
        hypotheses = [template.format(label) for label in labels]
        empty = [len(ids) for ids in self.tokenizer([""] * len(labels), hypotheses)["input_ids"]]
        longest = max(len(ids) for ids in self.tokenizer(list(texts), add_special_tokens=False)["input_ids"])
        return max(empty) >= limit and (most is None or max(empty) + longest <= most)

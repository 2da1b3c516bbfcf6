"""The sides of a row: transformers' pipeline, sentence-transformers' CrossEncoder, and brimful.

A side makes of its settings a function from a sample to an `Answered`. The clock runs from strings in memory to answers
in memory, or from a Parquet file to a Parquet file; models are loaded before, which for brimful's files is said apart.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from shapes import max_length
from works import TEMPLATE, Sample, Work, lengths_file, model_folder

import brimful
from brimful.core.callbacks import Callbacks
from brimful.core.records import Recipe

Settings = dict[str, Any]
_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
#: Rows that the pipeline's loop over a file reads, answers and writes at a time.
_FILE_ROWS = 16384


@dataclass(frozen=True, kw_only=True)
class Answered:
    """One run over a sample. labels, scores: of each text, None where they went to a file or were not asked for.

    facts: what else there is to say of the run.
    """

    seconds: float
    labels: list[str] | None = None
    scores: list[float] | None = None
    facts: dict[str, Any] = field(default_factory=dict)


Run = Callable[[Sample], Answered]


#: Settings that a model is made with; the others are of a call.
_OF_A_MODEL = ("dtype", "compile", "padding", "attention")


def padded_length(inputs: Path, work: Work) -> int:
    """Return the length that holds every sequence of the corpus, a multiple of 8 where the model has room for it."""
    longest = int(np.load(lengths_file(inputs, work)).max())
    return min(-(-longest // 8) * 8, max(longest, 512))


def compile_as_asked(model: Any, settings: Settings) -> None:
    """Compile a model in place: for each shape apart where it is padded to one length, else for symbolic ones."""
    torch.compiler.reset()
    if settings["compile"] is not None:
        dynamic = None if settings["padding"] == "batch" else False
        model.compile(mode=settings["compile"], dynamic=dynamic)


class Side(Protocol):
    """One way to classify."""

    def prepare(self, settings: Settings) -> Run:
        """With these settings. What was prepared before is not used any more."""
        ...


class PipelineSide:
    """transformers' pipeline, as its documentation calls it. sorted: texts in order of their characters, and back."""

    def __init__(self, work: Work, inputs: Path, device: str, *, smoke: bool) -> None:
        self._work, self._folder, self._device = work, str(model_folder(inputs, work)), device
        self._longest, self._padded = max_length(smoke), padded_length(inputs, work)
        self._pipe: Any = None
        self._made_with: Settings = {}

    def prepare(self, settings: Settings) -> Run:
        """See `Side`."""
        answer = self._file_to_file if self._work.files else self._in_memory
        pipe = self._made(settings)
        return lambda sample: answer(pipe, settings, sample)

    def _made(self, settings: Settings) -> Any:
        from transformers import pipeline

        made_with = {key: settings[key] for key in _OF_A_MODEL}
        if self._pipe is None or made_with != self._made_with:
            self._pipe = None
            self._pipe = pipeline(
                "zero-shot-classification" if self._work.candidates else "text-classification",
                model=self._folder,
                tokenizer=self._folder,
                dtype=_DTYPES[settings["dtype"]],
                device=self._device,
                model_kwargs={"attn_implementation": settings["attention"]},
            )
            compile_as_asked(self._pipe.model, settings)
            self._made_with = made_with
        return self._pipe

    def _in_memory(self, pipe: Any, settings: Settings, sample: Sample) -> Answered:
        began = time.perf_counter()
        found = self._answers(pipe, settings, sample.texts, sample.pairs)
        return _objects(found, time.perf_counter() - began)

    def _answers(self, pipe: Any, settings: Settings, texts: list[str], pairs: list[str] | None) -> list[Any]:
        asked: list[Any] = texts
        if pairs is not None:
            asked = [{"text": a, "text_pair": b} for a, b in zip(texts, pairs, strict=True)]
        # The zero-shot pipeline truncates by itself, and knows no other way.
        more = {"candidate_labels": list(self._work.candidates), "hypothesis_template": TEMPLATE}
        if not self._work.candidates:
            more = {"truncation": True, "max_length": self._longest}
            if settings["padding"] == "corpus":
                more |= {"padding": "max_length", "max_length": self._padded}
        more |= {"batch_size": settings["batch_size"], "num_workers": settings["workers"]}
        if not settings["sorted"]:
            return list(pipe(asked, **more))
        lengths = [len(text) for text in texts] if pairs is None else [len(d["text"] + d["text_pair"]) for d in asked]
        order = sorted(range(len(asked)), key=lengths.__getitem__, reverse=True)
        answers: list[Any] = [None] * len(asked)
        found = pipe([asked[i] for i in order], **more)
        for i, answer in zip(order, found, strict=True):
            answers[i] = answer
        return answers

    def _file_to_file(self, pipe: Any, settings: Settings, sample: Sample) -> Answered:
        with tempfile.TemporaryDirectory() as folder:
            source, target = _write(sample, Path(folder)), Path(folder) / "out.parquet"
            began = time.perf_counter()
            file = pq.ParquetFile(source)
            schema = file.schema_arrow.append(pa.field("label", pa.string())).append(pa.field("score", pa.float64()))
            with pq.ParquetWriter(target, schema) as writer:
                for batch in file.iter_batches(batch_size=_FILE_ROWS):
                    found = self._answers(pipe, settings, batch.column("text").to_pylist(), None)
                    columns = [pa.array([each[name] for each in found]) for name in ("label", "score")]
                    writer.write_batch(pa.record_batch([*batch.columns, *columns], schema=schema))
            return Answered(seconds=time.perf_counter() - began)


class CrossEncoderSide:
    """CrossEncoder.predict. It takes pairs: a single text goes with an empty one, a candidate label as a hypothesis."""

    def __init__(self, work: Work, inputs: Path, device: str, *, smoke: bool) -> None:
        self._work, self._folder, self._device = work, str(model_folder(inputs, work)), device
        self._longest, self._padded = max_length(smoke), padded_length(inputs, work)
        self._model: Any = None
        self._made_with: Settings = {}

    def prepare(self, settings: Settings) -> Run:
        """See `Side`."""
        from sentence_transformers import CrossEncoder

        made_with = {key: settings[key] for key in _OF_A_MODEL}
        if self._model is None or made_with != self._made_with:
            self._model = None
            model_kwargs = {"dtype": _DTYPES[settings["dtype"]], "attn_implementation": settings["attention"]}
            self._model = CrossEncoder(
                self._folder, device=self._device, max_length=self._longest, model_kwargs=model_kwargs
            )
            compile_as_asked(self._model.model, settings)
            self._made_with = made_with
        model = self._model
        return lambda sample: self._predict(model, settings, sample)

    def _predict(self, model: Any, settings: Settings, sample: Sample) -> Answered:
        more: dict[str, Any] = {"batch_size": settings["batch_size"], "show_progress_bar": False}
        if settings["padding"] == "corpus":
            text = {"padding": "max_length", "max_length": self._padded, "truncation": True}
            more["processing_kwargs"] = {"text": text}
        began = time.perf_counter()
        candidates = self._work.candidates
        names = [model.config.id2label[i] for i in range(model.config.num_labels)]
        if candidates:
            asked = [(text, TEMPLATE.format(label)) for text in sample.texts for label in candidates]
            logits = model.predict(asked, **more)
            entailed_NL = logits[:, names.index("entailment")].reshape(-1, len(candidates)).astype(np.float32)
            powers_NL = np.exp(entailed_NL - entailed_NL.max(1, keepdims=True))
            scores_NC, names = powers_NL / powers_NL.sum(1, keepdims=True), list(candidates)
        else:
            asked = list(zip(sample.texts, sample.pairs or [""] * len(sample.texts), strict=True))
            scores_NC = model.predict(asked, **more, apply_softmax=True)
        best = scores_NC.argmax(1)
        seconds = time.perf_counter() - began
        return Answered(seconds=seconds, labels=[names[i] for i in best], scores=scores_NC.max(1).tolist())


class BrimfulSide:
    """brimful.Classifier, or brimful.classify from file to file.

    settings: `precision`, `execution` and `token_budget` as its options. returns: "objects", what the pipeline returns,
    or "logits". verify: of a file, rows compared with the plain model before the clock runs.
    """

    def __init__(self, work: Work, inputs: Path, device: str, *, smoke: bool) -> None:
        self._work, self._folder, self._device = work, model_folder(inputs, work), device
        self._longest = max_length(smoke)
        self._classifier: brimful.Classifier | None = None
        self._callbacks, self._asked = _Notes(), Settings()

    def prepare(self, settings: Settings) -> Run:
        """See `Side`."""
        options = {"device": self._device, "max_length": self._longest} | {
            key: value for key, value in settings.items() if key in ("precision", "execution", "verify", "token_budget")
        }
        if self._work.files:
            return lambda sample: self._file_to_file(options, sample)
        if self._classifier is None or options != self._asked:
            if self._classifier is not None:
                self._classifier.close()
            self._callbacks, self._asked = _Notes(), options
            self._classifier = brimful.Classifier(self._folder, callbacks=self._callbacks, **options)
        answer = self._objects if settings["returns"] == "objects" else self._logits
        return lambda sample: answer(sample)

    def _objects(self, sample: Sample) -> Answered:
        assert self._classifier is not None
        began = time.perf_counter()
        if self._work.candidates:
            more: dict[str, Any] = {"labels": list(self._work.candidates), "hypothesis_template": TEMPLATE}
        else:
            more = {"pairs": sample.pairs}
        found = self._classifier(sample.texts, **more)
        seconds = time.perf_counter() - began
        assert isinstance(found, list)
        return _objects(found, seconds, self._facts())

    def _logits(self, sample: Sample) -> Answered:
        assert self._classifier is not None
        began = time.perf_counter()
        self._classifier.logits(sample.texts, sample.pairs)
        return Answered(seconds=time.perf_counter() - began, facts=self._facts())

    def _facts(self) -> dict[str, Any]:
        assert self._classifier is not None
        return {"recipe": _levers(self._classifier.recipe), "warnings": self._callbacks.lines}

    def _file_to_file(self, options: Settings, sample: Sample) -> Answered:
        callbacks = _Notes()
        with tempfile.TemporaryDirectory() as folder:
            source, target = _write(sample, Path(folder)), Path(folder) / "out.parquet"
            record = brimful.classify(self._folder, source, target, callbacks=callbacks, **options)
        assert record.wall_s is not None
        facts = {
            "recipe": _levers(record.recipe),
            "warnings": callbacks.lines,
            "start_s": record.start_s,
            "stages_s": {stage.name: stage.busy_s for stage in record.stages},
            "limit": record.limit,
            "fallback": record.fallback,
            "parity": None if record.equivalence is None else asdict(record.equivalence),
        }
        return Answered(seconds=record.wall_s, facts=facts)


class _Notes(Callbacks):
    """Keeps what a user would be warned of: a fallback must not go unseen."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def warning(self, text: str) -> None:
        self.lines.append(text)


def _levers(recipe: Recipe | None) -> dict[str, str]:
    return {} if recipe is None else {lever.name: lever.value for lever in recipe.levers}


def _objects(found: list[Any], seconds: float, facts: dict[str, Any] | None = None) -> Answered:
    """Of {"label", "score"} for each text, or {"labels", "scores"} with the likeliest first."""
    if found and "labels" in found[0]:
        found = [{"label": each["labels"][0], "score": each["scores"][0]} for each in found]
    labels, scores = [each["label"] for each in found], [each["score"] for each in found]
    return Answered(seconds=seconds, labels=labels, scores=scores, facts=facts or {})


def _write(sample: Sample, folder: Path) -> Path:
    """A Parquet file with the texts of a sample, and a number for each."""
    file = folder / "in.parquet"
    pq.write_table(pa.table({"id": np.arange(len(sample.texts)), "text": sample.texts}), file)
    return file


SIDES: dict[str, Callable[..., Side]] = {
    "pipeline": PipelineSide,
    "crossencoder": CrossEncoderSide,
    "brimful": BrimfulSide,
}

"""Evaluate answers that were given before: a file of rows with their true labels, and those that `classify` added."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from brimful.core.callbacks import Callbacks
from brimful.core.classification import Classification
from brimful.core.errors import DataError, OptionError, printable
from brimful.core.evaluation import Evaluation
from brimful.core.manifest import MANIFEST, MANIFEST_SUFFIX, read_manifest
from brimful.core.options.checks import split_names
from brimful.core.options.evaluate import EvaluateOptions
from brimful.core.records import LabelSpace, TaskName
from brimful.data.labels.columns import check_exists, find_columns
from brimful.data.labels.label_columns import LabelColumn
from brimful.data.labels.label_sets import known_sets
from brimful.data.readers.fields import rows_with_fields
from brimful.data.readers.file_format import FileFormat
from brimful.data.readers.rows import Rows
from brimful.data.readers.sources import read_rows
from brimful.engine.evaluation.truth import Truth, read_truth
from brimful.engine.scoring import PredictionFile, evaluation_of, truth_column
from brimful.tasks.label_rows import row_blocks
from brimful.tasks.scoring.baselines import constant_baseline
from brimful.tasks.scoring.choose import make_scorer
from brimful.tasks.scoring.labels import MultiLabelScorer, SingleLabelScorer
from brimful.tasks.scoring.scorers import Scored

#: Columns that `classify` adds, also where a column of the input has that name.
_ADDED = re.compile(r"(predicted_)?(label|score|scores|logits|num_tokens|truncated|error)(_\d+)?")
_UNANSWERED = "without an answer"
_NOT_ALL = (
    "only the score of the given label is in the file: AUC, Brier score and log loss need those of all"
    " (classify with --logits, or evaluate MODEL DATA)"
)


@dataclass(frozen=True, kw_only=True)
class _Answers:
    """Columns with the answers. label: None for numbers. logits: None if they are not there."""

    label: str | None
    score: str | None
    logits: str | None

    @property
    def names(self) -> set[str]:
        return {name for name in (self.label, self.score, self.logits) if name is not None}


def evaluate_answers(options: EvaluateOptions, *, command: str, callbacks: Callbacks) -> Evaluation:
    """Scores the answers in the file or folder `options.model`.

    Raises: InputError for a file without answers or without true labels.
    """
    began = time.perf_counter()
    callbacks.stage(f"reading {options.model}")
    rows = read_rows(options.model, FileFormat.of(options))
    for note in rows.notes:
        callbacks.note(note)
    for warning in rows.warnings:
        callbacks.warning(warning)
    record = _record_of(Path(options.model).expanduser())
    answers = _find_answers(rows, options)
    rows = rows_with_fields(rows, options.label_column)
    labels = _true_columns(rows, answers, options)
    callbacks.note(f"label: column {', '.join(map(repr, labels))}; answers: {', '.join(map(repr, _shown(answers)))}")
    space = _space(rows, answers, labels, record)
    answered_R = _answered(rows, answers)
    truth = read_truth(rows, labels, space, options, answered_R, absent=_UNANSWERED)
    scored, given, notes = _scored(rows, answers, truth, space, options)
    for note in (*truth.notes, *notes):
        callbacks.note(note)
    for doubt in truth.doubts:
        callbacks.warning(doubt)
    for reason, count in truth.left_out.items():
        callbacks.warning(f"{count:,} row{'s are' if count > 1 else ' is'} left out: {reason}")
    if options.output is not None:
        file = PredictionFile(Path(options.output), rows)
        file.write(truth.rows, truth_column(truth.space, truth.targets_N), given)
        file.finish()
        callbacks.note(f"written: {options.output}")
    return evaluation_of(
        scored,
        model=options.model if record is None else record.model,
        data=options.model,
        command=command,
        labels=truth.space,
        left_out=truth.left_out,
        baselines=(constant_baseline(truth.space, truth.targets_N, truth.targets_N),),
        notes=(*rows.warnings, *truth.doubts, *rows.notes, *truth.notes, *notes),
        predictions=options.output,
        options={k: v for k, v in vars(options).items() if k not in ("model", "data")},
        wall_s=time.perf_counter() - began,
    )


def _record_of(path: Path) -> Classification | None:
    """The record of the classification that wrote these answers, where its manifest is still beside them."""
    manifest = read_manifest(path / MANIFEST if path.is_dir() else path.with_name(path.name + MANIFEST_SUFFIX))
    return None if manifest is None else manifest.record


def _shown(answers: _Answers) -> list[str]:
    return [name for name in (answers.label, answers.score, answers.logits) if name is not None]


def _find_answers(rows: Rows, options: EvaluateOptions) -> _Answers:
    """Named columns, else the last ones with the names that `classify` gives: it puts answers behind the others."""
    for name, flag in ((options.prediction_column, "--prediction-column"), (options.score_column, "--score-column")):
        if name is not None:
            check_exists(rows, name, flag)
    true = set() if options.label_column is None else {options.label_column, *split_names(options.label_column)}

    def last(kind: str) -> str | None:
        found = [
            name
            for name in rows.table.column_names
            if re.fullmatch(rf"(predicted_)?{kind}(_\d+)?", name) and name not in true
        ]
        return found[-1] if found else None

    label, score, logits = options.prediction_column or last("label"), options.score_column, last("logits")
    if score is None and options.prediction_column is None:
        score = last("score")
    numbers_only = options.prediction_column is None and options.score_column is not None
    answers = _Answers(label=None if numbers_only else label, score=score, logits=logits)
    if answers.label is None and answers.score is None:
        raise DataError(
            "holds no answers: there are no columns that `classify` adds",
            file=rows.name,
            hint="name them: --prediction-column, or for numbers --score-column; or give a model before the data",
        )
    return answers


def _true_columns(rows: Rows, answers: _Answers, options: EvaluateOptions) -> tuple[str, ...]:
    names = rows.table.column_names
    if options.label_column is not None:
        asked = options.label_column
        found = (asked,) if asked in names else split_names(asked)
        for name in found:
            check_exists(rows, name, "--label-column")
        if same := answers.names.intersection(found):
            raise OptionError(
                f"--label-column and the answers are one column, {printable(sorted(same)[0])!r}",
                hint="name the other one by --prediction-column",
            )
        return found
    others = [name for name in names if name not in answers.names and not _is_added(name, names, answers)]
    try:
        return find_columns(replace(rows, table=rows.table.select(others)), text=options.text_column).labels
    except DataError as error:
        there = ", ".join(printable(name, 40) for name in names[:20])
        raise DataError(
            "no column with the true labels was found beside the answers",
            file=rows.name,
            hint=f"name it by --label-column, or give a model before the data; columns: {there}",
        ) from error


def _is_added(name: str, names: list[str], answers: _Answers) -> bool:
    """True for columns of `classify` behind its first one."""
    first = min(names.index(each) for each in answers.names)
    return bool(_ADDED.fullmatch(name)) and names.index(name) > first


def _space(rows: Rows, answers: _Answers, labels: tuple[str, ...], record: Classification | None) -> LabelSpace:
    """Labels of the classification's record, else all that are true or given somewhere."""
    if record is not None:
        return record.labels
    if answers.label is None:
        return LabelSpace(task="regression", names=labels)
    given = LabelColumn(rows=rows, name=answers.label)
    texts: list[str] = [] if given.holds_lists else given.distinct.to_pylist()
    several = given.holds_lists or len(labels) > 1 or (bool(texts) and all(t.lstrip().startswith("[") for t in texts))
    task: TaskName = "multi_label" if several else "single_label"
    names = dict.fromkeys(_labels_in(given))
    true = labels if len(labels) > 1 else _labels_in(LabelColumn(rows=rows, name=labels[0]), names if several else None)
    names |= dict.fromkeys(true)
    ordered = sorted(names)
    return LabelSpace(task=task, names=tuple(ordered), values={name: i for i, name in enumerate(ordered)})


def _labels_in(column: LabelColumn, known: Collection[str] | None = None) -> list[str]:
    """Labels of a column: of lists, of texts that are lists, and of others whole. known: some labels, where a text may
    stand for several."""
    if column.holds_lists:
        return list(pc.unique(column.elements).drop_null().to_pylist())
    if known is not None:
        return [label for label in known_sets(column.distinct, known).labels if label]
    found: dict[str, None] = {}
    for text in column.distinct.to_pylist():
        parts: Any = None
        if text.lstrip().startswith("["):
            try:
                parts = json.loads(text)
            except ValueError:
                parts = None
        found |= dict.fromkeys(map(str, parts) if isinstance(parts, list) else [text])
    return list(found)


def _answered(rows: Rows, answers: _Answers) -> npt.NDArray[np.bool_]:
    name = answers.label or answers.score
    assert name is not None
    column = LabelColumn(rows=rows, name=name)
    values = column.values if column.holds_lists else column.texts
    return np.asarray(values.is_valid().to_numpy())


def _scored(
    rows: Rows, answers: _Answers, truth: Truth, space: LabelSpace, options: EvaluateOptions
) -> tuple[Scored, dict[str, pa.Array], list[str]]:
    """Scores, columns of the answers, and notes."""
    named: dict[str, Any] = {"seed": options.seed, "resamples": options.resamples, "threshold": options.threshold}
    scorer, places = make_scorer(truth.space, truth.targets_N, **named), np.arange(len(truth.rows))
    chosen = pa.array(truth.rows)
    kept = [name for name in (answers.label, answers.score) if name is not None]
    given = {name: rows.table[name].take(chosen) for name in kept}
    shown = dict(zip(("label", "score") if answers.label else ("score",), given.values(), strict=False))
    if isinstance(scorer, SingleLabelScorer | MultiLabelScorer):
        assert answers.label is not None
        if answers.logits is not None:
            for at, logits_SC in _logits(rows, answers.logits, truth, space):
                scorer.add(at, logits_SC)
            return scorer.result(), shown, []
        told = read_truth(rows, (answers.label,), space, replace(options, label_map=None), _answered(rows, answers))
        at = np.searchsorted(told.rows, truth.rows)
        if isinstance(scorer, MultiLabelScorer):
            for part in row_blocks(len(at), space.num_outputs):
                flags = told.targets_N[at[part]] > 0.5
                scorer.add_answers(places[part], flags if truth.outputs is None else flags[:, truth.outputs])
            return scorer.result(), shown, [_NOT_ALL]
        scores = None if answers.score is None else _floats(rows, answers.score)[truth.rows]
        classes = told.targets_N[at].astype(np.int64)
        if scores is not None and space.num_outputs == 2 and bool((scores >= 0.5).all()):
            scorer.add(places, _of_two(classes, scores))
            return scorer.result(), shown, []
        scorer.add_answers(places, classes, scores)
        return scorer.result(), shown, [_NOT_ALL]
    assert answers.score is not None
    scorer.add(places, _number_rows(rows, answers.score, space.num_outputs, slice(None))[truth.rows])
    return scorer.result(), shown, []


def _floats(rows: Rows, name: str) -> npt.NDArray[np.float64]:
    return LabelColumn(rows=rows, name=name).numbers(gaps=True).astype(np.float64)


def _of_two(classes_N: npt.NDArray[np.int64], scores_N: npt.NDArray[np.float64]) -> npt.NDArray[np.float32]:
    """Logits of two classes whose probabilities are p and 1 - p."""
    p_N = np.clip(scores_N, 1e-12, 1 - 1e-12)
    logits_N2 = np.zeros((len(p_N), 2), np.float32)
    logits_N2[np.arange(len(p_N)), classes_N] = np.log(p_N) - np.log1p(-p_N)
    return logits_N2


def _logits(
    rows: Rows, name: str, truth: Truth, space: LabelSpace
) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]]:
    """Places and logits of the N rows, some at a time."""
    for part in row_blocks(rows.num_rows, space.num_outputs):
        first, end = np.searchsorted(truth.rows, (part.start, part.stop))
        found = _number_rows(rows, name, space.num_outputs, part)[truth.rows[first:end] - part.start]
        yield np.arange(first, end), found if truth.outputs is None else found[:, truth.outputs]


def _number_rows(rows: Rows, name: str, num_outputs: int, part: slice) -> npt.NDArray[np.float32]:
    """(S, C) numbers of a part of a column of lists, of lists as JSON text, or, of one output, of numbers. NaN where
    missing."""
    column = rows.table[name][part]
    if pa.types.is_large_string(column.type) and num_outputs > 1:
        values = [json.loads(text) if text else None for text in column.to_pylist()]
        column = pa.chunked_array([pa.array(values, pa.large_list(pa.float64()))])
    if not pa.types.is_large_list(column.type):
        some = LabelColumn(rows=rows, name=name, row_numbers=np.arange(rows.num_rows)[part])
        return some.numbers(gaps=True).reshape(-1, 1)
    numbers = np.full((len(column), num_outputs), np.nan, np.float32)
    lengths = pc.list_value_length(column).fill_null(0).to_numpy()
    whole = lengths == num_outputs
    if (lengths[~whole] > 0).any():
        raise DataError(
            f"column '{printable(name)}' has lists of another length than the {num_outputs} outputs", file=rows.name
        )
    numbers[whole] = pc.list_flatten(column).cast(pa.float32()).to_numpy().reshape(-1, num_outputs)
    return numbers

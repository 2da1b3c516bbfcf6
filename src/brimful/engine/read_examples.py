"""Labelled rows as a run trains and evaluates on them: read, their columns and labels found, split, each guess said."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from brimful.core.callbacks import Callbacks
from brimful.core.errors import DataError, listed, printable
from brimful.core.options.choices import TaskChoice
from brimful.core.options.train import TrainOptions
from brimful.core.records import LabelSpace
from brimful.data.labels.columns import Columns, describe_columns, find_columns, text_parts
from brimful.data.labels.doubts import data_doubts, label_doubts
from brimful.data.labels.examples import Examples, draw, make_examples, num_empty_labels, split_examples
from brimful.data.labels.label_columns import no_label_text
from brimful.data.labels.label_space import detect_labels, label_doubt, task_reason
from brimful.data.labels.missing import missing_texts, missing_words, said_of_words, without_words
from brimful.data.labels.weights import weighted
from brimful.data.readers.fields import rows_with_fields
from brimful.data.readers.file_format import FileFormat
from brimful.data.readers.in_memory import Tables
from brimful.data.readers.locations import find_splits
from brimful.data.readers.rows import Rows
from brimful.data.readers.sources import fitting, read_rows


@dataclass(frozen=True, kw_only=True)
class ReadExamples:
    """Labelled rows as they were read.

    fingerprint: of all rows. num_empty: rows dropped for want of a text or label.
    """

    space: LabelSpace
    training: Examples
    evaluation: Examples | None
    fingerprint: str
    num_empty: int


def read_examples(options: TrainOptions, callbacks: Callbacks, tables: Tables) -> ReadExamples:
    """Read the rows to train and to evaluate on, find their columns and labels, and say what was inferred.

    tables: data in memory, by their names.
    Raises: InputError for rows, columns or labels that cannot be trained on.
    """
    form, data, eval_data, held_out = FileFormat.of(options), options.data, options.eval_data, ""
    if data not in tables and (splits := find_splits(data)) is not None:
        data = splits.training
        if eval_data is None and options.eval_split and (eval_data := splits.evaluation) is not None:
            held_out = f", {eval_data} to evaluate on (by their names; --eval-data names another)"
        callbacks.note(f"splits: {data} to train on{held_out or ' (by its name)'}")
    named = (options.text_column, options.pair_column, options.label_column, options.weight_column)
    rows = rows_with_fields(read_rows(data, form, tables), *named)
    _tell_reading(rows, callbacks)
    columns = find_columns(
        rows,
        text=options.text_column,
        pair=options.pair_column,
        label=options.label_column,
        weight=options.weight_column,
    )
    report_columns(columns, callbacks)
    rows = _without_missing(rows, columns, options, callbacks)
    space = detect_labels(rows, columns, options.task)
    _tell_labels(rows, columns, options.task, space, callbacks)
    if options.missing_labels == "none" and space.task != "multi_label":
        callbacks.warning("--missing-labels none is for several labels a row: here a row without one is an error")
    training, num_empty = make_examples(rows, columns, space, options.missing_labels)
    if options.missing_labels == "error" and (num_without := num_empty_labels(training)):
        callbacks.note(f"{no_label_text(num_without)}; --missing-labels drop leaves them out")
    training = draw(weighted(training, callbacks.note), options.limit, options.seed)
    evaluation, fingerprint = None, rows.fingerprint
    if eval_data is not None:
        eval_rows = read_rows(eval_data, None if eval_data in tables else fitting(form, eval_data), tables)
        eval_rows = rows_with_fields(eval_rows, columns.text, columns.pair, *columns.labels)
        _tell_reading(eval_rows, callbacks)
        same = _same_columns(eval_rows, columns, data, callbacks)
        eval_rows = _without_missing(eval_rows, same, options, callbacks)
        evaluation, num_eval_empty = make_examples(eval_rows, same, space, options.missing_labels)
        num_empty, fingerprint = num_empty + num_eval_empty, f"{fingerprint}+{eval_rows.fingerprint}"
    elif options.eval_split > 0:
        training, evaluation = _split(training, options)
    for doubt in data_doubts(training, evaluation, space.names):
        callbacks.warning(doubt)
    return ReadExamples(
        space=space, training=training, evaluation=evaluation, fingerprint=fingerprint, num_empty=num_empty
    )


def _split(examples: Examples, options: TrainOptions) -> tuple[Examples, Examples]:
    """Training and evaluation examples. Raises: DataError where rows are too few, with what made them few."""
    try:
        return split_examples(examples, options.eval_split, options.seed)
    except DataError as error:
        if options.limit is None or options.limit > len(examples):
            raise
        hint = f"--limit {options.limit} leaves few: raise it, or train on all of them by --eval-split 0"
        raise DataError(error.message, file=error.file, row=error.row, value=error.value, hint=hint) from error


def _same_columns(rows: Rows, columns: Columns, data: str, callbacks: Callbacks) -> Columns:
    """The columns of training rows in `rows` to evaluate on. data: what is trained on.

    Raises: DataError where one is not there.
    """
    names = rows.table.column_names
    inputs = [*text_parts(names, columns.text), *([columns.pair] if columns.pair is not None else [])]
    shown = listed([f"'{printable(name, 40)}'" for name in [*inputs, *columns.labels] if name not in names])
    if shown and all(name in names for name in inputs):
        said = f"has no labels, so nothing can be evaluated on it: there is no column {shown}"
        hint = f"train on {printable(data, 200)} without --eval-data, which holds out a share of its rows"
        raise DataError(said, file=rows.name, hint=f"{hint}; or name rows with labels by --eval-data")
    if shown:
        said = f"is to be evaluated on, and lacks columns of the training rows: {shown}"
        raise DataError(said, file=rows.name, hint=f"it has {listed([printable(name, 40) for name in names])}")
    found = find_columns(rows, text=columns.text, pair=columns.pair, label=",".join(columns.labels))
    if columns.pair is None and found.pair is not None:  # by its name
        said = f"'{printable(found.pair, 40)}' of {printable(rows.name, 200)} is not read"
        callbacks.note(f"{said}: single texts are trained on (--pair-column)")
    return dataclasses.replace(found, pair=columns.pair)


def _without_missing(rows: Rows, columns: Columns, options: TrainOptions, callbacks: Callbacks) -> Rows:
    """Rows whose labels such as `nan` are null, where rows without one are to be left out; says which these are."""
    if options.missing_labels != "drop" or not (words := missing_words(rows, columns)):
        return rows
    callbacks.warning(f"{said_of_words(words)} taken for {'a missing one' if len(words) == 1 else 'missing ones'}")
    return without_words(rows, columns, words)


def _tell_labels(rows: Rows, columns: Columns, task: TaskChoice, space: LabelSpace, callbacks: Callbacks) -> None:
    """Says which task and labels were found, and what of them may be a mistake. task: as asked for."""
    if (doubt := label_doubt(rows, columns, task, space)) is not None:
        callbacks.warning(doubt)
    shown = ", ".join(map(_shown_name, space.names[:8])) + (", ..." if len(space.names) > 8 else "")
    noun = "output" if space.task == "regression" else "label"
    why = f" ({task_reason(rows, columns, space)}; --task names another)" if task == "auto" else ""
    callbacks.note(f"task: {space.task}, {len(space.names)} {noun}{'s' if len(space.names) > 1 else ''}: {shown}{why}")
    for doubt in (*label_doubts(rows, columns, space), missing_texts(rows, columns)):
        if doubt is not None:
            callbacks.warning(doubt)


def _shown_name(name: str) -> str:
    """A label as it is listed: in quotation marks where its ends would not be seen."""
    return repr(name) if "," in name or name != name.strip() else name


def _tell_reading(rows: Rows, callbacks: Callbacks) -> None:
    """Says what was decided about the files of `rows`, and what is doubtful."""
    for warning in rows.warnings:
        callbacks.warning(warning)
    for note in rows.notes:
        callbacks.note(note)


def report_columns(columns: Columns, callbacks: Callbacks) -> None:
    """Says which columns are read, why these, and what of it may be a mistake."""
    for line in describe_columns(columns):
        callbacks.note(line)
    for doubt in columns.doubts:
        callbacks.warning(doubt)

"""From scores of rows to the record of an evaluation, and the file with each row's answer."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from brimful.core import atomic_files
from brimful.core.errors import OptionError, printable
from brimful.core.evaluation import Evaluation, Mistake
from brimful.core.records import LabelSpace
from brimful.data.readers.rows import Rows
from brimful.data.writers.row_files import FORMS, Form, TableFile, form_of
from brimful.diagnosis.answers import findings_of_answers
from brimful.diagnosis.learning import Course
from brimful.diagnosis.rows import RowFacts
from brimful.tasks.label_rows import LabelRows, Targets
from brimful.tasks.scoring.mistakes import WrongRow
from brimful.tasks.scoring.scorers import Scored

#: Characters of a text that a record of mistakes has.
_MOST_TEXT = 300
UNANSWERED = "for which the model gave no finite number"


def evaluation_of(
    scored: Scored,
    *,
    findings: Sequence[str] = (),
    course: Course = "open",
    rows: RowFacts | None = None,
    **fields: Any,
) -> Evaluation:
    """The record of these scores, with findings about its answers before those that are given.

    course, rows: of the training. fields: those of Evaluation that scores do not hold.
    """
    left_out = dict(fields.pop("left_out", {}))
    if scored.num_unanswered:
        left_out[UNANSWERED] = scored.num_unanswered
    found = Evaluation(
        num_rows=scored.num_rows,
        metrics=scored.metrics,
        intervals=scored.intervals,
        by_label=scored.by_label,
        confusion=scored.confusion,
        reliability=scored.reliability,
        score_rows=scored.score_rows,
        left_out=left_out,
        **fields,
    )
    return replace(found, findings=(*findings_of_answers(found, course=course, rows=rows), *findings))


def mistakes_of(
    found: Sequence[WrongRow], rows: Rows, numbers_N: npt.NDArray[np.int64], texts: Any, pairs: Any
) -> tuple[Mistake, ...]:
    """The mistakes with the places and the texts of their rows.

    numbers_N: of each of the N rows among `rows`. texts, pairs: (N,) of them; pairs may be None.
    """
    made, several = [], len(rows.files) > 1
    for each in found:
        file, row = rows.place(int(numbers_N[each.index]))
        of_row = [column[each.index].as_py() or "" for column in (texts, pairs) if column is not None]
        text = " ⏎ ".join(part if len(part) <= _MOST_TEXT else f"{part[:_MOST_TEXT]}…" for part in of_row)
        fields = {name: value for name, value in vars(each).items() if name != "index"}
        made.append(Mistake(row=row, file=file if several else None, text=text, **fields))
    return tuple(made)


class PredictionFile:
    """Each row's place, true label, given label and score, as a file of rows by the end of its name.

    Written beside its name, and moved there when it is whole. rows: that `numbers` are of.
    Raises: OptionError for a name of a form that cannot be written.
    """

    def __init__(self, path: Path, rows: Rows) -> None:
        self._form, self._path, self._rows = prediction_form(path), path, rows
        self._temporary = atomic_files.temporary_path(path)
        self._file: TableFile | None = None

    def write(self, numbers_S: npt.NDArray[np.int64], truth: pa.Array, answers: dict[str, pa.Array]) -> None:
        """Add rows. answers: columns of the task's answers, such as label and score."""
        columns = self._places(numbers_S) | {"truth": truth} | answers
        table = pa.table({name: _plain(column) for name, column in columns.items()})
        with atomic_files.file_errors(self._path):
            if self._file is None:
                self._file = TableFile(self._temporary, self._form, table.schema)
            self._file.write(table)

    def finish(self) -> None:
        """Make the file whole and give it its name. Nothing if there were no rows."""
        if self._file is not None:
            with atomic_files.file_errors(self._path):
                self._file.finish()
                self._temporary.replace(self._path)
            self._file = None

    def discard(self) -> None:
        """Remove what was written; nothing of a finished file."""
        if self._file is not None:
            with suppress(OSError):
                self._file.discard()
            self._file = None

    def _places(self, numbers_S: npt.NDArray[np.int64]) -> dict[str, pa.Array]:
        """The file of each row, if there are several, and its number in it, from 1, header not counted."""
        starts = np.asarray(self._rows.starts)
        parts = np.searchsorted(starts, numbers_S, side="right") - 1
        places: dict[str, pa.Array] = {}
        if len(starts) > 1:
            places["file"] = pa.array(self._rows.files, pa.large_string()).take(pa.array(parts))
        return places | {"row": pa.array(numbers_S - starts[parts] + 1)}


def prediction_form(path: Path) -> Form:
    """The form of a file of answers. Raises: OptionError for a name that asks for none."""
    form = form_of(path)
    if form is None or path.is_dir():
        raise OptionError(f"--output {printable(path)} is no name of a file of rows", hint=f"let it end in {FORMS}")
    return form


def truth_column(space: LabelSpace, targets_S: Targets) -> pa.Array:
    """True labels as answers are written: a name, a list of names, a number, or a list of numbers."""
    names = pa.array(space.names, pa.large_string())
    if isinstance(targets_S, LabelRows):
        offsets, labels = pa.array(targets_S.offsets_N1, pa.int64()), pa.array(targets_S.labels_E)
        return pa.LargeListArray.from_arrays(offsets, names.take(labels))
    if space.task == "single_label":
        return names.take(pa.array(targets_S.astype(np.int64)))
    by_row = targets_S.reshape(len(targets_S), -1).astype(np.float64)
    if by_row.shape[1] == 1:
        return pa.array(by_row[:, 0])
    offsets = np.arange(len(by_row) + 1) * by_row.shape[1]
    return pa.LargeListArray.from_arrays(pa.array(offsets, pa.int64()), pa.array(by_row.ravel()))


def _plain(column: pa.Array) -> pa.Array:
    return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column

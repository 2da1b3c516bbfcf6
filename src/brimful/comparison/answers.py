"""Answers that were saved with an evaluation, and the rows that two of them have in common."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

#: Rows of a file: its name, or nothing where there is one, and the number in it.
Key = tuple[str, int]


@dataclass(frozen=True, kw_only=True)
class Answers:
    """Truth and answer of each row: a name, a tuple of names, a number or a tuple of numbers."""

    keys: tuple[Key, ...]
    truths: tuple[Any, ...]
    answers: tuple[Any, ...]


def read_answers(file: Path) -> Answers | None:
    """Answers in a file of predictions; None if there is none, or one of another form."""
    try:
        table = pq.read_table(file)  # type: ignore[no-untyped-call]
    except (OSError, pa.ArrowInvalid):
        return None
    names = table.column_names
    answer = "label" if "label" in names else "score"
    if not {"row", "truth", answer} <= set(names):
        return None
    files = table["file"].to_pylist() if "file" in names else [""] * table.num_rows
    return Answers(
        keys=tuple(zip(files, table["row"].to_pylist(), strict=True)),
        truths=tuple(map(_hashable, table["truth"].to_pylist())),
        answers=tuple(map(_hashable, table[answer].to_pylist())),
    )


@dataclass(frozen=True, kw_only=True)
class Common:
    """Rows that two files of answers have in common, with the same truth: N of each. differing: with another truth."""

    truths: tuple[Any, ...]
    first: tuple[Any, ...]
    other: tuple[Any, ...]
    differing: int


def in_common(first: Answers, other: Answers) -> Common:
    """Rows of both, in the order of the first. A row that one of them does not answer counts as answered wrongly."""
    places = {key: place for place, key in enumerate(other.keys)}
    found: list[tuple[Any, Any, Any]] = []
    differing = 0
    for key, truth, answer in zip(first.keys, first.truths, first.answers, strict=True):
        place = places.get(key)
        if place is None:
            continue
        if other.truths[place] != truth:
            differing += 1
            continue
        found.append((truth, answer, other.answers[place]))
    truths, answers, others = zip(*found, strict=True) if found else ((), (), ())
    return Common(truths=truths, first=answers, other=others, differing=differing)


def as_flags(values: tuple[Any, ...], names: dict[str, int]) -> npt.NDArray[np.float64]:
    """(N, L) 1 where a row has a label. values: a name, a tuple of names, or None."""
    flags = np.zeros((len(values), len(names)))
    for row, value in enumerate(values):
        for name in value if isinstance(value, tuple) else (value,):
            if name is not None:
                flags[row, names[name]] = 1.0
    return flags


def as_numbers(values: tuple[Any, ...]) -> npt.NDArray[np.float64]:
    """(N, O) numbers; NaN for None."""
    rows = [value if isinstance(value, tuple) else (value,) for value in values]
    width = max((len(row) for row in rows), default=1)
    return np.array([[np.nan if v is None else v for v in row] + [np.nan] * (width - len(row)) for row in rows])


def _hashable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value

"""Texts that stand for several labels: `["a", "b"]`, `['a', 'b']`, `a|b`. Works on distinct values, never on rows.

Legend: V distinct values, E labels of all of them together.
"""

from __future__ import annotations

import ast
import json
import re
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from brimful.data.readers.json_types import as_text
from brimful.tasks.label_rows import LabelRows

_MOST_LABELS = 1000
_SEPARATORS = "|;"
_SEPARATORS_WHEN_ASKED = "|;,"
#: A list as Python writes it into a CSV: quoted values with commas between them.
_PYTHON_LIST = re.compile(r"""\[\s*('[^'\\]*'|"[^"\\]*")(\s*,\s*('[^'\\]*'|"[^"\\]*"))*\s*\]""")
#: Values that are Python's texts at a time.
_WINDOW = 1 << 14

_Cut = Callable[[str], Iterable[str]]


@dataclass(frozen=True, kw_only=True, eq=False)
class Sets:
    """The labels that each of V distinct values stands for, as it names them.

    labels: the distinct ones, in order of appearance. offsets_V1, places_E: those of value i are
    labels[places_E[offsets_V1[i] : offsets_V1[i + 1]]].
    """

    labels: tuple[str, ...]
    offsets_V1: npt.NDArray[np.int64]
    places_E: npt.NDArray[np.int32]

    @property
    def num_cut(self) -> int:
        """Values that stand for several labels."""
        return int((np.diff(self.offsets_V1) > 1).sum())

    def uses(self) -> npt.NDArray[np.int64]:
        """Of each label, how often values name it."""
        return np.bincount(self.places_E, minlength=len(self.labels))

    def num_bits(self) -> int:
        """C where each value is a list of C >= 2 elements that say of each label by 0 or 1 if it is there; else 0."""
        lengths = np.unique(np.diff(self.offsets_V1))
        size = int(lengths[0]) if len(lengths) == 1 else 0
        return size if size > 1 and {*self.labels} <= {"0", "1"} else 0

    def bits(self) -> LabelRows:
        """The values as what their 0 and 1 say."""
        size, ones = self.num_bits(), np.array([label == "1" for label in self.labels], np.bool_)
        return LabelRows.of_blocks([ones[self.places_E].reshape(-1, size)], size)

    def first_value(self, label: str) -> int:
        """Number of the first value that names a label."""
        place = int(np.argmax(self.places_E == self.labels.index(label)))
        return int(np.searchsorted(self.offsets_V1, place, side="right")) - 1

    def targets(self, outputs: npt.NDArray[np.int64], num_outputs: int) -> LabelRows:
        """The values' labels by the output of each of `labels`; those below 0 are left out."""

        def part(ends: npt.NDArray[np.int64]) -> LabelRows:
            outputs_E = outputs[self.places_E[ends[0] : ends[-1]]]
            owners_E, known_E = np.repeat(np.arange(len(ends) - 1), np.diff(ends)), outputs_E >= 0
            return LabelRows.of_pairs(owners_E[known_E], outputs_E[known_E], (len(ends) - 1, num_outputs))

        starts = range(0, len(self.offsets_V1) - 1, _WINDOW)
        return LabelRows.joined((part(self.offsets_V1[at : at + _WINDOW + 1]) for at in starts), num_outputs)

    def has(self, marked: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        """(V,) whether a value names one of the `labels` that are marked."""
        before = np.concatenate([[0], np.cumsum(marked[self.places_E])])
        return np.asarray(np.diff(before[self.offsets_V1]) > 0)


def detect_sets(values: pa.Array, *, asked: bool) -> Sets | None:
    """Values as sets of labels, None if they look like one label each. asked: the user says that they are sets.

    Names of classes hold separators too (`Food; drinks`). Unasked, values are cut only where that gives fewer labels
    than there are values, and some of these labels stand alone in other values.
    """
    if (lists := _as_lists(values)) is not None:
        return lists
    for separator in _SEPARATORS_WHEN_ASKED if asked else _SEPARATORS:
        if not any(separator in value for value in _texts(values)):
            continue
        sets = _made(values, _split(separator))
        labels = {*sets.labels}
        combine = len(labels) < min(len(values), _MOST_LABELS) and any(value in labels for value in _texts(values))
        if asked or (combine and "" not in labels):
            return sets
    return _made(values, _whole) if asked else None


def known_sets(values: pa.Array, labels: Collection[str]) -> Sets:
    """Values as sets of `labels`, cut in the way that leaves the fewest unknown ones and gives the most known ones."""
    if (lists := _as_lists(values)) is not None:
        return lists
    ways: list[_Cut] = [_whole, *map(_split, _SEPARATORS_WHEN_ASKED)]

    def unknown_and_known(way: _Cut) -> tuple[int, int]:
        known = unknown = 0
        for value in _texts(values):
            for label in way(value):
                if label in labels:
                    known += 1
                else:
                    unknown += 1
        return unknown, -known

    return _made(values, min(ways, key=unknown_and_known))


def _texts(values: pa.Array) -> Iterator[str]:
    """The values as Python's texts, some at a time."""
    for start in range(0, len(values), _WINDOW):
        yield from values.slice(start, _WINDOW).to_pylist()


def _made(values: pa.Array, cut: _Cut) -> Sets:
    number: dict[str, int] = {}
    places, offsets = array("i"), array("q", [0])
    for value in _texts(values):
        places.extend([number.setdefault(label, len(number)) for label in cut(value)])
        offsets.append(len(places))
    return Sets(
        labels=tuple(number), offsets_V1=np.array(offsets, np.int64), places_E=np.array(places, np.int32)
    )  # fmt: skip


class _NoListError(ValueError):
    """A text that is no list."""


def _as_lists(values: pa.Array) -> Sets | None:
    """Texts that are all lists, in JSON or as Python writes them; else None."""
    try:
        return _made(values, _elements)
    except _NoListError:
        return None


def _elements(value: str) -> list[str]:
    text = value.strip()
    try:
        parsed = ast.literal_eval(text) if _PYTHON_LIST.fullmatch(text) else json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _NoListError from error
    if not isinstance(parsed, list) or not all(isinstance(element, (str, int, float)) for element in parsed):
        raise _NoListError
    return [as_text(element) or "" for element in parsed]


def _whole(value: str) -> Iterable[str]:
    return (value,)


def _split(separator: str) -> _Cut:
    return lambda value: [part.strip() for part in value.split(separator)]

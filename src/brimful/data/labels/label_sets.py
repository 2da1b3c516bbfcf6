"""Texts that stand for several labels: `["a", "b"]`, `['a', 'b']`, `a|b`. Works on distinct values, never on rows."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence

from brimful.data.readers.json_types import as_text

#: Text of a label column -> the labels that it stands for.
Sets = Mapping[str, tuple[str, ...]]

_MOST_LABELS = 1000
_SEPARATORS = "|;"
_SEPARATORS_WHEN_ASKED = "|;,"
#: A list as Python writes it into a CSV: quoted values with commas between them.
_PYTHON_LIST = re.compile(r"""\[\s*('[^'\\]*'|"[^"\\]*")(\s*,\s*('[^'\\]*'|"[^"\\]*"))*\s*\]""")


def detect_sets(values: Sequence[str], *, asked: bool) -> Sets | None:
    """Values as sets of labels, None if they look like one label each. asked: the user says that they are sets.

    Names of classes hold separators too (`Food; drinks`). Unasked, values are cut only where that gives fewer labels
    than there are values, and some of these labels stand alone in other values.
    """
    if (lists := _as_lists(values)) is not None:
        return lists
    for separator in _SEPARATORS_WHEN_ASKED if asked else _SEPARATORS:
        sets = _split(values, separator)
        labels = {label for several in sets.values() for label in several}
        if not any(len(several) > 1 for several in sets.values()):
            continue
        combine = len(labels) < min(len(values), _MOST_LABELS) and not labels.isdisjoint(values)
        if asked or (combine and "" not in labels):
            return sets
    return {value: (value,) for value in values} if asked else None


def known_sets(values: Sequence[str], labels: Collection[str]) -> Sets:
    """Values as sets of `labels`, cut in the way that leaves the fewest unknown ones and gives the most known ones."""
    if (lists := _as_lists(values)) is not None:
        return lists
    ways: list[Sets] = [{value: (value,) for value in values}]
    ways += [_split(values, separator) for separator in _SEPARATORS_WHEN_ASKED]

    def unknown_and_known(sets: Sets) -> tuple[int, int]:
        known = [label in labels for several in sets.values() for label in several]
        return known.count(False), -sum(known)

    return min(ways, key=unknown_and_known)


def num_bits(sets: Sets) -> int:
    """C where each set is a list of C >= 2 elements that say by 0 or 1 of each label whether it is there; else 0."""
    lengths = {len(several) for several in sets.values()}
    size = lengths.pop() if len(lengths) == 1 else 0
    return size if size > 1 and all(label in ("0", "1") for several in sets.values() for label in several) else 0


def _as_lists(values: Iterable[str]) -> Sets | None:
    """Texts that are all lists, in JSON or as Python writes them; else None."""
    lists = {}
    for value in values:
        text = value.strip()
        try:
            parsed = ast.literal_eval(text) if _PYTHON_LIST.fullmatch(text) else json.loads(text)
        except (ValueError, RecursionError):
            return None
        if not isinstance(parsed, list) or not all(isinstance(element, (str, int, float)) for element in parsed):
            return None
        lists[value] = tuple(as_text(element) or "" for element in parsed)
    return lists


def _split(values: Iterable[str], separator: str) -> Sets:
    return {value: tuple(part.strip() for part in value.split(separator)) for value in values}

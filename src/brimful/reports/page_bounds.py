"""Bounds of what a page takes, in bytes: of the record within it, and of its tables, whatever labels are called."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from markupsafe import escape

from brimful.core.errors import printable
from brimful.core.records import json_text

#: Bytes of the record within a page; characters of a name in a table.
_MOST_RECORD, _MOST_NAME = 500_000, 200
#: Bytes of a row and of a cell besides the cells' texts.
_ROW, _CELL = 50, 25
#: A list or mapping of fewer entries is never cut: it is no list of labels.
_SHORT = 60
#: Bytes of each longer list, and characters of each text, that are tried in turn until a record fits.
_TRIED = tuple((most, max(most // 64, _MOST_NAME)) for most in (256_000 >> i for i in range(8)))


def fitting_record(record: Any) -> tuple[dict[str, Any], bool]:
    """A record as JSON's kinds that fits into a page, and whether that is all of it.

    Of long lists and mappings the first entries stay, of long texts the beginnings. `shortened` then has the number of
    entries that lists lost, by their names.
    """
    whole = dataclasses.asdict(record)
    if _size(whole) <= _MOST_RECORD:
        return whole, True
    fitted = whole
    for most, characters in _TRIED:
        lost: dict[str, int] = {}
        fitted = {**_fitted(whole, "", most, characters, lost), "shortened": lost}
        if _size(fitted) <= _MOST_RECORD:
            break
    return fitted, False


def fitting_rows(rows: Sequence[tuple[str, ...]], most: int) -> list[tuple[str, ...]]:
    """The first rows of a table of labels that fit into so many bytes; names, their first cells, are cut."""
    fitting, taken = list[tuple[str, ...]](), 0
    for name, *cells in rows:
        row = (short_name(name), *cells)
        taken += _ROW + sum(len(escape(cell).encode()) + _CELL for cell in row)
        if taken > most:
            break
        fitting.append(row)
    return fitting


def short_name(name: str) -> str:
    """A name as tables have it: its beginning, where it is longer than a line or two."""
    return printable(name, _MOST_NAME)


def _size(value: Any) -> int:
    """Bytes of a value in a page, where each `<`, `>` and `&` takes six."""
    text = json_text(value)
    return len(text.encode()) + 5 * sum(map(text.count, "<>&"))


def _fitted(value: Any, name: str, most: int, characters: int, lost: dict[str, int]) -> Any:
    """A value whose long lists take at most so many bytes each."""
    if isinstance(value, str):
        return _cut(value, characters)
    if not isinstance(value, Mapping | list | tuple):
        return value
    fitted: dict[str, Any] | list[Any]
    if isinstance(value, Mapping):
        pairs = list(itertools.islice(value.items(), _first(value.items(), most)))
        named = {key: f"{name}.{key}" if name else str(key) for key, _ in pairs}
        fitted = {_cut(str(key), characters): _fitted(each, named[key], most, characters, lost) for key, each in pairs}
    else:
        fitted = [_fitted(each, name, most, characters, lost) for each in value[: _first(value, most)]]
    if len(fitted) < len(value):  # names that are alike once they are cut, too
        lost[name] = lost.get(name, 0) + len(value) - len(fitted)
    return fitted


def _first(entries: Collection[Any], most: int) -> int:
    """Count the first entries that fit into so many bytes: of a few entries all."""
    if len(entries) < _SHORT:
        return len(entries)
    taken = itertools.accumulate(map(_size, entries))
    return sum(1 for _ in itertools.takewhile(lambda size: size <= most, taken))


def _cut(text: str, characters: int) -> str:
    return text if len(text) <= characters else text[: characters - 1] + "…"

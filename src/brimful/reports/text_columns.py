"""Text in terminal columns: some characters, such as Chinese ones, are two columns wide."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.cells import cell_len, set_cell_size

from brimful.core.errors import printable


def fitted(text: str, columns: int) -> str:
    """`text` on one line, cut to `columns`; `(empty)` for an empty text."""
    line = printable(text, 4 * columns + 1) or "(empty)"
    return line if cell_len(line) <= columns else set_cell_size(line, columns - 1).rstrip() + "…"


def told_apart(names: Sequence[str], columns: int) -> list[str]:
    """Names cut to so many columns; those that would read alike keep their ends, too, and have numbers where these are
    alike as well."""
    short = [fitted(name, columns) for name in names]
    counts = Counter(short)
    cut = [text if counts[text] == 1 else _with_end(name, columns) for name, text in zip(names, short, strict=True)]
    alike = Counter(text for _, text in dict.fromkeys(zip(names, cut, strict=True)))
    numbers = Counter[str]()
    for place, text in enumerate(cut):
        if alike[text] > 1:
            numbers[text] += 1
            number = f" ({numbers[text]})"
            cut[place] = fitted(text, columns - len(number)) + number
    return cut


def _with_end(name: str, columns: int) -> str:
    if cell_len(line := printable(name, 10 * len(name) + 1)) <= columns:
        return fitted(name, columns)
    end = line[-columns // 2 :]
    while cell_len(end) > columns // 2:
        end = end[1:]
    return f"{fitted(name, columns - cell_len(end)).removesuffix('…')}…{end}"


def padded(text: str, columns: int) -> str:
    """`text` padded with spaces to `columns`."""
    return text + " " * (columns - cell_len(text))


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows as lines: each column is as wide as its widest cell, and two spaces are between columns."""
    widths = [max(map(cell_len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(padded, row, widths)).rstrip() for row in rows]

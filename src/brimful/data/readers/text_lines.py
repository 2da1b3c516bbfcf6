"""Files of lines: a text in each, or fastText's form with the labels before it.

__label__sports __label__football The striker scored twice.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import pyarrow as pa

from brimful.core.errors import DataError, printable
from brimful.data.readers.compression import not_utf8
from brimful.data.readers.lines import TOO_LONG, FileLines
from brimful.data.readers.parts import Part, Piece, RowsRead, in_order

PREFIX = "__label__"
_LABELS = re.compile(rf"\s*((?:{PREFIX}\S*\s*)*)")


class TextLinesPart(Part):
    """The lines of a file, each a text. A blank one is a row without text, so that rows stay where lines are."""

    def __init__(self, file: str, encoding: str | None = None) -> None:
        self.files = (file,)
        self._lines = FileLines(file, encoding=encoding)
        self.size_bytes = self._lines.size_bytes
        self._head = (self._lines.head().data or b"").decode("utf-8", "replace").splitlines()
        self.schema = pa.schema([("text", pa.large_string())])

    def notes(self) -> list[str]:
        return list(filter(None, [self._lines.note()]))

    def warnings(self) -> list[str]:
        counts = {line.count("\t") for line in self._head}
        if len(counts) > 1 or not counts or not counts.pop():
            return []
        said = "every line has a tab in it, and is read as one text: --delimiter tab reads columns"
        return [f"{printable(self.files[0])}: {said}"]

    def pieces(self, start: int) -> Iterator[Piece]:
        return in_order(self._tables())

    def _tables(self) -> Iterator[RowsRead]:
        for data, _ in self._lines.blocks():
            self.share = self._lines.share
            if data is None:
                yield pa.Table.from_pylist([{}], self.schema), {0: TOO_LONG}
                continue
            lines = data.removesuffix(b"\n").split(b"\n")
            faults: dict[int, DataError] = {}
            rows = [self._row(line.removesuffix(b"\r"), number, faults) for number, line in enumerate(lines)]
            yield pa.Table.from_pylist(rows, self.schema), faults

    def _row(self, line: bytes, number: int, faults: dict[int, DataError]) -> dict[str, object]:
        try:
            return self._values(line.decode())
        except UnicodeDecodeError:
            faults[number] = not_utf8(line)
        except DataError as error:
            faults[number] = error
        return {}

    def _values(self, line: str) -> dict[str, object]:
        return {"text": line}


class FastTextPart(TextLinesPart):
    """Lines in fastText's form. The label is a list where any of the first lines has several."""

    def __init__(self, file: str, encoding: str | None = None) -> None:
        super().__init__(file, encoding)
        self._several = any(line.count(PREFIX) > 1 and len(_labels(line)[0]) > 1 for line in self._head)
        kind = pa.large_list(pa.large_string()) if self._several else pa.large_string()
        self.schema = pa.schema([("text", pa.large_string()), ("label", kind)])

    def notes(self) -> list[str]:
        each = "several labels" if self._several else "one label"
        return [
            f"{printable(self.files[0])}: read as fastText, {each} a line, as it begins with {PREFIX}",
            *super().notes(),
        ]

    def warnings(self) -> list[str]:
        return []

    def _values(self, line: str) -> dict[str, object]:
        labels, text = _labels(line)
        if self._several:
            return {"text": text, "label": labels}
        if len(labels) > 1:
            said = f"{len(labels)} labels, and the first lines have one each"
            raise DataError(said, value=line, hint="put a line with several labels among the first")
        return {"text": text, "label": labels[0] if labels else None}


def is_fast_text(file: str, encoding: str | None = None) -> bool:
    """True for a file whose first line with anything in it begins with a label."""
    head = (FileLines(file, encoding=encoding).head().data or b"").lstrip()
    return head.startswith(PREFIX.encode())


def _labels(line: str) -> tuple[list[str], str]:
    """Labels and text of a line."""
    match = _LABELS.match(line)
    assert match is not None
    return [word.removeprefix(PREFIX) for word in match[1].split()], line[match.end() :].strip()

"""Excel and OpenDocument workbooks, through the extra `excel` (calamine, a reader in Rust)."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

import pyarrow as pa

from brimful.core.errors import DataError, OptionError, first_line, listed, printable
from brimful.core.options.checks import split_names
from brimful.data.column_names import IDS, KNOWN, key_of
from brimful.data.readers.compression import COPY_AGAIN
from brimful.data.readers.file_format import FileFormat
from brimful.data.readers.formats import no_rows
from brimful.data.readers.header import first_line_doubt, header_notes, title_doubt
from brimful.data.readers.parts import TablePart

_Rows = list[list[Any]]


class ExcelPart(TablePart):
    """The rows of one sheet. The first line with anything in it names the columns, unless the user says that it is a
    row; columns and lines without any value are none."""

    def __init__(self, file: str, form: FileFormat) -> None:
        self._form = form
        sheet, sheets, rows = _sheet(file, form)
        self._said = []
        if form.sheet is None and len(sheets) > 1:
            shown = listed([printable(name, 40) for name in sheets], 5)
            self._said = [f"{printable(file)}: sheet '{printable(sheet)}' is read, of {shown}; --sheet names another"]
        self._first = [_text(value) for value in rows[0]]
        names, rows = _named(file, rows, form)
        columns = {name: _column([row[index] for row in rows]) for index, name in enumerate(names) if name is not None}
        super().__init__(file, pa.table(columns))

    def notes(self) -> list[str]:
        return self._said

    def guesses(self) -> list[str]:
        return [] if self._doubt else header_notes(self.schema.names, self._form)

    def warnings(self) -> list[str]:
        return [f"{printable(self.files[0])}: {self._doubt}"] if self._doubt else []

    @cached_property
    def _doubt(self) -> str | None:
        """A likely mistake about the first line, seen from the first rows."""
        texts = self._table.slice(0, 1000)
        texts = pa.table({name: texts[name].cast(pa.large_string()) for name in texts.column_names})
        title = title_doubt(self._first, texts) if self._form.has_header is None else None
        return title or first_line_doubt(texts.column_names, texts, self._form)


def _sheet(file: str, form: FileFormat) -> tuple[str, list[str], _Rows]:
    """Name of the sheet to read, names of all, and its rows."""
    try:
        import python_calamine
    except ImportError as error:
        raise DataError(
            "reading workbooks needs the package python-calamine", file=file, hint="pip install 'brimful[excel]'"
        ) from error
    try:
        with python_calamine.load_workbook(file) as book:
            sheets = list(book.sheet_names)
            if form.sheet is not None and form.sheet not in sheets:
                hint = f"it has {listed([printable(name, 40) for name in sheets])}"
                raise OptionError(f"--sheet: {printable(file)} has no sheet '{printable(form.sheet)}'", hint=hint)
            names = [form.sheet] if form.sheet is not None else sheets
            found = _chosen(((name, _rows(book.get_sheet_by_name(name))) for name in names), form)
            if found is not None:
                return found[0], sheets, found[1]
    except (python_calamine.CalamineError, OSError) as error:
        raise DataError(f"is no whole workbook ({first_line(error)})", file=file, hint=COPY_AGAIN) from error
    raise no_rows(file, None)


def _rows(sheet: Any) -> _Rows:
    """The lines of a sheet with anything in them."""
    return [row for row in sheet.to_python(skip_empty_area=True) if any(value != "" for value in row)]


def _chosen(sheets: Iterable[tuple[str, _Rows]], form: FileFormat) -> tuple[str, _Rows] | None:
    """The sheet to read, with its rows: the first with the columns that are asked for, else the first with a usual name
    of a text or label, or a longer table before it, else the first with any rows. A title page is no table."""
    seen, known = list[tuple[str, _Rows]](), None
    for name, rows in sheets:
        if rows:
            seen.append((name, rows))
            names = [_text(value) for value in rows[0]] if form.has_header is not False else []
            if form.asked and all(set(names) >= set(_parts(names, asked)) for asked in form.asked):
                return seen[-1]
            if known is None and len(rows) > 1 and any(key_of(each) in KNOWN - IDS for each in names):
                known = seen[-1]
            if not form.asked and seen[0] is known:
                return known
    table = next((each for each in seen if _is_table(each[1])), None)
    if known is not None and (table is None or len(known[1]) >= len(table[1])):
        return known
    return table or next(iter(seen), None)


def _parts(names: Sequence[str], asked: str) -> Sequence[str]:
    """The columns that an option names: one, whatever its name, or several separated by commas."""
    return (asked,) if asked in names or "," not in asked else split_names(asked)


def _is_table(rows: _Rows) -> bool:
    """True if two lines or more have several values."""
    return len([row for row in rows if sum(value != "" for value in row) > 1]) > 1


def _named(file: str, rows: _Rows, form: FileFormat) -> tuple[list[str | None], _Rows]:
    """Names of the columns, None for one without any value, and the rows below the header."""
    used = [any(row[index] != "" for row in rows) for index in range(len(rows[0]))]
    if form.has_header is False:
        if form.names is not None and len(form.names) != sum(used):
            said = f"--column-names has {len(form.names)} names, and the sheet {sum(used)} columns"
            raise DataError(said, file=file, hint="name all columns, in their order")
        given = iter(form.names or [f"column_{number}" for number in range(1, sum(used) + 1)])
        return [next(given) if there else None for there in used], rows
    first, rows = rows[0], rows[1:]
    if not rows:
        raise no_rows(file, first)
    names = [
        _text(value) or f"column_{number}" if there else None
        for number, (value, there) in enumerate(zip(first, used, strict=True), 1)
    ]
    present = [name for name in names if name is not None]
    twice = next((name for name in present if present.count(name) > 1), None)
    if twice is not None:
        hint = "rename one of them, or add --no-header if the sheet has none"
        raise DataError("the header has a column twice", file=file, value=twice, hint=hint)
    return names, rows


def _column(values: Sequence[Any]) -> pa.Array:
    """Values of one kind as they are, whole numbers as such; of several kinds, dates and durations as text."""
    there = [value for value in values if value != ""]
    if there and all(isinstance(value, bool) for value in there):
        return pa.array([None if value == "" else value for value in values], pa.bool_())
    if there and all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in there):
        if all(float(value).is_integer() and abs(value) < 1 << 53 for value in there):
            return pa.array([None if value == "" else int(value) for value in values], pa.int64())
        return pa.array([None if value == "" else float(value) for value in values], pa.float64())
    return pa.array([None if value == "" else _text(value) for value in values], pa.large_string())


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return value.isoformat() if isinstance(value, (datetime.date, datetime.time)) else str(value)

"""The user's word about how files of rows are read, where the files themselves do not say it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from brimful.core.options.checks import DELIMITERS, split_names

#: Options that name columns, in the commands that have them.
_COLUMNS = ("text_column", "pair_column", "label_column", "weight_column")


class _Options(Protocol):
    """Options of every command that reads files."""

    @property
    def header(self) -> bool | None: ...
    @property
    def column_names(self) -> str | None: ...
    @property
    def delimiter(self) -> str | None: ...
    @property
    def encoding(self) -> str | None: ...
    @property
    def sheet(self) -> str | None: ...


@dataclass(frozen=True)
class FileFormat:
    """The form of files; None where a file is to be looked at.

    has_header: whether the first line of CSV, TSV and Excel files names the columns; None to take it for names, and to
    warn where it looks like a row. names: of the columns of such files without a header; None for column_1, column_2,
    ... delimiter: one character. encoding: of text; None for UTF-8, and Windows-1252 for bytes that are not. sheet: of
    Excel files; None for the first with a table, and with the columns `asked` for, if one has them.
    """

    has_header: bool | None = None
    names: tuple[str, ...] | None = None
    delimiter: str | None = None
    encoding: str | None = None
    sheet: str | None = None
    asked: tuple[str, ...] = ()

    @classmethod
    def of(cls, options: _Options) -> FileFormat:
        """The form that the options of a command name."""
        names = options.column_names
        return cls(
            has_header=options.header if names is None else False,
            names=None if names is None else split_names(names),
            delimiter=None if options.delimiter is None else DELIMITERS.get(options.delimiter, options.delimiter),
            encoding=options.encoding,
            sheet=options.sheet,
            asked=tuple(filter(None, (getattr(options, name, None) for name in _COLUMNS))),
        )

"""CSV and TSV -> Arrow, every value as the text that stands in the file.

Whether a file quotes its values is not written anywhere. Most do; many TSVs hold bare quotation marks instead, which a
quoting reader takes for the beginning of a value and swallows rows until the next one. So: a file whose lines all have
the header's columns without quoting, and that is not well-formed with quoting, is read without.
"""

from __future__ import annotations

import contextlib
import csv
import io
from collections.abc import Generator, Iterable, Iterator, Sequence

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pacsv

from brimful.core.errors import DataError, first_line, printable
from brimful.data.readers.compression import in_blocks, not_utf8, reading

_REWRITE = "write it anew as CSV or JSONL with the tool that it comes from"
DELIMITERS = ",;\t|"
_REFUSED = (pa.ArrowInvalid, pa.ArrowKeyError)

_Records = Generator[list[str], None, None]


def read_delimited(file: str, delimiter: str | None = None) -> pa.Table:
    """The rows of `file`, all columns large_string, an empty value as ''. delimiter: None to see it from the header.

    Raises: DataError with file and row for text that is not UTF-8, rows of another length, a column name twice.
    """
    if delimiter is None:
        delimiter = max(DELIMITERS, key=lambda candidate: len(_header(file, candidate)))
    names = _header(file, delimiter)
    plain = _read_plain(file, delimiter)
    if plain is not None and (not _has_quotes(plain) or not _well_quoted(file, delimiter, len(names))):
        return plain.rename_columns(names) if len(names) == plain.num_columns else plain
    try:
        return _read(file, delimiter, names, quoting=True)
    except _REFUSED as error:
        raise _fault(file, delimiter, error) from error


def _read_plain(file: str, delimiter: str) -> pa.Table | None:
    """The rows without regard to quotes, None if they do not all have the header's columns so."""
    names = _header(file, delimiter, quoting=False)
    if len(set(names)) < len(names):
        return None
    try:
        return _read(file, delimiter, names, quoting=False)
    except _REFUSED:
        return None


def _read(file: str, delimiter: str, names: list[str], *, quoting: bool) -> pa.Table:
    check_names(names, file)

    def read(block_bytes: int) -> pa.Table:
        with reading(file) as stream:
            return pacsv.read_csv(
                stream,
                read_options=pacsv.ReadOptions(block_size=block_bytes),
                parse_options=pacsv.ParseOptions(
                    delimiter=delimiter, quote_char='"' if quoting else False, newlines_in_values=quoting
                ),
                convert_options=pacsv.ConvertOptions(
                    include_columns=names,
                    column_types=dict.fromkeys(names, pa.large_string()),
                    strings_can_be_null=False,
                ),
            )

    return in_blocks(read)


def _header(file: str, delimiter: str, *, quoting: bool = True) -> list[str]:
    with contextlib.closing(_records(file, delimiter, quoting=quoting)) as records:
        names = next(records)
    if bad := bad_utf8(names):
        raise not_utf8(bad, file=file)
    return names


def check_names(names: Sequence[str], file: str) -> None:
    """Raises DataError for a header with a column twice."""
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise DataError("the header has a column twice", file=file, value=twice, hint="rename one of them")


@contextlib.contextmanager
def long_values() -> Iterator[None]:
    """Lets csv read values of any length. Its limit belongs to the whole process, so it is put back."""
    limit = csv.field_size_limit((1 << 31) - 1)
    try:
        yield
    finally:
        csv.field_size_limit(limit)


def _records(file: str, delimiter: str, *, quoting: bool = True, strict: bool = False) -> _Records:
    """Header and rows by Python's slow but exact parser; bytes that are not UTF-8 come as lone surrogates."""
    with (
        long_values(),
        reading(file) as stream,
        io.TextIOWrapper(stream, encoding="utf-8-sig", errors="surrogateescape", newline="") as lines,
    ):
        records = csv.reader(
            lines,
            delimiter=delimiter,
            quoting=csv.QUOTE_MINIMAL if quoting else csv.QUOTE_NONE,
            strict=strict,
        )
        yield from filter(None, records)


def _has_quotes(table: pa.Table) -> bool:
    return any('"' in name for name in table.column_names) or any(
        pc.any(pc.match_substring(column, '"'), min_count=0).as_py() for column in table.columns
    )


def _well_quoted(file: str, delimiter: str, num_columns: int) -> bool:
    try:
        with contextlib.closing(_records(file, delimiter, strict=True)) as records:
            return all(len(record) == num_columns for record in records)
    except csv.Error:
        return False


def _fault(file: str, delimiter: str, error: Exception) -> DataError:
    """The first row that `read_delimited` stumbled over, found by going through the file again."""
    with contextlib.closing(_records(file, delimiter)) as records:
        names, row = next(records), 0
        for row, record in enumerate(records, 1):
            if bad := bad_utf8(record):
                return not_utf8(bad, file=file, row=row)
            if len(record) != len(names):
                return DataError(
                    f"{len(record)} columns, the header has {len(names)}",
                    file=file,
                    row=row,
                    value=delimiter.join(record),
                    hint=_hint_ragged(record, len(names), delimiter),
                )
    if not row:
        return DataError("has a header and no rows", file=file, hint="it needs rows of texts: is it the right file?")
    return DataError(f"cannot be parsed ({first_line(error)})", file=file, hint=_REWRITE)


def _hint_ragged(record: list[str], num_columns: int, delimiter: str) -> str:
    if any("\n" in value for value in record):
        return 'a quotation mark opens here and closes rows later: write " within a value as ""'
    if len(record) < num_columns:
        return f"is the row cut off? The file is read with the delimiter '{printable(delimiter)}'"
    return f"put quotation marks around values that hold the delimiter '{printable(delimiter)}'"


def bad_utf8(record: Iterable[str]) -> bytes | None:
    """The first value with bytes that are not UTF-8."""
    for value in record:
        try:
            value.encode()
        except UnicodeEncodeError:
            return value.encode("utf-8", "surrogateescape")
    return None

"""From a user's name for their data to its rows: a file, a folder, a glob of these, or a name on the hub."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Collection, Sequence
from typing import BinaryIO

import pyarrow as pa

from brimful.core.errors import OptionError
from brimful.data.file_names import split_suffix
from brimful.data.readers.columnar import ArrowPart, ParquetPart
from brimful.data.readers.compression import reading
from brimful.data.readers.delimited import DelimitedPart
from brimful.data.readers.formats import checked_format
from brimful.data.readers.header import Header
from brimful.data.readers.hub import load_hub
from brimful.data.readers.json_document import has_lines, parse_document
from brimful.data.readers.json_rows import JsonObjectsPart, JsonPipePart, json_lines_parts
from brimful.data.readers.lines import FileLines
from brimful.data.readers.locations import Location, locate, refusals
from brimful.data.readers.parts import Part, TablePart, TextFilesPart
from brimful.data.readers.rows import Rows
from brimful.data.readers.stream import RowStream

_WITH_HEADER = (".csv", ".tsv")


def read_rows(spec: str, header: Header | None = None) -> Rows:
    """All rows of `spec` in memory, in the order of the files' names and of the rows within each.

    spec: a CSV, TSV, JSON, JSONL, Parquet (each also .gz or .zst), Arrow or Feather file; a folder of such files; a
    folder saved by `datasets`, of which several splits the one called train; a folder with one sub-folder of .txt files
    per class; a glob of any of these; or `name`, `owner/name` or `owner/name:split` of a hub data set.
    header: whether the first lines of CSV and TSV files name the columns.

    Raises: OptionError for a `header` where there are no such files; DataError for a file that is missing, damaged,
    empty or of other columns, and for the first row that cannot be read, with file and row.
    """
    with refusals(spec):
        return RowStream(spec, _parts_at(locate(spec), header or Header())).collect()


def open_stream(spec: str, stdin: BinaryIO | None = None, header: Header | None = None) -> RowStream:
    """The rows of `spec`, as `read_rows` describes it, or of `-` for JSON lines on `stdin`.

    A column has one type in all files: the wider number, or text, where their types differ.

    Raises: as `read_rows` does, but DataError for damage only where it is seen from the start, and for a row only where
    none of the first can be read.
    """
    header = header or Header()
    with refusals(spec):
        if spec == "-":
            _check_header(header, ())
            stream = RowStream(spec, [JsonPipePart(stdin or sys.stdin.buffer)])
        else:
            stream = RowStream(spec, _parts_at(locate(spec), header))
        stream.sample  # noqa: B018
    return stream


def can_have_header(spec: str) -> bool:
    """True where CSV or TSV files are among those of `spec`."""
    with refusals(spec):
        return any(split_suffix(location.path)[0] in _WITH_HEADER for location in locate(spec))


def _check_header(header: Header, formats: Collection[str]) -> None:
    """Raises: OptionError for a `header` that no file can have."""
    if header.is_there is False and not any(each in _WITH_HEADER for each in formats):
        given = "--no-header" if header.names is None else "--column-names"
        hint = "leave it out: these data name their columns themselves"
        raise OptionError(f"{given} is for CSV and TSV files, and there is none in the data", hint=hint)


def _parts_at(locations: Sequence[Location], header: Header) -> list[Part]:
    files = [location.path for location in locations if location.label is None and location.otherwise is None]
    kinds = {file: _format_of(file) for file in files}
    _check_header(header, kinds.values())
    json_files = [file for file in files if kinds[file] == ".jsonl"]
    json_parts = dict(zip(json_files, json_lines_parts(json_files), strict=True))
    parts: list[Part] = []
    for label, group in itertools.groupby(locations, key=lambda location: location.label is not None):
        if label:
            texts, labels = zip(*((each.path, each.label) for each in group), strict=True)
            parts.append(TextFilesPart(texts, labels))
        else:
            parts.extend(json_parts.get(each.path) or _part_at(each, kinds.get(each.path), header) for each in group)
    return parts


def _format_of(file: str) -> str:
    """The end of its name; .jsonl for all files with an object per line."""
    kind = checked_format(file)
    if kind == ".json":
        head = next(FileLines(file).blocks()).data
        kind = ".jsonl" if head is not None and has_lines(head) else kind
    return ".jsonl" if kind == ".ndjson" else kind


def _part_at(location: Location, kind: str | None, header: Header) -> Part:
    if location.otherwise is not None:
        return TablePart(location.path, load_hub(location.path, location.otherwise))
    file = location.path
    if kind == ".json":
        with reading(file) as (stream, _):
            rows = parse_document(stream.read().removeprefix(b"\xef\xbb\xbf"), file)
        return TablePart(file, rows) if isinstance(rows, pa.Table) else JsonObjectsPart(file, rows)
    if kind in _WITH_HEADER:
        return DelimitedPart(file, "\t" if kind == ".tsv" else None, header)
    return ParquetPart(file) if kind == ".parquet" else ArrowPart(file)

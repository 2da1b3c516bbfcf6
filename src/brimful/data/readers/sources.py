"""From a user's name for their data to its rows: a file, a folder, a glob of these, or a name on the hub."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from typing import BinaryIO

import pyarrow as pa

from brimful.data.readers.columnar import ArrowPart, ParquetPart
from brimful.data.readers.compression import reading
from brimful.data.readers.delimited import DelimitedPart
from brimful.data.readers.formats import checked_format
from brimful.data.readers.hub import load_hub
from brimful.data.readers.json_document import has_lines, parse_document
from brimful.data.readers.json_rows import JsonObjectsPart, JsonPipePart, json_lines_parts
from brimful.data.readers.lines import FileLines
from brimful.data.readers.locations import Location, locate, refusals
from brimful.data.readers.parts import Part, TablePart, TextFilesPart
from brimful.data.readers.rows import Rows
from brimful.data.readers.stream import RowStream


def read_rows(spec: str) -> Rows:
    """All rows of `spec` in memory, in the order of the files' names and of the rows within each.

    spec: a CSV, TSV, JSON, JSONL, Parquet (each also .gz or .zst), Arrow or Feather file; a folder of such files; a
    folder saved by `datasets`, of which several splits the one called train; a folder with one sub-folder of .txt files
    per class; a glob of any of these; or `name`, `owner/name` or `owner/name:split` of a hub data set.

    Raises: DataError for a file that is missing, damaged, empty or of other columns, and for the first row that cannot
    be read, with file and row.
    """
    with refusals(spec):
        return RowStream(spec, _parts_at(locate(spec))).collect()


def open_stream(spec: str, stdin: BinaryIO | None = None) -> RowStream:
    """The rows of `spec`, which is what `sources.read_rows` takes, or `-` for JSON lines on `stdin`.

    A column has one type in all files: the wider number, or text, where their types differ.

    Raises: DataError for what is missing, empty, of different columns, or damaged where that is seen from the start.
    """
    with refusals(spec):
        if spec == "-":
            stream = RowStream(spec, [JsonPipePart(stdin or sys.stdin.buffer)])
        else:
            stream = RowStream(spec, _parts_at(locate(spec)))
        stream.sample()
    return stream


def _parts_at(locations: Sequence[Location]) -> list[Part]:
    files = [location.path for location in locations if location.label is None and location.otherwise is None]
    kinds = {file: _format_of(file) for file in files}
    json_files = [file for file in files if kinds[file] == ".jsonl"]
    json_parts = dict(zip(json_files, json_lines_parts(json_files), strict=True))
    parts: list[Part] = []
    for label, group in itertools.groupby(locations, key=lambda location: location.label is not None):
        if label:
            parts.append(TextFilesPart([(each.path, each.label or "") for each in group]))
        else:
            parts.extend(json_parts.get(each.path) or _part_at(each, kinds.get(each.path)) for each in group)
    return parts


def _format_of(file: str) -> str:
    """The end of its name; .jsonl for all files with an object per line."""
    kind = checked_format(file)
    if kind == ".json":
        head = next(FileLines(file).blocks()).data
        kind = ".jsonl" if head is not None and has_lines(head) else kind
    return ".jsonl" if kind == ".ndjson" else kind


def _part_at(location: Location, kind: str | None) -> Part:
    if location.otherwise is not None:
        return TablePart(location.path, load_hub(location.path, location.otherwise))
    file = location.path
    if kind == ".json":
        with reading(file) as stream:
            rows = parse_document(stream.read().removeprefix(b"\xef\xbb\xbf"), file)
        return TablePart(file, rows) if isinstance(rows, pa.Table) else JsonObjectsPart(file, rows)
    if kind in (".csv", ".tsv"):
        return DelimitedPart(file, "\t" if kind == ".tsv" else None)
    return ParquetPart(file) if kind == ".parquet" else ArrowPart(file)

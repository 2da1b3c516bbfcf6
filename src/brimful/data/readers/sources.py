"""From a user's name for their data to its rows: a file, a folder, a glob of these, or a name on the hub."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import BinaryIO

import pyarrow as pa

from brimful.core.errors import DataError, OptionError
from brimful.data.file_names import split_suffix
from brimful.data.readers.columnar import ArrowPart, ParquetPart
from brimful.data.readers.compression import reading
from brimful.data.readers.delimited import DelimitedPart
from brimful.data.readers.excel import ExcelPart
from brimful.data.readers.file_format import FileFormat
from brimful.data.readers.formats import EXCEL, checked_format
from brimful.data.readers.hub import load_hub
from brimful.data.readers.in_memory import Tables
from brimful.data.readers.json_document import has_lines, parse_document
from brimful.data.readers.json_rows import JsonObjectsPart, JsonPipePart, json_lines_parts
from brimful.data.readers.lines import FileLines
from brimful.data.readers.locations import Location, locate, refusals
from brimful.data.readers.parts import BrokenPart, Part, TablePart, TextFilesPart
from brimful.data.readers.rows import Rows
from brimful.data.readers.stream import RowStream
from brimful.data.readers.text_encoding import BOM, TextDecoder, decoded_text
from brimful.data.readers.text_lines import FastTextPart, TextLinesPart, is_fast_text

_WITH_HEADER = (".csv", ".tsv", *sorted(EXCEL))


def read_rows(spec: str, form: FileFormat | None = None, tables: Tables | None = None) -> Rows:
    """All rows of `spec` in memory, in the order of the files' names and of the rows within each.

    spec: a CSV, TSV, JSON, JSONL, Parquet (each also .gz or .zst), fastText (.txt), Excel, Arrow or Feather file; a
    folder of such files; a folder saved by `datasets`, of which several splits the one called train; a folder with one
    sub-folder of .txt files per class; a folder of .txt files, a row each; a glob of any of these; or `name`,
    `owner/name` or `owner/name:split` of a hub data set.
    form: the user's word about the form of the files. tables: data in memory, by their names.

    Raises: OptionError for a `form` that none of the files can have; DataError for a file that is missing, damaged,
    empty or of other columns, and for the first row that cannot be read, with file and row.
    """
    form = form or FileFormat()
    if tables is not None and spec in tables:
        return _stream_of(spec, tables[spec], form).collect()
    with refusals(spec):
        return RowStream(spec, _parts_at(locate(spec), form)).collect()


def open_stream(
    spec: str,
    stdin: BinaryIO | None = None,
    form: FileFormat | None = None,
    limit: int | None = None,
    tables: Tables | None = None,
    *,
    keep_broken: bool = False,
) -> RowStream:
    """The first `limit` rows of `spec`, as `read_rows` describes it, or of `-` for JSON lines on `stdin`.

    A column has one type in all files: the wider number, or text, where their types differ. keep_broken: a file that
    cannot be read from its start on raises its error when its rows are read, if any other file can be read.

    Raises: as `read_rows` does, but DataError for damage only where it is seen from the start, and for a row only where
    none of the first can be read.
    """
    form = form or FileFormat()
    with refusals(spec):
        if tables is not None and spec in tables:
            stream = _stream_of(spec, tables[spec], form, limit)
        elif spec == "-":
            _check_form(form, ())
            stream = RowStream(spec, [JsonPipePart(stdin or sys.stdin.buffer)], limit)
        else:
            locations = locate(spec)
            try:
                return _sampled(spec, locations, form, limit, {})
            except DataError:
                if not keep_broken or not (broken := _broken(locations, form)):
                    raise
            return _sampled(spec, locations, form, limit, broken)
        stream.sample  # noqa: B018
    return stream


def _sampled(
    spec: str, locations: Sequence[Location], form: FileFormat, limit: int | None, broken: Mapping[str, DataError]
) -> RowStream:
    """The rows of all locations, with their sample read. broken: errors of files that are not opened, by path."""
    parts = _parts_at([location for location in locations if location.path not in broken], form)
    if broken:
        order = {location.path: number for number, location in enumerate(locations)}
        parts += [BrokenPart(file, error) for file, error in broken.items()]
        parts.sort(key=lambda part: order[part.files[0]])
    stream = RowStream(spec, parts, limit)
    stream.sample  # noqa: B018
    return stream


def _broken(locations: Sequence[Location], form: FileFormat) -> dict[str, DataError]:
    """The errors of files that cannot be read from their start on, by path; none where no file can be."""
    files = [location for location in locations if not location.is_text and location.otherwise is None]
    found: dict[str, DataError] = {}
    for location in files:
        try:
            with refusals(location.path):
                [part] = _opened([location], form, {location.path: _format_of(location.path, form)})
                if part.peek() is not None:
                    RowStream(location.path, [part]).sample  # noqa: B018
        except DataError as error:
            found[location.path] = error
    return found if len(found) < len(locations) else {}


def _stream_of(name: str, table: pa.Table, form: FileFormat, limit: int | None = None) -> RowStream:
    """The rows of a table in memory; its content is its fingerprint."""
    _check_form(form, ())
    if not table.num_rows:
        raise DataError("has no rows", file=name, hint="give one row or more")
    stream = RowStream(name, [TablePart(name, table)], limit)
    stream.fingerprint = stream.collect().fingerprint
    return stream


def fitting(form: FileFormat, spec: str) -> FileFormat:
    """As much of a form as files of `spec` can have: it was given for others, and may fit these too."""
    with refusals(spec):
        files = (location for location in locate(spec) if location.otherwise is None)
        kinds = {".txt" if each.is_text or _is_fast_text(each, form) else _format_of(each.path, form) for each in files}
    left_out = {field: None for fields, _, suffixes in _FORMS for field in fields if kinds.isdisjoint(suffixes)}
    return replace(form, **left_out)  # type: ignore[arg-type]


def _is_fast_text(location: Location, form: FileFormat) -> bool:
    return split_suffix(location.path)[0] == ".txt" and is_fast_text(location.path, form.encoding)


#: Fields of a form, the kinds of files that can have them, and their suffixes.
_FORMS: tuple[tuple[tuple[str, ...], str, Collection[str]], ...] = (
    (("has_header", "names"), "CSV, TSV and Excel", _WITH_HEADER),
    (("delimiter",), "CSV, TSV and .txt", (".csv", ".tsv")),
    (("encoding",), "text", (".csv", ".tsv", ".txt", ".json", ".jsonl")),
    (("sheet",), "Excel", EXCEL),
)


def _check_form(form: FileFormat, formats: Collection[str]) -> None:
    """Raises: OptionError for a `form` that no file can have."""
    for fields, kinds, suffixes in _FORMS:
        is_given = form.has_header is False if "names" in fields else getattr(form, fields[0]) is not None
        if is_given and not any(each in suffixes for each in formats):
            flag, hint = f"--{fields[0]}", "leave it out"
            if "names" in fields:
                flag = "--no-header" if form.names is None else "--column-names"
                hint = "leave it out: these data name their columns themselves"
            raise OptionError(f"{flag} is for {kinds} files, and there is none in the data", hint=hint)


def _parts_at(locations: Sequence[Location], form: FileFormat) -> list[Part]:
    files = [location.path for location in locations if not location.is_text and location.otherwise is None]
    kinds = {file: _format_of(file, form) for file in files}
    _check_form(form, [*kinds.values(), *(".txt" for location in locations if location.is_text)])
    return _opened(locations, form, kinds)


def _opened(locations: Sequence[Location], form: FileFormat, kinds: Mapping[str, str]) -> list[Part]:
    """The parts of the locations, in their order. kinds: of the files, as `_format_of` tells them."""
    files = [location.path for location in locations if location.path in kinds]
    json_files = [file for file in files if kinds[file] == ".jsonl"]
    json_parts = dict(zip(json_files, json_lines_parts(json_files, form.encoding), strict=True))
    parts: list[Part] = []
    for is_text, group in itertools.groupby(locations, key=lambda location: location.is_text):
        if is_text:
            texts = list(group)
            labels = [each.label for each in texts if each.label is not None]
            parts.append(TextFilesPart([each.path for each in texts], labels or None, form.encoding))
        else:
            parts.extend(json_parts.get(each.path) or _part_at(each, kinds.get(each.path), form) for each in group)
    return parts


def _format_of(file: str, form: FileFormat) -> str:
    """The end of its name; .jsonl for all files with an object per line, .csv for .txt files with columns."""
    kind = checked_format(file, form.encoding)
    if kind == ".json":
        head = next(FileLines(file, encoding=form.encoding or "utf-8").blocks()).data
        kind = ".jsonl" if head is not None and has_lines(head) else kind
    if kind == ".txt" and (form.delimiter is not None or form.names is not None or form.has_header is not None):
        kind = ".csv"
    return ".jsonl" if kind == ".ndjson" else kind


def _part_at(location: Location, kind: str | None, form: FileFormat) -> Part:
    if location.otherwise is not None:
        return TablePart(location.path, load_hub(location.path, location.otherwise))
    file = location.path
    if kind == ".json":
        with reading(file) as (stream, _):
            document = stream.read()
        rows = parse_document(_as_utf8(document, file, form.encoding), file)
        return TablePart(file, rows) if isinstance(rows, pa.Table) else JsonObjectsPart(file, rows)
    if kind == ".txt":
        return (FastTextPart if is_fast_text(file, form.encoding) else TextLinesPart)(file, form.encoding)
    if kind in EXCEL:
        return ExcelPart(file, form)
    if kind in _WITH_HEADER:
        return DelimitedPart(file, "\t" if kind == ".tsv" else None, form)
    return ParquetPart(file) if kind == ".parquet" else ArrowPart(file)


def _as_utf8(document: bytes, file: str, encoding: str | None) -> bytes:
    if not TextDecoder(file, encoding, document).recodes:
        return document.removeprefix(BOM)
    return decoded_text(document, file, encoding)[0].encode("utf-8", "surrogatepass")

"""JSON -> Arrow: an object per line, an array of objects, or one object that holds such an array.

pyarrow reads what is regular. What it refuses is read again by Python, in batches: there a column of several types
becomes text, and what is broken gets its row number.
"""

from __future__ import annotations

import io
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.json as pajson

from brimful.core.errors import DataError
from brimful.data.readers.compression import in_blocks, not_utf8, reading
from brimful.data.readers.rows import stack

_BATCH_ROWS = 1 << 16
REFUSED = (pa.ArrowInvalid, pa.ArrowNotImplementedError, UnicodeDecodeError)
_ARRAY = "it holds an array of objects, or one object per line"
_ONE_PER_LINE = "each line is one JSON object"


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    parsed = dict(pairs)
    if len(parsed) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {next(key for key in keys if keys.count(key) > 1)!r} stands twice")
    return parsed


#: Refuses objects with a key twice.
DECODER = json.JSONDecoder(object_pairs_hook=_without_twins)


def read_json_lines(file: str) -> pa.Table:
    """The rows of a file with one JSON object per line. A key that an object lacks is null.

    Raises: DataError with file, row and value for a line that is no JSON object.
    """
    try:
        return in_blocks(lambda block_bytes: read_arrow(file, block_bytes))
    except REFUSED:
        return _table_of(_parsed_lines(file), file)


def read_json(file: str) -> pa.Table:
    """The rows of a .json file: an array of objects, one object with one such array, or in truth one object per line.

    Raises: DataError for anything else, with the row and the value where there is one.
    """
    with reading(file) as stream:
        document = stream.read().removeprefix(b"\xef\xbb\xbf")
    if has_lines(document):
        return read_json_lines(file)
    rows = parse_document(document, file)
    return rows if isinstance(rows, pa.Table) else _table_of(enumerate(rows, 1), file)


def parse_document(document: bytes, file: str) -> pa.Table | list[Any]:
    """The objects of a document, as a table where pyarrow can make one of them. Raises: as `read_json` does."""
    if len(document) >= (1 << 31) - 64:
        raise DataError(
            f"is one JSON document of {len(document):,} bytes, more than 2 GiB",
            file=file,
            hint="write one object per line: jq -c '.[]' data.json > data.jsonl",
        )
    table = _read_arrow_document(document)
    return table if table is not None else _objects_in(document, file)


def read_arrow(source: str | bytes, block_bytes: int, schema: pa.Schema | None = None) -> pa.Table:
    """What pyarrow makes of a file of lines or of one document, with strings that look like times kept as strings."""
    read_options = pajson.ReadOptions(block_size=block_bytes)
    one_document = isinstance(source, bytes)
    parse_options = pajson.ParseOptions(newlines_in_values=one_document, explicit_schema=schema)
    if one_document:
        table = pajson.read_json(pa.BufferReader(source), read_options, parse_options)
    else:
        with reading(str(source)) as stream:
            table = pajson.read_json(stream, read_options, parse_options)
    as_text = pa.schema([pa.field(field.name, _times_as_text(field.type)) for field in table.schema])
    if table.schema.equals(as_text) or schema is not None:
        return table
    return read_arrow(source, block_bytes, as_text)


def _times_as_text(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_timestamp(kind):
        return pa.string()
    if pa.types.is_list(kind):
        return pa.list_(_times_as_text(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([(field.name, _times_as_text(field.type)) for field in kind])
    return kind


def has_lines(document: bytes) -> bool:
    """Whether a document that is not an array has an object on its first line, and is not one object around rows."""
    start = re.compile(rb"\s*").match(document)
    begin = start.end() if start else 0
    end = document.find(b"\n", begin)
    line = document[begin : end if end >= 0 else len(document)]
    try:
        first = json.loads(line) if line.startswith(b"{") else None
    except (ValueError, RecursionError):
        return False
    return isinstance(first, dict) and (bool(document[begin + len(line) :].strip()) or not _arrays_in(first))


def _read_arrow_document(document: bytes) -> pa.Table | None:
    """The objects in the one array of the document as a table, None where pyarrow cannot or there is not just one."""
    if document.lstrip()[:1] == b"[":
        document = b'{"rows":' + document + b"}"
    try:
        table = read_arrow(document, len(document) + 1)
    except REFUSED:
        return None
    arrays = [c for c in table.columns if pa.types.is_list(c.type) and pa.types.is_struct(c.type.value_type)]
    if table.num_rows != 1 or len(arrays) != 1:
        return None
    objects = arrays[0].chunk(0).flatten()
    return None if objects.null_count else pa.Table.from_batches([pa.RecordBatch.from_struct_array(objects)])


def _objects_in(document: bytes, file: str) -> list[Any]:
    try:
        parsed = json.loads(document, object_pairs_hook=_without_twins)
    except json.JSONDecodeError as error:
        raise DataError(
            f"is not JSON ({error.msg} in line {error.lineno}, column {error.colno})",
            file=file,
            value=error.doc[max(0, error.pos - 20) : error.pos + 40],
            hint=_ARRAY,
        ) from error
    except UnicodeDecodeError as error:
        raise not_utf8(document, file=file) from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"is not JSON ({reason(error)})", file=file, hint=_ARRAY) from error
    if isinstance(parsed, list):
        return parsed
    arrays = _arrays_in(parsed) if isinstance(parsed, dict) else []
    if len(arrays) == 1:
        return list(parsed[arrays[0]])
    raise DataError(
        f"has {len(arrays)} arrays of objects: {', '.join(map(repr, arrays))}" if arrays else "is no array of objects",
        file=file,
        hint="write one array of objects, as [{...}, {...}], or one object per line",
    )


def _arrays_in(parsed: dict[str, Any]) -> list[str]:
    return [key for key, value in parsed.items() if isinstance(value, list) and any(isinstance(v, dict) for v in value)]


def _parsed_lines(file: str) -> Iterator[tuple[int, Any]]:
    """Row number and value of each line that is not blank."""
    with (
        reading(file) as stream,
        io.TextIOWrapper(stream, encoding="utf-8-sig", errors="surrogateescape", newline="\n") as lines,
    ):
        for row, line in enumerate((line for line in lines if not line.isspace()), 1):
            try:
                line.encode()
                value = DECODER.decode(line)
            except UnicodeEncodeError as error:
                raise not_utf8(line.encode("utf-8", "surrogateescape"), file=file, row=row) from error
            except (ValueError, RecursionError) as error:
                said, shown = f"is not JSON ({reason(error)})", line.strip()
                raise DataError(said, file=file, row=row, value=shown, hint=_ONE_PER_LINE) from error
            yield row, value


def _table_of(numbered: Iterable[tuple[int, Any]], file: str) -> pa.Table:
    """Parsed objects with their row numbers as a table, without ever holding more than a batch of them as objects."""
    remaining, tables = iter(numbered), []
    while batch := list(itertools.islice(remaining, _BATCH_ROWS)):
        for row, value in batch:
            if not isinstance(value, dict):
                shown = json.dumps(value, ensure_ascii=False)
                raise DataError("is not a JSON object", file=file, row=row, value=shown, hint=_ONE_PER_LINE)
        names = dict.fromkeys(name for _, value in batch for name in value)
        try:
            columns = {name: column_of([value.get(name) for _, value in batch]) for name in names}
        except UnicodeEncodeError as error:
            raise _half_character(batch, file) from error
        tables.append(pa.table(columns))
    if not tables:
        raise DataError("has no rows", file=file, hint="it needs rows of texts: is it the right file?")
    return stack(tables)


def column_of(values: Sequence[Any]) -> pa.Array:
    try:
        return pa.array(values)
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError):
        return pa.array([as_text(value) for value in values], pa.large_string())


def as_text(value: Any) -> str | None:
    if value is None or isinstance(value, str):
        return value
    if type(value) is int:
        return str(value)
    whole = isinstance(value, float) and value.is_integer()
    return json.dumps(int(value) if whole else value, ensure_ascii=False)


def _half_character(batch: Sequence[tuple[int, Any]], file: str) -> DataError:
    for row, value in batch:
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            shown = json.dumps(value)
            hint = "remove it, or write the whole character"
            return DataError("half of a surrogate pair is no character", file=file, row=row, value=shown, hint=hint)
    raise AssertionError("only called for a batch that holds one")


def reason(error: Exception) -> str:
    """Why Python could not parse a line of JSON, and where in it."""
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} at character {error.pos + 1}"
    return "nested too deeply" if isinstance(error, RecursionError) else str(error)

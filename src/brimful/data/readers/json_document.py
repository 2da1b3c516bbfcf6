"""One JSON document: an array of objects, or one object that holds such an array. It is read whole."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa

from brimful.core.errors import DataError
from brimful.data.readers.compression import not_utf8
from brimful.data.readers.json_types import REFUSED, read_arrow, reason, without_twins

_ARRAY = "it holds an array of objects, or one object per line"


def has_lines(document: bytes) -> bool:
    """True for an object on the first line, unless the document is one object around rows, or of columns."""
    begin = len(document) - len(document.lstrip())
    end = document.find(b"\n", begin)
    line = document[begin : end if end >= 0 else len(document)]
    try:
        first = json.loads(line) if line.startswith(b"{") else None
    except (ValueError, RecursionError):
        return False
    has_more = bool(document[begin + len(line) :].strip())
    return isinstance(first, dict) and (has_more or not (_arrays_in(first) or _holds_columns(first)))


def parse_document(document: bytes, file: str) -> pa.Table | list[Any]:
    """The objects of a document, as a table where pyarrow can make one of them.

    Raises: DataError for a document that is damaged, has no array of objects, or several.
    """
    if len(document) >= (1 << 31) - 64:
        raise DataError(
            f"is one JSON document of {len(document):,} bytes, more than 2 GiB",
            file=file,
            hint="write one object per line: jq -c '.[]' data.json > data.jsonl",
        )
    table = _read_arrow_document(document)
    return table if table is not None else _objects_in(document, file)


def _read_arrow_document(document: bytes) -> pa.Table | None:
    """The objects in the one array of the document as a table, None where pyarrow cannot or there is not just one."""
    if document.lstrip()[:1] == b"[":
        document = b'{"rows":' + document + b"}"
    try:
        table = read_arrow(document)
    except REFUSED:
        return None
    arrays = [c for c in table.columns if pa.types.is_list(c.type) and pa.types.is_struct(c.type.value_type)]
    if table.num_rows != 1 or len(arrays) != 1:
        return None
    objects = arrays[0].chunk(0).flatten()
    return None if objects.null_count else pa.Table.from_batches([pa.RecordBatch.from_struct_array(objects)])


def _objects_in(document: bytes, file: str) -> list[Any]:
    try:
        parsed = json.loads(document, object_pairs_hook=without_twins)
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
    if not arrays and isinstance(parsed, dict) and _holds_columns(parsed):
        raise DataError(
            "holds columns, not rows",
            file=file,
            hint="write one array of objects, or one object per line; in pandas: to_json(path, orient='records')",
        )
    raise DataError(
        f"has {len(arrays)} arrays of objects: {', '.join(map(repr, arrays))}" if arrays else "is no array of objects",
        file=file,
        hint="write one array of objects, as [{...}, {...}], or one object per line",
    )


def _holds_columns(parsed: dict[str, Any]) -> bool:
    """True for several values that are all objects or all lists, with as many values each: a table by columns."""
    kinds, sizes = (
        {type(value) for value in parsed.values()},
        {len(v) for v in parsed.values() if hasattr(v, "__len__")},
    )
    return len(parsed) > 1 and kinds in ({dict}, {list}) and len(sizes) == 1


def _arrays_in(parsed: dict[str, Any]) -> list[str]:
    return [key for key, value in parsed.items() if isinstance(value, list) and any(isinstance(v, dict) for v in value)]

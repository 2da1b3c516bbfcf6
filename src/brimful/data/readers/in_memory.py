"""Data in memory, wherever a file is taken: DataFrames of pandas and polars, data sets of `datasets`, tables of Arrow,
lists of texts and labels, lists of rows, mappings of columns. No library is imported for it: whoever gives a DataFrame
has imported its library."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal

import pyarrow as pa

from brimful.core.errors import DataError, OptionError, first_line, printable
from brimful.data.column_names import PAIR_COLUMNS

Kind = Literal["pandas", "polars", "datasets", "arrow", "list"]
#: Tables by the names that options have for them.
Tables = Mapping[str, pa.Table]
#: What messages call a list of texts.
_TEXTS = "list of texts"
_KINDS = "a file, a DataFrame, a Dataset, an Arrow table, a list of rows, or texts with labels"


@dataclass(frozen=True)
class InMemory:
    """Rows in memory. name: what options and messages call them. kind: of what was given."""

    name: str
    table: pa.Table
    kind: Kind


def is_in_memory(data: object) -> bool:
    """True for anything but a name: a path, a text, or nothing."""
    return data is not None and not isinstance(data, (str, bytes)) and not hasattr(data, "__fspath__")


def is_table(given: object) -> bool:
    """True for a DataFrame or another table: a loop over it gives its columns or their names, and no row."""
    return hasattr(given, "columns") and hasattr(given, "shape")


def splits_of(data: Any) -> tuple[Any, Any]:
    """Data to train and to evaluate on, of a mapping of splits such as a DatasetDict; (data, None) of anything else."""
    if not isinstance(data, Mapping) or not all(hasattr(part, "with_format") for part in data.values()) or not data:
        return data, None
    if "train" not in data:
        raise _several_splits(data)
    names = ("validation", "valid", "val", "dev", "eval", "test")
    return data["train"], next((data[name] for name in names if name in data), None)


def in_memory(data: Any, labels: Any = None) -> InMemory:
    """Rows of `data`, a table of any kind, or texts with their labels.

    labels: of a list of texts; also as the second of a pair `(texts, labels)`.
    Raises: OptionError for what is no data, DataError for columns that Arrow cannot hold.
    """
    if isinstance(data, tuple) and len(data) == 2 and labels is None:
        data, labels = data
    try:
        found = _table(data) if labels is None else None
        if found is None:
            found = _listed(data, labels)
    except (pa.ArrowException, TypeError, ValueError) as error:
        hint = "give each column values of one kind"
        raise DataError(f"the {type(data).__name__} cannot be read ({first_line(error)})", hint=hint) from error
    if found is None:
        raise OptionError(
            f"data is {printable(type(data).__name__)}: it must be {_KINDS}", hint="see docs/guides/python.md"
        )
    return found


def _table(data: Any) -> InMemory | None:
    """Tables that know their columns; None for anything else."""
    library = type(data).__module__.partition(".")[0]
    if isinstance(data, pa.Table):
        return InMemory("Arrow table", data, "arrow")
    if library == "pandas" and hasattr(data, "columns"):
        table = pa.Table.from_pandas(_named(data), preserve_index=False).replace_schema_metadata(None)
        return InMemory("DataFrame", table, "pandas")
    if library == "polars" and hasattr(data, "collect"):
        data = data.collect()
    if library == "polars" and hasattr(data, "to_arrow") and hasattr(data, "columns"):
        return InMemory("DataFrame", data.to_arrow(), "polars")
    if library == "datasets" and isinstance(data, Mapping):
        raise _several_splits(data)
    if library == "datasets" and hasattr(data, "with_format") and not hasattr(data, "__len__"):
        said = f"data is {printable(type(data).__name__)}, which has no end before it is read"
        raise OptionError(said, hint="give its rows: list(data), or list(data.take(1000))")
    if library == "datasets" and hasattr(data, "with_format"):
        table = data.with_format("arrow")[:]
        return InMemory("Dataset", table.replace_schema_metadata(data.features.arrow_schema.metadata), "datasets")
    if isinstance(data, Mapping):
        return InMemory("columns", pa.table({str(name): _array(values) for name, values in data.items()}), "list")
    if isinstance(data, Sequence) and data and all(isinstance(row, Mapping) for row in data):
        # Arrow would take the columns of the first row alone.
        columns = {str(name): [row.get(name) for row in data] for name in dict.fromkeys(chain.from_iterable(data))}
        return InMemory("list of rows", pa.table({name: _array(each) for name, each in columns.items()}), "list")
    return None


def _several_splits(data: Mapping[Any, Any]) -> OptionError:
    shown = ", ".join(map(str, data))
    return OptionError(f"data is splits, not rows: {printable(shown)}", hint=f"give one, as data[{next(iter(data))!r}]")


def _array(values: Any) -> pa.Array:
    """A column of Arrow; NaN among texts is how pandas writes that there is none."""
    listed = list(values)
    try:
        return pa.array(listed)
    except (pa.ArrowException, TypeError):
        return pa.array([None if _is_missing(value) else value for value in listed])


def _is_missing(value: object) -> bool:
    return (isinstance(value, float) and math.isnan(value)) or type(value).__name__ in ("NAType", "NaTType")


def _named(frame: Any) -> Any:
    """Column names as text."""
    return frame.rename(columns=str)


def _listed(texts: Any, labels: Any) -> InMemory | None:
    """Texts, or pairs of texts, with their labels if any; None for what is no list of texts."""
    values = _values(texts)
    if values is None:
        return None
    columns = {
        name: pa.array(column, pa.large_string()) for name, column in _text_columns(values).items()
    }  # typed, for a column of None alone is one of texts too
    if labels is not None:
        named = _values(labels)
        if named is None:
            said = f"labels is {printable(type(labels).__name__)}: it must be a list, one for each text"
            raise OptionError(said, hint="train(texts, labels=labels, ...)")
        if len(named) != len(values):
            raise OptionError(f"{len(values):,} texts have {len(named):,} labels", hint="give each text one")
        columns["label"] = _array(named)
    return InMemory(_TEXTS, pa.table(columns), "list")


def _text_columns(values: list[Any]) -> dict[str, list[str | None]]:
    """The column of texts, or both columns of pairs. Raises: DataError for the first row that is neither."""
    is_pair = [isinstance(value, (tuple, list)) for value in values]
    for row, value in enumerate(values, 1):
        if any(is_pair) and (not is_pair[row - 1] or len(value) != len(PAIR_COLUMNS)):
            kind = type(value).__name__ + (f" of {len(value)}" if is_pair[row - 1] else "")
            hint = "give every row a pair, (text, text), or every row a text"
            raise DataError(f"{kind} is no pair of texts", file=_TEXTS, row=row, value=repr(value), hint=hint)
    columns = zip(*values, strict=True) if any(is_pair) else [values]
    found = {
        name: [None if _is_missing(each) else each for each in column]
        for name, column in zip(PAIR_COLUMNS, columns, strict=False)
    }
    for row, texts in enumerate(zip(*found.values(), strict=True), 1):
        for each in texts:
            if not isinstance(each, str | None):
                said, hint = f"{type(each).__name__} is no text", "give each row a text, or None"
                raise DataError(said, file=_TEXTS, row=row, value=repr(each), hint=hint)
    return found


def _values(given: Any) -> list[Any] | None:
    """Elements of a list, an array or a column."""
    if isinstance(given, (str, bytes, Mapping)) or not hasattr(given, "__iter__"):
        return None
    if hasattr(given, "to_pylist"):
        return list(given.to_pylist())
    return list(given.tolist() if hasattr(given, "tolist") else given)


def as_kind(table: pa.Table, kind: Kind, like: Any = None) -> Any:
    """A table as a DataFrame, a Dataset, a list of rows, or as it is.

    like: what was given; of pandas, its index and its columns are kept as they are.
    """
    if kind == "pandas":
        if type(like).__module__.partition(".")[0] != "pandas" or len(like) < table.num_rows:
            return table.to_pandas()
        return _beside(like.iloc[: table.num_rows], table)
    if kind == "polars":
        import polars

        return polars.from_arrow(table)
    if kind == "datasets":
        import datasets

        return datasets.Dataset(table)
    return table.to_pylist() if kind == "list" else table


def _beside(given: Any, table: pa.Table) -> Any:
    """The columns of `table` that pandas was not given, beside its own, which Arrow would turn into other types."""
    import pandas

    own = _named(given) if hasattr(given, "columns") else given.to_frame()[[]]
    added = table.select([name for name in table.column_names if name not in own.columns]).to_pandas()
    added.index = own.index
    return pandas.concat([own, added], axis=1)

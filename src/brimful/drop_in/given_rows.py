"""Texts, labels and weights as callers of scikit-learn give them, checked, as columns for training."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from brimful.core.errors import ArgumentError, printable
from brimful.data.labels.label_columns import parse_numbers
from brimful.data.readers.in_memory import is_table

TEXT, PAIR, LABEL, WEIGHT = "text", "text_pair", "label", "weight"
#: A whole number with a fraction of zeros, which is the same label as without.
_WHOLE = re.compile(r"-?\d+\.0+")
_KINDS = "a list, an array, a Series or a DataFrame of one column, or pairs as tuples or two columns"


@dataclass(frozen=True)
class GivenTexts:
    """Texts of N rows, and the second ones of pairs."""

    texts: list[str]
    pairs: list[str] | None = None

    def __len__(self) -> int:
        return len(self.texts)

    def columns(self) -> dict[str, list[str]]:
        """The columns of a table to train on."""
        return {TEXT: self.texts} | ({} if self.pairs is None else {PAIR: self.pairs})


def given_texts(X: Any) -> GivenTexts:
    """The texts of X, whatever holds them.

    Raises: ArgumentError for what holds no texts, and for a row without one.
    """
    rows = _rows(X)
    if not rows:
        raise ArgumentError("X has no rows (0 samples)", hint="give a text at least")
    if isinstance(rows[0], Mapping):
        rows = [(row.get(TEXT), row[PAIR]) if PAIR in row else row.get(TEXT) for row in rows]
    if isinstance(rows[0], str) or not isinstance(rows[0], Sequence | np.ndarray):
        return GivenTexts([_text(row, place) for place, row in enumerate(rows)])
    widths = {len(row) if isinstance(row, Sequence | np.ndarray) and not isinstance(row, str) else 0 for row in rows}
    if widths == {1}:
        return GivenTexts([_text(row[0], place) for place, row in enumerate(rows)])
    if widths != {2}:
        shown = ", ".join(map(str, sorted(widths)))
        raise ArgumentError(f"rows of X have {shown} values: a row is one text, or two", hint=f"X is {_KINDS}")
    firsts = [_text(row[0], place) for place, row in enumerate(rows)]
    return GivenTexts(firsts, [_text(row[1], place) for place, row in enumerate(rows)])


def _rows(X: Any) -> list[Any]:
    if isinstance(X, str | bytes):
        raise ArgumentError("X is one text", hint="give a list of texts: [text]")
    if hasattr(X, "tocsr"):
        raise ArgumentError("X is a sparse matrix of numbers", hint="give the texts: no vectorizer goes before this")
    if is_table(X):
        columns = [list(X[name]) for name in X.columns]
        return list(zip(*columns, strict=True)) if columns else []
    if hasattr(X, "to_pylist"):
        return list(X.to_pylist())
    if getattr(X, "ndim", 1) == 0 or isinstance(X, Mapping) or not hasattr(X, "__iter__"):
        raise ArgumentError(f"X is {printable(type(X).__name__)}", hint=f"X is {_KINDS}")
    return list(X)


def _text(value: Any, place: int) -> str:
    if isinstance(value, str):
        return str(value)
    if _is_missing(value):
        raise ArgumentError(f"X[{place}] has no text", hint="leave the row out, or give it the text ''")
    raise ArgumentError(
        f"X[{place}] is no text: it is of type {printable(type(value).__name__)}", hint="each is a str, or two of them"
    )


def _is_missing(value: Any) -> bool:
    is_nan = isinstance(value, float | np.floating) and bool(np.isnan(value))
    return value is None or is_nan or type(value).__name__ in ("NAType", "NaTType")


@dataclass(frozen=True)
class GivenLabels:
    """Labels of N rows, and the names that the model's outputs will have.

    classes_C: as `classes_` has them. names: of each class, in this order, different and no number but a whole one.
    indices_N: of single labels, the place of each in `classes_C`. flags_NC: of several, whether each is true.
    """

    classes_C: npt.NDArray[Any]
    names: tuple[str, ...]
    indices_N: npt.NDArray[np.int64] | None = None
    flags_NC: npt.NDArray[np.uint8] | None = None

    def columns(self) -> dict[str, Any]:
        """The columns of a table to train on."""
        if self.indices_N is not None:
            return {LABEL: pa.array(self.names).take(pa.array(self.indices_N))}
        assert self.flags_NC is not None
        return {name: self.flags_NC[:, place] for place, name in enumerate(self.names)}


def given_labels(y: Any, num_rows: int) -> GivenLabels:
    """The labels of y: one of each row, or a table of 0 and 1 with a column for each label.

    Raises: ArgumentError for what is neither, and ValueError as scikit-learn does for what it can name better.
    """
    from sklearn.utils import column_or_1d
    from sklearn.utils.multiclass import type_of_target
    from sklearn.utils.validation import check_consistent_length

    if y is None:
        raise ArgumentError(
            "TextClassifier requires y to be passed, but the target y is None", hint="fit(texts, labels)"
        )
    columns = [str(name) for name in y.columns] if is_table(y) else None
    if twice := next((name for name in columns or () if (columns or []).count(name) > 1), None):
        raise ArgumentError(f"y has several columns {printable(twice)!r}", hint="give each label a name of its own")
    y = y.toarray() if hasattr(y, "toarray") else y
    listed = list(y) if hasattr(y, "__iter__") and columns is None else []
    missing = [place for place, label in enumerate(listed) if _is_missing(label)]
    if missing and any(isinstance(label, str) for label in listed):  # of numbers scikit-learn says it
        more = f", as {len(missing) - 1:,} more have" if len(missing) > 1 else ""
        raise ArgumentError(f"y[{missing[0]}] has no label (None or NaN){more}", hint="leave the row out")
    with np.errstate(invalid="ignore"):  # of NaN, which is refused
        kind = type_of_target(y, input_name="y", raise_unknown=True)
    check_consistent_length(np.empty(num_rows), y)
    if kind == "multilabel-indicator":
        flags_NC = np.asarray(y).astype(np.uint8)
        classes_C = np.arange(flags_NC.shape[1]) if columns is None else np.array(columns)
        return GivenLabels(classes_C, _names_of_several(columns, flags_NC.shape[1]), flags_NC=flags_NC)
    if kind not in ("binary", "multiclass"):
        raise ArgumentError(
            f"Unknown label type: {kind}. Classes are texts or whole numbers, or a table of 0 and 1",
            hint="numbers to predict go to brimful.train(..., task='regression')",
        )
    classes_C, indices_N = np.unique(column_or_1d(y, warn=True), return_inverse=True)
    if len(classes_C) < 2:
        raise ArgumentError(
            f"y has one class, {printable(classes_C[0])}: a classifier needs two", hint="give rows of another class"
        )
    named = classes_C.astype(np.int64) if classes_C.dtype.kind == "f" else classes_C
    return GivenLabels(classes_C, _safe([str(each) for each in named.tolist()]), indices_N.astype(np.int64))


def _names_of_several(columns: list[str] | None, number: int) -> tuple[str, ...]:
    """Names that columns of a table can have: as they are read in a list of names, and not those of other columns."""
    numbered = [f"label {place}" for place in range(number)]
    names = numbered if columns is None else [name.strip() for name in columns]
    if any("," in name or '"' in name or name in (TEXT, PAIR, WEIGHT) for name in names):
        names = numbered
    return _safe(names if len(set(names)) == number else numbered)


def _safe(names: Sequence[str]) -> tuple[str, ...]:
    """The names, or others where training would read them differently: blank ones, `nan`, `1.0` for `1`."""
    numbers = parse_numbers(pa.array(names))
    tidied = numbers is not None and (not np.isfinite(numbers).all() or all(_WHOLE.fullmatch(name) for name in names))
    if all(name.strip() for name in names) and not tidied and len(set(names)) == len(names):
        return tuple(names)
    return tuple(f"class {place}" for place in range(len(names)))


def given_weights(sample_weight: Any, num_rows: int) -> npt.NDArray[np.float64] | None:
    """(N,) the weights of rows, None where all count alike. Raises: ArgumentError."""
    if sample_weight is None:
        return None
    weights_N = np.asarray(sample_weight, dtype=np.float64)
    weights_N = np.full(num_rows, float(weights_N)) if weights_N.ndim == 0 else weights_N
    if weights_N.shape != (num_rows,):
        said = f"sample_weight has the shape {weights_N.shape}: Sample weights must be 1D array or scalar"
        raise ArgumentError(f"{said}, one for each of {num_rows:,} rows", hint="give each row one")
    if not (np.isfinite(weights_N) & (weights_N >= 0)).all() or not weights_N.any():
        wrong = "is zero for all rows" if not weights_N.any() else "has weights that are negative or not finite"
        raise ArgumentError(f"sample_weight {wrong}", hint="0 leaves a row out, 2 counts it twice")
    return weights_N


def without_classes(
    weights_N: npt.NDArray[np.float64] | None, indices_N: npt.NDArray[np.int64], weights_C: npt.NDArray[Any]
) -> npt.NDArray[np.float64]:
    """(N,) the weights of rows, 0 for those of a class of weight 0. Raises: ArgumentError where no row is left."""
    kept_N = (weights_C != 0)[indices_N]
    found_N: npt.NDArray[np.float64] = kept_N * (np.ones(len(kept_N)) if weights_N is None else weights_N)
    if not found_N.any():
        raise ArgumentError("class_weight is 0 for the classes of all rows that count", hint="0 leaves a row out")
    return found_N

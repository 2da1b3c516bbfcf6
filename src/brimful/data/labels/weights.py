"""Weights of rows: what each counts as in the loss, from a column of numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from brimful.core.errors import DataError
from brimful.core.units import count_text
from brimful.data.labels.examples import Examples
from brimful.data.labels.label_columns import LabelColumn

_HINT = "--weight-column names the column; give each row a number, 0 to leave it out"


def weighted(examples: Examples, note: Callable[[str], None]) -> Examples:
    """The examples with the weights of their rows, without those of weight 0: as if they were not there.

    note: called with the number left out. Without a column of weights, the examples as they are.
    Raises: DataError for what is no number, negative or not finite, and where no row is left.
    """
    name = examples.columns.weight
    if name is None:
        return examples
    column = LabelColumn(rows=examples.rows, name=name, row_numbers=examples.row_numbers)
    try:
        weights_N = column.numbers()
    except DataError as error:
        raise DataError(error.message, file=error.file, row=error.row, value=error.value, hint=_HINT) from error
    if (weights_N < 0).any():
        first = int((weights_N < 0).argmax())
        raise column.error_at(first, "has a negative weight", column.values[first].as_py(), _HINT)
    kept_N = weights_N > 0
    if not kept_N.any():
        raise column.error("has no weight above 0", hint=_HINT)
    examples = replace(examples, weights=weights_N)
    if kept_N.all():
        return examples
    note(f"left out for a weight of 0: {count_text(int(np.count_nonzero(~kept_N)))} rows")
    return examples.filter(kept_N)

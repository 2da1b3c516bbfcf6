"""Rows of a loop's batches as a step reads them: dictionaries, or columns of padded tensors.

Legend: B rows, L columns of a padded batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from brimful.core.errors import OptionError
from brimful.core.records import LabelSpace
from brimful.models.end_tokens import count_ends

#: Tokenised rows: a dictionary each, with `input_ids`, or columns of them such as padded tensors.
Rows = Sequence[Mapping[str, Any]] | Mapping[str, Any]

_END_HINT = "let the tokenizer end each row with it, and leave it out of texts"
_TASK_HINT = 'is it task="multi_label" or "regression"?'


@dataclass(frozen=True, kw_only=True)
class ReadRows:
    """Token ids of each row without padding, token types if the model has any, and targets.

    weights_N: fp32, what each row counts as in the loss; None: all as one.
    """

    ids: list[np.ndarray]
    types: list[np.ndarray] | None
    targets_N: np.ndarray
    weights_N: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.ids)


def joined(parts: Sequence[ReadRows]) -> ReadRows:
    """All rows of several, as one."""
    if len(parts) == 1:
        return parts[0]
    types = [each for part in parts for each in part.types or ()]
    weights = [np.ones(len(part), np.float32) if part.weights_N is None else part.weights_N for part in parts]
    return ReadRows(
        ids=[each for part in parts for each in part.ids],
        types=None if parts[0].types is None else types,
        targets_N=np.concatenate([part.targets_N for part in parts]),
        weights_N=None if all(part.weights_N is None for part in parts) else np.concatenate(weights),
    )


def num_rows(rows: Rows) -> int:
    """Return how many rows a batch has, of dictionaries or of columns; 1 of columns without ids, which are refused."""
    if not isinstance(rows, Mapping):
        return len(rows)
    return len(rows["input_ids"]) if "input_ids" in rows else 1


@dataclass(frozen=True, kw_only=True)
class RowReader:
    """Reads rows for one model. with_types: it has token types. Raises: OptionError for rows that it cannot take.

    left_is_right: asked where rows are padded on the left, whether the model answers them as it does without padding.
    end_id: the token that its head looks for, if it looks for one.
    """

    max_length: int
    vocab_size: int
    padding_id: int | None
    with_types: bool
    types_are_words: bool
    space: LabelSpace
    left_is_right: Callable[[], bool] = lambda: False
    end_id: int | None = None

    def read(self, rows: Rows) -> ReadRows:
        """Rows with their targets."""
        ids, types = self.sequences(rows)
        self._require_alike_ends(ids)
        return ReadRows(
            ids=ids, types=types, targets_N=self._targets(rows, len(ids)), weights_N=_weights_N(rows, len(ids))
        )

    def sequences(self, rows: Rows) -> tuple[list[np.ndarray], list[np.ndarray] | None]:
        """Token ids of each row without padding, and token types if the model has any and they are given."""
        if not num_rows(rows):
            raise OptionError("a batch has no rows", hint="leave such batches out")
        self._require_mask(rows)
        left = self.left_is_right
        ids, types = _columns(rows, left) if isinstance(rows, Mapping) else _dictionaries(rows, left)
        self._require_tokens(ids)
        if not self.with_types or (types is None and self.types_are_words):
            return ids, None
        return ids, [np.zeros_like(sequence) for sequence in ids] if types is None else types

    def _require_tokens(self, ids: list[np.ndarray]) -> None:
        """Refuse rows that are empty or too long, and tokens that the model has no embedding of."""
        lengths = [len(sequence) for sequence in ids]
        if lengths and min(lengths) > 0 and max(lengths) <= self.max_length:
            together = np.concatenate(ids)  # looked at as one: a batch has many rows
            if 0 <= together.min() <= together.max() < self.vocab_size:
                return
        for number, sequence in enumerate(ids):
            length = len(sequence)
            if not 0 < length <= self.max_length:
                raise OptionError(
                    f"row {number} has {length} tokens, and max_length is {self.max_length}",
                    hint="truncate when you tokenise",
                )
            if not 0 <= sequence.min() <= sequence.max() < self.vocab_size:
                raise OptionError(
                    f"row {number} has a token outside of the model's vocabulary of {self.vocab_size}",
                    hint="use the model's own tokenizer",
                )

    def _require_alike_ends(self, ids: list[np.ndarray]) -> None:
        """Refuse rows that hold different numbers of end tokens, as the head that looks for them does."""
        if self.end_id is None or not ids:
            return
        ends_N = count_ends(ids, self.end_id)
        if not ends_N[0]:
            raise OptionError(f"row 0 has no end token ({self.end_id}), where the model's head reads", hint=_END_HINT)
        if (other_N := np.flatnonzero(ends_N != ends_N[0])).size:
            row = int(other_N[0])
            raise OptionError(
                f"row 0 has {ends_N[0]} end tokens ({self.end_id}) and row {row} has {ends_N[row]}: the model's head"
                " takes rows that have as many",
                hint=_END_HINT,
            )

    def require_last_ends(self, ids: Sequence[np.ndarray]) -> None:
        """Refuse rows whose last token is not the end token that the head looks for: packed, the last one is read."""
        if self.end_id is None:
            return
        if (row := next((n for n, each in enumerate(ids) if each[-1] != self.end_id), None)) is not None:
            raise OptionError(
                f"row {row} goes on after its end token ({self.end_id}), and packed rows are read at their last token",
                hint='end rows with it, or pass packing="off"',
            )

    def _require_mask(self, rows: Rows) -> None:
        """Refuse padded columns that do not say where rows end."""
        if not isinstance(rows, Mapping) or rows.get("attention_mask") is not None or self.padding_id is None:
            return
        ids_BL = rows.get("input_ids")
        if (
            not isinstance(ids_BL, Tensor | np.ndarray)
            or ids_BL.ndim != 2
            or not (ids_BL[:, -1:] == self.padding_id).any()
        ):
            return
        raise OptionError(
            f"rows end in padding tokens ({self.padding_id}) and the batch has no attention_mask: padding is text",
            hint="pass the attention_mask; a tokenizer and DataCollatorWithPadding return it",
        )

    def _targets(self, rows: Rows, number: int) -> np.ndarray:
        """(N,) int64 classes, or (N, C) fp32."""
        labels = _labels(rows)
        if len(labels) != number:
            raise OptionError(f"there are {len(labels)} labels of {number} rows")
        outputs = self.space.num_outputs
        if self.space.task == "single_label":
            labels = labels[:, 0] if labels.shape[1:] == (1,) else labels  # as transformers' loss reads them
            if labels.ndim > 1 or not np.issubdtype(labels.dtype, np.integer):
                raise OptionError("labels are not one integer a row", hint=_TASK_HINT)
            if not 0 <= labels.min() <= labels.max() < outputs:
                row = int(np.flatnonzero((labels < 0) | (labels >= outputs))[0])
                said = f"row {row} has the label {labels[row]}, and the model has {outputs}, from 0 to {outputs - 1}"
                raise OptionError(said, hint=_TASK_HINT)
            return labels.astype(np.int64)
        labels = labels.reshape(number, -1).astype(np.float32)
        if labels.shape[1] != outputs:
            raise OptionError(f"each row has {labels.shape[1]} labels, and the model has {outputs} outputs")
        return labels


def _columns(
    rows: Mapping[str, Any], left_is_right: Callable[[], bool]
) -> tuple[list[np.ndarray], list[np.ndarray] | None]:
    """Ids and types of columns: padded rows, or lists of sequences."""
    given = {name: rows.get(name) for name in ("input_ids", "attention_mask", "token_type_ids")}
    if given["input_ids"] is None:
        raise OptionError("a batch has no input_ids", hint="pass what the model's forward takes")
    if not all(value is None or isinstance(value, Tensor | np.ndarray) for value in given.values()):
        names = [name for name, value in given.items() if value is not None]
        found = [dict(zip(names, values, strict=True)) for values in zip(*(given[n] for n in names), strict=True)]
        return _dictionaries(found, left_is_right)
    ids_BL = array(given["input_ids"])
    mask_BL = np.ones_like(ids_BL) if given["attention_mask"] is None else array(given["attention_mask"])
    mask_BL = mask_BL.astype(bool)
    lengths_B, starts_B = mask_BL.sum(axis=1), mask_BL.argmax(axis=1)
    from_start_BL = np.arange(ids_BL.shape[1]) - starts_B[:, None]
    wrong_B = (mask_BL != ((from_start_BL >= 0) & (from_start_BL < lengths_B[:, None]))).any(axis=1)
    if not wrong_B.any() and starts_B.any() and not left_is_right():
        wrong_B = starts_B > 0
    if wrong_B.any():
        raise _holes(int(np.flatnonzero(wrong_B)[0]))
    types_BL = None if given["token_type_ids"] is None else array(given["token_type_ids"])
    ids = _split(ids_BL[mask_BL], lengths_B)
    return ids, None if types_BL is None else _split(types_BL[mask_BL], lengths_B)


def _split(together: np.ndarray, lengths_B: np.ndarray) -> list[np.ndarray]:
    """Rows of these lengths, as views: `np.split` takes microseconds a row."""
    ends = np.cumsum(lengths_B).tolist()
    return [together[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def _dictionaries(
    rows: Sequence[Mapping[str, Any]], left_is_right: Callable[[], bool]
) -> tuple[list[np.ndarray], list[np.ndarray] | None]:
    ids, types = [], []
    for number, row in enumerate(rows):
        if not isinstance(row, Mapping) or row.get("input_ids") is None:
            wrong = "has no input_ids" if isinstance(row, Mapping) else f"is a {type(row).__name__}"
            raise OptionError(
                f"row {number} {wrong}", hint="a batch is a dictionary of tensors, or a list of dictionaries"
            )
        found = array(row["input_ids"])
        mask = np.ones(len(found), np.bool_) if row.get("attention_mask") is None else array(row["attention_mask"])
        start, length = int(mask.argmax()) if len(mask) else 0, int(mask.astype(bool).sum())
        tokens = slice(start, start + length)
        if not mask[tokens].all() or (start and not left_is_right()):
            raise _holes(number)
        ids.append(found[tokens])
        if row.get("token_type_ids") is not None:
            types.append(array(row["token_type_ids"])[tokens])
    if types and len(types) != len(ids):
        raise OptionError("some rows have token_type_ids, and some have none", hint="give them all, or none")
    return ids, types or None


def _holes(number: int) -> OptionError:
    return OptionError(f"attention_mask of row {number} is not ones, then zeros", hint="pad on the right")


def _labels(rows: Rows) -> np.ndarray:
    if isinstance(rows, Mapping):
        found = rows.get("labels", rows.get("label"))
        if found is None:
            raise OptionError("a batch has no labels")
        return array(found) if isinstance(found, Tensor | np.ndarray) else np.stack([array(each) for each in found])
    if missing := [number for number, row in enumerate(rows) if "labels" not in row and "label" not in row]:
        raise OptionError(f"row {missing[0]} has no labels")
    return np.stack([array(row.get("labels", row.get("label"))) for row in rows])


def _weights_N(rows: Rows, number: int) -> np.ndarray | None:
    """(N,) fp32, None where no row has a weight."""
    if isinstance(rows, Mapping):
        found = rows.get("weights", rows.get("weight"))
    else:
        each = [row.get("weights", row.get("weight")) for row in rows]
        found = None if all(value is None for value in each) else [1.0 if value is None else value for value in each]
    if found is None:
        return None
    weights_N = array(found).astype(np.float32)
    if weights_N.shape != (number,):
        raise OptionError(f"weights have the shape {weights_N.shape}, and there are {number} rows", hint="one a row")
    if not (np.isfinite(weights_N) & (weights_N >= 0)).all() or not weights_N.any():
        wrong = "are zero for all rows" if not weights_N.any() else "are negative or not finite"
        raise OptionError(f"weights {wrong}", hint="0 leaves a row out, 2 counts it twice")
    return weights_N


def array(value: Any) -> np.ndarray:
    """A tensor of any device, or numbers, as an array on the host."""
    return value.detach().cpu().numpy() if isinstance(value, Tensor) else np.asarray(value)

"""The batches of transformers' DataCollatorWithPadding, made by numpy of lists of numbers, as tokenizers return them.

The tokenizer pads lists one by one, which takes milliseconds a batch, and by default in the process that trains.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import BatchEncoding, DataCollatorWithPadding, PreTrainedTokenizerBase

#: Columns that are padded, and names that a collator knows labels by.
_PADDED = ("input_ids", "attention_mask", "token_type_ids")
_LABELS = ("label", "labels", "label_ids")


def quick_padding(collator: Any) -> Any:
    """Return a quicker collator with the same results; `collator` itself where it is not transformers' own."""
    if type(collator) is not DataCollatorWithPadding or collator.return_tensors != "pt":
        return collator
    kind, base = type(collator.tokenizer), PreTrainedTokenizerBase
    own = all(getattr(kind, name, None) is getattr(base, name) for name in ("pad", "_pad", "__getattribute__"))
    return QuickPadding(collator) if own and collator.padding in (True, "longest") else collator


class QuickPadding:
    """A collator. What is no list of dictionaries of lists goes through the collator that it stands for."""

    def __init__(self, collator: DataCollatorWithPadding) -> None:
        self.collator = collator

    def __call__(self, features: list[dict[str, Any]]) -> Any:
        """Pad to the longest row."""
        found = self._padded(features)
        return self.collator(features) if found is None else found

    def _padded(self, features: list[dict[str, Any]]) -> BatchEncoding | None:
        """The batch; None where it is not seen to be what the collator makes."""
        if not features or not all(type(row) is dict for row in features):
            return None
        names, tokenizer = list(features[0]), self.collator.tokenizer
        fill = {"input_ids": tokenizer.pad_token_id, "attention_mask": 0, "token_type_ids": tokenizer.pad_token_type_id}
        known = {*_PADDED, *_LABELS}.issuperset(names) and sum(name in _LABELS for name in names) <= 1
        masks = "attention_mask" in names and "attention_mask" in tokenizer.model_input_names
        alike = all(row.keys() == features[0].keys() for row in features)
        if not (known and masks and alike and tokenizer.model_input_names[0] == "input_ids" and "input_ids" in names):
            return None
        lengths = [len(row["input_ids"]) if type(row["input_ids"]) is list else 0 for row in features]
        if not min(lengths) or type(fill["input_ids"]) is not int or tokenizer.padding_side not in ("right", "left"):
            return None
        made: dict[str, Tensor | None] = {
            name: self._column([row[name] for row in features], lengths, fill[name])
            if name in fill
            else _labels([row[name] for row in features])
            for name in names
        }
        if any(column is None for column in made.values()):
            return None
        for name in ("label", "label_ids"):
            if name in made:
                made["labels"] = made.pop(name)
        return BatchEncoding(made)

    def _column(self, rows: Sequence[Any], lengths: Sequence[int], fill: int) -> Tensor | None:
        """(B, L) of lists of whole numbers."""
        if not all(type(row) is list and len(row) == length for row, length in zip(rows, lengths, strict=True)):
            return None
        flat = np.array(list(chain.from_iterable(rows)))
        if flat.dtype != np.int64:
            return None
        multiple = self.collator.pad_to_multiple_of or 1
        columns = -(-max(lengths) // multiple) * multiple
        place_L = np.arange(columns)
        ours_BL = place_L < np.array(lengths)[:, None]
        if self.collator.tokenizer.padding_side == "left":
            ours_BL = ours_BL[:, ::-1]
        padded_BL = np.full(ours_BL.shape, fill, dtype=np.int64)
        padded_BL[ours_BL] = flat
        return torch.from_numpy(padded_BL)


def _labels(values: Sequence[Any]) -> Tensor | None:
    """(B,) of numbers, or (B, C) of lists of them."""
    flat = list(chain.from_iterable(values)) if all(type(value) is list for value in values) else values
    if not flat or {type(value) for value in flat} not in ({int}, {float}):
        return None
    return torch.tensor(values) if flat is values or len({len(value) for value in values}) == 1 else None

"""Batches of Trainer's padded to a few lengths, each of which is compiled and captured before steps are timed.

With `torch_compile_mode="reduce-overhead"` every shape is a CUDA graph of its own: the fastest that Trainer is on short
texts, where the lengths of batches are few and known.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from transformers import DataCollatorWithPadding, Trainer

from brimful.data.batches.packing import partition
from brimful.data.batches.padding import ROW_TILE

#: Each shape is met so often: a CUDA graph runs eagerly, is recorded, and is replayed.
_MEETINGS = 3


def lengths_for(longest_of_batches: Sequence[int], most: int) -> tuple[int, ...]:
    """At most so many lengths, ascending, to which these batches are padded with the fewest tokens."""
    longest_B = np.asarray(longest_of_batches, dtype=np.int64)
    rounded_B = np.minimum(-(-longest_B // ROW_TILE) * ROW_TILE, longest_B.max())  # a model may read no more than that
    sizes, counts = np.unique(rounded_B, return_counts=True)
    return tuple(partition(sizes, counts, most))


class FixedLengths:
    """A collator that pads a batch to the shortest of these lengths that holds it."""

    def __init__(self, tokenizer: Any, lengths: Iterable[int]) -> None:
        self._by_length = {
            length: DataCollatorWithPadding(tokenizer, padding="max_length", max_length=length) for length in lengths
        }

    def length_of(self, rows: Sequence[dict[str, Any]]) -> int:
        """Tokens that each of these rows is padded to."""
        longest = max(len(row["input_ids"]) for row in rows)
        return next(length for length in self._by_length if length >= longest)

    def __call__(self, rows: Sequence[dict[str, Any]]) -> Any:
        return self._by_length[self.length_of(rows)](rows)


@contextmanager
def compiled_apart() -> Iterator[None]:
    """Within, torch compiles each shape apart, as many as there are."""
    with torch._dynamo.config.patch(automatic_dynamic_shapes=False, recompile_limit=64):
        yield


def meet_shapes(trainer: Trainer, step_arguments: Sequence[Any]) -> float:
    """Run the compiled model, as a step does, on a micro-batch of each length, and drop the gradients; the seconds that
    it took. step_arguments: of `training_step`, beside model and batch."""
    began, collate, data = time.monotonic(), trainer.data_collator, trainer.train_dataset
    size = trainer.args.per_device_train_batch_size
    first = dict[int, list[dict[str, Any]]]()
    for start in range(0, len(data), size):
        rows = [data[place] for place in range(start, min(start + size, len(data)))]
        first.setdefault(collate.length_of(rows), rows)
    for rows in first.values():
        for _ in range(_MEETINGS):
            Trainer.training_step(trainer, trainer.model_wrapped, collate(rows), *step_arguments)
            trainer.model_wrapped.zero_grad()
    return time.monotonic() - began

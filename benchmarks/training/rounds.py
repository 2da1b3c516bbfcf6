"""Rounds of a Trainer's steps by the clock, and the shapes that a compiled Trainer meets before the first one."""

from __future__ import annotations

import bisect
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import turns
from settings import BUCKETS
from transformers import Trainer, TrainerCallback

#: Epochs of random batches that are looked through for the lengths that they are padded to.
_EPOCHS = 4
#: Each shape is met so often: a CUDA graph runs eagerly, is recorded, and is replayed.
_MEETINGS = 3
#: An epoch's last batch, which may be smaller, comes up in a measurement if an epoch has fewer batches than this.
_SHORT_EPOCH = 200
_LONGEST_ERROR = 300
#: Rounds that are left out at most, of each that counts: what is compiled again and again is slow.
_MOST_LEFT_OUT = 3


@dataclass(frozen=True, kw_only=True)
class Round:
    """Steps that were timed: the first and the one after the last, and their seconds by the clock and of CPU."""

    first: int
    end: int
    seconds: float
    cpu_s: float


class Rounds(TrainerCallback):
    """Times `count` rounds after `warm_up` steps, then ends the training.

    A round is of `steps` steps, or of as many times that as take `least_s`. One in which torch compiled anything is
    left out where `clean` asks for it. Other processes leave the GPU alone from the middle of the warm-up on. With a
    `trainer`, shapes are met after the first step; not_met: why they could not be.
    """

    def __init__(self, warm_up: int, steps: int, count: int, *, least_s: float = 0.0, clean: bool = False) -> None:
        self.found = list[Round]()
        self.left_out = self._first = 0
        self.warm_up_s = 0.0
        self.not_met: str | None = None
        self.trainer: Any = None
        self._warm_up, self._steps, self._count = warm_up, steps, count
        self._least_s, self._clean = least_s, clean
        self._at, self._cpu_at, self._compiled, self._start_s = 0.0, 0.0, 0, time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        step: int = state.global_step
        if step == 1 and self.trainer is not None:
            try:
                meet_shapes(self.trainer)
            except Exception as failure:  # its steps are timed all the same, and rounds that compile are left out
                self.not_met = f"{type(failure).__name__}: {failure}"[:_LONGEST_ERROR]
        if step == turn_at(self._warm_up):
            self._start_s += turns.take()  # waiting for a turn is no warm-up
        if step == self._warm_up:
            self._begin(step)
            self.warm_up_s = self._at - self._start_s
        elif step > self._warm_up and (step - self._first) % self._steps == 0:
            if time.perf_counter() - self._at >= self._least_s:
                self._end(step)
            control.should_training_stop = len(self.found) == self._count

    def _begin(self, step: int) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._first, self._compiled = step, compiled_graphs()
        self._at, self._cpu_at = time.perf_counter(), time.process_time()

    def _end(self, step: int) -> None:
        at, cpu_at, first, compiled = self._at, self._cpu_at, self._first, self._compiled
        self._begin(step)
        if self._clean and self._compiled != compiled and self.left_out < _MOST_LEFT_OUT * self._count:
            self.left_out += 1
        else:
            self.found.append(Round(first=first, end=step, seconds=self._at - at, cpu_s=self._cpu_at - cpu_at))


def turn_at(warm_up: int) -> int:
    """The step after which other processes are to leave the GPU alone: what can be compiled before, is."""
    return max(1, warm_up // 2)


def compiled_graphs() -> int:
    """How many graphs torch has compiled in this process."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def meet_shapes(trainer: Any) -> None:
    """Run the compiled model, as a step does, on batches of every shape that is to come, and drop the gradients."""
    collate = trainer.get_train_dataloader().collate_fn
    data, arguments = trainer.train_dataset, trainer.args
    rows = rows_ahead(
        np.array([len(row["input_ids"]) for row in data]),
        arguments.per_device_train_batch_size,
        buckets=trainer.buckets,
        one_length=trainer.one_length,
        grouped=arguments.train_sampling_strategy == "group_by_length",
    )
    for batch in rows:
        for _ in range(_MEETINGS):
            inputs = collate([data[i] for i in batch])
            Trainer.training_step(trainer, trainer.model_wrapped, inputs, *trainer.step_arguments)
            trainer.model_wrapped.zero_grad()


def rows_ahead(
    lengths_N: np.ndarray, batch_size: int, *, buckets: bool, one_length: bool, grouped: bool
) -> list[list[int]]:
    """Return rows of batches that have every shape of an epoch.

    buckets: batches are padded to the next of BUCKETS, and each of those that come up is met; one_length: to the same
    length. Otherwise three lengths, after which shapes are symbolic. grouped: rows of about the same length come
    together.
    """
    order = np.argsort(lengths_N, kind="stable")
    sizes = [batch_size]
    if lengths_N.size % batch_size and lengths_N.size // batch_size < _SHORT_EPOCH:
        sizes.append(lengths_N.size % batch_size)
    if one_length:
        ends = [lengths_N.size]
    elif buckets:
        longest = lengths_N if grouped else _longest_of_batches(lengths_N, batch_size)
        wanted = sorted({min(bisect.bisect_left(BUCKETS, length), len(BUCKETS) - 1) for length in longest.tolist()})
        ends = [int(np.searchsorted(lengths_N[order], BUCKETS[i], side="right")) for i in wanted]
    else:
        ends = [max(batch_size, lengths_N.size * part // 3) for part in (1, 2, 3)]
    # The rows before an end in order of length: the last one is the longest. A smaller batch of grouped rows has the
    # shortest ones.
    met = [(size, end) for size in sizes for end in (ends[:1] if grouped and size < batch_size else ends)]
    return [_filled(order[max(0, end - size) : end].tolist(), size) for size, end in met]


def _longest_of_batches(lengths_N: np.ndarray, batch_size: int) -> np.ndarray:
    source = np.random.default_rng(0)
    whole = lengths_N.size // batch_size * batch_size
    shuffled = [source.permutation(lengths_N)[:whole].reshape(-1, batch_size).max(1) for _ in range(_EPOCHS)]
    return np.concatenate(shuffled) if whole else lengths_N


def _filled(rows: Sequence[int], size: int) -> list[int]:
    """As many rows as a batch has: rows come again where there are too few."""
    return [rows[i % len(rows)] for i in range(size)]

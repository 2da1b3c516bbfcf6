"""Batches staged ahead of the step: built in a thread, pinned, copied on a side stream. The step never waits for input
that could have been ready; where it did wait, `wait_s` says how long.

On a GPU they take turns in a few places, which grow to the size of the largest: a run takes no more memory the further
it goes.
"""

from __future__ import annotations

import itertools
import queue
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from brimful.core.ahead import POLL_S, Ahead
from brimful.data.batches.batch import Batch, Layout, Sampler, Whole, make_batch
from brimful.data.batches.shares import shares_of, starts_of
from brimful.data.tokens.augment import Augmenter, worker_errors
from brimful.data.tokens.encoder import Tokens
from brimful.hardware.memory import is_out_of_memory
from brimful.hardware.streams import stream_for
from brimful.tasks.label_rows import Targets
from brimful.tasks.task import Task

#: Batches that wait, staged, for the step.
AHEAD = 3
#: Places on a GPU besides those that wait: of the one being staged, and of the one that the step was given.
_MORE_PLACES = 2


class Batches(Protocol):
    """Effective batches by number, on the host."""

    def batches(self, start: int, stop: int | None) -> Iterator[Batch]:
        """Batches from number `start` up to `stop`, or to the end if it is None."""
        ...


class Source:
    """Effective batches by number: samples, ids and targets put together, still on the host.

    texts: where a transform is given, what it is applied to: a function from sample indices to texts and pairs.
    ahead: batches that will wait, staged, for the step; a transform works on twice as many. quick: whether they are
    made so fast that none need be ahead of steps that are replayed. weights_N: of the samples. part: (rank, count) of
    several processes, each of which has a share of the rows of each batch.
    """

    def __init__(
        self,
        tokens: Tokens,
        targets_N: Targets,
        task: Task,
        layout: Layout,
        order: Sampler,
        *,
        augmenter: Augmenter | None = None,
        texts: Callable[[np.ndarray], tuple[list[str], list[str] | None]] | None = None,
        ahead: int = AHEAD,
        quick: bool = False,
        weights_N: np.ndarray | None = None,
        part: tuple[int, int] = (0, 1),
    ) -> None:
        self.tokens, self.targets_N, self.task, self.layout, self.order = tokens, targets_N, task, layout, order
        self.augmenter, self._texts, self.ahead, self.weights_N = augmenter, texts, ahead, weights_N
        self.quick, self._part = quick, part

    def close(self) -> None:
        """Ends the processes of a transform."""
        if self.augmenter is not None:
            self.augmenter.close()

    def batches(self, start: int, stop: int | None) -> Iterator[Batch]:
        """Batches from number `start` up to `stop`, without end if it is None."""
        numbers = itertools.count(start) if stop is None else range(start, stop)
        if self.augmenter is None:
            for number in numbers:
                yield self._batch(number, None)
            return
        futures = ((number, self._submit(self.augmenter, number)) for number in numbers)
        waiting = deque(itertools.islice(futures, 2 * self.ahead + 1))
        while waiting:
            number, future = waiting.popleft()
            with worker_errors():
                encoded = future.result()
            yield self._batch(number, encoded)
            waiting.extend(itertools.islice(futures, 1))

    def _submit(self, augmenter: Augmenter, number: int) -> Future[Tokens]:
        samples = self.order.samples(number)
        assert self._texts is not None
        return augmenter.submit(self.order.epoch(number), samples, *self._texts(samples))

    def _batch(self, number: int, encoded: Tokens | None) -> Batch:
        samples = self.order.samples(number)
        tokens, rows = (self.tokens, samples) if encoded is None else (encoded, np.arange(len(samples)))
        targets_N = self.targets_N[samples]
        weights_N = None if self.weights_N is None else self.weights_N[samples]
        whole, (rank, count) = None, self._part
        if count > 1:
            lengths_N = tokens.lengths[rows]
            shares = shares_of(lengths_N, count)
            mine = shares[rank]
            whole = Whole(
                denominator=self.task.denominator(targets_N, weights_N),
                num_samples=len(samples),
                num_tokens=int(lengths_N.sum()),
                shares=[lengths_N[rows] for rows in shares],
                starts_N=starts_of(lengths_N)[mine],
            )
            samples, rows, targets_N = samples[mine], rows[mine], targets_N[mine]
            weights_N = None if weights_N is None else weights_N[mine]
        ids, types = tokens.sequences(rows)
        return make_batch(
            number, samples, ids, types, targets_N, self.task, self.layout, weights_N=weights_N, whole=whole
        )


@dataclass(frozen=True)
class _Place:
    """Memory on a GPU that one batch after another is copied into. free: when what reads the last one is done; None
    while there was none."""

    memory: Tensor | None = None
    free: torch.cuda.Event | None = None


#: A batch, and on a GPU its place there and the end of its copy.
_Staged = tuple[Batch, _Place | None, torch.cuda.Event | None]


class Feed:
    """Iterates over batches on the device, made ahead in a thread. A context manager: leaving it ends the thread.

    A batch's tensors on a GPU are there for what is queued on the current stream until the next batch is asked for, or
    the iterator is dropped. One that the GPU has no room for comes as it is on the host: whoever runs it can make room.

    ahead: batches that wait, staged; 0 to make each when it is asked for, which pays where steps are in flight on a GPU
    and the host has little else to do: two threads of Python take the interpreter's lock from one another. wait_s:
    seconds that the consumer has waited for a batch that was not ready; with none ahead, at most: those of batches at
    whose end the GPU had nothing left to do. made_s: seconds that the consumer's own thread has made batches.
    """

    def __init__(
        self, source: Batches, device: torch.device, *, start: int = 0, stop: int | None = None, ahead: int = AHEAD
    ) -> None:
        self._source, self._device, self._range = source, device, (start, stop)
        self._ahead: Ahead[_Staged] | None = None
        self._asked: Iterator[_Staged] | None = None  # made when they are asked for
        self._depth = ahead
        self._stream = stream_for("batches", device, priority=-1) if device.type == "cuda" else None
        self._places: queue.SimpleQueue[_Place] = queue.SimpleQueue()
        for _ in range(ahead + _MORE_PLACES):
            self._places.put(_Place())
        self._room = 0
        self.wait_s = self.made_s = 0.0

    def __enter__(self) -> Feed:
        if self._depth:
            self._ahead = Ahead(self._staged(), self._depth, name="brimful-feed")
        else:
            self._asked = self._staged()
        return self

    def __exit__(self, *_: object) -> None:
        if self._ahead is not None:
            self._ahead.close()
        self._asked = None
        if self._stream is not None:  # what comes into the memory of places is copied after what still reads them
            self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def __iter__(self) -> Iterator[Batch]:
        while (item := self._next()) is not None:
            batch, place, copied = item
            if place is None or copied is None:
                yield batch
                continue
            torch.cuda.current_stream(self._device).wait_event(copied)
            try:
                yield batch
            finally:
                free = torch.cuda.Event()
                free.record(torch.cuda.current_stream(self._device))
                self._places.put(replace(place, free=free))

    def _next(self) -> _Staged | None:
        """Return the next batch once it is there, None at the end; count what the step waited for it."""
        began = time.perf_counter()
        if self._asked is not None:
            made = next(self._asked, None)
            seconds = time.perf_counter() - began
            self.made_s += seconds
            if self._stream is None or torch.cuda.current_stream(self._device).query():
                self.wait_s += seconds
            return made
        if self._ahead is None or self._ahead.ended.is_set():
            return None
        item = None
        try:
            item = self._ahead.take()
        finally:
            self.wait_s += time.perf_counter() - began
            if item is None:
                self._ahead.ended.set()
        return item

    def _staged(self) -> Iterator[_Staged]:
        for batch in self._source.batches(*self._range):
            if self._stream is None:
                yield batch, None, None
            elif (place := self._next_place()) is None:
                return
            else:
                yield self._to_device(batch, place, self._stream) or (batch, None, None)

    def _next_place(self) -> _Place | None:
        """None if the feed was left meanwhile. A batch that is asked for waits for none to be free."""
        if not self._depth and self._places.empty():
            return _Place()
        while self._ahead is None or not self._ahead.ended.is_set():
            try:
                return self._places.get(timeout=POLL_S)
            except queue.Empty:
                continue
        return None

    def _to_device(self, batch: Batch, place: _Place, stream: torch.cuda.Stream) -> _Staged | None:
        """Sends a batch to a place, made larger if a batch has been larger than it; None where memory ran out."""
        self._room = max(self._room, batch.num_bytes)
        memory = place.memory
        try:
            with torch.cuda.stream(stream):
                if place.free is not None:
                    stream.wait_event(place.free)
                if memory is None or len(memory) < self._room:
                    memory = torch.empty(self._room, dtype=torch.uint8, device=self._device)
                sent, copied = batch.sent(self._device, memory), torch.cuda.Event()
                copied.record(stream)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            self._places.put(place)
            return None
        return sent, _Place(memory), copied

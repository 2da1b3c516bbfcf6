"""Batches staged ahead of the step: built in a thread, pinned, copied on a side stream. The step never waits for input
that could have been ready; where it did wait, `wait_s` says how long.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import cache
from typing import Any

import numpy as np
import torch

from brimful.data.augment import Augmenter, Encoded, worker_errors
from brimful.data.batches import Batch, Layout, Order, make_batch
from brimful.data.tokens import Tokens
from brimful.tasks.task import Task

#: Batches that wait, staged, for the step.
_AHEAD = 3


class Source:
    """Effective batches by number: samples, ids and targets put together, still on the host.

    texts: where a transform is given, what it is applied to: a function from sample indices to texts and pairs.
    """

    def __init__(
        self,
        tokens: Tokens,
        targets_N: np.ndarray,
        task: Task,
        layout: Layout,
        order: Order,
        *,
        augmenter: Augmenter | None = None,
        texts: Callable[[np.ndarray], tuple[list[str], list[str] | None]] | None = None,
    ) -> None:
        self.tokens, self.targets_N, self.task, self.layout, self.order = tokens, targets_N, task, layout, order
        self.augmenter, self._texts = augmenter, texts

    def close(self) -> None:
        """Ends the processes of a transform."""
        if self.augmenter is not None:
            self.augmenter.close()

    def batches(self, start: int, stop: int | None) -> Iterator[Batch]:
        """Batches from number `start` up to `stop`, without end if it is None."""
        waiting: deque[tuple[int, Future[Encoded]]] = deque()
        number = start
        while stop is None or number < stop:
            if self.augmenter is None:
                yield self._batch(number, None)
                number += 1
                continue
            while len(waiting) <= 2 * _AHEAD and (stop is None or number + len(waiting) < stop):
                ahead = number + len(waiting)
                waiting.append((ahead, self._submit(self.augmenter, ahead)))
            number, future = waiting.popleft()
            with worker_errors():
                encoded = future.result()
            yield self._batch(number, encoded)
            number += 1

    def _submit(self, augmenter: Augmenter, number: int) -> Future[Encoded]:
        samples = self.order.samples(number)
        assert self._texts is not None
        return augmenter.submit(self.order.epoch(number), samples, *self._texts(samples))

    def _batch(self, number: int, encoded: Encoded | None) -> Batch:
        samples = self.order.samples(number)
        if encoded is None:
            ids, types = self.tokens.sequences(samples)
        else:
            ids, kinds = [e[0] for e in encoded], [e[1] for e in encoded]
            types = [kind for kind in kinds if kind is not None] if self.tokens.types is not None else None
        return make_batch(number, samples, ids, types, self.targets_N[samples], self.task, self.layout)


@cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    """One for the process, of high priority: torch hands out streams in turn, and this one must not be in a capture."""
    return torch.cuda.Stream(device, priority=-1)


class Feed:
    """Iterates over staged batches on the device. Use as a context manager: leaving it ends the thread.

    wait_s: seconds the consumer has waited for a batch that was not ready.
    """

    def __init__(self, source: Source, device: torch.device, *, start: int = 0, stop: int | None = None) -> None:
        self._source, self._device, self._range = source, device, (start, stop)
        self._ready: queue.Queue[Any] = queue.Queue(maxsize=_AHEAD)
        self._ended = threading.Event()
        self._stream = _copy_stream(device) if device.type == "cuda" else None
        self._thread = threading.Thread(target=self._stage, name="brimful-feed", daemon=True)
        self._over = False
        self.wait_s = 0.0

    def __enter__(self) -> Feed:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        while self._thread.is_alive():  # the thread may be waiting for room
            try:
                self._ready.get_nowait()
            except queue.Empty:
                self._thread.join(0.01)

    def __iter__(self) -> Iterator[Batch]:
        while not self._over:
            began = time.perf_counter()
            item = self._ready.get()
            self.wait_s += time.perf_counter() - began
            if item is None or isinstance(item, BaseException):
                self._over = True
                if item is None:
                    return
                raise item
            batch, event = item
            if event is not None:
                torch.cuda.current_stream(self._device).wait_event(event)
                # What was filled on another stream stays until what is queued on this one is done with it.
                for memory in batch.memories:
                    memory.record_stream(torch.cuda.current_stream(self._device))
            yield batch

    def _stage(self) -> None:
        try:
            for batch in self._source.batches(*self._range):
                if not self._put(self._to_device(batch)):
                    return
            self._put(None)
        except BaseException as error:  # the consumer's to raise
            self._put(error)

    def _put(self, item: Any) -> bool:
        while not self._ended.is_set():
            try:
                self._ready.put(item, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    def _to_device(self, batch: Batch) -> tuple[Batch, torch.cuda.Event | None]:
        if self._stream is None:
            return batch, None
        with torch.cuda.stream(self._stream):
            sent, event = batch.sent(self._device), torch.cuda.Event()
            event.record(self._stream)
        return sent, event

"""Sums of gradients of which each process keeps its part alone: one slice of each bucket.

all gradients kept    they are added up over micro-batches where they are, and sent with the last one
parts alone kept      each bucket is sent after each micro-batch, from one of two pieces of memory that take turns
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from brimful.hardware.peers import PeerMemory, others_of
from brimful.hardware.ranks import Ending, Ranks
from brimful.hardware.traffic import SENT
from brimful.kernels.side_stream import SideStream
from brimful.step.reduce.buckets import Bucket, GradientArena, cut_buckets
from brimful.step.reduce.reduction import Reduction

#: Pieces of memory that buckets are sent from in turn, where gradients are not kept.
_IN_TURN = 2


def own_part(bucket: Bucket, ranks: Ranks) -> slice:
    """Return the slice of the memory of all gradients that is this process's of a bucket."""
    size = (bucket.end - bucket.start) // ranks.count
    return slice(bucket.start + ranks.rank * size, bucket.start + (ranks.rank + 1) * size)


def other_part(bucket: Bucket, ranks: Ranks) -> slice:
    """Return the slice that is the other one's, of two processes."""
    own = own_part(bucket, ranks)
    return slice(own.stop, bucket.end) if ranks.rank == 0 else slice(bucket.start, own.start)


def own_places(buckets: Sequence[Bucket], count: int) -> list[slice]:
    """Return where a process's parts of the buckets are in a memory of these alone."""
    found, at = [], 0
    for bucket in buckets:
        size = (bucket.end - bucket.start) // count
        found.append(slice(at, at + size))
        at += size
    return found


@dataclass(frozen=True, kw_only=True)
class Segment:
    """This process's part of a parameter. at: its place in the parameter, flat; own: among all of its parts."""

    index: int
    at: slice
    own: slice


def own_segments(buckets: Sequence[Bucket], sizes: Sequence[int], ranks: Ranks) -> Iterator[Segment]:
    """Return this process's part of each parameter that it has one of. sizes: of all parameters."""
    for bucket, place in zip(buckets, own_places(buckets, ranks.count), strict=True):
        part = own_part(bucket, ranks)
        for index, start in zip(bucket.members, bucket.starts, strict=True):
            first, last = max(start, part.start), min(start + sizes[index], part.stop)
            if first < last:
                before = place.start - part.start
                own = slice(before + first, before + last)
                yield Segment(index=index, at=slice(first - start, last - start), own=own)


class OwnParts(Reduction):
    """Sums over processes of which each keeps its part, in `own`; memory, fill and all else as of `Reduction`."""

    def __init__(
        self, ranks: Ranks, parameters: Sequence[Tensor], buckets: Sequence[Bucket], memory: Tensor,
        fill: Callable[[Bucket], object], *, half: bool, overlap: bool, side_stream: SideStream | None = None,
        gives_back: bool = False,
    ) -> None:  # fmt: skip
        self.buckets, self._places = buckets, own_places(buckets, ranks.count)
        self.own = torch.zeros(self._places[-1].stop, dtype=memory.dtype, device=memory.device)
        self._spreads = False  # parts are on their way to others
        super().__init__(
            ranks, parameters, buckets, memory, fill, half=half, overlap=overlap, side_stream=side_stream,
            gives_back=gives_back,
        )  # fmt: skip

    @property
    def _exchanges(self) -> bool:
        return True

    def _sum(self, bucket: Bucket) -> Ending:
        return self._summed(bucket, self._memory[bucket.part], self.own[self._places[bucket.number]])

    def _summed(self, bucket: Bucket, given: Tensor, into: Tensor) -> Ending:
        """The sum of this process's part; of parts that are sent in bf16, in the order of the processes."""
        if not self._halves:
            return self.ranks.begin_scattered_sum(into, given)
        sent, got = self._halves[bucket.number]
        sent.copy_(given)
        exchanged = self.ranks.begin_exchange(got, sent)

        def end() -> None:
            exchanged()
            first, *others = got.view(self.ranks.count, -1)
            into.copy_(first)
            for part in others:
                into.add_(part)

        return end

    def arm(self) -> None:
        """As `Reduction` has it."""
        self._spreads = False  # a step that failed meanwhile is begun again
        super().arm()

    def spread(self, memory: Any, bucket: Bucket) -> None:
        """Send this process's part of a bucket in `memory`, a tensor, to all, beside what is launched from now on."""
        whole, part = memory[bucket.part], memory[own_part(bucket, self.ranks)]
        if self._stream is None:
            self.ranks.begin_gather(whole, part.clone())()
            return
        with self._spreading():
            self.ranks.begin_gather(whole, part)()

    @contextmanager
    def _spreading(self) -> Iterator[None]:
        """Send a part within, when what was launched by now is done. All parts of a step are one stretch of time: the
        link rests at no time."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            if self._clock is not None and not self._spreads:
                self._clock.start(SENT)
            self._spreads = True
            try:
                yield
            except BaseException:
                self._spreads = False
                raise

    def wait_for_spread(self) -> None:
        """Have all parts before what is launched from now on."""
        if self._stream is not None and self._clock is not None and self._spreads:
            with torch.cuda.stream(self._stream):
                self._clock.stop(SENT)
        self._spreads = False
        self._wait()


class PeerParts(OwnParts):
    """`OwnParts` by copies between processes' memory: parts of gradients are fetched, parts of weights are put there.

    gradients: memory that those of all parameters are in. No process writes gradients of a step before all have put
    their weights of the last one there, and so have fetched what they need. add: the sum of a bucket's parts of all
    processes into a memory. What the last bucket needs is read where it is: nothing is left that a copy could be
    beside. dtype_of: a bucket's gradients, the same in all processes: fp32, or halves at the same
    numbers of the same memory.
    """

    def __init__(
        self, ranks: Ranks, parameters: Sequence[Tensor], buckets: Sequence[Bucket], gradients: PeerMemory,
        fill: Callable[[Bucket], object], add: Callable[[Bucket, list[Tensor], Tensor], None],
        dtype_of: Callable[[Bucket], torch.dtype], *, overlap: bool, side_stream: SideStream | None = None,
    ) -> None:  # fmt: skip
        super().__init__(
            ranks, parameters, buckets, gradients.own, fill, half=False, overlap=overlap, side_stream=side_stream
        )  # fmt: skip
        self._gradients, self._add, self._others = gradients, add, others_of(ranks.rank, ranks.count)
        self._dtype_of = dtype_of
        self._met = set[int]()  # buckets of this step that all processes have: one that fails then is begun again
        most = max((bucket.end - bucket.start for bucket in buckets[:-1]), default=0) // ranks.count
        # Of one bucket at a time: each process's part of it but this one's.
        self._fetched_R = [gradients.own.new_zeros(0 if r == ranks.rank else most) for r in range(ranks.count)]

    def _sum(self, bucket: Bucket) -> Ending:
        part, own = own_part(bucket, self.ranks), self.own[self._places[bucket.number]]
        if bucket.number not in self._met:
            self._gradients.meet()
            self._met.add(bucket.number)
        dtype = self._dtype_of(bucket)
        parts_R = [theirs.view(dtype)[part] for theirs in self._gradients.all_R]
        if bucket.number < len(self.buckets) - 1:
            for rank in self._others:
                parts_R[rank] = self._fetched_R[rank].view(dtype)[: len(own)].copy_(parts_R[rank])
        self._add(bucket, parts_R, own)
        return _at_once

    def arm(self) -> None:
        """As `Reduction` has it."""
        self._met.clear()
        super().arm()

    def disarm(self) -> None:
        """As `Reduction` has it."""
        self._met.clear()
        super().disarm()

    def finish(self) -> None:
        """As `Reduction` has it."""
        super().finish()
        self._met.clear()

    def spread(self, memory: Any, bucket: Bucket) -> None:
        """As `OwnParts` has it: put this process's part of a bucket into the others' `memory`, a `PeerMemory`."""
        part = own_part(bucket, self.ranks)
        with self._spreading():
            for rank in self._others:
                memory.all_R[rank][part].copy_(memory.own[part])

    def wait_for_spread(self) -> None:
        """As `OwnParts` has it: others have put theirs there."""
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            self._gradients.meet()
        super().wait_for_spread()


def _at_once() -> None:
    """The ending of what needs none."""


class ScatteredReduction(OwnParts):
    """Sums of gradients that any update keeps, by parts. used: numbers of parameters that had a gradient.

    each: whether gradients are sent after each micro-batch, and not kept.
    """

    def __init__(self, ranks: Ranks, parameters: Sequence[Tensor], *, each: bool, half: bool, overlap: bool) -> None:
        first, count = parameters[0], ranks.count
        arena = self._arena = None if each else GradientArena(parameters, count)
        buckets = arena.buckets if arena is not None else cut_buckets([p.numel() for p in parameters], count)
        dtype = torch.float64 if first.dtype == torch.float64 else torch.float32
        most = max(bucket.end - bucket.start for bucket in buckets)
        self.each, self.used, self._parameters = each, set[int](), parameters
        turns = range(_IN_TURN if each else 0)
        self._pieces = [torch.zeros(most, dtype=dtype, device=first.device) for _ in turns]
        self._sums = [torch.zeros(most // count, dtype=dtype, device=first.device) for _ in turns]
        memory = self._pieces[0] if arena is None else arena.memory
        gives_back = arena is not None
        super().__init__(
            ranks, parameters, buckets, memory, self._take, half=half, overlap=overlap, gives_back=gives_back
        )  # fmt: skip

    @property
    def kept(self) -> list[Tensor]:
        """Memory of gradients and of their sums."""
        return [self.own, *self._pieces, *self._sums, *([] if self._arena is None else [self._arena.memory])]

    def clear(self) -> None:
        """Drop what was summed."""
        self.own.zero_()
        self.used.clear()
        for parameter in self._parameters:
            parameter.grad = None

    def _take(self, bucket: Bucket) -> None:
        """Put a bucket's gradients where they are sent from."""
        self.used.update(i for i in bucket.members if self._parameters[i].grad is not None)
        if self._arena is not None:
            self._arena.fill(bucket)
            return
        self._wait_for_piece()
        piece = self._piece(bucket).zero_()
        for index, start in zip(bucket.members, bucket.starts, strict=True):
            parameter = self._parameters[index]
            if (gradient := parameter.grad) is None:
                continue
            at = start - bucket.start
            piece[at : at + gradient.numel()].view(gradient.shape).copy_(gradient)
            if gradient.is_cuda:
                gradient.record_stream(torch.cuda.current_stream())
            parameter.grad = None

    def _piece(self, bucket: Bucket) -> Tensor:
        return self._pieces[bucket.number % _IN_TURN][: bucket.end - bucket.start]

    def _wait_for_piece(self) -> None:
        """Have the bucket that was sent from the same piece before arrive first."""
        while len(self._endings) >= _IN_TURN:
            self._endings.pop(0)()

    def _sum(self, bucket: Bucket) -> Ending:
        if self._arena is not None:
            return super()._sum(bucket)
        own = self.own[self._places[bucket.number]]
        into = self._sums[bucket.number % _IN_TURN][: len(own)]
        arrive = self._summed(bucket, self._piece(bucket), into)

        def end() -> None:
            arrive()
            own.add_(into)

        return end

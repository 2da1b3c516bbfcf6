"""Sums of gradients of which each process keeps its part alone: one slice of each bucket.

all gradients kept    they are added up over micro-batches where they are, and sent with the last one
parts alone kept      each bucket is sent after each micro-batch, from one of two pieces of memory that take turns
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from brimful.hardware.ranks import Ending, Ranks
from brimful.step.reduce.buckets import Bucket, GradientArena, cut_buckets
from brimful.step.reduce.reduction import Reduction

#: Pieces of memory that buckets are sent from in turn, where gradients are not kept.
_IN_TURN = 2


def own_part(bucket: Bucket, ranks: Ranks) -> slice:
    """Return the slice of the memory of all gradients that is this process's of a bucket."""
    size = (bucket.end - bucket.start) // ranks.count
    return slice(bucket.start + ranks.rank * size, bucket.start + (ranks.rank + 1) * size)


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


def put_together(own: Tensor, buckets: Sequence[Bucket], ranks: Ranks) -> Iterator[tuple[int, Tensor]]:
    """Return the number of each parameter, and its tensor, flat from its beginning, of all processes' parts."""
    for bucket, place in zip(buckets, own_places(buckets, ranks.count), strict=True):
        whole = torch.empty(bucket.end - bucket.start, dtype=own.dtype, device=own.device)
        ranks.begin_gather(whole, own[place])()
        for index, start in zip(bucket.members, bucket.starts, strict=True):
            yield index, whole[start - bucket.start :]


class ScatteredReduction(Reduction):
    """Sums over processes of which each keeps its part, in `own`. used: numbers of parameters that had a gradient.

    each: whether gradients are sent after each micro-batch, and not kept.
    """

    def __init__(self, ranks: Ranks, parameters: Sequence[Tensor], *, each: bool, half: bool, overlap: bool) -> None:
        first, count = parameters[0], ranks.count
        arena = None if each else GradientArena(parameters, count)
        buckets = arena.buckets if arena is not None else cut_buckets([p.numel() for p in parameters], count)
        dtype = torch.float64 if first.dtype == torch.float64 else torch.float32
        sizes = [bucket.end - bucket.start for bucket in buckets]
        self.buckets, self.each, self.used = buckets, each, set[int]()
        self._parameters, self._arena, self._places = parameters, arena, own_places(buckets, count)
        self.own = torch.zeros(self._places[-1].stop, dtype=dtype, device=first.device)
        self._pieces = [
            torch.zeros(max(sizes), dtype=dtype, device=first.device) for _ in range(_IN_TURN if each else 0)
        ]
        self._sums = [torch.zeros(max(sizes) // count, dtype=dtype, device=first.device) for _ in self._pieces]
        memory = self._pieces[0] if arena is None else arena.memory
        super().__init__(ranks, parameters, buckets, memory, self._take, half=half, overlap=overlap)

    @property
    def _exchanges(self) -> bool:
        return True

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
        self._wait_for_piece(bucket)
        piece = self._given(bucket).zero_()
        for index, start in zip(bucket.members, bucket.starts, strict=True):
            parameter = self._parameters[index]
            if (gradient := parameter.grad) is None:
                continue
            at = start - bucket.start
            piece[at : at + gradient.numel()].view(gradient.shape).copy_(gradient)
            if gradient.is_cuda:
                gradient.record_stream(torch.cuda.current_stream())
            parameter.grad = None

    def _given(self, bucket: Bucket) -> Tensor:
        if self._arena is not None:
            return self._arena.memory[bucket.part]
        return self._pieces[bucket.number % _IN_TURN][: bucket.end - bucket.start]

    def _wait_for_piece(self, bucket: Bucket) -> None:
        """Have the bucket that was sent from the same piece before arrive first."""
        while len(self._endings) >= _IN_TURN:
            self._endings.pop(0)()

    def _sum(self, bucket: Bucket) -> Ending:
        given, own = self._given(bucket), self.own[self._places[bucket.number]]
        into = own if self._arena is not None else self._sums[bucket.number % _IN_TURN][: len(own)]
        begin = self.ranks.begin_scattered_sum
        arrive = self._exchanged(bucket, given, into) if self._halves else begin(into, given)
        if self._arena is not None:
            return arrive

        def end() -> None:
            arrive()
            own.add_(into)

        return end

    def _exchanged(self, bucket: Bucket, given: Tensor, into: Tensor) -> Ending:
        """The sum of this process's part, of parts that are sent in bf16, in the order of the processes."""
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

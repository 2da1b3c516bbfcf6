"""Buckets of gradients: slices of one memory, in the order in which a backward pass completes them.

bucket 0: the last layers' gradients     bucket 1: ...     last bucket: the embeddings' gradients
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

#: Bytes of a bucket in fp32, unless one parameter has more: large enough for a link's full rate, small enough that
#: little is left to send when the backward pass ends.
BUCKET_BYTES = 32 << 20
#: Elements that parameters and a process's share of a bucket start at multiples of.
_ALIGNMENT = 16


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """Parameters by number, their places in the memory of all gradients, and the slice that is sent for them."""

    number: int
    members: tuple[int, ...]
    starts: tuple[int, ...]
    start: int
    end: int

    @property
    def part(self) -> slice:
        """Its slice of the memory."""
        return slice(self.start, self.end)


def cut_buckets(sizes: Sequence[int], count: int) -> list[Bucket]:
    """Return buckets of parameters of these sizes, the last parameter first; each can be cut in `count` equal parts."""
    found: list[Bucket] = []
    at = 0
    for groups in _together([[index] for index in reversed(range(len(sizes)))], sizes):
        found.append(_bucket(len(found), [index for group in groups for index in group], sizes, at, count))
        at = found[-1].end
    return found


def lay_out(
    sections: Sequence[Sequence[Sequence[int]]], sizes: Sequence[int], count: int, most_bytes: int | None = None
) -> list[Bucket]:
    """Return buckets of parameters in the order of their places, of a section after another; of each the last come
    first. Each bucket can be cut in `count` equal parts.

    sections: parameters by number, in groups that lie side by side. most_bytes: of a bucket in fp32, instead of
    `BUCKET_BYTES`.
    """
    found: list[Bucket] = []
    at = 0
    for section in sections:
        buckets: list[Bucket] = []
        for groups in reversed(_together(list(reversed(section)), sizes, most_bytes)):
            members = [index for group in reversed(groups) for index in group]
            buckets.append(_bucket(0, members, sizes, at, count))
            at = buckets[-1].end
        found += reversed(buckets)
    return [replace(bucket, number=number) for number, bucket in enumerate(found)]


def _bucket(number: int, members: Sequence[int], sizes: Sequence[int], start: int, count: int) -> Bucket:
    """A bucket of these parameters, one after another, and what fills its parts up."""
    starts, at = list[int](), start
    for index in members:
        starts.append(at)
        at += -(-sizes[index] // _ALIGNMENT) * _ALIGNMENT
    multiple = count * _ALIGNMENT
    end = start + -(-(at - start) // multiple) * multiple
    return Bucket(number=number, members=tuple(members), starts=tuple(starts), start=start, end=end)


def _together(
    order: Sequence[Sequence[int]], sizes: Sequence[int], most_bytes: int | None = None
) -> list[list[Sequence[int]]]:
    """Groups of parameters one after another, as many in a bucket as fit."""
    most = (BUCKET_BYTES if most_bytes is None else most_bytes) // 4
    found: list[list[Sequence[int]]] = []
    held = 0
    for group in order:
        size = sum(sizes[index] for index in group)
        if not found or held + size > most:
            found.append([])
            held = 0
        found[-1].append(group)
        held += size
    return found


class Overlap:
    """Has each bucket begin its way as soon as its gradients are complete, in one order in all processes.

    begin: called with each bucket once a step, in their order; it must not wait for others. A process whose rows do not
    reach some parameters, or that has none, begins what is left when it `finish`es.
    """

    def __init__(
        self, parameters: Sequence[Tensor], buckets: Sequence[Bucket], begin: Callable[[Bucket], None]
    ) -> None:
        self._buckets, self._begin = buckets, begin
        self._bucket_of = {index: bucket.number for bucket in buckets for index in bucket.members}
        self._missing: list[int] = []
        self._next, self._armed = 0, False
        self._hooks = [p.register_post_accumulate_grad_hook(self._hook(index)) for index, p in enumerate(parameters)]

    def _hook(self, index: int) -> Callable[[Tensor], None]:
        def complete(_: Tensor) -> None:
            if self._armed:
                self._complete(index)

        return complete

    def arm(self) -> None:
        """Have buckets begin within the next backward pass: it is the last one of an effective batch."""
        self._missing, self._next, self._armed = [len(bucket.members) for bucket in self._buckets], 0, True

    def finish(self) -> None:
        """Begin the buckets that the backward pass did not complete; all of them where there was none."""
        self._armed = False
        while self._next < len(self._buckets):
            self._begin_next()
        self._next = 0

    def disarm(self) -> None:
        """Leave out what did not begin in a backward pass that failed: none of it is begun in another one."""
        self._armed, self._next = False, 0

    def _complete(self, index: int) -> None:
        number = self._bucket_of[index]
        if number < self._next:
            raise RuntimeError("a gradient was added to after it was sent: its layer runs twice in a backward pass")
        self._missing[number] -= 1
        while self._next < len(self._buckets) and self._missing[self._next] <= 0:
            self._begin_next()

    def _begin_next(self) -> None:
        self._begin(self._buckets[self._next])
        self._next += 1

    def remove(self) -> None:
        """Leave the parameters as they were."""
        for hook in self._hooks:
            hook.remove()


class GradientArena:
    """Gradients of parameters in one memory, a bucket after another. count: processes that buckets can be cut for."""

    def __init__(self, parameters: Sequence[Tensor], count: int) -> None:
        self._parameters = parameters
        self.buckets = cut_buckets([parameter.numel() for parameter in parameters], count)
        first = parameters[0]
        dtype = torch.float64 if first.dtype == torch.float64 else torch.float32
        self.memory = torch.zeros(self.buckets[-1].end, dtype=dtype, device=first.device)
        places = {i: start for each in self.buckets for i, start in zip(each.members, each.starts, strict=True)}
        self.views = [self.memory[(at := places[i]) : at + p.numel()].view(p.shape) for i, p in enumerate(parameters)]

    def fill(self, bucket: Bucket) -> None:
        """Take in the gradients of a bucket's parameters, zeros of those that have none."""
        views, gradients = list[Tensor](), list[Tensor]()
        for index in bucket.members:
            parameter, view = self._parameters[index], self.views[index]
            if parameter.grad is None:
                view.zero_()
            elif parameter.grad.data_ptr() != view.data_ptr():
                views.append(view)
                gradients.append(parameter.grad)
                parameter.grad = view
        if views:  # one launch for many parameters
            torch._foreach_copy_(views, gradients)

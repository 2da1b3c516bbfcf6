"""Sums over processes, in the precision of the memory that they are in, or in bf16 on the way.

bf16: each process sends every other one its part of a bucket, adds up the parts that it is sent in fp32, in the order
of the processes, and sends the sum round: half the bytes, rounded twice, whatever the number of processes. A ring of
sums in bf16 would round once a hop. Of two processes that is the same, and one collective instead of two.

On a GPU collectives are on a stream of their own, branches of a graph where a step is captured. On a CPU gloo's threads
do them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

import torch
from torch import Tensor

from brimful.hardware.ranks import Ending, Ranks
from brimful.hardware.streams import stream_for
from brimful.hardware.traffic import BLOCKED, SENT, DeviceClock, Traffic
from brimful.kernels.side_stream import SideStream
from brimful.step.reduce.buckets import Bucket, Overlap

try:
    from brimful.kernels.stream_clock import StreamClock
except ImportError:  # Triton comes with torch for GPUs, and is missing beside torch for CPUs
    StreamClock = None  # type: ignore[assignment, misc]


def clock_of(traffic: Traffic, device: torch.device) -> DeviceClock | None:
    """Return the clock of what is sent from a GPU, one for all of a process; None on a CPU, and where there can be
    none: a run does without."""
    if device.type == "cuda" and traffic.device is None and StreamClock is not None:
        with suppress(Exception):
            traffic.device = StreamClock(device, slots=2)
    return traffic.device


@contextmanager
def counted(clock: DeviceClock | None, slot: int) -> Iterator[None]:
    """Count what the current stream does within, where there is a clock."""
    if clock is not None:
        clock.start(slot)
    yield
    if clock is not None:
        clock.stop(slot)


class Reduction:
    """Sums of the gradients of one update over processes, bucket by bucket, while the backward pass goes on.

    memory: of all gradients. fill: puts a bucket's gradients there. half: whether sums are in bf16 on the way. overlap:
    whether buckets are sent within backward passes. side_stream: that gradients may be computed on. gives_back: whether
    `fill` gives gradients' memory back, which what is launched next may then write to: it copies them before, and not
    beside that.
    """

    def __init__(
        self, ranks: Ranks, parameters: Sequence[Tensor], buckets: Sequence[Bucket], memory: Tensor,
        fill: Callable[[Bucket], object], *, half: bool, overlap: bool, side_stream: SideStream | None = None,
        gives_back: bool = False,
    ) -> None:  # fmt: skip
        self._gives_back = gives_back
        self.ranks, self._memory, self._fill, self._side_stream = ranks, memory, fill, side_stream
        self._overlap = Overlap(parameters if overlap else (), buckets, self._begin)
        self._stream = stream_for("sums", memory.device, priority=-1) if memory.is_cuda else None
        self._clock = clock_of(ranks.pulse.traffic, memory.device)
        self._endings: list[Ending] = []
        # Made beforehand: a process that others wait for allocates nothing.
        self._halves = [self._half_memory(bucket) for bucket in buckets] if half else []
        most = max((len(got) for _, got in self._halves), default=0) // ranks.count
        self._total = torch.zeros(most, dtype=memory.dtype, device=memory.device)  # of one bucket at a time

    def _half_memory(self, bucket: Bucket) -> tuple[Tensor, Tensor]:
        """Memory to send a bucket in bf16, and to be sent one where parts are exchanged, in whole parts of each."""
        size = -(-(bucket.end - bucket.start) // self.ranks.count) * self.ranks.count
        sent = torch.zeros(size, dtype=torch.bfloat16, device=self._memory.device)
        return sent, torch.zeros_like(sent) if self._exchanges else sent[:0]

    @property
    def _exchanges(self) -> bool:
        """True where processes send one another parts, and not whole buckets."""
        return self.ranks.count > 2

    #: Whether gradients are sent after each micro-batch, and not after the last one of a batch.
    each = False

    def arm(self) -> None:
        """Begin sums within the next backward pass."""
        self._overlap.arm()

    def disarm(self) -> None:
        """Begin no sums within the next backward pass: the one that they were to begin in has failed."""
        self._overlap.disarm()
        self._endings.clear()

    def finish(self) -> None:
        """Begin the sums that were not begun, and have all of them before what is launched from now on."""
        self._overlap.finish()
        endings, self._endings = self._endings, []
        for ending in endings:
            ending()
        self._wait()

    def _wait(self) -> None:
        """Have what was sent before what is launched from now on."""
        if self._stream is not None:
            with counted(self._clock, BLOCKED):
                torch.cuda.current_stream().wait_stream(self._stream)

    def remove(self) -> None:
        """Leave the parameters as they were."""
        self._overlap.remove()

    def _begin(self, bucket: Bucket) -> None:
        if self._stream is None:
            self._fill(bucket)
            self._endings.append(self._sum(bucket))
            return
        if self._gives_back:
            self._fill(bucket)
        self._stream.wait_stream(torch.cuda.current_stream())
        if self._side_stream is not None:
            self._side_stream.precede(self._stream)
        with torch.cuda.stream(self._stream), counted(self._clock, SENT):
            if not self._gives_back:
                self._fill(bucket)
            self._sum(bucket)()

    def _sum(self, bucket: Bucket) -> Ending:
        whole, ranks = self._memory[bucket.part], self.ranks
        if not self._halves:
            return ranks.begin_sum(whole)
        sent, got = self._halves[bucket.number]
        sent[: len(whole)].copy_(whole)
        if not self._exchanges:
            summed = ranks.begin_sum(sent)

            def end_of_two() -> None:
                summed()
                whole.copy_(sent[: len(whole)])

            return end_of_two
        exchanged = ranks.begin_exchange(got, sent)

        def end() -> None:
            exchanged()
            first, *others = got.view(ranks.count, -1)
            total = self._total[: len(first)].copy_(first)
            for part in others:
                total += part
            own = sent.view(ranks.count, -1)[ranks.rank]
            own.copy_(total)
            ranks.begin_gather(got, own)()
            whole.copy_(got[: len(whole)])

        return end

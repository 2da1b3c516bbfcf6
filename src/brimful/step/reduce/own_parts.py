"""Sums of gradients of which each process keeps its part, sent in the precision that they were computed in.

What a backward pass has left in half precision is exchanged so, and added up in fp32 by whoever keeps it: half the
bytes of a sum in fp32, and the same numbers. What was updated is sent to all from where it lies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from brimful.hardware.ranks import Ending, Ranks
from brimful.kernels.side_stream import SideStream
from brimful.step.reduce.buckets import Bucket
from brimful.step.reduce.reduction import Reduction
from brimful.step.reduce.scattered import own_part, own_places


class OwnParts(Reduction):
    """Sums over processes of which each keeps its part, in `own`, fp32.

    fill: puts a bucket's gradients where `sent` says that they are. half: whether those in fp32 are rounded to bf16 on
    their way. overlap, side_stream: as of `Reduction`.
    """

    def __init__(
        self, ranks: Ranks, parameters: Sequence[Tensor], buckets: Sequence[Bucket], fill: Callable[[Bucket], object],
        sent: Callable[[Bucket], Tensor], *, half: bool, overlap: bool, side_stream: SideStream | None,
    ) -> None:  # fmt: skip
        self._places, self._sent, self._rounds = own_places(buckets, ranks.count), sent, half
        device, most = parameters[0].device, max(bucket.end - bucket.start for bucket in buckets)
        self.own = torch.zeros(self._places[-1].stop, dtype=torch.float32, device=device)
        # Of one bucket at a time, in 16 bits a number: what others send, and what is rounded for them.
        self._got = torch.zeros(most * 2, dtype=torch.uint8, device=device)
        self._rounded = torch.zeros(most if half else 0, dtype=torch.bfloat16, device=device)
        super().__init__(
            ranks, parameters, buckets, self.own, fill, half=False, overlap=overlap, side_stream=side_stream
        )

    def _sum(self, bucket: Bucket) -> Ending:
        given, own, count = self._sent(bucket), self.own[self._places[bucket.number]], self.ranks.count
        if given.dtype == own.dtype and not self._rounds:
            return self.ranks.begin_scattered_sum(own, given)
        if given.dtype == own.dtype:
            given = self._rounded[: len(given)].copy_(given)
        got = self._got[: given.nbytes].view(given.dtype)
        self.ranks.begin_exchange(got, given)()
        torch.sum(got.view(count, -1), 0, dtype=own.dtype, out=own)
        return _done

    def spread(self, memory: Tensor, bucket: Bucket) -> None:
        """Send this process's part of a bucket to all, beside what is launched from now on."""
        whole, part = memory[bucket.part], memory[own_part(bucket, self.ranks)]
        if self._stream is None:
            self.ranks.begin_gather(whole, part.clone())()
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self.ranks.begin_gather(whole, part)()

    def wait_for_spread(self) -> None:
        """Have all parts before what is launched from now on."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)


def _done() -> None:
    """Nothing to wait for."""

"""The update in three kernels of which each process makes a part: moments of that part alone are kept (ZeRO-1).

    backward pass     each bucket's gradients go to the processes that update parts of it
    norm, decision    one small sum over processes: squares, the loss, and which parameters are used. Where processes
                      copy from one another's memory, squares are summed beside their gradients, and all is read there
    update            bucket by bucket; what is updated goes to all while the next one is

Two processes take half the time of an update, and send three quarters of the bytes that sums of whole gradients take:
weights are sent as products read them. Where processes copy from one another's memory, gradients in half precision of a
batch that is one micro-batch are copied as they are, half the bytes of their sums in fp32, and widened to be summed. Of
two processes each puts there what the other one needs, and reads its own where they are.
Source: Rajbhandari et al. 2020, arXiv 1910.02054.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import accumulate, chain, pairwise
from typing import Any

import torch
from torch import Tensor

from brimful.data.batches.packing import round_up
from brimful.hardware.memory import release_unused
from brimful.hardware.peers import PeerMemory, Peers, peers_for
from brimful.hardware.ranks import Ranks
from brimful.measurement.memory import Kept
from brimful.step.reduce.buckets import Bucket
from brimful.step.reduce.scattered import OwnParts, PeerParts, Segment, other_part, own_part, own_segments
from brimful.step.state import ParameterState, StepState
from brimful.step.updates.fused_adamw import FusedAdamW, Launch
from brimful.step.updates.own_state import own_state, owned

try:
    from brimful.kernels.optimizers import adamw
except ImportError:  # as in fused_adamw.py
    adamw = None  # type: ignore[assignment]

#: Most bytes of a bucket that NCCL sends. Between two H100s it sends a part of 57 MB at 150 to 250 GB/s, and one of
#: 14 MB at 100: tweets with BERT-base made 13,800 samples/s by buckets of 32 MiB, 14,360 by 64, and 14,740 by these.
SENT_BYTES = 128 << 20


class FusedShardedAdamW(FusedAdamW):
    """`FusedAdamW` by parts, one of each of several processes. Masters of others' parts are of the last `collect`.

    Where `together` is not set, nothing is sent: such an update must be held back.
    """

    gathers_state = True
    releases_together = True
    #: Finds memory of the other processes, for copies there instead of what is sent; None to send.
    find_peers: Callable[[Ranks, torch.device], tuple[Peers | None, str]] | None = None
    #: Whether to end where there is none, and not to send: by the process that leads.
    must_copy = False

    def share(self, ranks: Ranks, *, half: bool = False, overlap: bool = True) -> None:
        """As `Update` has it; parts are cut for these processes."""
        self._prepare_buckets()
        self.prepare_gathering()
        assert self._sum is not None
        self._beside: dict[str, Any] = {"overlap": overlap, "side_stream": self.side_stream}
        sent = (self._buckets, self._sum, self._gather_bucket)
        self.reduction = self._sums = OwnParts(ranks, self.parameters, *sent, half=half, **self._beside)
        self._copies_sent: Tensor | PeerMemory = self._copy
        self._masters_sent: Tensor | PeerMemory = self._master
        sizes = [parameter.numel() for parameter in self.parameters]
        self._segments = list(own_segments(self._buckets, sizes, ranks))
        own_of = [self._blocks_within(bucket, own_part(bucket, ranks)) for bucket in self._buckets]
        blocks, edges = list(chain.from_iterable(own_of)), [0, *accumulate(map(len, own_of))]
        places = [0] * len(sizes)
        for each in self._segments:
            places[each.index] = each.own.start - each.at.start
        self._hold(_table(blocks, torch.int32, self.device).view(-1, 3), _table(places, torch.int64, self.device),
                   len(self._sums.own))  # fmt: skip
        self._edges = edges
        # What each process tells all others before it updates, in one memory.
        self._told = torch.zeros(adamw.PARTIALS + 1 + len(sizes), dtype=torch.float32, device=self.device)
        self._parts = self._told[: adamw.PARTIALS]
        self._tellings: PeerMemory | None = None  # of all processes, where they reach one another's memory
        self._is_used = torch.zeros(len(sizes), dtype=torch.bool, device=self.device)

    def meet(self) -> str:
        """As `Update` has it: with `find_peers`, what is sent moves to memory that all processes reach.

        Raises: OptionError in all processes where there is none, with `must_copy`.
        """
        if self.find_peers is None:
            return ""
        ranks = self._sums.ranks
        peers, warning = peers_for(self.find_peers, ranks, self.device, must=self.must_copy)
        if peers is None:
            return warning
        self._sums.remove()
        gradients = self._move_to_peers(peers)
        if ranks.count == 2:
            others = [other_part(bucket, ranks) for bucket in self._buckets]
            blocks = (self._blocks_within(*each) for each in zip(self._buckets, others, strict=True))
            self._others_of = [_table(each, torch.int32, self.device).view(-1, 3) for each in blocks]
        fetched = (self._buckets, gradients, self._gather_bucket, self._add_parts, self._dtype_sent)
        self.reduction = self._sums = PeerParts(ranks, self.parameters, *fetched, **self._beside)
        return ""

    def _move_to_peers(self, peers: Peers) -> PeerMemory:
        """Keep what processes send one another where all of them reach it: gradients, which are returned, copies of the
        weights, and masters. Each goes before the next one comes."""
        self.before()
        self._sum = None
        self.reduction = self._sums = None  # type: ignore[assignment]
        release_unused(self.device)
        gradients = peers.zeros(len(self._master), torch.float32)
        self._sum = gradients.own
        masters = self._masters_sent = peers.zeros(len(self._master), torch.float32)
        self._master = masters.own.copy_(self._master)
        self._place_parameters()
        release_unused(self.device)
        copies = self._copies_sent = peers.zeros(len(self._copy), self._copy.dtype)
        self._copy = copies.own.copy_(self._copy)
        self._place_parameters()
        release_unused(self.device)
        self._tellings = peers.zeros(len(self._told), torch.float32)
        return gradients

    def _blocks_within(self, bucket: Bucket, part: slice) -> list[tuple[int, int, int]]:
        """Blocks of a bucket's parameters in a part of the arenas."""
        found = []
        for index, start in zip(bucket.members, bucket.starts, strict=True):
            size, end = self._block_sizes[index], start + self.parameters[index].numel()
            first, last = max(start, part.start) - start, min(end, part.stop) - start
            for block in range(first // size * size, last, size) if first < last else ():
                found.append((index, max(block, first), min(block + size, last)))
        return found

    @property
    def _by_copies(self) -> bool:
        return isinstance(self._sums, PeerParts)

    def kept(self) -> Kept:
        """As `Update` has it, without what others reach: that is outside of torch's memory."""
        if not self._by_copies:
            return super().kept()
        outside = {each.data_ptr() for each in (self._copy, self._master, self._sum) if each is not None}
        weights = [*self.model.parameters(), *self.model.buffers()]
        kinds = (weights, self._gradient_tensors(), self._state_tensors())
        return Kept.of(
            self.device, *([t for t in kind if t.untyped_storage().data_ptr() not in outside] for kind in kinds)
        )

    def _is_copied(self, bucket: Bucket) -> bool:
        return bucket.end <= self._end_of_copies

    def _dtype_sent(self, bucket: Bucket) -> torch.dtype:
        """The dtype that a bucket's gradients have on their way: their own, unless several were added up before."""
        return self._copy.dtype if self._by_copies and self.single and self._is_copied(bucket) else torch.float32

    def _gather_bucket(self, bucket: Bucket) -> None:
        """Put gradients where others fetch them from: halves at the same numbers of the same memory, before all places
        of gradients in fp32, as buckets with copies come first. What fills a bucket up is 0 in either."""
        assert self._sum is not None
        memory = self._sum.view(self._dtype_sent(bucket))
        gathering = self._gathering(bucket, memory, self._others_of[bucket.number] if self._reads_own else None)
        self._addresses_given = gathering.arguments[3]
        gathering.run()
        filled = bucket.starts[-1] + round_up(self.parameters[bucket.members[-1]].numel(), adamw.ALIGNMENT)
        if filled < bucket.end:
            memory[filled : bucket.end].zero_()

    def reduce(self) -> None:
        """As `Update` has it; of the sums of gradients, this process has its part. `apply` sums the rest."""
        self._sums.finish()

    def apply(self, *, gathered: bool) -> Tensor:
        """As `Update` has it."""
        if not self.together:
            return super().apply(gathered=gathered)
        readings = self._readings()
        norm, decide, *updates = self._updating(readings, gathered=True)
        if not self._by_copies:
            norm.run()
        self._tell()
        self.committed = True
        decide.run()
        # Tables of words, which are sent in fp32, come first: the link then rests at no time.
        for bucket, update in reversed(list(zip(self._buckets, updates, strict=True))):
            update.run()
            self._sums.spread(self._copies_sent if self._is_copied(bucket) else self._masters_sent, bucket)
        self._sums.wait_for_spread()
        self._rescale(self._control[0])
        return readings

    def _tell(self) -> None:
        """Sum squares, the loss, and which parameters are used, over processes."""
        loss, used = self._told[adamw.PARTIALS], self._told[adamw.PARTIALS + 1 :]
        loss.copy_(self.loss)
        used.copy_(self._used)
        self._sum_told()
        self.loss.copy_(loss)
        self._used.copy_(torch.gt(used, 0, out=self._is_used))

    def _sum_told(self) -> None:
        """Sum what processes tell, in their order. No process writes the next before all have put their weights of this
        step into others' memory, and so have read what they were told."""
        if self._tellings is None:
            self._sums.ranks.sum([self._told])
            return
        self._tellings.own.copy_(self._told)
        self._tellings.meet()
        first, *others = self._tellings.all_R
        self._told.copy_(first)
        for each in others:
            self._told.add_(each)

    def compile_kernels(self, *, gathered: bool) -> None:
        """Compile the kernels, as `Update` has it."""
        super().compile_kernels(gathered=True)
        if self.find_peers is None:
            return
        assert self._sum is not None
        own, of_two = self._sums.own, self._sums.ranks.count == 2
        halves = own.view(self._copy.dtype)
        gathering = self._gathering(self._buckets[0], self._sum.view(self._copy.dtype))
        gathering.compile()
        for begins in (True, False):
            for given in (own,) if of_two else (own, halves):
                self._adding(given, given, own, begins=begins).compile()
        for bucket in self._buckets if of_two else ():  # their tables begin at other addresses
            given = halves if self._is_copied(bucket) else own
            self._adding_own(bucket, given, own, gathering.arguments[3]).compile()

    @property
    def _reads_own(self) -> bool:
        """True where this process's part of gradients is read where a backward pass left it."""
        return self._by_copies and self.single and self._sums.ranks.count == 2

    def _add_parts(self, bucket: Bucket, parts_R: list[Tensor], into: Tensor) -> None:
        if self._reads_own:
            other = parts_R[1 - self._sums.ranks.rank]
            self._adding_own(bucket, other, into, self._addresses_given).run()
            return
        total, *between, last = parts_R
        if between:
            total = into.copy_(total)
        for each in between:
            total.add_(each)
        self._adding(total, last, into, begins=bucket.number == 0).run()

    def _adding_own(self, bucket: Bucket, other: Tensor, into: Tensor, addresses: Tensor) -> Launch:
        """`_adding` of another process's part of a bucket and this one's gradients, at these addresses."""
        blocks_B3, places = self._own_B3[self._ranges[bucket.number]], self._places
        origin = own_part(bucket, self._sums.ranks).start
        given = (
            blocks_B3, places.starts_P, places.copied_P, addresses, self._used, other, into, self._parts, origin,
            len(blocks_B3), int(bucket.number == 0),
        )  # fmt: skip
        return Launch(adamw.sum_with_own, (adamw.PARTIALS,), given, self._constants)

    def _adding(self, first: Tensor, second: Tensor, into: Tensor, *, begins: bool) -> Launch:
        """Sum two parts of a bucket, and its squares, of which the first bucket's begin."""
        given = (first, second, into, self._parts, len(into), int(begins))
        return Launch(adamw.sum_parts, (adamw.PARTIALS,), given, {"SIZE": adamw.BLOCK})

    @property
    def num_updated(self) -> int:
        """As `Update` has it."""
        return sum(each.at.stop - each.at.start for each in self._segments)

    @property
    def _num_partials(self) -> int:
        """As many in all processes, and all of them written."""
        return adamw.PARTIALS

    @property
    def _ranges(self) -> list[slice]:
        """Blocks of each bucket."""
        return [slice(first, last) for first, last in pairwise(self._edges)]

    def _addresses_of_sums(self) -> Tensor:
        return self._states_P * 4 + self._sums.own.data_ptr()

    def collect(self) -> None:
        """As `Update` has it: masters of all parts."""
        for bucket in self._buckets:
            self._sums.spread(self._masters_sent, bucket)
        self._sums.wait_for_spread()

    def alike(self) -> Collection[Tensor]:
        """As `Update` has it: masters are not, between steps."""
        return self.parameters

    def state(self) -> StepState:
        """As `Update` has it, of this process's parts."""
        used, moments = set(self._used_names()), {"exp_avg": self._moment1, "exp_avg_sq": self._moment2}
        own = owned(self._segments, self.named, self._own_master, moments, used)
        steps = {name: step for name, step in zip(self.named, self._steps.cpu().unbind(), strict=True) if name in used}
        return own_state(own, steps, self.model, self._saved_counters(), leads=self._sums.ranks.leads)

    def _own_master(self, each: Segment) -> Tensor:
        return self._views[each.index].view(-1)[each.at]

    def release(self) -> None:
        """As `Update` has it."""
        self._sums.remove()
        if self._by_copies:  # memory that others reach ends with the processes' connection
            self._views = [master.clone() for master in self._views]
        super().release()

    def _gradient_tensors(self) -> Iterator[Tensor]:
        yield from super()._gradient_tensors()
        yield self._sums.own

    def _load_moments(self, state: Mapping[str, ParameterState]) -> None:
        names = list(self.named)
        for key, moments in (("exp_avg", self._moment1), ("exp_avg_sq", self._moment2)):
            moments.zero_()
            for each in self._segments:
                if names[each.index] in state:
                    moments[each.own].copy_(state[names[each.index]].tensors[key].flatten()[each.at])


def _table(values: list[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=device)

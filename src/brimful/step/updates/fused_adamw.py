"""The update in three kernels, on weights that lie in one arena; products in half precision read copies that it writes.

Under autocast every step casts each Linear weight to half precision, and its gradient back. Here the model's Linear
layers hold the half-precision copies themselves: the same products, the same gradients, no casts. Masters and moments
stay fp32, and what is saved are the masters.

Gradients of a batch that is a single micro-batch are read where the backward pass left them. Those of several are
added up in fp32.
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from brimful.hardware.ranks import Ranks
from brimful.kernels.side_stream import SideStream
from brimful.models.half_weights import arena_order
from brimful.models.model_stats import linear_parameters
from brimful.step.reduce.buckets import Bucket, lay_out
from brimful.step.reduce.reduction import Reduction
from brimful.step.state import ParameterState
from brimful.step.updates.update import Update

try:
    import triton

    from brimful.kernels.optimizers import adamw
except ImportError:  # Triton comes with torch for GPUs, and is missing beside torch for CPUs
    triton = adamw = None  # type: ignore[assignment]

#: Blocks whose moments are looked through at once.
_BLOCKS_AT_ONCE = 4096
#: Most graphs that read gradients where backward passes left them.
MOST_GRAPHS = 64


def can_fuse(model: nn.Module, device: torch.device | None = None) -> bool:
    """Return whether the kernels can update this model: all of its trained parameters are in fp32 on a GPU.

    device: that they will be on; without it, where they are.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    return adamw is not None and all(
        (device or p.device).type == "cuda" and p.dtype == torch.float32 for p in trained
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class _Places:
    """Positions of P parameters in the arenas, as tables on the device.

    blocks_B3: parameter of each block, where in it the block begins, and where it ends. starts_P: first place.
    copied_P: whether it has a half-precision copy; those that do come first, so that the copies' arena ends with them.
    """

    blocks_B3: Tensor
    starts_P: Tensor
    decays_P: Tensor
    copied_P: Tensor


class Launch(NamedTuple):
    """A kernel, its grid and its arguments."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    constants: dict[str, Any]

    def run(self) -> None:
        if self.grid[0]:
            self.kernel[self.grid](*self.arguments, **self.constants)

    def compile(self) -> None:
        self.kernel.warmup(*self.arguments, grid=self.grid, **self.constants)


class _Lent:
    """Lives as long as the graph that tables are lent to."""


class FusedAdamW(Update):
    """AdamW by our own kernels, on a GPU.

    weight_decay: by name of those parameters that have any. half: dtype of the copies that Linear layers hold of their
    weights, None for no copies. parts: that each bucket can be cut in; with several, moments are made by whoever cuts.
    bucket_bytes: most of a bucket in fp32; None for `buckets.BUCKET_BYTES`.
    """

    def __init__(
        self, model: nn.Module, schedule: Tensor, *, max_grad_norm: float, scaled: bool, betas: tuple[float, float],
        epsilon: float, weight_decay: Mapping[str, float], half: torch.dtype | None, parts: int = 1,
        bucket_bytes: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__(model, schedule, max_grad_norm=max_grad_norm, scaled=scaled)
        self._betas, self._epsilon = betas, epsilon
        copied = set() if half is None else linear_parameters(model)
        half = half or torch.float32
        half_type = getattr(triton.language, str(half).removeprefix("torch."))
        self._constants: dict[str, Any] = {"HALF": half_type, "SIZE": adamw.BLOCK}
        sections = _sections(self.named, copied)
        sizes = [parameter.numel() for parameter in self.parameters]
        self._buckets = lay_out(sections, sizes, parts, bucket_bytes)
        places = ((i, at) for each in self._buckets for i, at in zip(each.members, each.starts, strict=True))
        starts = [at for _, at in sorted(places)]
        end = max(bucket.end for bucket in self._buckets)
        ends = [each.end for each in self._buckets if id(self.parameters[each.members[0]]) in copied]
        self._end_of_copies = max(ends, default=0)
        tables = {id(module.weight) for module in self.model.modules() if isinstance(module, nn.Embedding)}
        self._block_sizes = [_whole_rows(p) if id(p) in tables else adamw.BLOCK for p in self.parameters]
        self._places = self._tables(starts, copied, weight_decay)
        device, count = self.device, len(starts)
        fp32: dict[str, Any] = {"dtype": torch.float32, "device": device}  # whatever the process's default is
        self._master = torch.zeros(end, **fp32)
        self._copy = torch.zeros(max(self._end_of_copies, 1), dtype=half, device=device)
        if parts == 1:
            self._hold(self._places.blocks_B3, self._places.starts_P, end)
        self._blocks_of: list[Tensor] = []  # of each bucket that is sent
        self._sum: Tensor | None = None  # fp32 gradients of several micro-batches, made when first needed
        self._steps = torch.zeros(count, **fp32)
        self._used = torch.zeros(count, dtype=torch.int32, device=device)
        self._nowhere = torch.zeros(count, dtype=torch.int64, device=device)
        self._no_halves = torch.zeros(count, dtype=torch.int32, device=device)
        self._corrections = torch.zeros(count, 2, **fp32)
        self._control = torch.zeros(3, **fp32)
        self._gathered = torch.zeros((), dtype=torch.int32, device=device)
        self._parts = torch.zeros(adamw.PARTIALS, **fp32)
        self.side_stream = SideStream(device) if device.type == "cuda" else None
        # Tables of graphs, made beforehand: memory of a capture is written to at every replay. Those that a capture has
        # taken wait for its end to be filled.
        self._spare = self._tables_of_graphs(MOST_GRAPHS)
        # Those of launched kernels, of all gradients first: what is sent to others takes no memory.
        self._launched = self._tables_of_graphs(1)
        self._waiting: list[tuple[Tensor, list[int]]] = []

        with torch.no_grad():
            for parameter, master in zip(self.parameters, self._views_of(self._master), strict=True):
                master.copy_(parameter)
        self._place_parameters()

    def _place_parameters(self) -> None:
        """Make the model's parameters views of the arenas: of the copies, as the masters are, or of the masters."""
        self._views = self._views_of(self._master)
        starts, copied = self._places.starts_P.tolist(), self._places.copied_P.tolist()
        with torch.no_grad():
            for parameter, master, start, has_copy in zip(self.parameters, self._views, starts, copied, strict=True):
                if has_copy:
                    parameter.data = self._copy[start : start + parameter.numel()].view(parameter.shape)
                    parameter.copy_(master)
                else:
                    parameter.data = master

    def _hold(self, blocks_B3: Tensor, states_P: Tensor, size: int) -> None:
        """Make the moments of the blocks that are updated here. states_P: places of parameters' first numbers in the
        memory of each moment, of this size."""
        self._own_B3, self._states_P = blocks_B3, states_P
        device = self.device
        self._touched = torch.zeros(len(blocks_B3), dtype=torch.int32, device=device)
        self._moment1, self._moment2 = (torch.zeros(size, dtype=torch.float32, device=device) for _ in range(2))

    def _views_of(self, arena: Tensor) -> list[Tensor]:
        """Each parameter's part of an arena of all."""
        places = zip(self.parameters, self._places.starts_P.tolist(), strict=True)
        return [arena[at : at + p.numel()].view(p.shape) for p, at in places]

    def _tables(self, starts: list[int], copied: set[int], weight_decay: Mapping[str, float]) -> _Places:
        def table(values: list[Any], dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=self.device)

        blocks = [
            (index, start, min(start + size, parameter.numel()))
            for index, (parameter, size) in enumerate(zip(self.parameters, self._block_sizes, strict=True))
            for start in range(0, parameter.numel(), size)
        ]
        return _Places(
            blocks_B3=table(blocks, torch.int32),
            starts_P=table(starts, torch.int64),
            decays_P=table([weight_decay.get(name, 0.0) for name in self.named], torch.float32),
            copied_P=table([id(p) in copied for p in self.parameters], torch.int32),
        )

    def _tables_of_graphs(self, number: int) -> list[Tensor]:
        count = len(self.parameters)
        return list(self._nowhere.new_zeros(number, count + count % 2)[:, :count].unbind(0))

    def before(self) -> None:
        """Drop gradients: each backward pass leaves its own, wherever it likes."""
        self._spare += [table for table, _ in self._waiting]  # of a capture that did not come to its end
        self._waiting.clear()
        for parameter in self.parameters:
            parameter.grad = None

    def around_backward(self) -> AbstractContextManager[None]:
        """Compute gradients of weights on a side stream within a graph: nobody adds to them on the way."""
        capturing = self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        return self.side_stream.active() if capturing and self.side_stream is not None else nullcontext()

    def prepare_gathering(self) -> None:
        """Allocate the arena of sums: memory of a capture is written to at every replay."""
        if self._sum is None:
            self._sum = torch.empty_like(self._master)

    def gather(self) -> None:
        """Add the gradients of one micro-batch to the batch's, in fp32."""
        self._gathering().run()
        self._gathered.fill_(1)

    def share(self, ranks: Ranks, *, half: bool = False, overlap: bool = True) -> None:
        """As `Update` has it, in the arena of sums: a bucket's gradients are added to it when they are complete."""
        self.prepare_gathering()
        assert self._sum is not None
        self._prepare_buckets()
        self.reduction = Reduction(
            ranks, self.parameters, self._buckets, self._sum, self._gather_bucket, half=half, overlap=overlap,
            side_stream=self.side_stream,
        )  # fmt: skip

    def _prepare_buckets(self) -> None:
        """Make tables of the blocks of each bucket, and of gradients' addresses for graphs that read them by bucket."""
        parameter_B = self._places.blocks_B3[:, 0].cpu()
        self._blocks_of = [
            self._places.blocks_B3[torch.isin(parameter_B, torch.tensor(bucket.members)).to(self.device)]
            for bucket in self._buckets
        ]
        self._spare += self._tables_of_graphs(MOST_GRAPHS * len(self._buckets))
        self._launched = self._tables_of_graphs(1 + len(self._buckets))

    def _gather_bucket(self, bucket: Bucket) -> None:
        self._gathering(bucket).run()

    def reduce(self) -> None:
        """As `Update` has it. Which parameters are used is summed on the device."""
        assert self.reduction is not None
        self.reduction.finish()
        self.reduction.ranks.sum([self.loss, self._used])
        self._used.clamp_(max=1)

    def apply(self, *, gathered: bool) -> Tensor:
        """Update in three launches, as `Update` has it."""
        readings = self._readings()
        norm, *update = self._updating(readings, gathered=gathered)
        norm.run()
        self.committed = True
        for launch in update:
            launch.run()
        self._rescale(self._control[0])
        return readings

    def compile_kernels(self, *, gathered: bool) -> None:
        """Compile the kernels, as `Update` has it."""
        gathering = [self._gathering()] if gathered else []
        for launch in (*gathering, *self._updating(self._readings(), gathered=gathered)):
            launch.compile()

    def _readings(self) -> Tensor:
        return torch.empty(5, dtype=torch.float64, device=self.device)

    def _gathering(
        self, bucket: Bucket | None = None, into: Tensor | None = None, blocks_B3: Tensor | None = None
    ) -> Launch:
        """bucket: whose gradients; None for all. into: memory of all sums, None for that of several micro-batches.
        blocks_B3: of the bucket's, None for all."""
        self.prepare_gathering()
        places = self._places
        if blocks_B3 is None:
            blocks_B3 = places.blocks_B3 if bucket is None else self._blocks_of[bucket.number]
        gathered = (
            blocks_B3, places.starts_P, places.copied_P, self._addresses(bucket), self._used, self._gathered,
            self._sum if into is None else into,
        )  # fmt: skip
        return Launch(adamw.gather_gradients, (len(blocks_B3),), gathered, self._constants)

    def _updating(self, readings: Tensor, *, gathered: bool) -> Iterator[Launch]:
        """Gradients' norm, what is decided from it, and the update, in so many launches as `_ranges` says."""
        places = self._places
        if gathered:
            addresses, half_weights = self._addresses_of_sums(), self._no_halves
        else:
            addresses, half_weights = self._addresses(), places.copied_P
        programs = self._num_partials
        summed = (self._own_B3, half_weights, addresses, self._parts, len(self._own_B3))
        yield Launch(adamw.adamw_norm, (programs,), summed, self._constants)
        decided = (
            self._parts, self._nowhere if gathered else addresses, self._used, self._steps, self._corrections,
            self.loss, self.scale, self.applied, self.schedule, self._control, readings, self._gathered,
            len(self.parameters), programs, len(self.schedule), self.max_grad_norm or 0.0,
        )  # fmt: skip
        logs = {"LOG_BETA1": math.log(self._betas[0]), "LOG_BETA2": math.log(self._betas[1])}
        yield Launch(adamw.adamw_decide, (1,), decided, logs | {"SIZE": adamw.PARTIALS})
        for part in self._ranges:
            updated = (
                self._own_B3[part], self._touched[part], places.starts_P, self._states_P, places.decays_P,
                places.copied_P, half_weights, addresses, self._used, self._corrections, self._control, self._master,
                self._moment1, self._moment2, self._copy, *(1 - beta for beta in self._betas), self._epsilon,
            )  # fmt: skip
            yield Launch(adamw.adamw_update, (part.stop - part.start,), updated, self._constants)

    @property
    def _num_partials(self) -> int:
        """Sums of squares that the norm is made of."""
        return min(adamw.PARTIALS, len(self._own_B3))

    @property
    def _ranges(self) -> list[slice]:
        """Blocks that are updated by one launch each."""
        return [slice(0, len(self._own_B3))]

    def _addresses_of_sums(self) -> Tensor:
        """(P,) int64: where gradients were gathered."""
        assert self._sum is not None
        return self._places.starts_P * 4 + self._sum.data_ptr()

    def _addresses(self, bucket: Bucket | None = None) -> Tensor:
        """(P,) int64: where each parameter's gradient is, 0 where there is none. bucket: of those asked for."""
        members = range(len(self.parameters)) if bucket is None else set(bucket.members)
        chosen = [p if i in members else None for i, p in enumerate(self.parameters)]
        for parameter in (p for p in chosen if p is not None):
            gradient = parameter.grad
            if gradient is not None and (not gradient.is_contiguous() or gradient.data_ptr() % 16):
                parameter.grad = gradient.clone(memory_format=torch.contiguous_format)  # a view of something larger
                if gradient.is_cuda:  # a backward pass that goes on may be given its memory
                    gradient.record_stream(torch.cuda.current_stream())
        launched = self._launched[0 if bucket is None else 1 + bucket.number]
        return self._to_device([0 if p is None or p.grad is None else p.grad.data_ptr() for p in chosen], launched)

    def _to_device(self, addresses: list[int], launched: Tensor) -> Tensor:
        if not self.parameters[0].is_cuda:
            return torch.tensor(addresses)
        if torch.cuda.is_current_stream_capturing():
            if not self._spare:
                raise RuntimeError(f"more than {MOST_GRAPHS} graphs read gradients")
            self._waiting.append((self._spare.pop(), addresses))
            return self._waiting[-1][0]
        return launched.copy_(torch.tensor(addresses).pin_memory(), non_blocking=True)

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        """As `Update` has it; tables that graphs took meanwhile are given back with them."""
        spare = list(self._spare)
        with super().undisturbed():
            yield
        self._spare = spare
        self._waiting.clear()

    def gradients(self, *, gathered: bool) -> list[Tensor]:
        """As `Update` has it; those of several micro-batches were added up in the arena of sums."""
        if not gathered:
            return super().gradients(gathered=False)
        assert self._sum is not None
        return [gradient.clone() for gradient in self._views_of(self._sum)]

    def _counters(self) -> tuple[Tensor, ...]:
        own = (self._used, self._touched, self._steps, self._corrections, self._control, self._gathered)
        return (*super()._counters(), *own)

    def num_idle(self) -> int:
        """Count parameters of idle blocks."""
        _, starts_B, ends_B = self._own_B3.unbind(1)
        return int(((ends_B - starts_B) * (self._touched == 0)).sum())

    def abandon(self) -> None:
        """As `Update` has it."""
        super().abandon()
        self.before()
        self._gathered.zero_()

    def captured(self) -> Any:
        """Write the addresses of the graph's gradients, which it reads at every replay, into tables.

        Return what lends them to the graph: they are another's when it is gone.
        """
        for table, addresses in self._waiting:
            table.copy_(torch.tensor(addresses).pin_memory(), non_blocking=True)
        tables, lent = [table for table, _ in self._waiting], _Lent()
        weakref.finalize(lent, self._spare.extend, tables).atexit = False
        self._waiting.clear()
        self.before()  # gradients are the graph's, and its memory is free for the next one's
        return lent

    def release(self) -> None:
        """Make the masters the model's parameters."""
        for parameter, master in zip(self.parameters, self._views, strict=True):
            parameter.grad = None
            parameter.data = master

    def _masters(self) -> dict[str, Tensor]:
        return dict(zip(self.named, self._views, strict=True))

    def _gradient_tensors(self) -> Iterator[Tensor]:
        yield from super()._gradient_tensors()
        if self._sum is not None:
            yield self._sum

    def _state_tensors(self) -> Iterator[Tensor]:
        yield from (self._moment1, self._moment2, self._steps)

    def _used_names(self) -> tuple[str, ...]:
        return tuple(name for name, used in zip(self.named, self._used.tolist(), strict=True) if used)

    def _state_views(self) -> dict[str, dict[str, Tensor]]:
        moments = zip(self._views_of(self._moment1), self._views_of(self._moment2), strict=True)
        states = zip(self.named, self._steps.unbind(), moments, strict=True)
        return {name: {"step": step, "exp_avg": one, "exp_avg_sq": two} for name, step, (one, two) in states}

    def _optimizer_state(self) -> dict[str, ParameterState]:
        views = self._state_views()
        return {name: ParameterState(tensors=views[name]) for name in self._used_names()}

    def _have_moments(self) -> Tensor:
        """(B,) int32: the blocks that have a moment which is not zero."""
        found, states = [], self._states_P.tolist()
        groups = (list(group) for _, group in itertools.groupby(self._own_B3.tolist(), key=itemgetter(0)))
        for index, blocks in ((group[0][0], some) for group in groups for some in _slices(group, _BLOCKS_AT_ONCE)):
            first, last = blocks[0][1], blocks[-1][2]
            place = slice(states[index] + first, states[index] + last)
            some = (self._moment1[place] != 0) | (self._moment2[place] != 0)
            before = F.pad(some.cumsum(0, dtype=torch.int32), (1, 0))  # how many there are before each place
            edges = torch.tensor([start - first for _, start, _ in blocks] + [last - first], device=self.device)
            found.append(before[edges].diff() > 0)
        return torch.cat(found).int() if found else torch.zeros_like(self._touched)

    def _load_optimizer_state(self, state: Mapping[str, ParameterState], used: set[str]) -> None:
        self._used.copy_(torch.tensor([name in used for name in self.named]))
        for step, name in zip(self._steps.unbind(), self.named, strict=True):
            step.copy_(state[name].tensors["step"]) if name in state else step.zero_()
        self._load_moments(state)
        self._touched.copy_(self._have_moments())
        with torch.no_grad():
            for parameter, master in zip(self.parameters, self._views, strict=True):
                if parameter.dtype != master.dtype:
                    parameter.copy_(master)
        self._gathered.zero_()

    def _load_moments(self, state: Mapping[str, ParameterState]) -> None:
        for key, moments in (("exp_avg", self._moment1), ("exp_avg_sq", self._moment2)):
            for name, target in zip(self.named, self._views_of(moments), strict=True):
                target.copy_(state[name].tensors[key]) if name in state else target.zero_()


def _sections(named: Mapping[str, nn.Parameter], copied: Collection[int]) -> list[list[list[int]]]:
    """Parameters by number in the order of their places: those with ids in `copied`, and all others; in groups of those
    that may be read as one matrix."""
    key = arena_order(named, copied)
    order = sorted(range(len(named)), key=key)
    groups = [list(group) for _, group in itertools.groupby(order, key=lambda index: key(index)[:3])]
    ids = [id(parameter) for parameter in named.values()]
    sections = [[group for group in groups if (ids[group[0]] in copied) == has_copy] for has_copy in (True, False)]
    return [section for section in sections if section]


def _slices(blocks: list[list[int]], size: int) -> Iterator[list[list[int]]]:
    return (blocks[at : at + size] for at in range(0, len(blocks), size))


def _whole_rows(table: Tensor) -> int:
    """Numbers of a block of a table of embeddings: as many rows as it holds, if they lie as blocks must."""
    width = table.shape[1]
    fits = width <= adamw.BLOCK and width % adamw.ALIGNMENT == 0
    return adamw.BLOCK // width * width if fits else adamw.BLOCK

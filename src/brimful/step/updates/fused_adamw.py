"""The update in three kernels, on weights that lie in one arena; products in half precision read copies that it writes.

Under autocast every step casts each Linear weight to half precision, and its gradient back. Here the model's Linear
layers hold the half-precision copies themselves: the same products, the same gradients, no casts. Masters and moments
stay fp32, and what is saved are the masters.

Gradients of a batch that is a single micro-batch are read where the backward pass left them. Those of several are
added up in fp32.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from brimful.hardware.ranks import Ranks
from brimful.kernels.side_stream import SideStream
from brimful.models.half_weights import arena_order
from brimful.models.model_stats import linear_parameters
from brimful.step.reduce.buckets import Bucket, cut_sections
from brimful.step.reduce.reduction import Reduction
from brimful.step.state import ParameterState
from brimful.step.updates.update import Update

try:
    import triton

    from brimful.kernels.optimizers import adamw
except ImportError:  # Triton comes with torch for GPUs, and is missing beside torch for CPUs
    triton = adamw = None  # type: ignore[assignment]

#: Most graphs that read gradients where backward passes left them.
MOST_GRAPHS = 64


def can_fuse(model: nn.Module) -> bool:
    """Return whether the kernels can update this model: all of its trained parameters are in fp32 on a GPU."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return adamw is not None and all(p.is_cuda and p.dtype == torch.float32 for p in trained)


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


class _Launch(NamedTuple):
    """A kernel, its grid and its arguments."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    constants: dict[str, Any]

    def run(self) -> None:
        self.kernel[self.grid](*self.arguments, **self.constants)

    def compile(self) -> None:
        self.kernel.warmup(*self.arguments, grid=self.grid, **self.constants)


class _Lent:
    """Lives as long as the graph that tables are lent to."""


class FusedAdamW(Update):
    """AdamW by our own kernels, on a GPU.

    weight_decay: by name of those parameters that have any. half: dtype of the copies that Linear layers hold of their
    weights, None for no copies.
    """

    def __init__(
        self, model: nn.Module, schedule: Tensor, *, max_grad_norm: float, scaled: bool, betas: tuple[float, float],
        epsilon: float, weight_decay: Mapping[str, float], half: torch.dtype | None,
    ) -> None:  # fmt: skip
        super().__init__(model, schedule, max_grad_norm=max_grad_norm, scaled=scaled)
        self._betas, self._epsilon = betas, epsilon
        copied = set() if half is None else linear_parameters(model)
        half = half or torch.float32
        half_type = getattr(triton.language, str(half).removeprefix("torch."))
        self._constants: dict[str, Any] = {"HALF": half_type, "SIZE": adamw.BLOCK}
        order = sorted(range(len(self.parameters)), key=arena_order(self.named, copied))
        starts, end, end_of_copies = [0] * len(order), 0, 0
        for index in order:
            starts[index] = end
            end += -(-self.parameters[index].numel() // adamw.ALIGNMENT) * adamw.ALIGNMENT
            if id(self.parameters[index]) in copied:
                end_of_copies = end
        tables = {id(module.weight) for module in self.model.modules() if isinstance(module, nn.Embedding)}
        self._block_sizes = [_whole_rows(p) if id(p) in tables else adamw.BLOCK for p in self.parameters]
        self._places = self._tables(starts, copied, weight_decay)
        device, count = self.device, len(order)
        self._touched = torch.zeros(len(self._places.blocks_B3), dtype=torch.int32, device=device)
        fp32: dict[str, Any] = {"dtype": torch.float32, "device": device}  # whatever the process's default is
        self._master, self._moment1, self._moment2 = (torch.zeros(end, **fp32) for _ in range(3))
        self._copy = torch.zeros(max(end_of_copies, 1), dtype=half, device=device)
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
        self._waiting: list[tuple[Tensor, list[int]]] = []

        def views(arena: Tensor) -> Iterator[Tensor]:
            return (arena.narrow(0, at, p.numel()).view(p.shape) for p, at in zip(self.parameters, starts, strict=True))

        self._views = list(views(self._master))
        self._moments = list(zip(views(self._moment1), views(self._moment2), strict=True))
        with torch.no_grad():
            for parameter, master, start in zip(self.parameters, self._views, starts, strict=True):
                master.copy_(parameter)
                if id(parameter) in copied:
                    parameter.data = self._copy.narrow(0, start, parameter.numel()).view(parameter.shape)
                    parameter.copy_(master)
                else:
                    parameter.data = master

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
        starts, copied = self._places.starts_P.tolist(), self._places.copied_P.tolist()
        order = sorted(range(len(starts)), key=starts.__getitem__)
        sections = [[index for index in order if copied[index]], [index for index in order if not copied[index]]]
        buckets = cut_sections([each for each in sections if each], starts, [p.numel() for p in self.parameters])
        parameter_B = self._places.blocks_B3[:, 0].cpu()
        self._blocks_of = [
            self._places.blocks_B3[torch.isin(parameter_B, torch.tensor(bucket.members)).to(self.device)]
            for bucket in buckets
        ]
        self._spare += self._tables_of_graphs(MOST_GRAPHS * len(buckets))
        self.reduction = Reduction(
            ranks, self.parameters, buckets, self._sum, self._gather_bucket, half=half, overlap=overlap,
            side_stream=self.side_stream,
        )  # fmt: skip

    def _gather_bucket(self, bucket: Bucket) -> None:
        self._gathering(self._blocks_of[bucket.number], set(bucket.members)).run()

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

    def _gathering(self, blocks_B3: Tensor | None = None, members: Collection[int] | None = None) -> _Launch:
        """blocks_B3, members: of a part of the parameters; None for all."""
        self.prepare_gathering()
        places = self._places
        blocks_B3 = places.blocks_B3 if blocks_B3 is None else blocks_B3
        gathered = (
            blocks_B3, places.starts_P, places.copied_P, self._addresses(members), self._used, self._gathered,
            self._sum,
        )  # fmt: skip
        return _Launch(adamw.gather_gradients, (len(blocks_B3),), gathered, self._constants)

    def _updating(self, readings: Tensor, *, gathered: bool) -> Iterator[_Launch]:
        places, blocks = self._places, len(self._places.blocks_B3)
        if gathered:
            assert self._sum is not None
            addresses, half_weights = places.starts_P * 4 + self._sum.data_ptr(), self._no_halves
        else:
            addresses, half_weights = self._addresses(), places.copied_P
        programs = min(adamw.PARTIALS, blocks)
        summed = (places.blocks_B3, half_weights, addresses, self._parts, blocks)
        yield _Launch(adamw.adamw_norm, (programs,), summed, self._constants)
        decided = (
            self._parts, self._nowhere if gathered else addresses, self._used, self._steps, self._corrections,
            self.loss, self.scale, self.applied, self.schedule, self._control, readings, self._gathered,
            len(self.parameters), programs, len(self.schedule), self.max_grad_norm or 0.0,
        )  # fmt: skip
        logs = {"LOG_BETA1": math.log(self._betas[0]), "LOG_BETA2": math.log(self._betas[1])}
        yield _Launch(adamw.adamw_decide, (1,), decided, logs | {"SIZE": adamw.PARTIALS})
        updated = (
            places.blocks_B3, self._touched, places.starts_P, places.decays_P, places.copied_P, half_weights, addresses,
            self._used, self._corrections, self._control, self._master, self._moment1, self._moment2, self._copy,
            *self._betas, self._epsilon,
        )  # fmt: skip
        yield _Launch(adamw.adamw_update, (blocks,), updated, self._constants)

    def _addresses(self, members: Collection[int] | None = None) -> Tensor:
        """(P,) int64: where each parameter's gradient is, 0 where there is none. members: those asked for."""
        chosen = [p if members is None or i in members else None for i, p in enumerate(self.parameters)]
        for parameter in (p for p in chosen if p is not None):
            gradient = parameter.grad
            if gradient is not None and (not gradient.is_contiguous() or gradient.data_ptr() % 16):
                parameter.grad = gradient.clone(memory_format=torch.contiguous_format)  # a view of something larger
        return self._to_device([0 if p is None or p.grad is None else p.grad.data_ptr() for p in chosen])

    def _to_device(self, addresses: list[int]) -> Tensor:
        if not self.parameters[0].is_cuda:
            return torch.tensor(addresses)
        if torch.cuda.is_current_stream_capturing():
            if not self._spare:
                raise RuntimeError(f"more than {MOST_GRAPHS} graphs read gradients")
            self._waiting.append((self._spare.pop(), addresses))
            return self._waiting[-1][0]
        return torch.tensor(addresses).pin_memory().to(self.device, non_blocking=True)

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
        places = zip(self.parameters, self._places.starts_P.tolist(), strict=True)
        return [self._sum[at : at + p.numel()].view(p.shape).clone() for p, at in places]

    def _counters(self) -> tuple[Tensor, ...]:
        own = (self._used, self._touched, self._steps, self._corrections, self._control, self._gathered)
        return (*super()._counters(), *own)

    def num_idle(self) -> int:
        """Count parameters of idle blocks."""
        _, starts_B, ends_B = self._places.blocks_B3.unbind(1)
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
        states = zip(self.named, self._steps.unbind(), self._moments, strict=True)
        return {name: {"step": step, "exp_avg": one, "exp_avg_sq": two} for name, step, (one, two) in states}

    def _optimizer_state(self) -> dict[str, ParameterState]:
        views = self._state_views()
        return {name: ParameterState(tensors=views[name]) for name in self._used_names()}

    def _have_moments(self) -> Tensor:
        """(B,) int32: the blocks that have a moment which is not zero."""
        found = []
        for (first, second), size in zip(self._moments, self._block_sizes, strict=True):
            some = ((first != 0) | (second != 0)).flatten()
            found.append(F.pad(some, (0, -len(some) % size)).view(-1, size).any(1))
        return torch.cat(found).int()

    def _load_optimizer_state(self, state: Mapping[str, ParameterState], used: set[str]) -> None:
        self._used.copy_(torch.tensor([name in used for name in self.named]))
        for name, views in self._state_views().items():
            for key, target in views.items():
                target.copy_(state[name].tensors[key]) if name in state else target.zero_()
        self._touched.copy_(self._have_moments())
        with torch.no_grad():
            for parameter, master in zip(self.parameters, self._views, strict=True):
                if parameter.dtype != master.dtype:
                    parameter.copy_(master)
        self._gathered.zero_()


def _whole_rows(table: Tensor) -> int:
    """Numbers of a block of a table of embeddings: as many rows as it holds, if they lie as blocks must."""
    width = table.shape[1]
    fits = width <= adamw.BLOCK and width % adamw.ALIGNMENT == 0
    return adamw.BLOCK // width * width if fits else adamw.BLOCK

"""Peak memory of a run by component, from the allocator's own records, and by three readings.

torch counts what is allocated on the host, so reading it waits for nothing: before and after the forward pass, the
backward pass and the update of steps whose shapes are new, also while they are captured. Weights, gradients and
optimizer states are counted as tensors, each storage once. What the driver counts beyond torch's segments (context,
kernels, libraries) is read from NVML.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from brimful.core.records import PeakMemory
from brimful.core.units import parse_bytes
from brimful.hardware.capture import is_capturing
from brimful.hardware.device_memory import hold_limit
from brimful.hardware.memory import process_bytes
from brimful.measurement.host_memory import HostRecords, peak_resident_bytes, resident_bytes

#: Steps of a shape that are watched: the eager one when it is first met, and its capture.
_WATCHED = 2
#: Forward passes that are watched on a CPU, with what follows them: a look at all tensors takes milliseconds.
_WATCHED_ON_HOST = 8
#: Seconds between readings of the driver beside a run: each asks for all processes on the GPU.
_BETWEEN_LOOKS_S = 1.0
#: Moment of a peak before the first phase.
START = "start"


class AllocatorRecords(Protocol):
    """The records of a device's allocator, in bytes."""

    def allocated(self) -> int:
        """Allocated now."""
        ...

    def peak(self) -> int:
        """Most that was allocated since the last `reset`."""
        ...

    def reset(self) -> None:
        """Begin a new peak."""
        ...

    def reserved(self) -> int:
        """Held by torch now: what is allocated, and what it keeps for later."""
        ...

    def reserved_peak(self) -> int:
        """Most that torch held."""
        ...

    def workspaces(self, known: set[int]) -> int:
        """Held by libraries of matrix products. known: addresses of tensors."""
        ...

    def process(self) -> int | None:
        """All that the process has, by the driver."""
        ...


class CudaRecords:
    """The records of torch's caching allocator of one GPU; memory of CUDA graphs is in them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._reserved = 0

    def allocated(self) -> int:
        """As `AllocatorRecords` has it."""
        return self._read("allocated_bytes", "current")

    def peak(self) -> int:
        """As `AllocatorRecords` has it."""
        return self._read("allocated_bytes", "peak")

    def reset(self) -> None:
        """As `AllocatorRecords` has it. torch begins the peak of reserved memory anew, too."""
        self._reserved = self.reserved_peak()
        torch.cuda.reset_peak_memory_stats(self._device)

    def reserved(self) -> int:
        """As `AllocatorRecords` has it."""
        return self._read("reserved_bytes", "current")

    def reserved_peak(self) -> int:
        """As `AllocatorRecords` has it."""
        return max(self._reserved, self._read("reserved_bytes", "peak"))

    def workspaces(self, known: set[int]) -> int:
        """As `AllocatorRecords` has it: blocks of the sizes that torch gives to cuBLAS, which hold no known tensor."""
        if is_capturing():
            return 0
        sizes = workspace_sizes(torch.cuda.get_device_capability(self._device), os.environ)
        index = torch.cuda.current_device() if self._device.index is None else self._device.index
        return workspace_bytes(torch.cuda.memory_snapshot(), index, sizes, known)

    def process(self) -> int | None:
        """As `AllocatorRecords` has it."""
        return process_bytes(self._device)

    def _read(self, name: str, which: str) -> int:
        found = torch.cuda.memory_stats_as_nested_dict(self._device)
        return int(found[name]["all"][which]) if found else 0


def workspace_sizes(capability: tuple[int, int], environment: Mapping[str, str]) -> set[int]:
    """Return the bytes of a workspace that torch gives to cuBLAS and to cuBLASLt.

    Source: torch, aten/src/ATen/cuda/CublasHandlePool.cpp: 32 MiB on Hopper, 8,320 KiB on others, unless
    CUBLAS_WORKSPACE_CONFIG (`:KiB:count`, repeated) or CUBLASLT_WORKSPACE_SIZE (KiB) say otherwise.
    """
    kib = {32768 if capability == (9, 0) else 8320}
    with suppress(ValueError):
        numbers = [int(number) for number in environment.get("CUBLAS_WORKSPACE_CONFIG", "").split(":") if number]
        if numbers and len(numbers) % 2 == 0:
            kib = {sum(size * count for size, count in zip(numbers[::2], numbers[1::2], strict=True))}
    with suppress(ValueError, KeyError):
        kib.add(int(environment["CUBLASLT_WORKSPACE_SIZE"]))
    return {1024 * each for each in kib if each}


def workspace_bytes(segments: Iterable[Mapping[str, Any]], index: int, sizes: set[int], known: set[int]) -> int:
    """Sum allocated blocks of these sizes on GPU `index` in a snapshot of torch's, but those at known addresses."""
    blocks = (
        block
        for segment in segments
        if segment["device"] == index
        for block in segment["blocks"]
        if block["state"] == "active_allocated"
    )
    return sum(
        block["size"]
        for block in blocks
        if block.get("requested_size", block["size"]) in sizes and block.get("address") not in known
    )


@dataclass(frozen=True, kw_only=True)
class Kept:
    """Bytes of tensors that outlive a step, by what they are, and the addresses of their storages."""

    weights: int = 0
    gradients: int = 0
    optimizer_states: int = 0
    addresses: frozenset[int] = frozenset()

    @classmethod
    def of(
        cls, device: torch.device, weights: Iterable[Tensor], gradients: Iterable[Tensor] = (),
        optimizer_states: Iterable[Tensor] = (),
    ) -> Kept:  # fmt: skip
        """Count storages on a device, each once, as the first that it is named as."""
        seen: set[int] = set()
        counted = [_storage_bytes(tensors, device, seen) for tensors in (weights, gradients, optimizer_states)]
        return cls(weights=counted[0], gradients=counted[1], optimizer_states=counted[2], addresses=frozenset(seen))


def _storage_bytes(tensors: Iterable[Tensor], device: torch.device, seen: set[int]) -> int:
    total = 0
    for tensor in tensors:
        for plain in _plain(tensor):
            storage = plain.untyped_storage()
            if plain.device.type == device.type and storage.data_ptr() not in seen and storage.nbytes():
                seen.add(storage.data_ptr())
                total += storage.nbytes()
    return total


def _plain(tensor: Tensor) -> Iterator[Tensor]:
    """A tensor, or those that one of a class of its own is made of."""
    if not is_traceable_wrapper_subclass(tensor):
        yield tensor
        return
    names, _ = tensor.__tensor_flatten__()
    for name in names:
        yield from _plain(getattr(tensor, name))


@dataclass(frozen=True, kw_only=True)
class Moment:
    """Allocated bytes at a peak. when: in words. parts: bytes by component, which sum up to `allocated`."""

    when: str
    allocated: int
    parts: Mapping[str, int]

    def grown(self, allocated: int) -> Moment:
        """The same moment with more of what comes and goes."""
        more = self.parts["temporaries"] + allocated - self.allocated
        return Moment(when=self.when, allocated=allocated, parts={**self.parts, "temporaries": more})


def split(allocated: int, when: str, kept: Kept, activations: int = 0, new_gradients: int = 0) -> Moment:
    """Split a peak into components: what is kept, what the forward pass left, and as temporaries what remains.

    Activations go as gradients come, and how many are left at the peak of a backward pass is unknown: as many are
    counted as there can be. new_gradients: of this pass until then.
    """
    parts = dict.fromkeys(("weights", "gradients", "optimizer_states", "activations", "temporaries"), 0)
    left = allocated
    known = (
        ("weights", kept.weights), ("optimizer_states", kept.optimizer_states), ("gradients", kept.gradients),
        ("gradients", new_gradients), ("activations", activations),
    )  # fmt: skip
    for name, num_bytes in known:
        taken = min(max(num_bytes, 0), left)
        parts[name] += taken
        left -= taken
    return Moment(when=when, allocated=allocated, parts={**parts, "temporaries": left})


class PhaseMemory:
    """The highest peak among the phases of a run, with its components. Does nothing until `begin`.

    kept: counts the tensors that outlive a step. parameters: those that a backward pass makes gradients of.
    """

    def __init__(self, kept: Callable[[], Kept], parameters: Sequence[Tensor] = ()) -> None:
        self.kept, self._parameters = kept, parameters
        self.highest: Moment | None = None
        self.workspaces = 0  # most that an eager step had; a graph has as much in its pool
        self.records: AllocatorRecords | None = None
        self._met: Counter[Hashable] = Counter()
        self._watching = False
        self._before, self._activations = Kept(), 0

    def begin(self, records: AllocatorRecords) -> None:
        """Watch from now on. The allocator's peak is begun anew, here and with each phase."""
        self.records, self.highest, self.workspaces = records, None, 0
        records.reset()

    @contextmanager
    def forward(self, shape: Hashable) -> Iterator[None]:
        """Within, the forward pass of a micro-batch: watched with what follows it, if its shape is new."""
        records = self.records
        self._watching = records is not None and self._met[shape] < _WATCHED
        if isinstance(records, HostRecords):  # where each shape may be another one
            self._watching = self._watching and self._met.total() < _WATCHED_ON_HOST
        if records is None or not self._watching:
            yield
            return
        self._met[shape] += 1
        self.close()
        self._before, began = self.kept(), records.allocated()
        yield
        self._activations = max(0, records.allocated() - began)
        self._look("forward pass", self._before, self._activations)

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Within, the backward pass of the micro-batch."""
        if not self._watching:
            yield
            return
        made = 0

        def look(parameter: Tensor) -> None:
            nonlocal made
            if parameter.grad is not None and parameter.grad.untyped_storage().data_ptr() not in self._before.addresses:
                made += parameter.grad.nbytes
            self._in_backward(made)

        hooks = [parameter.register_post_accumulate_grad_hook(look) for parameter in self._parameters]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            for parameter in self._parameters:
                if not parameter._post_accumulate_grad_hooks:  # type: ignore[attr-defined]
                    parameter._post_accumulate_grad_hooks = None  # type: ignore[assignment]  # else still called
        self._in_backward(made)

    def _in_backward(self, made: int) -> None:
        """Take account of a part of the backward pass. made: bytes of gradients in it; on a CPU those that are there
        are counted instead, as updates within the pass free some."""
        if isinstance(self.records, HostRecords):
            self._look("backward pass", self._with_gradients)
        else:
            self._look("backward pass", self._before, self._activations, made)

    def _with_gradients(self) -> Kept:
        """Count what there was before the pass, with the gradients that there are by now."""
        now = sum(each.grad.nbytes for each in self._parameters if each.grad is not None)
        return replace(self._before, gradients=max(self._before.gradients, now))

    @contextmanager
    def update(self) -> Iterator[None]:
        """Within, the update of the step whose last micro-batch came before."""
        before = self.kept() if self._watching else Kept()
        yield
        if self._watching and self.records is not None:
            after = self.kept()
            self.workspaces = max(self.workspaces, self.records.workspaces(set(after.addresses)))
            gradients = max(before.gradients, after.gradients)
            self._look(
                "update",
                Kept(weights=after.weights, gradients=gradients, optimizer_states=after.optimizer_states),
            )

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Within, something else than a step, such as an evaluation."""
        self.close()
        yield
        if self.records is not None:
            self._look(name, self.kept())

    def close(self) -> None:
        """Take account of what came since the last phase: steps like those that were watched."""
        if self.records is None:
            return
        peak = self.records.peak()
        if self.highest is None:
            self._look(START, self.kept())
        elif peak > self.highest.allocated:
            self.highest = self.highest.grown(peak)
        self.records.reset()

    def _look(
        self, when: str, kept: Kept | Callable[[], Kept], activations: int = 0, new_gradients: int = 0
    ) -> None:  # fmt: skip
        assert self.records is not None
        peak = self.records.peak()
        if self.highest is None or peak > self.highest.allocated:
            kept = kept if isinstance(kept, Kept) else kept()
            self.highest = split(peak, when, kept, activations, new_gradients)
        self.records.reset()


class MemoryWatch:
    """Peaks on one device since it was made, of what is in use by then and comes to it; on a CPU of the whole process.

    torch keeps its own peaks; the driver's is the highest of the readings. `look` takes one, and `look_beside` has a
    thread take one, as it takes as long as some steps, if there was none within the last second. What torch has
    reserved it gives back only when told to. While shapes are first met and captured it is, so that the driver's peak
    may be of later steps, and below what was reserved.

    phases: of the work to be watched. records: of the allocator, those of `device` unless given. limit: of the process,
    as 8GB, which torch is held to with each look: what the rest of the process takes grows.
    """

    def __init__(
        self,
        device: torch.device,
        phases: PhaseMemory,
        *,
        records: AllocatorRecords | None = None,
        limit: str | None = None,
    ) -> None:
        self.phases, self._device = phases, device
        self._limit_bytes = None if limit is None else parse_bytes(limit)
        self._nvml_bytes: int | None = None
        self._outside_bytes = 0
        self._reading: threading.Thread | None = None
        self._began_at = -math.inf
        if records is None and device.type == "cuda":
            torch.cuda.empty_cache()  # kept from what the process did before
            torch.cuda.reset_peak_memory_stats(device)
            records = CudaRecords(device)
        self._records = records
        if records is not None:
            phases.begin(records)
        elif peak_resident_bytes() is not None:
            phases.begin(HostRecords())

    def look(self) -> None:
        """Takes a reading from the driver."""
        if self._records is None:
            return
        reserved = self._records.reserved()
        if (now := self._records.process()) is not None:
            reserved = max(reserved, self._records.reserved())  # what was given back meanwhile is not outside of torch
            self._nvml_bytes = max(now, self._nvml_bytes or 0)
            self._outside_bytes = max(now - reserved, self._outside_bytes)
            if self._limit_bytes is not None:
                hold_limit(self._device, self._limit_bytes)

    def look_beside(self) -> None:
        """Begin a reading from the driver, if it is time for one."""
        now = time.monotonic()
        if self._records is None or now - self._began_at < _BETWEEN_LOOKS_S:
            return
        if self._reading is None or not self._reading.is_alive():
            self._began_at = now
            self._reading = threading.Thread(target=self.look, name="memory-watch", daemon=True)
            self._reading.start()

    def now(self) -> int | None:
        """Bytes that torch has reserved on a GPU, or that the process has resident; None where unknown."""
        return resident_bytes() if self._records is None else self._records.reserved()

    @property
    def limit_bytes(self) -> int | None:
        """Bytes that the process may take on a GPU: its limit, or all that the GPU has; None on a CPU."""
        if self._device.type != "cuda":
            return None
        total = torch.cuda.get_device_properties(self._device).total_memory
        return total if self._limit_bytes is None else min(total, self._limit_bytes)

    def peak(self) -> PeakMemory:
        """The peaks so far."""
        return self._of_host() if self._records is None else self._of_device(self._records)

    def with_what_came(self, peak: PeakMemory) -> PeakMemory:
        """Peaks that were taken before, and of host memory what the process has had since, as all else: a model that is
        saved. Of a device they stay."""
        resident = peak_resident_bytes() if peak.resident is not None else None
        if peak.resident is None or peak.total is None or resident is None or resident <= peak.resident:
            return peak
        more = resident - peak.resident
        parts = {**peak.components, "all_else": peak.components.get("all_else", 0) + more}
        return replace(peak, resident=resident, total=peak.total + more, components=parts)

    def _of_device(self, records: AllocatorRecords) -> PeakMemory:
        if self._reading is not None:
            self._reading.join()
        self.look()
        self.phases.close()
        highest = self.phases.highest
        assert highest is not None
        reserved, parts = max(records.reserved_peak(), highest.allocated), dict(highest.parts)
        workspaces = max(records.workspaces(set(self.phases.kept().addresses)), self.phases.workspaces)
        workspaces = min(workspaces, parts["temporaries"])
        parts |= {
            "temporaries": parts["temporaries"] - workspaces,
            "workspaces": workspaces,
            "unused": reserved - highest.allocated,
            "outside_torch": self._outside_bytes,
        }
        return PeakMemory(
            allocated=highest.allocated,
            reserved=reserved,
            nvml=self._nvml_bytes,
            total=sum(parts.values()),
            moment=highest.when,
            components=parts,
        )

    def _of_host(self) -> PeakMemory:
        """Weights and states that there are now, and gradients that there were at the peak: where that was before the
        first step, those are known only if they outlive steps."""
        self.phases.close()
        if (highest := self.phases.highest) is None:
            return PeakMemory()
        kept, resident, at_start = self.phases.kept(), highest.allocated, highest.when == START
        gradients = kept.gradients if at_start else highest.parts["gradients"]
        moment = split(resident, highest.when, replace(kept, gradients=gradients))
        parts = {name: value for name, value in moment.parts.items() if name not in ("activations", "temporaries")}
        if at_start and not gradients:
            del parts["gradients"]
        return PeakMemory(
            resident=resident, total=resident, components={**parts, "all_else": moment.parts["temporaries"]}
        )

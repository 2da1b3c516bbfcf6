"""Lines of the recipe for what was set before anything was allocated: the memory limit and the allocator's segments."""

from __future__ import annotations

from dataclasses import dataclass

from brimful.core.units import bytes_text
from brimful.hardware.memory import device_free_bytes
from brimful.levers.lever import Assembly, Cost, Lever, StepWork


@dataclass(frozen=True, kw_only=True)
class MemoryLimit(Lever):
    """A GPU that is used as a smaller one."""

    name = "memory_limit"
    source = "torch.cuda.set_per_process_memory_fraction"

    @classmethod
    def choose(cls, assembly: Assembly) -> MemoryLimit | None:
        """Choose what was asked for."""
        limit = assembly.options.memory_limit
        if limit is None:
            return None
        free = bytes_text(device_free_bytes(assembly.device))
        return cls(
            value=limit, reason=f"asked for: torch has what the rest of the process leaves of it; {free} free by now"
        )

    def cost(self, work: StepWork) -> Cost:
        """Nothing."""
        return Cost()

    def apply(self, assembly: Assembly) -> None:
        """Done before the model was loaded, by `hardware.device_memory`."""


@dataclass(frozen=True, kw_only=True)
class Allocator(Lever):
    """The way in which torch takes segments from the driver."""

    name = "allocator"
    source = "docs.pytorch.org, CUDA semantics: PYTORCH_CUDA_ALLOC_CONF"

    @classmethod
    def choose(cls, assembly: Assembly) -> Allocator | None:
        """Choose what was asked for."""
        value = assembly.options.allocator
        if value == "default":
            return None
        return cls(value=value, reason="asked for, and seen in effect on a first block: segments grow")

    def cost(self, work: StepWork) -> Cost:
        """Nothing."""
        return Cost()

    def apply(self, assembly: Assembly) -> None:
        """Done before the model was loaded, by `hardware.device_memory`."""

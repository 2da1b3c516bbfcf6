"""Peak memory of a run by three readings: what torch allocated, what it reserved, what the driver sees (NVML)."""

from __future__ import annotations

import os

import torch

from brimful.core.records import PeakMemory


class MemoryWatch:
    """Peaks on one device since it was made, of what is in use by then and comes to it. On a CPU all are unknown.

    torch keeps its own peaks; the driver's is the highest of the readings, and `look` takes one. What torch has
    reserved it gives back only when told to. While shapes are first met and captured it is, so that the driver's peak
    may be of later steps, and below what was reserved.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._nvml_bytes: int | None = None
        if device.type == "cuda":
            torch.cuda.empty_cache()  # kept from what the process did before
            torch.cuda.reset_peak_memory_stats(device)

    def look(self) -> None:
        """Takes a reading from the driver."""
        if self._device.type == "cuda" and (now := process_bytes(self._device)) is not None:
            self._nvml_bytes = max(now, self._nvml_bytes or 0)

    def peak(self) -> PeakMemory:
        """The peaks so far."""
        if self._device.type != "cuda":
            return PeakMemory()
        self.look()
        return PeakMemory(
            allocated=torch.cuda.max_memory_allocated(self._device),
            reserved=torch.cuda.max_memory_reserved(self._device),
            nvml=self._nvml_bytes,
        )


def process_bytes(device: torch.device) -> int | None:
    """Bytes of this process on a GPU as nvidia-smi shows them; where the driver does not tell processes apart (in a
    container or a virtual machine), all that is used on the GPU. None where NVML cannot be read."""
    try:
        import pynvml

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
        for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle):
            if process.pid == os.getpid() and process.usedGpuMemory:
                return int(process.usedGpuMemory)
        return int(pynvml.nvmlDeviceGetMemoryInfo(handle).used)
    except (ImportError, AttributeError, pynvml.NVMLError):
        return None

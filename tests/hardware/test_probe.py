"""Choice of a process's device."""

from __future__ import annotations

import pytest
import torch

from brimful.core.errors import DeviceError
from brimful.hardware.probe import choose_device


def test_each_task_of_srun_takes_the_gpu_that_it_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    for name, value in (("is_available", True), ("device_count", 1), ("current_device", 0)):
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    monkeypatch.setenv("SLURM_GPUS_PER_TASK", "1")
    assert choose_device("cuda", 3) == torch.device("cuda", 0)
    monkeypatch.delenv("SLURM_GPUS_PER_TASK")
    with pytest.raises(DeviceError, match="process 4 on this machine has no GPU: torch sees 1"):
        choose_device("cuda", 3)
    assert taken == []

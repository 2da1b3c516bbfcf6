"""Links between the GPUs of a host, as a made-up driver has them."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from brimful.hardware.memory import process_bytes
from brimful.hardware.peers import why_not_linked


class _NVMLError(Exception):
    pass


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Three GPUs, of which NVLink joins the first two."""
    module = ModuleType("pynvml")
    module.NVMLError = _NVMLError
    module.NVML_P2P_CAPS_INDEX_NVLINK, module.NVML_P2P_STATUS_OK = 2, 0
    module.nvmlInit = lambda: None
    module.nvmlDeviceGetHandleByUUID = lambda name: int(name.removeprefix("GPU-"))
    module.nvmlDeviceGetP2PStatus = lambda one, other, kind: 0 if kind == 2 and {one, other} == {0, 1} else 5
    monkeypatch.setitem(sys.modules, "pynvml", module)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: SimpleNamespace(uuid=str(number)))
    return module


def test_linked_gpus_are_known_by_the_driver(driver: ModuleType) -> None:
    assert why_not_linked(2) == ""
    assert why_not_linked(3) == "NVLink does not join GPUs 0 and 2"
    assert why_not_linked(4) == "of 4 GPUs this process sees 3"
    assert why_not_linked(5) == "its launcher does not say that all processes are on this host"


def test_a_driver_that_does_not_say_is_named(driver: ModuleType) -> None:
    def refuse(*_: object) -> int:
        raise _NVMLError("Not Supported")

    driver.nvmlDeviceGetP2PStatus = refuse
    assert why_not_linked(2) == "the driver does not say what joins the GPUs (Not Supported)"


def test_what_reads_the_driver_may_be_missing(driver: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert why_not_linked(2) == "pynvml is missing, which says what joins the GPUs"
    assert process_bytes(torch.device("cuda", 0)) is None

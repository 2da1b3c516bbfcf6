"""More GPUs than there are, seen before any process is started."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from brimful.core.errors import OptionError
from brimful.hardware import gpu_missing
from brimful.hardware.gpu_missing import check_count


@pytest.mark.parametrize(("there", "asked"), [(8, "8"), (8, "all"), (None, "99")])
def test_as_many_as_there_are(there: int | None, asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_missing, "_num_visible", lambda: there)
    check_count(asked)


@pytest.mark.parametrize(("there", "said"), [(1, "there is 1 GPU to run on"), (8, "there are 8 GPUs to run on")])
def test_more(there: int, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_missing, "_num_visible", lambda: there)
    with pytest.raises(OptionError, match=f"--gpus is 99, and {said}"):
        check_count("99")
    with pytest.raises(OptionError, match=f"--gpus is 99, and {said}"):
        check_count("99", there)


@pytest.mark.parametrize(
    ("shown", "there"),
    [
        (None, 4),
        ("", 0),
        ("-1", 0),
        ("2", 1),
        ("0,1", 2),
        ("1,-1,2", 1),
        ("0,1,2,3,4", 4),
        ("MIG-1", None),
        ("7", 0),
        ("0,9,1", 1),
        ("0,0", 0),
        ("none", 0),
        ("GPU-1,GPU-2", 2),
    ],
)
def test_gpus_that_cuda_would_show(shown: str | None, there: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = SimpleNamespace(nvmlInit=lambda: None, nvmlDeviceGetCount=lambda: 4)
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if shown is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
    assert gpu_missing._num_visible() == there
    if there == 0:
        with pytest.raises(OptionError, match="CUDA_VISIBLE_DEVICES shows no GPU"):
            check_count("all")
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
        with pytest.raises(OptionError, match="there is no GPU to run on"):
            check_count("2", 0)

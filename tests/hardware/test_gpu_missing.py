"""More GPUs than there are, seen before any process is started."""

from __future__ import annotations

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

"""When torch's libraries are loaded before torch is imported."""

from __future__ import annotations

from pathlib import Path

import pytest

from brimful.hardware.device_start import _has_choice


def _write(folder: Path, *names: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).touch()
    return folder


@pytest.mark.parametrize(
    ("names", "has_choice"),
    [
        ((), False),
        (("libcuda.so.1", "libnvidia-ml.so.1"), False),  # the driver's folder, which containers name
        (("libcuda.so.1", "libnvJitLink.so.13"), True),  # a toolkit's
        (("libtorch_cpu.so",), True),  # another torch
    ],
)
def test_a_choice_of_libraries_is_left_to_torch(
    names: tuple[str, ...], has_choice: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = _write(tmp_path / "site" / "torch" / "lib", "libtorch_cpu.so", "libtorch_python.so").parent
    _write(tmp_path / "site" / "nvidia" / "cu13" / "lib", "libnvJitLink.so.13")
    monkeypatch.setenv("LD_LIBRARY_PATH", f"{tmp_path / 'missing'}:{_write(tmp_path / 'named', *names)}")
    assert _has_choice(torch) is has_choice

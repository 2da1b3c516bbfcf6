"""--memory-limit and --allocator by the command line, where there is no GPU to limit."""

from __future__ import annotations

from pathlib import Path

import pytest

from commands import Brimful, Files, train_words


@pytest.mark.parametrize(("flag", "value"), [("--memory-limit", "8GB"), ("--allocator", "expandable")])
def test_refused_on_a_cpu_before_anything_is_written(
    brimful: Brimful, files: Files, tmp_path: Path, flag: str, value: str
) -> None:
    said = brimful(*train_words(files.reviews, files.base, tmp_path / "run", "--device", "cpu", flag, value))
    assert said.code == 2
    assert said.err.splitlines()[-2] == f"error: {flag} is {value}: it is for GPUs, and this run is on a CPU"
    assert not (tmp_path / "run").exists()
    for command in ("classify", "evaluate"):
        said = brimful(command, files.classifier, files.reviews, "--device", "cpu", flag, value)
        assert said.code == 2
        assert f"{flag} is {value}: it is for GPUs" in said.err


def test_no_size(brimful: Brimful, files: Files, tmp_path: Path) -> None:
    said = brimful(*train_words(files.reviews, files.base, tmp_path / "run", "--memory-limit", "lots"))
    assert said.code == 2
    assert "error: --memory-limit is lots: it must be a size, as 8GB, 7.5GiB or 500MB" in said.err

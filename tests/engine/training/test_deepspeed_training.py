"""Runs whose weights DeepSpeed keeps in parts: what they learn and leave is what one process learns and leaves."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification

from brimful.cli.commands import run
from brimful.core.errors import OptionError
from brimful.step.updates.deepspeed_parts import SwapFolder
from engine.training.test_several_processes import start, told, words
from engine.training.test_sharded_training import same, sharding
from runs import save_tiny_model, single_label_rows, write_rows

HERE = importlib.util.find_spec("deepspeed") is not None


def _has_async_io() -> bool:
    from deepspeed.ops.op_builder import AsyncIOBuilder

    return bool(AsyncIOBuilder().is_compatible())


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("deepspeed")
    save_tiny_model(folder / "model", dropout=0.0)
    write_rows(folder / "rows.jsonl", single_label_rows(75))
    return folder


@pytest.mark.skipif(not HERE, reason="DeepSpeed is not installed")
def test_deepspeed_learns_what_one_process_does(files: Path, tmp_path: Path) -> None:
    """Several micro-batches; resumed, then by one process. Checkpoints are whole, the model a plain one."""
    constant = ("--lr-scheduler-type", "constant", "--token-budget", "64", "--class-weights", "balanced")
    assert run(words(files, tmp_path / "one", "--max-steps", "6", *constant)) == 0
    output = tmp_path / "parts"
    for steps, count in ((2, 2), (4, 2), (6, 1)):
        cut = ("--sharding", "deepspeed") if count > 1 else ()
        ask = words(files, output, "--max-steps", str(steps), *constant, *cut, "--resume")
        assert start(tmp_path / f"logs-{steps}", *ask, count=count).results() == [0] * count
        if count > 1:
            assert sharding(output)["value"] == "deepspeed"
    same(told(tmp_path / "one"), told(output))
    one, other = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("one", "parts"))
    assert one.keys() == other.keys()
    whole, parts = (torch.cat([each[name].flatten() for name in one]) for each in (one, other))
    assert float((whole - parts).norm() / whole.norm()) < 1e-3
    AutoModelForSequenceClassification.from_pretrained(output / "model")
    frozen = ("--max-steps", "2", *constant, "--freeze", "embeddings")  # the first layer's input has no gradient
    assert run(words(files, tmp_path / "one frozen", *frozen)) == 0
    ask = words(files, tmp_path / "frozen", *frozen, "--sharding", "deepspeed")
    assert start(tmp_path / "logs-frozen", *ask).results() == [0, 0]
    same(told(tmp_path / "one frozen"), told(tmp_path / "frozen"))
    ask = words(
        files, tmp_path / "off", "--max-steps", "2", *constant, "--sharding", "deepspeed", "--optimizer-offload"
    )
    assert start(tmp_path / "logs-off", *ask).results() == [0, 0]
    same(told(tmp_path / "one")[:2], told(tmp_path / "off"))


@pytest.mark.skipif(not HERE or not _has_async_io(), reason="DeepSpeed's async_io cannot be built")
def test_states_on_a_disk(files: Path, tmp_path: Path) -> None:
    """Two processes learn what one does, before and after they are resumed, with groups long enough to leave memory."""
    wide = {"intermediate_size": 4096, "num_hidden_layers": 4}
    model = save_tiny_model(tmp_path / "model", dropout=0.0, **wide)
    disk, output, last = tmp_path / "disk", tmp_path / "parts", tmp_path / "disk" / "brimful-states-of-one-killed"
    last.mkdir(parents=True)

    def ask(output: Path, steps: int) -> list[str]:
        words_ = ("--model", str(model), "--max-steps", str(steps), "--lr-scheduler-type", "constant")
        return words(files, output, *words_, "--token-budget", "64", "--resume")

    assert run(ask(tmp_path / "one", 6)) == 0
    for steps in (2, 4):
        cut = ("--sharding", "deepspeed", "--offload-folder", str(disk))
        assert start(tmp_path / f"logs-{steps}", *ask(output, steps), *cut).results() == [0, 0]
        assert not list(disk.iterdir())
    assert run(ask(output, 6)) == 0
    same(told(tmp_path / "one"), told(output))


def test_folders_of_the_disk(tmp_path: Path) -> None:
    """Each process has its own. It goes with the process, or with the next one where that was killed."""
    killed = tmp_path / "brimful-states-of-one-killed"
    killed.mkdir()
    first, second = SwapFolder(tmp_path), SwapFolder(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([first.path, second.path])
    (first.path / "moment").touch()
    first.remove()
    first.remove()
    assert list(tmp_path.iterdir()) == [second.path]
    with pytest.raises(OptionError, match=r"has .* free, and what is kept there, .* takes 1048576.0 TiB"):
        SwapFolder(tmp_path, 2**60)
    killed.mkdir()
    second.remove()
    assert not list(tmp_path.iterdir())
    (tmp_path / "file").touch()
    with pytest.raises(OptionError, match=r"no folder can be made in .*file: "):
        SwapFolder(tmp_path / "file")


def test_deepspeed_that_is_not_there(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(importlib.util, "find_spec", lambda *_: None)
    assert run(words(files, tmp_path / "run", "--sharding", "deepspeed")) == 2
    assert "needs DeepSpeed, which is not installed" in (said := capsys.readouterr().err)
    assert "brimful[deepspeed]" in said
    assert run(words(files, tmp_path / "run", "--offload-folder", "x")) == 2
    assert "--offload-folder is for --sharding deepspeed" in capsys.readouterr().err

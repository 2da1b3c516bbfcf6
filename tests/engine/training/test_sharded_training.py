"""Runs of the command line whose processes keep parts of states, gradients or weights: what they learn and leave."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForSequenceClassification

from brimful.cli.commands import run
from brimful.core.errors import CheckpointError, DiskFullError
from brimful.engine.training import checkpoint_writer
from brimful.engine.training.checkpoint import checkpoint_path, load_checkpoint, save_part
from brimful.step.updates.fully_sharded import layer_groups
from brimful.step.updates.sharded import ShardedUpdate
from engine.training.test_several_processes import start, told, words
from runs import checkpoints, save_tiny_model, single_label_rows, write_rows


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sharded")
    save_tiny_model(folder / "model", dropout=0.0)
    write_rows(folder / "rows.jsonl", single_label_rows(75))
    return folder


@pytest.fixture(scope="module")
def deep(files: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same rows, and a model whose layers are put together two at a time."""
    folder = tmp_path_factory.mktemp("deep")
    save_tiny_model(folder / "model", dropout=0.0, num_hidden_layers=6)
    (folder / "rows.jsonl").write_bytes((files / "rows.jsonl").read_bytes())
    return folder


def sharding(folder: Path) -> dict[str, Any]:
    levers = json.loads((folder / "run.json").read_text())["recipe"]["levers"]
    return next(dict(lever) for lever in levers if lever["name"] == "sharding")


def same(one: list[tuple[int, float, float]], other: list[tuple[int, float, float]]) -> None:
    assert len(one) == len(other)
    for expected, found in zip(one, other, strict=True):
        assert found == pytest.approx(expected, rel=1e-3)


@pytest.mark.thorough
def test_parts_of_any_number_of_processes_make_one_checkpoint(files: Path, tmp_path: Path) -> None:
    """Three steps each by two, three, two and one: the checkpoints are whole, and the run is one process's."""
    constant = ("--lr-scheduler-type", "constant", "--save-steps", "3", "--eval-split", "0", "--save-total-limit", "9")
    assert run(words(files, tmp_path / "one", "--max-steps", "12", *constant)) == 0
    output = tmp_path / "parts"
    for part, count in enumerate((2, 3, 2, 1)):
        steps, cut = str(3 * part + 3), ("gradients", "states", "parameters", "auto")[part]
        ask = words(files, output, "--max-steps", steps, *constant, "--sharding", cut, "--resume")
        both = start(tmp_path / f"logs-{part}", *ask, count=count)
        assert both.results() == [0] * count
        if count > 1:
            assert sharding(output)["value"] == cut
            assert "weights of processes" not in both.said(0)
    same(told(tmp_path / "one"), told(output))
    for step in (3, 6, 9, 12):
        alone, parts = (
            load_checkpoint(checkpoint_path(tmp_path / name / "checkpoints", step)) for name in ("one", "parts")
        )
        assert not parts.state.parts
        assert alone.state.optimizer.keys() == parts.state.optimizer.keys()
        for name, kept in alone.state.optimizer.items():
            for key, tensor in kept.tensors.items():
                torch.testing.assert_close(parts.state.optimizer[name].tensors[key], tensor, rtol=2e-2, atol=1e-5)
    folder = checkpoint_path(output / "checkpoints", 6)
    written = sorted(file.name for file in folder.glob("*.safetensors"))
    assert [name for name in written if name.startswith("weights")] == [
        "weights-00001.safetensors", "weights-00002.safetensors", "weights.safetensors",
    ]  # fmt: skip
    (folder / "optimizer-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match="optimizer-00002"):
        load_checkpoint(folder)
    (one, other) = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("one", "parts"))
    assert one.keys() == other.keys()


@pytest.mark.slow
def test_a_disk_that_is_full_for_one_process_costs_the_checkpoint(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not the run, whether a part cannot be written or its state not be read: the next one is there."""

    def full(folder: Path, step: int, *given: Any, **more: Any) -> Any:
        if step == 2:
            raise DiskFullError("no space left")
        return save_part(folder, step, *given, **more)

    def unread(self: Any) -> Any:
        if (int(self.applied), os.environ["RANK"]) in ((4, "1"), (6, "0")):
            raise DiskFullError("no space on the other disk")
        return state(self)

    state = ShardedUpdate.state
    monkeypatch.setattr(checkpoint_writer, "save_part", full)
    monkeypatch.setattr(ShardedUpdate, "state", unread)
    ask = words(files, tmp_path / "run", "--max-steps", "8", "--save-steps", "2", "--sharding", "states")
    both = start(tmp_path / "logs", *ask, "--eval-split", "0")
    assert both.results() == [0, 0]
    assert "no checkpoint after step 2: process 1: no space left" in both.said(0)
    assert "no checkpoint after step 4: process 1: no space on the other disk" in both.said(0)
    assert "no checkpoint after step 6: no space on the other disk" in both.said(0)
    assert checkpoints(tmp_path / "run") == [8]
    load_checkpoint(checkpoint_path(tmp_path / "run" / "checkpoints", 8))


def test_neighbouring_layers_are_put_together_at_once() -> None:
    """Not of many in too few groups, nor of many bytes; one by one where the backward pass calls any again."""

    def sizes(number: int, width: int = 4, *, recomputed: int = 0) -> list[int]:
        layers = [nn.Linear(width, width, device="meta") for _ in range(number)]
        for layer in layers[:recomputed]:
            layer.gradient_checkpointing = True  # type: ignore[assignment]
        return [len(group) for group in layer_groups(layers)]

    assert sizes(2) == [1, 1]
    assert sizes(9) == [3, 3, 3]
    assert sizes(9, 10_000) == [2, 2, 2, 2, 1]
    assert sizes(9, 20_000) == [1] * 9
    assert sizes(9, recomputed=9) == sizes(9, recomputed=1) == [1] * 9
    assert sizes(0) == []


@pytest.mark.thorough
def test_the_best_of_parts_of_weights_is_kept(deep: Path, tmp_path: Path) -> None:
    """In host memory, evaluated together; what is saved is a plain model, that of the best step."""
    best = ("--metric-for-best-model", "loss", "--eval-steps", "1", "--max-steps", "4", "--sharding", "parameters")
    ask = words(deep, tmp_path / "run", *best, "--optimizer-offload", "--freeze", "embeddings")
    ask[ask.index("1e-3")] = "10"  # worse and worse
    both = start(tmp_path / "logs", *ask)
    assert both.results() == [0, 0]
    assert "was best, and is kept" in both.said(0)
    assert "could not be compared with the plain model: weights are in parts" in both.said(0)
    (step,) = [int(words.split()[0]) for words in both.said(0).split("the model after step ")[1:]]
    saved = load_checkpoint(checkpoint_path(tmp_path / "run" / "checkpoints", step)).state.weights
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "run" / "model")
    for name, weight in saved.items():
        assert torch.equal(model.get_parameter(name), weight)


@pytest.mark.slow
def test_what_cannot_be_cut_is_refused_and_not_chosen(files: Path, tmp_path: Path) -> None:
    ask = words(files, tmp_path / "run", "--optim", "adafactor", "--max-steps", "1")
    refused = start(tmp_path / "refused", *ask, "--sharding", "states")
    assert refused.results()[0] == 2
    assert "--sharding states does not work here: adafactor may look at whole weights" in refused.said(0)
    offload = start(tmp_path / "offload", *words(files, tmp_path / "run", "--optimizer-offload", "--sharding", "none"))
    assert offload.results()[0] == 2
    assert "for one process so far, or for --sharding parameters" in offload.said(0)
    assert run([*words(files, tmp_path / "alone", "--max-steps", "1"), "--sharding", "states"]) == 0


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize(
    ("free_mib", "expected"), [(1000, "none"), (2.3, "states"), (1.5, "gradients"), (1.1, "parameters")]
)
def test_the_least_that_fits_is_chosen(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free_mib: float, expected: str
) -> None:
    from brimful.levers import sharding as lever

    original = lever.needed_bytes

    def scaled(assembly: Any, name: str) -> int:
        """Of a model whose weights, gradients and states take 2 MiB whole."""
        return int(2 * (1 << 20) * original(assembly, name) / original(assembly, "none"))

    monkeypatch.setattr(lever, "needed_bytes", scaled)
    monkeypatch.setattr(lever, "_free_bytes", lambda _: int(free_mib * (1 << 20)))
    ask = words(files, tmp_path / "run", "--max-steps", "2", "--eval-split", "0")
    assert start(tmp_path / "logs", *ask).results() == [0, 0]
    found = sharding(tmp_path / "run")
    assert found["value"] == expected
    assert "MiB" in found["reason"]


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize("sharding", ["none", "gradients"])
def test_adapters_learn_what_one_process_learns(files: Path, tmp_path: Path, sharding: str) -> None:
    """Class weights, a ragged last batch, several micro-batches."""
    more = ("--peft", "lora", "--num-train-epochs", "1", "--class-weights", "balanced", "--token-budget", "64")
    assert run(words(files, tmp_path / "one", *more)) == 0
    assert start(tmp_path / "logs", *words(files, tmp_path / "two", *more, "--sharding", sharding)).results() == [0, 0]
    same(told(tmp_path / "one"), told(tmp_path / "two"))
    one, two = (load_file(tmp_path / name / "model" / "adapter_model.safetensors") for name in ("one", "two"))
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, rtol=1e-2, atol=1e-4)

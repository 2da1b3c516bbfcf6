"""Processes that were given other rows, another model or another folder than the first one, under the same options."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from brimful.cli.commands import run
from brimful.core.errors import ModelError
from brimful.core.options.train import TrainOptions
from brimful.core.place import Place
from brimful.engine.training import same_path
from brimful.levers.facts import kernels_of
from brimful.models.model_stats import layers_of
from brimful.models.packed.ways import Way, set_ways, ways_of
from forked_ranks import Forked
from levers.assemblies import assembly_of
from runs import save_tiny_model, single_label_rows, write_rows
from tiny import FAMILIES


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows and a model; the same rows in another order; a model of one other weight."""
    folder = tmp_path_factory.mktemp("same-work")
    rows = single_label_rows(40)
    for name, given in (("rows", rows), ("turned", rows[::-1])):
        write_rows(folder / f"{name}.jsonl", given)
    for name in ("model", "other"):
        save_tiny_model(folder / name, dropout=0.0)
    weights = load_file(folder / "other" / "model.safetensors")
    next(iter(weights.values())).flatten()[3] += 0.5
    save_file(weights, folder / "other" / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("command", "given", "said"),
    [
        ("train", {"data": "turned.jsonl"}, "error: process 1: not the same as in process 0: the data\n"),
        ("train", {"model": "other"}, "error: process 1: not the same as in process 0: the model's weights\n"),
        ("train", {"output": "elsewhere"}, "elsewhere is not there, where process 0 writes\n"),
        ("profile", {"data": "turned.jsonl"}, "error: process 1: not the same as in process 0: the data\n"),
    ],
)
def test_other_work(
    command: str, given: dict[str, str], said: str, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first process says what differs, before a step is taken, and leaves nothing behind."""
    monkeypatch.setattr(same_path, "_SEEN_S", 0.1)

    def work(place: Place) -> int:
        asked = {"data": "rows.jsonl", "model": "model", "output": "run"} | (given if place.rank else {})
        words = [command, str(files / asked["data"]), "--model", str(files / asked["model"])]
        output = ["--output", str(tmp_path / asked["output"]), "--no-baselines"]
        words += output if command == "train" else ["--steps", "1"]
        return run([*words, "--device", "cpu", "--batch-size", "8", "--eval-split", "0", "--learning-rate", "1e-3"])

    both = Forked(tmp_path / "logs", 2, work)
    assert both.exit_codes() == [2, 2]
    assert said in both.said(0)
    assert "output" in given or [each.name for each in (tmp_path / "run").glob("*")] in ([], [".lock"])


@pytest.mark.thorough
def test_a_second_process_of_one_number_says_so(files: Path, tmp_path: Path) -> None:
    """It alone knows; the others train."""

    def work(place: Place) -> int:
        os.environ |= {"WORLD_SIZE": "2", "RANK": str(min(place.rank, 1)), "LOCAL_RANK": str(min(place.rank, 1))}
        words = ["train", str(files / "rows.jsonl"), "--model", str(files / "model"), "--output", str(tmp_path / "run")]
        return run([*words, "--device", "cpu", "--batch-size", "8", "--max-steps", "2", "--no-baselines"])

    three = Forked(tmp_path / "logs", 3, work)
    first, *both = three.exit_codes()
    assert (first, sorted(both)) == (0, [0, 2])
    second = 1 + both.index(2)
    assert "error: another process is number 1 of 2: " in three.said(second)


@dataclass
class Follower:
    """Parts of a run that take on the first process's way."""

    model: Any
    packing: Any
    source: Any
    layout: Any = None


@pytest.mark.parametrize(
    ("asked", "told", "precision"),
    [("auto", "tf32", "tf32"), ("auto", "bf16", "bf16"), ("fp8", "bf16", "bf16"), ("fp8", "fp8", "fp8")],
)
def test_products_are_as_precise_as_in_the_first_process(asked: Any, told: str, precision: str) -> None:
    """It may have found that the model has no half precision, or that fp8 does not do. Nor are launches and copies
    another process's to choose."""
    way = {"precision": told, "packed": True, "execution": "fused", "eager_attention": False, "sharding": "none"}
    way |= {"copies": True, "attention": "flash_attention"}
    found = same_path.options_of(json.dumps(way), TrainOptions(data="", model="", output="", precision=asked))
    options = found.options
    assert (options.precision, options.execution, options.peer_copies) == (precision, "fused", True)
    assert found.attention == "flash_attention"


@pytest.mark.parametrize("told", ["flash_attention", ""])
def test_attention_is_that_of_the_first_process(told: str) -> None:
    """It decides by seconds that it measured, and masks of dropout are the kernel's."""
    assembly = replace(assembly_of(FAMILIES["bert"].model()), attention=told, facts={})
    assert assembly.fact(kernels_of).fastest == (told or None)
    built: Any = SimpleNamespace(recipe=SimpleNamespace(value=lambda _: "ours"))
    same_path.check_kernels(json.dumps({"kernels": "ours"}), built)
    with pytest.raises(ModelError, match="attention is by FlashAttention-2 in the first process, and by ours"):
        same_path.check_kernels(json.dumps({"kernels": "FlashAttention-2"}), built)


def test_layers_keep_as_much_as_in_the_first_process() -> None:
    """It decides by seconds that it measured."""
    first, model = FAMILIES["bert"].model(), FAMILIES["bert"].model()
    set_ways(layers_of(first) or (), {0: Way.RECOMPUTED, 1: Way.REMADE})
    set_ways(layers_of(model) or (), {0: Way.EMPTIED})
    told = json.dumps({"packed": True, "sizes": {}, "ways": ways_of(layers_of(first) or ())})
    follower: Any = Follower(model=model, packing=SimpleNamespace(packed=True), source=SimpleNamespace())
    same_path.with_sizes(told, follower)
    assert ways_of(layers_of(model) or ()) == {0: Way.RECOMPUTED, 1: Way.REMADE}

"""Layers that are recomputed: the same gradient bit for bit, fewer bytes kept, and what is refused."""

from __future__ import annotations

import gc
import json
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import brimful
from brimful.core.errors import OptionError
from brimful.core.options import TrainOptions
from brimful.levers.checkpointing import Checkpointing
from brimful.levers.lever import StepWork
from brimful.levers.token_budget import TokenBudget
from brimful.models.model_stats import layers_of
from brimful.models.packed.recompute import keep_all, recompute
from levers.assemblies import assembly_of
from runs import save_tiny_model, single_label_rows, write_rows
from tiny import FAMILIES

DEEP = {"hidden_size": 32, "num_hidden_layers": 4}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("data") / "rows.jsonl", single_label_rows(48))


def weights_of(folder: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "model" / "model.safetensors")


@pytest.mark.parametrize(
    ("family", "packing"),
    [("bert", "auto"), ("bert", "off"), ("modernbert", "auto"), ("deberta-v2", "auto"), ("llama", "off")],
)
def test_a_run_learns_the_same_bit_for_bit(family: str, packing: Any, data: Path, tmp_path: Path) -> None:
    """With dropout on."""
    model = save_tiny_model(tmp_path / "base", family=family, dropout=0.2, num_hidden_layers=2)
    found = []
    for asked in ("none", "full", "every-2"):
        run = brimful.train(
            data, model=model, output=tmp_path / asked, max_steps=4, batch_size=8, packing=packing, eval_split=0.0,
            device="cpu", gradient_checkpointing=asked, execution="eager",
        )  # fmt: skip
        lines = {lever.name: lever.value for lever in run.recipe.levers}
        assert lines.get("gradient_checkpointing", "none") == asked
        found.append(weights_of(tmp_path / asked))
    plain, *others = found
    for other in others:
        assert all(torch.equal(plain[name], other[name]) for name in plain)
    record = json.loads((tmp_path / "full" / "run.json").read_text())
    (line,) = [each for each in record["recipe"]["levers"] if each["name"] == "gradient_checkpointing"]
    assert line["arithmetic"] == "exact"


class Kept:
    """A tensor that a backward pass was promised."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def kept_bytes(step: brimful.Step, rows: list[dict[str, Any]]) -> int:
    """Bytes kept between forward and backward pass, each storage counted once, without the weights."""
    weights = {p.untyped_storage().data_ptr() for p in step._built.model.parameters()}
    alive: weakref.WeakSet[Kept] = weakref.WeakSet()

    def pack(x: Tensor) -> Kept:
        kept = Kept(x)
        alive.add(kept)
        return kept

    batch = step.batch(rows)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept.tensor):
        loss_S = step._built.step.loss_rows_S(batch.arrived(0))
        gc.collect()
        storages = {kept.tensor.untyped_storage().data_ptr(): kept.tensor.untyped_storage().nbytes() for kept in alive}
        loss_S.sum().backward()
    return sum(num_bytes for place, num_bytes in storages.items() if place not in weights)


def test_less_is_kept_and_release_undoes_it() -> None:
    draw = np.random.default_rng(0)
    rows = [{"input_ids": draw.integers(5, 40, 30), "labels": 0} for _ in range(8)]
    kept = {}
    for asked in ("none", "every-2", "full"):
        model = FAMILIES["bert"].model(**DEEP).train()
        step = brimful.Step(model, num_steps=2, batch_size=8, device="cpu", gradient_checkpointing=asked)
        kept[asked] = kept_bytes(step, rows)
        assert step.run(step.batch(rows)).read().applied
        released = step.release()
        assert not any(getattr(m, "gradient_checkpointing", False) for m in released.modules())
    assert kept["full"] < 0.6 * kept["none"]  # the rest is outside of layers
    assert kept["full"] < kept["every-2"] < kept["none"]


@pytest.mark.parametrize(("asked", "share"), [("full", 1.0), ("every-2", 0.5)])
def test_it_costs_the_layers_once_more(asked: str, share: float) -> None:
    """Operations that torch counts in a step, against seconds at an operation a second."""
    model = FAMILIES["bert"].model(**DEEP, intermediate_size=128).train()
    ids_RL = torch.full((4, 25), 7)
    found = []
    for numbers in ((), range(4) if asked == "full" else (1, 3)):
        recompute(list(layers_of(model) or ()), numbers)
        with FlopCounterMode(display=False) as counter:
            model(input_ids=ids_RL).logits.sum().backward()
        found.append(counter.get_total_flops())
    keep_all(list(layers_of(model) or ()))
    lever = assembly_of(model, gradient_checkpointing=asked).lever(Checkpointing)
    work = StepWork.of(model, np.full(4, 25), flops_per_s=1.0, bytes_per_s=1.0)
    assert lever.share == share
    assert lever.cost(work).step_s == pytest.approx(found[1] - found[0], rel=0.2)  # attention's products are not in it


def test_a_micro_batch_may_be_larger_where_less_is_kept() -> None:
    found = [
        assembly_of(FAMILIES["bert"].model(**DEEP), gradient_checkpointing=asked).lever(TokenBudget).token_bytes
        for asked in ("none", "every-2", "full")
    ]
    assert found[0] > found[1] > found[2] > 0


def test_a_model_without_a_list_of_layers_is_refused() -> None:
    with pytest.raises(OptionError, match="own code cannot recompute"):
        assembly_of(FAMILIES["albert"].model(), gradient_checkpointing="full").find(Checkpointing)


@pytest.mark.parametrize("asked", ["half", "every-0", "every-", "every-2.5", ""])
def test_what_cannot_be_meant_is_refused(asked: str) -> None:
    with pytest.raises(OptionError, match="gradient-checkpointing is"):
        TrainOptions(data="", model="", output="", gradient_checkpointing=asked)


def test_a_distance_beyond_the_depth_is_refused() -> None:
    with pytest.raises(OptionError, match="2 layers"):
        assembly_of(FAMILIES["bert"].model(), gradient_checkpointing="every-3").find(Checkpointing)

"""The first batch through captured and compiled steps, on a GPU: it passes, what is wrong is found, nothing changes."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

import brimful
from brimful.core.callbacks import Callbacks
from brimful.core.options.train import TrainOptions
from brimful.engine.first_batch import checked, compare
from brimful.engine.plain_pass import Rows
from brimful.step.graphs.captured_step import CapturedStep
from gpu.test_equivalence_on_gpu import _FAMILIES, _SMALL

pytestmark = pytest.mark.gpu

RANDOM = np.random.default_rng(0)
LENGTHS = RANDOM.integers(3, 100, size=32)
ROWS = Rows(
    ids=[RANDOM.integers(5, 900, size=length) for length in LENGTHS],
    types=None,
    targets_N=RANDOM.integers(0, 3, size=32),
)


def make_step(family: str, *, dropout: float = 0.1, **options: Any) -> brimful.Step:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**_SMALL, "num_hidden_layers": 4, **_FAMILIES[family]})
    for name in vars(config):
        if "dropout" in name or name.endswith("pdrop"):
            setattr(config, name, dropout)
    model = AutoModelForSequenceClassification.from_config(config)
    given = {"batch_size": 32, "lengths": LENGTHS, "precision": "bf16", "execution": "compiled", "device": "cuda"}
    return brimful.Step(model, num_steps=50, **given | options)


def batch_of(step: brimful.Step) -> Any:
    rows = zip(ROWS.ids, ROWS.targets_N, strict=True)
    return step.batch([{"input_ids": ids, "labels": label} for ids, label in rows])


@pytest.mark.parametrize("token_budget", [8192, 256], ids=["whole", "pieces"])
@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", "fp16"])
@pytest.mark.parametrize("mode", ["eager", "captured", "compiled"])
@pytest.mark.parametrize("family", ["bert", "modernbert", "deberta-v2", "llama"])
def test_it_passes(family: str, mode: str, precision: str, token_budget: int) -> None:
    step = make_step(family, execution=mode, precision=precision, token_budget=token_budget)
    assert step.packed
    found = compare(step._built, ROWS)
    print(f"{family:12} {mode:8} {precision} {token_budget}: {found}")
    assert found.passed, found.reason


@pytest.mark.parametrize("family", ["gpt2", "gemma2", "distilbert", "mpnet", "albert"])
def test_other_compiled_layers(family: str) -> None:
    """Torch's own compiler has dropout in its code."""
    step = make_step(family, execution="captured" if family == "albert" else "compiled")
    found = compare(step._built, ROWS)
    print(f"{family:12}: {found}")
    assert found.passed, found.reason


@pytest.mark.parametrize("optim", ["adamw_torch_fused", "sgd"])
@pytest.mark.parametrize("token_budget", [8192, 256], ids=["whole", "pieces"])
def test_nothing_changes(token_budget: int, optim: str) -> None:
    """Weights, states, random streams; and the losses of the steps after it, dropout on."""
    losses, heard = [], list[str]()

    class Heard(Callbacks):
        def warning(self, text: str) -> None:
            heard.append(text)

    for compared in (False, True):
        step = make_step("bert", token_budget=token_budget, optim=optim, callbacks=Heard())
        inner: Any = step._built.step
        assert isinstance(inner, CapturedStep)
        streams = torch.cuda.get_rng_state(), torch.get_rng_state()
        # Not clones that remember where they are from: a graph of the weights that is alive keeps them from a capture.
        before = {name: weight.detach().clone() for name, weight in inner.update.weights().items()}
        if compared:
            assert compare(step._built, ROWS).passed
        assert torch.equal(torch.cuda.get_rng_state(), streams[0])
        assert torch.equal(torch.get_rng_state(), streams[1])
        assert all(torch.equal(weight, before[name]) for name, weight in inner.update.weights().items())
        assert int(inner.update.applied) == 0
        losses.append([step.run(batch_of(step)).read().loss for _ in range(8)])
        assert heard == []  # why nothing is captured, or another step runs
        assert step._built.step is inner
        assert inner.num_graphs > 0
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)


def test_what_is_wrong_in_a_graph_is_found_and_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mistake that only compiled layers have, after all was checked at load."""
    from brimful.kernels.layers import postnorm_ops

    real = postnorm_ops._ProjectedAttention.forward
    monkeypatch.setattr(
        postnorm_ops._ProjectedAttention, "forward", staticmethod(lambda ctx, *given: 1.2 * real(ctx, *given))
    )
    wrong = make_step("bert")
    found = compare(wrong._built, ROWS)
    assert found.passed is False
    heard: list[str] = []

    class Heard(Callbacks):
        def warning(self, text: str) -> None:
            heard.append(text)

    def make(options: TrainOptions, _precision: Any, _eager: bool) -> Any:
        return make_step("bert", execution=options.execution, packing=options.packing)._built

    asked = TrainOptions(data="", model="", output="", execution="compiled")
    made, result = checked(make, asked, wrong._built.precision, ROWS, Heard())
    assert result.passed
    assert made.recipe.value("execution") == "captured"
    assert len(result.fallbacks) == 1
    assert result.fallbacks[0] in heard


@pytest.mark.alone
def test_three_seconds_for_bert_base() -> None:
    """Kernels compiled before, as a second start finds them."""
    config = AutoConfig.for_model("bert", num_labels=3)
    model = AutoModelForSequenceClassification.from_config(config)
    step = brimful.Step(
        model, num_steps=2000, batch_size=32, lengths=LENGTHS, precision="bf16", execution="compiled", device="cuda"
    )
    for what in ("first", "again"):
        began = time.perf_counter()
        found = compare(step._built, ROWS)
        print(f"{what}: {time.perf_counter() - began:.2f} s, {found}")
        assert found.passed
    assert found.seconds < 3.0

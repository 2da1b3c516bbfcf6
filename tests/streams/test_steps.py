"""Steps on a GPU's streams whose weights, activations, gradients or states are not all there at once."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from brimful.core.records import LabelSpace
from brimful.levers.optimizer import Optimizer
from brimful.models.model_stats import layers_of
from brimful.models.packed.offload import offload
from brimful.models.packed.packed_forward import PaddedModel
from brimful.models.packed.streamed_layers import TRAINED, StreamedLayers, move_all_but
from brimful.step.precision import Precision
from brimful.step.step import Step, make_schedule
from brimful.step.updates.bucketed_adamw import Savings
from brimful.tasks.task import SingleLabel
from pretend_gpu import GPU, PretendGpu
from step.test_step import ROWS, STEPS
from tiny import FAMILIES

#: A batch of one micro-batch, one of several, and the first again.
NUMBERS = (STEPS - 1, 0, STEPS - 1)
ADAMW = Optimizer(value="adamw_torch", weight_decay=0.1)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of tiny tensors too, something is moved, and in several buckets, by torch's own kernels."""
    monkeypatch.setattr("brimful.models.packed.offload.LEAST_BYTES", 1)
    monkeypatch.setattr("brimful.step.updates.bucketed_adamw.BUCKET", 2000)
    monkeypatch.setattr("brimful.step.updates.bucketed_adamw.can_launch", lambda *_: False)


def step_of(model: Any, max_grad_norm: float = 0.0, *, optimizer: Optimizer = ADAMW, **of_step: Any) -> Step:
    precision = Precision(value="fp32", device=GPU, reason="a test")
    update = optimizer.update(model, make_schedule("linear", 2e-3, STEPS, 3), precision, max_grad_norm=max_grad_norm)
    task = SingleLabel(LabelSpace(task="single_label", names=("a", "b", "c")))
    return Step(PaddedModel(model), task, update, precision, seed=0, **of_step)


def saving(**savings: Any) -> Optimizer:
    return dataclasses.replace(ADAMW, savings=Savings(**savings))


def course(step: Step) -> None:
    """Take the steps of a run: its first batch is compared, each step is read when the next one is launched, and a
    checkpoint is made while the last one runs."""
    step.probe(ROWS.batch(STEPS - 1, packed=False).sent(GPU))
    before = None
    for number in NUMBERS:
        pending = step.run(ROWS.batch(number, packed=False).sent(GPU))
        if before is not None:
            before.read()
        before = pending
    for state in step.state().optimizer.values():
        for tensor in state.tensors.values():
            tensor.clone()
    for weight in step.update.weights().values():
        weight.clone()
    assert before is not None
    before.read()
    step.run(ROWS.batch(STEPS - 1, packed=False).sent(GPU)).read()
    step.release()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stored", "depth", "in_backward"), [("host", 3, False), ("host", 5, True), ("disk", 5, False), ("disk", 3, True)]
)
@pytest.mark.sampled
def test_streamed_weights(gpu: PretendGpu, stored: str, depth: int, in_backward: bool, tmp_path: Path) -> None:
    model = FAMILIES["bert"].model(num_hidden_layers=depth, dropout=0.1).train()
    layers: Any = layers_of(model)
    move_all_but(model, layers, GPU)
    model.streamed_layers = StreamedLayers(layers, GPU, tmp_path if stored == "disk" else None, TRAINED)
    model.streamed_layers.recompute()
    optimizer = saving(on_host=True, in_backward=in_backward)
    course(step_of(model, 0.0 if in_backward else 0.1, optimizer=optimizer))


@pytest.mark.slow
def test_offloaded_activations(gpu: PretendGpu) -> None:
    model = FAMILIES["bert"].model(num_hidden_layers=5, dropout=0.1).train().to(GPU)
    layers: Any = layers_of(model)
    offload(layers, 3, GPU)
    course(step_of(model))


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize("in_backward", [False, True], ids=["after", "in backward"])
@pytest.mark.parametrize("on_host", [False, True], ids=["here", "on host"])
def test_buckets(gpu: PretendGpu, on_host: bool, in_backward: bool) -> None:
    model = FAMILIES["bert"].model(num_hidden_layers=3, dropout=0.1).train().to(GPU)
    optimizer = saving(on_host=on_host, in_backward=in_backward)
    course(step_of(model, 0.0 if in_backward else 0.1, optimizer=optimizer))

"""Parameters that no batch has used yet: nothing decays them, and a resumed step does not forget which they are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from brimful.core.records import LabelSpace
from brimful.data.batches.batch import Batch, MicroBatch
from brimful.kernels.forward_context import ForwardContext
from brimful.levers.optimizer import Optimizer
from brimful.models.packed.packed_forward import ForwardOutputs, LayoutModel
from brimful.models.packed.recompute import call_emptied, call_recomputed
from brimful.step.precision import Precision
from brimful.step.step import Step
from brimful.tasks.task import SingleLabel

#: For each batch, whether it uses the second expert.
USES = (False, False, True, False, False, True)


@dataclass(frozen=True)
class Rows:
    """Inputs of a batch, and whether it uses the second expert."""

    x_S4: Tensor
    uses: bool


class Experts(LayoutModel):
    """A model whose second part is used by some batches only, as experts and optional embeddings are."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.ModuleList([nn.Linear(4, 2), nn.Linear(4, 2)])

    def __call__(self, inputs: Any, context: ForwardContext | None = None) -> ForwardOutputs:
        logits: Tensor = self.model[0](inputs.x_S4)
        return ForwardOutputs(logits=logits + self.model[1](inputs.x_S4) if inputs.uses else logits)


def make_step(optim: Any, *, fused: bool = False) -> Step:
    precision = Precision(value="fp32", device=torch.device("cpu"), reason="")
    task = SingleLabel(LabelSpace(task="single_label", names=("a", "b")))
    optimizer = Optimizer(value=optim, weight_decay=0.5, fused=fused)
    execution = Experts()
    update = optimizer.update(execution.model, torch.full((9,), 0.1), precision, max_grad_norm=1.0)
    return Step(execution, task, update, precision, seed=1)


def batch(number: int) -> Batch:
    x_S4 = torch.randn(3, 4, generator=torch.Generator().manual_seed(number))
    inputs: Any = Rows(x_S4, USES[number])
    micro = MicroBatch(
        inputs=inputs,
        targets_S=torch.tensor([0, 1, 1]),
        valid_S=torch.ones(3, dtype=torch.bool),
        denominator=torch.tensor(3.0, dtype=torch.float64),
        samples=np.arange(3),
    )
    return Batch(number=number, micro_batches=(micro,), num_samples=3, num_tokens=3, num_computed=3)


@pytest.mark.parametrize("optim", ["sgd", "adamw_torch"])
@pytest.mark.parametrize("stop", range(1, len(USES)))
def test_a_resumed_step_knows_what_has_been_used(optim: str, stop: int) -> None:
    check_a_resumed_step(optim, stop, fused=False)


def check_a_resumed_step(optim: str, stop: int, *, fused: bool) -> None:
    alone, first, resumed = (make_step(optim, fused=fused) for _ in range(3))
    untouched = alone.execution.model[1].weight.clone()
    for number in range(len(USES)):
        alone.run(batch(number))
        if number == 1:
            assert torch.equal(alone.execution.model[1].weight, untouched)
    for number in range(stop):
        first.run(batch(number))
    resumed.load_state(first.state())
    for number in range(stop, len(USES)):
        resumed.run(batch(number))
    for (name, expected), found in zip(
        alone.execution.model.named_parameters(), resumed.execution.model.parameters(), strict=True
    ):
        assert torch.equal(found, expected), name


@pytest.mark.parametrize("call", [call_recomputed, call_emptied])
def test_a_part_of_a_recomputed_layer_that_nothing_uses_has_no_gradient(call: Any) -> None:
    """As LiLT's last layer, of whose two outputs the head reads one: zeros would let weights decay."""
    used, unused = nn.Linear(4, 2), nn.Linear(4, 2)
    x_S4 = torch.ones(3, 4, requires_grad=True)
    first, _ = call(lambda x: (used(x), unused(x)), x_S4)
    first.sum().backward()
    assert used.weight.grad is not None
    assert unused.weight.grad is None
    assert torch.equal(x_S4.grad, used.weight.sum(0).expand(3, 4))

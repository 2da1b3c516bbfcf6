"""A loop's own optimizer on a GPU: its updates captured, by the rates that its groups have at each step."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim.lr_scheduler import ExponentialLR

import brimful
from plain import padded
from tiny import FAMILIES, sequences
from tolerances import difference

pytestmark = pytest.mark.gpu

SIZES: dict[str, Any] = {
    "hidden_size": 128, "num_attention_heads": 2, "intermediate_size": 256, "initializer_range": 0.02,
}  # fmt: skip
NUM_UPDATES = 8


@pytest.mark.parametrize("execution", ["eager", "captured"])
@pytest.mark.parametrize("kind", ["AdamW", "NAdam"])
def test_it_learns_what_a_plain_loop_learns(kind: str, execution: str) -> None:
    """AdamW is updated within the graph; NAdam by the host, after it."""
    plain = FAMILIES["bert"].model(**SIZES).cuda().train()
    model = copy.deepcopy(plain)
    ids = sequences(np.random.default_rng(0).integers(3, 60, size=16).tolist())
    batch = padded(ids, None, 0) | {"labels": torch.arange(16) % 3}
    on_gpu = {name: value.cuda() for name, value in batch.items()}
    losses: list[list[float]] = [[], []]
    optimizer = getattr(torch.optim, kind)(plain.parameters(), lr=1e-3)
    scheduler = ExponentialLR(optimizer, 0.5)
    for _ in range(NUM_UPDATES):
        loss = plain(**on_gpu).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses[0].append(loss.item())
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=1e-3)
    scheduler = ExponentialLR(optimizer, 0.5)
    step = brimful.Step(
        model, optimizer, batch_size=16, max_length=64, lengths=[len(each) for each in ids], max_grad_norm=1.0,
        device="cuda", precision="fp32", execution=execution,
    )  # fmt: skip
    for _ in range(NUM_UPDATES):
        outcome = step(batch)
        scheduler.step()
        losses[1].append(outcome.loss)
    assert step.first_batch is not None
    assert step.first_batch.passed
    assert step._built.step.num_graphs == (execution == "captured")
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)
    state = copy.deepcopy(step.state_dict())
    assert isinstance(optimizer.param_groups[0]["lr"], float)
    step.load_state_dict(state)
    assert step(batch).applied
    step.release()
    one, other = (torch.cat([p.detach().flatten() for p in each.parameters()]) for each in (plain, model))
    assert difference(other.cpu(), one.cpu()) < 1e-2

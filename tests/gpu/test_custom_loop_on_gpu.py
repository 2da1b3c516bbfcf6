"""A loop of one's own on a GPU: captured steps, logits between them, a continuation, and the plain model afterwards."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch

import brimful
from brimful.core.tolerances import TOLERANCES
from brimful.step.step import Outcome
from plain import padded
from tiny import FAMILIES, sequences
from tolerances import difference

pytestmark = pytest.mark.gpu

SIZES: dict[str, Any] = {
    "hidden_size": 128, "num_attention_heads": 2, "intermediate_size": 256, "initializer_range": 0.02,
}  # fmt: skip


@pytest.mark.parametrize("execution", ["captured", "compiled"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_loop_of_ones_own(precision: str, execution: str) -> None:
    model = FAMILIES["bert"].model(dropout=0.1, **SIZES).train()
    frozen = model.bert.embeddings.LayerNorm.eval()
    ids = sequences(np.random.default_rng(0).integers(3, 60, size=16).tolist())
    rows = [{"input_ids": each.tolist(), "labels": number % 3} for number, each in enumerate(ids)]
    step = brimful.Step(
        model, num_steps=20, batch_size=16, learning_rate=1e-4, max_length=64, lengths=[len(each) for each in ids],
        device="cuda", precision=precision, execution=execution,
    )  # fmt: skip
    assert step.packed

    def run(number: int) -> list[Outcome]:
        with brimful.Feed(step, [rows] * number) as feed:
            return [step.run(batch).read() for batch in feed]

    assert all(outcome.applied for outcome in run(4))
    assert step._built.step.num_graphs > 0
    assert step.predict(rows).shape == (16, 3)
    run(1)
    state = copy.deepcopy(step.state())
    expected = run(2)
    step.load_state(state)
    found = run(2)
    assert [outcome.number for outcome in found] == [outcome.number for outcome in expected] == [5, 6]
    assert [outcome.loss for outcome in found] == pytest.approx([outcome.loss for outcome in expected], rel=1e-2)

    logits_NC = step.predict(rows)
    assert step.release() is model
    assert model.training
    assert not frozen.training
    inputs = {name: tensor.cuda() for name, tensor in padded(ids, None, 0).items()}
    with torch.no_grad():
        plain_NC = model.eval()(**inputs).logits
    assert difference(logits_NC, plain_NC.cpu()) < TOLERANCES[precision].logits

"""Models in one process leave one another alone, and the process's random streams; a recomputed layer is the same one.

On the CPU by Triton's interpreter; `tests/gpu/test_isolation_on_gpu.py` runs the same on a GPU.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from brimful.data.batches.batch import Batch
from brimful.data.tokens.encoder import Tokens
from brimful.engine.inference import evaluating, predict_logits
from brimful.kernels.float8 import Plan
from brimful.models.model_stats import layers_of
from brimful.models.packed.equivalence import check_equivalence
from brimful.models.packed.packed_forward import PackedModel
from brimful.models.packed.recompute import recompute
from brimful.step.forward import LayoutForward
from brimful.step.step import Outcome, Step
from models.fusion.test_fusion import LONG, ONE_LAYER, SHORT, WIDE, compiled, our_attention
from plain import gradient
from step.test_step import PACKED, make_step
from tiny import FAMILIES, sequences
from tolerances import difference

__all__ = ["our_attention"]
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute")  # dynamo looks at inputs' gradients

#: What becomes of each step of a run, and the weights at its end.
Course = tuple[list[Outcome], list[Tensor]]


def fused(seed: int, dropout: float, precision: str, plan: Plan | None) -> Step:
    """A step of a model on fused kernels. Its layers and embeddings are compiled."""
    model = FAMILIES["bert"].model(dropout=dropout, seed=seed, **ONE_LAYER).train()
    compiled(model)
    step = make_step(model, seed=seed, precision=precision)
    step.precision = dataclasses.replace(step.precision, plan=plan)
    return step


def as_it_is(seed: int, dropout: float, precision: str, plan: Plan | None) -> Step:
    """A step of a model on torch's kernels, of which no product is in fp8."""
    return make_step(FAMILIES["bert"].model(dropout=dropout, seed=seed).train(), seed=seed, precision=precision)


def pair(make: Callable[..., Step]) -> list[Step]:
    """Two that differ in precision, dropout, the dtype of residuals and products in fp8."""
    return [make(1, 0.3, "fp32", None), make(2, 0.1, "fp16", Plan())]


def ended(step: Step, outcomes: list[Outcome]) -> Course:
    return outcomes, [parameter.detach().clone() for parameter in step.update.parameters]


def check_same(found: Course, expected: Course) -> None:
    assert found[0] == expected[0]
    assert all(torch.equal(one, other) for one, other in zip(found[1], expected[1], strict=True))


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize("make", [as_it_is, fused])
def test_models_in_turns_do_what_each_does_alone(make: Callable[..., Step], our_attention: None) -> None:
    batches = [SHORT, SHORT]
    alone = [ended(step, [step.run(batch).read() for batch in batches]) for step in pair(make)]
    torch._dynamo.reset()
    steps = pair(make)
    outcomes: list[list[Outcome]] = [[], []]
    for batch, (step, kept) in itertools.product(batches, list(zip(steps, outcomes, strict=True))):
        kept.append(step.run(batch).read())
    assert outcomes[0] != outcomes[1]
    for step, kept, expected in zip(steps, outcomes, alone, strict=True):
        check_same(ended(step, kept), expected)


@pytest.mark.thorough
def test_models_in_threads_do_what_each_does_alone() -> None:
    batches = [SHORT, LONG]
    alone = [ended(step, [step.run(batch).read() for batch in batches]) for step in pair(as_it_is)]
    steps = pair(as_it_is)
    outcomes: list[list[Outcome]] = [[], []]
    start = threading.Barrier(2)

    def run(step: Step, kept: list[Outcome]) -> None:
        start.wait()
        kept += [step.run(batch).read() for batch in batches]

    threads = [threading.Thread(target=run, args=each) for each in zip(steps, outcomes, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for step, kept, expected in zip(steps, outcomes, alone, strict=True):
        check_same(ended(step, kept), expected)


def drawn() -> list[Any]:
    """Numbers that come next of the process's own streams."""
    return [torch.rand(3).tolist(), np.random.rand(3).tolist(), random.random()]


@pytest.mark.slow
def test_the_users_random_streams_are_untouched() -> None:
    model = FAMILIES["bert"].model(dropout=0.3).train()
    step = make_step(model)
    few = sequences([5, 17, 2])
    tokens = Tokens(
        ids=np.concatenate(few).astype(np.int32), types=None, offsets=np.cumsum([0, *map(len, few)]),
        truncated=np.zeros(len(few), dtype=bool),
    )  # fmt: skip

    def seeded() -> None:
        torch.manual_seed(5)
        np.random.seed(5)
        random.seed(5)

    seeded()
    expected = drawn()
    seeded()
    check_equivalence(model, max_length=32, device=torch.device("cpu"), precision="fp32", cache=False)
    step.compile_kernels(SHORT)
    step.run(LONG).read()
    with evaluating(model):
        predict_logits(LayoutForward(step.execution, PACKED, step.precision, batch_tokens=64, most_rows=8), tokens)
    assert drawn() == expected
    assert torch.initial_seed() == 5
    assert torch.get_float32_matmul_precision() == "highest"


def checkpointed(model: Any, *, reentrant: bool) -> None:
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": reentrant})


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize(
    ("family", "is_compiled", "short", "reentrant"),
    [("bert", True, False, False), ("bert", False, True, False), ("bert", False, True, True),
     ("modernbert", True, False, False)],
)  # fmt: skip
def test_a_recomputed_layer_has_the_same_gradient(
    family: str, is_compiled: bool, short: bool, reentrant: bool, our_attention: None
) -> None:
    """Bit for bit, with dropout on: its masks are drawn again, and a last layer cut short is cut short again."""
    found = []
    for checkpointing in (False, True):
        model = FAMILIES[family].model(dropout=0.3, **WIDE | {"num_hidden_layers": 2}).train()
        step = make_step(model, family=family)
        step.execution = PackedModel(model, dataclasses.replace(step.execution.form, short=short))  # type: ignore[attr-defined]
        if is_compiled:
            assert compiled(model) == []
        if checkpointing:
            checkpointed(model, reentrant=reentrant)
        rows_S = step.accumulate(SHORT, 0)
        found.append((rows_S, gradient(model)))
    (rows_S, expected), (again_S, recomputed) = found
    assert torch.equal(rows_S, again_S)
    assert torch.equal(expected, recomputed)


# Triton's interpreter multiplies the bits of bf16 as if they were numbers: compiled layers are compared in fp32 here.
@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize(
    ("is_compiled", "precision"), [(False, "fp32"), (False, "bf16"), (False, "fp16"), (True, "fp32")]
)
def test_a_layer_recomputed_by_our_call_has_the_same_gradient(
    is_compiled: bool, precision: str, our_attention: None
) -> None:
    """Bit for bit, with dropout on, where autocast and our own casts make copies of what a layer is given."""
    found = []
    for numbers in ((), (0, 1)):
        model = FAMILIES["bert"].model(dropout=0.3, **WIDE | {"num_hidden_layers": 2}).train()
        step = make_step(model, precision=precision)
        step.seeded_dropout = True
        if is_compiled:
            assert compiled(model) == []
        recompute(list(layers_of(model) or ()), numbers)
        rows_S = step.accumulate(SHORT, 0)
        found.append((rows_S, {name: p.grad for name, p in model.named_parameters()}))
    (rows_S, expected), (again_S, recomputed) = found
    assert torch.equal(rows_S, again_S)
    differ = [name for name, grad in expected.items() if not _equal(grad, recomputed[name])]
    assert set(differ) <= {"bert.embeddings.LayerNorm.bias"}  # a sum in the order of its gradient's layout
    for name in differ:
        assert difference(expected[name], recomputed[name]) < 1e-6


def _equal(one: Tensor | None, other: Tensor | None) -> bool:
    return one is other if one is None or other is None else torch.equal(one, other)


def test_the_number_of_real_tokens_is_with_the_inputs() -> None:
    batch: Batch = LONG
    used = [int(micro.inputs.num_real) for micro in batch.micro_batches]  # type: ignore[union-attr]
    assert sum(used) == batch.num_tokens < batch.num_computed

"""The update in three kernels against torch's own, on the CPU by Triton's interpreter."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from brimful.levers.optimizer import Optimizer, decayed_names, parameter_groups
from brimful.step.precision import Precision
from brimful.step.step import Step
from brimful.step.updates.fused_adamw import FusedAdamW
from step import test_step, test_unused_parameters
from step.test_step import FAMILIES, ROWS, Rows, make_step

OURS = Optimizer(value="adamw_torch", weight_decay=0.1, fused=True)


def both(model: Any = None, optimizer: Optimizer = OURS, **options: Any) -> tuple[Step, Step]:
    """The same step with torch's update, and with the fused one."""
    model = model or FAMILIES["bert"].model()
    plain = make_step(copy.deepcopy(model), optimizer=replace(optimizer, fused=False), **options)
    fused = make_step(model, optimizer=optimizer, **options)
    assert isinstance(fused.update, FusedAdamW)
    return plain, fused


def difference(step: Step, other: Step) -> float:
    """Relative difference of all weights but key biases: their true gradient is zero, and AdamW scales its noise."""
    ours, theirs = (each.state().weights for each in (step, other))
    names = [name for name, _ in step.execution.model.named_parameters() if not name.endswith("key.bias")]
    one, two = (torch.cat([group[name].flatten() for name in names]) for group in (ours, theirs))
    return float((one - two).norm() / two.norm())


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize("max_grad_norm", [0.0, 0.5])
def test_equal_to_torch_in_fp32(max_grad_norm: float) -> None:
    plain, fused = both(max_grad_norm=max_grad_norm)
    for number in range(4):
        batch = ROWS.batch(number)
        expected, found = plain.run(batch).read(), fused.run(batch).read()
        assert found.loss == pytest.approx(expected.loss, rel=1e-5)
        assert found.grad_norm == pytest.approx(expected.grad_norm, rel=1e-4)
        assert (found.learning_rate, found.applied) == (expected.learning_rate, expected.applied)
    assert difference(fused, plain) < 1e-5
    theirs, ours = plain.state().optimizer, fused.state().optimizer
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(ours[name].tensors["step"], kept.tensors["step"]) for name, kept in theirs.items())


@pytest.mark.slow
def test_half_copies_are_what_autocast_makes() -> None:
    """Linear layers hold bf16 weights, and learn what the fp32 ones under autocast do."""
    plain, fused = both(precision="bf16")
    layer = fused.execution.model.bert.encoder.layer[0]
    assert layer.output.dense.weight.dtype == torch.bfloat16
    assert layer.output.LayerNorm.weight.dtype == torch.float32
    assert fused.execution.model.bert.embeddings.word_embeddings.weight.dtype == torch.float32
    first = None
    for number in range(4):
        batch = ROWS.batch(number)
        expected, found = plain.run(batch).read(), fused.run(batch).read()
        assert found.loss == pytest.approx(expected.loss, rel=1e-5 if first is None else 1e-2)
        assert found.grad_norm == pytest.approx(expected.grad_norm, rel=1e-2)
        first = found
    assert difference(fused, plain) < 2e-3
    master = fused.state().weights["bert.encoder.layer.0.output.dense.weight"]
    assert torch.allclose(layer.output.dense.weight.float(), master, rtol=2**-7)  # the interpreter does not round


@pytest.mark.slow
@pytest.mark.parametrize("weight_decay", [0.0, 0.3])
def test_words_that_no_batch_has_had_are_left_alone(monkeypatch: pytest.MonkeyPatch, weight_decay: float) -> None:
    """But for weight decay; once a batch has them, they learn as all others do. Blocks are of 64 rows of 16 numbers."""
    model = FAMILIES["bert"].model(vocab_size=1000)
    optimizer = replace(OURS, weight_decay=weight_decay)
    plain, fused = both(model, optimizer)
    update: Any = fused.update
    words = next(i for i, name in enumerate(update.named) if name.endswith("word_embeddings.weight"))
    blocks_of_words = update._places.blocks_B3[:, 0] == words
    assert int(blocks_of_words.sum()) == 16
    rows = Rows()
    for number, first in enumerate((5, 5, 900)):
        monkeypatch.setattr(Rows, "ids", lambda *_, first=first: [np.arange(first, first + 7, dtype=np.int32)] * 6)
        batch = rows.batch(number)
        expected, found = plain.run(batch).read(), fused.run(batch).read()
        assert found.grad_norm == pytest.approx(expected.grad_norm, rel=1e-4)
        assert difference(fused, plain) < 1e-5
        touched = update._touched[blocks_of_words].nonzero().flatten().tolist()
        assert touched == ([0] if first == 5 else [0, 14])
    # Words: blocks 1 to 13, and the last one, of 40 rows. Positions: rows 64 to 79.
    assert update.num_idle() == 16 * (13 * 64 + 40 + 16)
    assert torch.equal(update._have_moments()[blocks_of_words], update._touched[blocks_of_words])
    again = make_step(copy.deepcopy(model), optimizer=optimizer)
    again.load_state(fused.state())
    assert torch.equal(again.update._touched[blocks_of_words], update._touched[blocks_of_words])  # type: ignore[attr-defined]


class Tables(torch.nn.Module):
    """Tables whose rows fill blocks, leave some of one empty, lie as no block may begin, and are longer than one."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {"words": (9, 768), "narrow": (130, 16), "odd": (50, 50), "wide": (5, 1040), "even": (3, 1024)}
        self.tables = torch.nn.ModuleDict({name: torch.nn.Embedding(*size) for name, size in sizes.items()})
        self.gain = torch.nn.Parameter(torch.randn(37))


@pytest.mark.parametrize("weight_decay", [0.0, 0.3])
def test_blocks_of_whole_rows(weight_decay: float) -> None:
    torch.manual_seed(0)
    model = Tables()
    plain = copy.deepcopy(model)
    optimizer = replace(OURS, weight_decay=weight_decay)
    schedule = torch.full((9,), 1e-2)
    precision = Precision(value="fp32", device=torch.device("cpu"), reason="a test")
    update: Any = optimizer.update(model, schedule, precision, max_grad_norm=0.0)
    sizes = dict(zip(update.named, update._block_sizes, strict=True))
    assert [sizes[f"tables.{name}.weight"] for name in ("words", "narrow", "odd", "wide")] == [768, 1024, 1024, 1024]
    theirs = torch.optim.AdamW(parameter_groups(plain, decayed_names(plain), weight_decay), lr=1e-2)
    for number in range(4):
        update.before()
        for one, other in zip(model.parameters(), plain.parameters(), strict=True):
            one.grad = torch.zeros_like(one)
            one.grad[number :: 3 if one.ndim == 1 else 40] = torch.randn(one.shape[1:])  # few rows of tables
            other.grad = one.grad.clone()
        update.apply(gathered=False)
        theirs.step()
    for (name, found), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.allclose(found, expected, atol=1e-6), name
    assert 0 < update.num_idle() < sum(parameter.numel() for parameter in model.parameters())


def test_sibling_layers_lie_side_by_side() -> None:
    """Queries, keys and values may be read as one matrix."""
    step = make_step(FAMILIES["bert"].model(), optimizer=OURS, precision="bf16")
    attention = step.execution.model.bert.encoder.layer[1].attention.self
    for kind in ("weight", "bias"):
        parts = [getattr(getattr(attention, name), kind) for name in ("query", "key", "value")]
        places = [part.data_ptr() for part in parts]
        assert [b - a for a, b in pairwise(places)] == [parts[0].numel() * 2] * 2


def test_the_end_gives_masters_back() -> None:
    step = make_step(FAMILIES["bert"].model(), optimizer=OURS, precision="bf16")
    step.run(ROWS.batch(0))
    before = test_step.snapshot(step).weights
    step.release()
    after = step.execution.model.state_dict()
    assert all(after[name].dtype == torch.float32 and torch.equal(after[name], before[name]) for name in after)


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_continuation_goes_on_bit_for_bit(precision: str) -> None:
    step = make_step(FAMILIES["bert"].model(), optimizer=OURS, precision=precision)
    step.update.scale.fill_(64.0 if precision == "fp16" else 1.0)
    for number in range(3):
        step.run(ROWS.batch(number))
    again = make_step(FAMILIES["bert"].model(), optimizer=OURS, precision=precision)
    again.load_state(test_step.snapshot(step))
    for number in range(3, 5):
        one, other = step.run(ROWS.batch(number)).read(), again.run(ROWS.batch(number)).read()
        assert one == other
    assert test_step.same(step.state(), again.state())


def test_a_step_that_is_not_finite_changes_nothing() -> None:
    step = make_step(FAMILIES["bert"].model(), optimizer=OURS, precision="bf16")
    step.run(ROWS.batch(0))
    before = test_step.snapshot(step)
    batch = ROWS.batch(1)
    with test_step.spoiled(step.execution, batch, {int(batch.samples[0])}, math.nan):
        outcome = step.run(batch).read()
    assert not outcome.applied
    assert test_step.same(test_step.snapshot(step), before)
    assert step.run(ROWS.batch(2)).read().applied


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_fp16_scale_is_torchs() -> None:
    plain, fused = both(precision="fp16")
    for scale in (64.0, 2.0**40, 64.0):
        outcomes = []
        for step in (plain, fused):
            step.update.scale.fill_(scale)
            outcomes.append(step.run(ROWS.batch(3)).read())
        assert outcomes[0].applied == outcomes[1].applied == (scale == 64.0)
        assert outcomes[0].overflow == outcomes[1].overflow
        assert plain.update.scale == fused.update.scale
        assert plain.update.growth == fused.update.growth


@pytest.mark.parametrize("stop", [1, 3, 5])
def test_parameters_that_no_batch_has_used(stop: int) -> None:
    test_unused_parameters.check_a_resumed_step("adamw_torch", stop, fused=True)


@pytest.mark.slow
def test_unused_and_frozen_parameters_are_left_alone() -> None:
    test_step.check_what_a_model_does_not_use(fused=True)


@pytest.mark.slow
def test_weight_decay_is_for_matrices() -> None:
    plain, fused = both(optimizer=replace(OURS, weight_decay=0.9))
    for number in range(3):
        plain.run(ROWS.batch(number))
        fused.run(ROWS.batch(number))
    assert difference(fused, plain) < 1e-5

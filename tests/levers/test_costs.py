"""Costs of levers against what is measured: bytes that tensors have, operations that torch counts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

pytest.importorskip("triton")

from brimful.kernels.layout import PackedShape, packed_inputs, padded_inputs
from brimful.levers.attention import Attention
from brimful.levers.dropout import Dropout
from brimful.levers.execution import ExecutionMode
from brimful.levers.lever import Cost, StepWork
from brimful.levers.optimizer import Optimizer
from brimful.levers.packing import Packing
from brimful.levers.precision import PrecisionLever
from brimful.levers.token_budget import TokenBudget
from brimful.models.packed.packed_forward import PackedForm, PackedModel, PaddedModel
from levers.assemblies import EQUIVALENCE, assembly_of
from step.test_step import ROWS, TASK, Step, execution_of
from tiny import FAMILIES, sequences

#: Wide enough that biases and norms are few beside matrices, as in the models that are trained.
WIDE = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}
LENGTHS = np.array([7, 19, 40, 26])
FLOPS_PER_S, BYTES_PER_S = 1e12, 1e11


def work_of(model: Any, lengths: Sequence[int] | np.ndarray = LENGTHS) -> StepWork:
    return StepWork.of(model, np.asarray(lengths), flops_per_s=FLOPS_PER_S, bytes_per_s=BYTES_PER_S)


def allocated(tensors: Any) -> int:
    """Bytes of the storages of these tensors, each counted once."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


# --- bytes ----------------------------------------------------------------------------------------------------------


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("optim", "fused", "precision"),
    [
        ("adamw_torch", False, "fp32"),
        ("sgd", False, "fp32"),
        ("adamw_torch", True, "fp32"),
        ("adamw_torch", True, "bf16"),
    ],
)
def test_an_optimizers_bytes_are_those_of_its_tensors(optim: Any, fused: bool, precision: str) -> None:
    """States and copies after a step, and the gradients that it had, beside weights and the tables of kernels."""
    model = FAMILIES["bert"].model(**WIDE)
    work, weights = work_of(model), sum(p.nbytes for p in model.parameters())
    assembly = assembly_of(model, precision=precision)
    lever = Optimizer(value=optim, fused=fused, copies=precision == "bf16")
    update = lever.update(model, torch.full((3,), 1e-3), assembly.precision, max_grad_norm=1.0)
    step = Step(execution_of(model), TASK, update, assembly.precision, seed=0)
    held: list[int] = []
    step.accumulate(ROWS.batch(0), 0)
    held.append(sum(p.grad.nbytes for p in model.parameters() if p.grad is not None))
    step.apply_update(gathered=False)
    kept = [value for value in vars(update).values() if isinstance(value, Tensor)]
    kept += [tensor for state in update.state().optimizer.values() for tensor in state.tensors.values()]
    cost = lever.cost(work)
    assert allocated([*kept, *model.parameters()]) - weights == pytest.approx(cost.resident_bytes, rel=0.05, abs=2e4)
    gradients = cost.step_bytes + (2 * work.linear_parameters if precision == "bf16" else 0)  # no casts
    assert held[0] == pytest.approx(gradients, rel=0.02)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("training", [False, True])
def test_a_precisions_bytes_are_those_of_weights(precision: str, training: bool) -> None:
    model = FAMILIES["bert"].model(**WIDE).requires_grad_(training)
    work = work_of(model)
    assembly = assembly_of(model, precision=precision, training=training)
    cost = assembly.lever(PrecisionLever).cost(work)
    assert sum(p.nbytes for p in assembly.model.parameters()) == cost.resident_bytes
    cast = 0
    if precision == "bf16" and training:
        layers = [m for m in model.modules() if isinstance(m, torch.nn.Linear)]
        cast = sum(p.bfloat16().nbytes for layer in layers for p in layer.parameters())
    assert cost.step_bytes == cast


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_budgets_bytes_are_those_that_autograd_keeps(precision: str) -> None:
    """Within a third: what is kept depends on kernels. Here they are torch's own, one for each operation.

    Without dropout, whose masks a CPU keeps in the dtype of what is dropped, and a GPU in bytes.
    """
    sizes = {"num_hidden_layers": 6, "hidden_size": 256, "intermediate_size": 1024, "num_attention_heads": 4}
    model = FAMILIES["bert"].model(**sizes)
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    ids = sequences([48] * 4)
    assembly = assembly_of(
        model, precision=precision, lengths=(48,) * 4, token_budget=192, function="grouped_attention"
    )
    assembly.lever(Attention)  # which lays rows out for torch's own kernel
    lever = assembly.lever(TokenBudget)
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own and tensor.dtype.is_floating_point:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    assert assembly.execution is not None
    assert assembly.layout is not None
    [(inputs, _)] = assembly.layout.arrange(ids, None)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t), assembly.precision.autocast():
        loss = assembly.execution(inputs).logits.float().sum()
    weights = 2 * work_of(model).linear_parameters if precision == "bf16" else 0  # casts of weights are kept too
    found = (sum(kept.values()) - weights) / inputs.num_tokens
    assert loss.requires_grad
    assert found == pytest.approx(lever.token_bytes, rel=0.34)


# --- operations -----------------------------------------------------------------------------------------------------


def flops(execution: Any, inputs: Any, *, training: bool) -> dict[str, float]:
    """Of products with weights, and of those of attention, by torch's own count of a pass, or of a step."""
    with FlopCounterMode(display=False) as counter:
        logits = execution(inputs).logits.float()
        if training:
            logits.sum().backward()
    found = {str(name).removeprefix("aten."): count for name, count in counter.get_flop_counts()["Global"].items()}
    weights = sum(count for name, count in found.items() if name in ("mm", "addmm"))
    return {"weights": weights, "attention": sum(found.values()) - weights}


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
def test_seconds_of_a_layout_are_those_of_its_products(packed: bool, training: bool) -> None:
    """Without the pooler and the head, which see one token of a sequence."""
    model = FAMILIES["bert"].model(**WIDE).requires_grad_(training)
    work, ids = work_of(model), sequences(LENGTHS.tolist())
    if packed:
        shape = PackedShape(num_tokens=int(LENGTHS.sum()), num_slots=4, max_length=40)
        execution: Any = PackedModel(model, PackedForm(pooling="first", first_position=0), plain=True)
        inputs: Any = packed_inputs(ids, shape, padding_id=0)
    else:
        execution, inputs = PaddedModel(model), padded_inputs(ids, 4, int(LENGTHS.max()), padding_id=0)
    cost = Packing(value="packed" if packed else "padded", reason="a test", equivalence=EQUIVALENCE).cost(work)
    assert flops(execution, inputs, training=training)["weights"] == pytest.approx(cost.step_s * FLOPS_PER_S, rel=0.05)


@pytest.mark.parametrize("training", [False, True])
def test_seconds_of_attention_are_those_of_its_products(training: bool) -> None:
    """In padded rows that are all full, by eager attention: what a kernel of variable lengths computes."""
    model = FAMILIES["bert"].model(**WIDE).requires_grad_(training)
    lengths = [40] * 3
    inputs = padded_inputs(sequences(lengths), 3, 40, padding_id=0)
    lever = assembly_of(model, training=training).lever(Attention)
    found = flops(PaddedModel(model, "eager"), inputs, training=training)["attention"]
    assert found == pytest.approx(lever.cost(work_of(model, lengths)).step_s * FLOPS_PER_S, rel=0.01)


def test_empty_places_of_a_budget_cost_their_products() -> None:
    model = FAMILIES["bert"].model(**WIDE)
    lever = assembly_of(model, lengths=(30, 30, 30, 30), token_budget=512).lever(TokenBudget)
    assert lever.budgets is not None
    work = work_of(model, [30] * 4)
    computed = work.num_tokens / lever.budgets.fill
    assert lever.cost(work).step_s == pytest.approx(work.products_s(round(computed - work.num_tokens)))


@pytest.mark.parametrize(("packing", "taken"), [("auto", "32"), ("off", "30")])
def test_a_budget_below_the_longest_row_is_raised_with_a_warning(packing: str, taken: str) -> None:
    """To that row, in whole tiles, and not to the longest that there can be: one asked for holds."""
    warned: list[str] = []
    model = FAMILIES["bert"].model()
    lever = assembly_of(model, token_budget=10, packing=packing, warn=warned.append).lever(TokenBudget)
    assert lever.value.split(", ")[-1] == taken
    assert warned == [f"--token-budget 10 is raised to {taken}: a row has 30 tokens, and is not cut in two"]
    for asked in (40, 50, 63):
        found = assembly_of(model, token_budget=asked, packing=packing).lever(TokenBudget)
        assert 30 <= int(found.value.split(", ")[-1]) <= asked
    assert assembly_of(model, packing=packing).lever(TokenBudget).value.split(", ")[-1] in ("64", "4096")


def test_an_updates_seconds_are_those_of_the_bytes_it_moves() -> None:
    """Weight, gradient and two states read, all but the gradient written, the gradient read for its norm: fp32."""
    model = FAMILIES["bert"].model(**WIDE)
    work = work_of(model)
    sizes = [p.nbytes for p in model.parameters()]
    adamw, sgd = (Optimizer(value=value).cost(work).step_s for value in ("adamw_torch", "sgd"))  # type: ignore[arg-type]
    assert adamw == pytest.approx(8 * sum(sizes) / BYTES_PER_S)
    assert sgd == pytest.approx(4 * sum(sizes) / BYTES_PER_S)


def test_dropout_keeps_a_number_for_each_that_it_drops() -> None:
    """On a CPU in the dtype of what is dropped, on a GPU in a byte. Attention's own dropout is its kernel's."""
    model = FAMILIES["bert"].model(dropout=0.3, **WIDE).train()
    for layer in model.bert.encoder.layer:
        layer.attention.self.dropout.p = 0.0
    without = assembly_of(FAMILIES["bert"].model(**WIDE)).lever(Dropout)
    assert without.cost(work_of(model)) == Cost()
    lever = assembly_of(model).lever(Dropout)
    assert lever.modules == 1 + 2 * 4 + 1  # after the embeddings, twice in a layer, before the head
    masks: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        share = (tensor == 0).float().mean() if tensor.is_floating_point() else torch.zeros(())
        if 0.2 < share < 0.4 and torch.unique(tensor).numel() == 2:
            masks[tensor.data_ptr()] = tensor.numel()
        return tensor

    ids = sequences(LENGTHS.tolist())
    shape = PackedShape(num_tokens=int(LENGTHS.sum()), num_slots=4, max_length=40)
    execution = PackedModel(model, PackedForm(pooling="first", first_position=0), plain=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        loss = execution(packed_inputs(ids, shape, padding_id=0)).logits.sum()
    assert loss.requires_grad
    assert sum(masks.values()) == pytest.approx(lever.cost(work_of(model)).step_bytes, rel=0.12)  # the head has 4 rows


def test_compiling_saves_some_of_each_step() -> None:
    work = work_of(FAMILIES["bert"].model(**WIDE))
    eager, captured, compiled = (
        ExecutionMode(value=value, reason="a test").cost(work) for value in ("eager", "captured", "compiled")
    )
    assert eager == Cost()
    assert (captured.step_s, captured.resident_bytes) == (0.0, 4 * work.num_trained)
    assert 0 > compiled.step_s > -work.products_s(work.num_tokens)


def test_costs_add_up() -> None:
    """Those of all levers are a step's: products of all places, filled or not, attention, and one update."""
    model = FAMILIES["bert"].model(**WIDE)
    assembly, work = assembly_of(model), work_of(model)
    assembly.recipe([Packing, TokenBudget, PrecisionLever, Optimizer, Attention, ExecutionMode, Dropout], "CPU")
    levers = [lever for lever in assembly.levers.values() if lever is not None]
    total = sum((lever.cost(work) for lever in levers), Cost())
    assert total.resident_bytes == (4 + 8) * work.num_parameters
    budgets = assembly.lever(TokenBudget).budgets
    assert budgets is not None
    assert work.attention is not None
    places = round(work.num_tokens / budgets.fill)
    update_s = 8 * 4 * work.num_parameters / BYTES_PER_S
    attention_s = work.attention.flops(LENGTHS) / FLOPS_PER_S
    assert total.step_s == pytest.approx(work.products_s(places) + attention_s + update_s)

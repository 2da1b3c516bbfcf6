"""Fused layers that keep less for their backward pass: the same gradient to the bit with dropout on, and less work than
a whole layer once more."""

from __future__ import annotations

import copy
import dataclasses
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from brimful.kernels.attention.dispatch import triton_attention
from brimful.kernels.forward_context import ForwardContext
from brimful.kernels.layers import dropout_add_layernorm, dropout_add_prenorm, gelu, glu, postnorm_ops
from brimful.kernels.remade import Remade, note_maker
from brimful.levers.compiled_layers import compiled_for_a_while
from brimful.models.fusion import layer_backend
from brimful.models.model_stats import layers_of
from brimful.models.packed import packed_forward
from brimful.models.packed.activations import Activations, measure_activations
from brimful.models.packed.check_inputs import filled_row
from brimful.models.packed.layer_calls import compiled_modules
from brimful.models.packed.packed_forward import PackedModel
from brimful.models.packed.recompute import call_recomputed, keep_all
from brimful.models.packed.remade_layers import call_remade
from brimful.models.packed.ways import Way, set_ways, ways_of
from models.fusion.test_fusion import settings_of
from tiny import FAMILIES

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute")  # dynamo looks at inputs' gradients

LENGTHS = (3, 6, 2)


@pytest.fixture(autouse=True)
def our_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our kernels on the CPU too."""
    torch._dynamo.reset()
    monkeypatch.setattr(packed_forward, "choose_attention", lambda *_, **__: triton_attention)


def packed(family: str) -> Any:
    sizes = settings_of(family, num_layers=2) | {"dropout": 0.3 if family == "bert" else 0.0}
    return PackedModel(FAMILIES[family].model(**sizes).train(), FAMILIES[family].form)


def fused(family: str) -> Any:
    execution = packed(family)
    for layer in layers_of(execution.model) or ():
        layer.compile(dynamic=True, backend=partial(layer_backend, note=pytest.fail))
    execution.run_whole()
    return execution


def row_of(execution: Any, scale: int = 1) -> Any:
    draw = np.random.default_rng(0)
    ids = [draw.integers(5, 40, length).astype(np.int32) for length in LENGTHS * scale]
    return filled_row(ids, execution.model.config, (4, "triton_attention"))


def gradient_of(execution: Any, ways: dict[int, Way]) -> Tensor:
    set_ways(list(layers_of(execution.model) or ()), ways)
    context = ForwardContext(seeded_dropout=True, seed=torch.tensor(7), places_X=torch.arange(sum(LENGTHS)))
    execution.model.zero_grad(set_to_none=True)
    torch.manual_seed(0)  # of dropout outside of layers
    row = row_of(execution)
    if row.num_tokens != sum(LENGTHS):
        context = dataclasses.replace(context, places_X=torch.arange(row.num_tokens))
    execution(row, context).logits[: len(LENGTHS)].logsumexp(1).sum().backward()
    assert ways_of(list(layers_of(execution.model) or ())) == {n: way for n, way in ways.items() if way}
    keep_all(list(layers_of(execution.model) or ()))
    return torch.cat([p.grad.flatten() for p in execution.model.parameters() if p.grad is not None])


def counted(monkeypatch: pytest.MonkeyPatch, module: Any, name: str) -> list[int]:
    calls, function = [0], getattr(module, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        return function(*args, **kwargs)

    monkeypatch.setattr(module, name, call)
    return calls


#: A family's last function, the function of its activation, and calls of both in a step of two layers by what is kept.
KINDS: dict[str, tuple[tuple[Any, str], tuple[Any, str], dict[Way, tuple[int, int]]]] = {
    "bert": (
        (dropout_add_layernorm, "fused_forward"),
        (gelu, "fused_forward"),
        {Way.KEPT: (4, 2), Way.REMADE: (4, 4), Way.RECOMPUTED: (6, 4), Way.EMPTIED: (8, 4)},
    ),
    "qwen3": (
        (dropout_add_prenorm, "fused_add"),
        (glu, "fused_forward"),
        {Way.KEPT: (2, 2), Way.REMADE: (2, 4), Way.RECOMPUTED: (2, 4), Way.EMPTIED: (2, 4)},
    ),
}


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize("family", list(KINDS))
def test_the_gradient_is_the_same_and_no_more_is_computed_again(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    execution, (last, activation, expected) = fused(family), KINDS[family]
    kept = gradient_of(execution, {})
    ends, activations = counted(monkeypatch, *last), counted(monkeypatch, *activation)
    for way, calls in expected.items():
        ends[0] = activations[0] = 0
        assert torch.equal(gradient_of(execution, dict.fromkeys(range(2), way)), kept)
        assert (ends[0], activations[0]) == calls, way
    assert torch.equal(gradient_of(execution, {0: Way.EMPTIED, 1: Way.REMADE}), kept)
    assert kept.norm() > 0


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize("family", list(KINDS))
def test_what_is_kept_is_measured_on_fused_layers(family: str) -> None:
    """After it, layers are as they were before."""
    execution, weights = packed(family), set[int]()
    model, layers = execution.model, layers_of(execution.model)
    assert layers is not None
    for each in (*model.parameters(), *model.buffers()):
        weights.add(each.untyped_storage().data_ptr())

    def run(inputs: Any) -> Tensor:
        return execution(inputs, ForwardContext(seeded_dropout=True)).logits

    sizes = [row_of(execution), row_of(execution, 3)]
    with compiled_for_a_while(execution, note=pytest.fail):
        assert (execution.last is not None) == (family == "bert")
        found = measure_activations(layers, run, sizes, weights, torch.device("cpu"))
    layer, width, wide = found.layers[0], 32 * 4, 48 * 4
    assert layer.remade == pytest.approx(wide)
    assert layer.ending == pytest.approx(width + 8 if family == "bert" else 0)  # and a row's mean and deviation
    assert layer.input == pytest.approx(width)
    assert layer.kept > 2 * wide + 4 * width
    assert layer.forward_s > 0
    assert min(layer.remade_s, layer.ending_s) >= 0
    if family == "bert":  # what follows attention in the last layer is given first tokens only
        assert found.layers[1].kept < layer.kept
    assert execution.last is None
    assert not compiled_modules(model)


@pytest.mark.thorough
def test_what_a_recomputed_layer_keeps_goes_with_the_backward_pass() -> None:
    execution = fused("bert")
    set_ways(list(layers_of(execution.model) or ()), dict.fromkeys(range(2), Way.RECOMPUTED))
    loss = execution(row_of(execution), ForwardContext(seeded_dropout=True)).logits[: len(LENGTHS)].sum()
    nodes, seen = [loss.grad_fn], set[Any]()
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            nodes += [each for each, _ in node.next_functions]
    calls: list[Any] = [node for node in seen if hasattr(node, "num_given")]
    assert len(calls) == 2
    kept = [[weakref.ref(each) for each in call.saved_tensors[call.num_given :]] for call in calls]
    assert all(len(each) == 2 and all(ref() is not None for ref in each) for each in kept)
    loss.backward()
    assert not any(ref() is not None for each in kept for ref in each)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_rows_that_another_function_reads_are_not_left_out() -> None:
    """Of a layer that gives its last rows, and what it makes of them."""
    gain, shift = torch.ones(32, requires_grad=True), torch.zeros(32, requires_grad=True)
    draw = torch.Generator().manual_seed(0)
    weights = [torch.randn(32, 32, generator=draw).requires_grad_() for _ in range(2)]
    x = torch.randn(1, 9, 32, generator=draw, requires_grad=True)
    bias = torch.zeros(32, requires_grad=True)

    def layer(x: Tensor) -> tuple[Tensor, Tensor]:
        y = postnorm_ops.linear_dropout_add_norm(x, weights[0], bias, x, gain, shift, 1e-12, 0.0)
        return y, postnorm_ops.linear(y, weights[1], None)

    found = []
    with ForwardContext().active():
        for call in (lambda f, given: f(given), call_recomputed):
            one, other = call(layer, x)
            found.append(torch.autograd.grad(one.sin().sum() + other.sin().sum(), x)[0])
    assert torch.equal(*found)


def test_a_result_that_was_written_to_is_kept() -> None:
    x = torch.arange(4.0, requires_grad=True)
    given_back = []

    def twice(given: Tensor) -> Tensor:
        given_back.append(given)
        return given * 2

    with Remade().active():
        y = x * 2
        note_maker(y, twice, x)
        z = (y * y).sum()
        w = x * 3
        note_maker(w, lambda given: given * 5, x)  # a wrong one, if it were used
        w.add_(1)
        z = z + (w * w).sum()
    z.backward()
    assert given_back
    assert torch.equal(x.grad, 8 * x.detach() + 6 * (3 * x.detach() + 1))


def test_an_input_that_was_written_to_is_not_computed_with() -> None:
    """Before its result is saved that is kept; after it, as autograd has it, an error."""
    x = torch.arange(-2.0, 2.0, requires_grad=True)
    with Remade().active():
        h = x * 1
        y = h.relu()
        note_maker(y, torch.relu, h)
        h.add_(3)
        (y * y).sum().backward()
        assert torch.equal(x.grad, 2 * x.detach().relu())
        h = x * 1
        y = h.relu()
        note_maker(y, torch.relu, h)
        z = (y * y).sum()
        h.add_(3)
    with pytest.raises(RuntimeError, match="was written to"):
        z.backward()


def test_a_model_whose_results_are_made_again_is_copied_and_saved(tmp_path: Path) -> None:
    model = FAMILIES["bert"].model(**settings_of("bert", num_layers=2))
    layers: Any = layers_of(model)
    set_ways(list(layers), {0: Way.REMADE})
    torch.save(model, tmp_path / "model.pt")
    copied = copy.deepcopy(model)
    assert copied.bert.encoder.layer[0]._gradient_checkpointing_func is call_remade


def test_ways_go_from_all_to_the_input_alone() -> None:
    assert [way.value for way in Way] == [0, 1, 2, 3]
    assert Activations(layers=(), outside=0, fixed=7).bytes(3) == 7

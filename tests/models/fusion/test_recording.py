"""Recordings: what they serve, what is left to torch's compiler, and parts of layers on padded rows."""

from __future__ import annotations

import copy
import gc
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor

pytest.importorskip("triton")

from brimful.kernels.layout import Segments
from brimful.levers import compiled_layers
from brimful.models import fusion
from brimful.models.fusion import recording
from brimful.models.model_stats import layer_lists
from brimful.models.packed import packed_forward
from heads.tiny_heads import tiny_model
from models.fusion.test_fusion import SHORT, WIDE, our_attention, settings_of
from step.test_step import ROWS, make_step
from tiny import FAMILIES
from tolerances import MODEL_FP32, difference

__all__ = ["our_attention"]


def test_one_recording_serves_rows_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Token budgets differ in tokens, segments, and the longest of these."""
    recorded, record = list[Any](), recording.Recorded._record
    monkeypatch.setattr(recording.Recorded, "_record", lambda *given: recorded.append(given) or record(*given))
    model: Any = FAMILIES["bert"].model(**settings_of("bert", num_layers=2))
    layer = model.bert.encoder.layer[1]
    recording.record_calls([layer], fusion.fuse, backend="eager")
    for num_tokens, lengths in ((32, [5, 27]), (48, [40, 7, 1]), (61, [59, 2])):
        offsets = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
        numbers = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
        segments = Segments(cu_seqlens_N=offsets, segment_T=numbers, max_length=max(lengths), typical_length=9)
        model.set_attn_implementation(packed_forward.PACKED)
        x = torch.randn(1, num_tokens, WIDE["hidden_size"])
        given = {"attention_mask": None, "segments": segments, "plain": False}
        with torch.no_grad():
            assert torch.allclose(layer(x, **given), layer._call_impl(x, **given), atol=1e-5)
    assert len(recorded) == 1


def test_nothing_of_a_step_outlives_it() -> None:
    """A gradient function of a weight that is still there belongs to the stream of its step: no capture takes it."""

    def is_alive(parameter: torch.nn.Parameter) -> bool:
        for _ in range(2):  # a node that was made anew has no mark
            ((node, _),) = parameter.view_as(parameter).grad_fn.next_functions  # type: ignore[union-attr]
            found, node.metadata["seen"] = "seen" in node.metadata, True
            del node
        return found

    model: Any = FAMILIES["bert"].model(**settings_of("bert"))
    step = make_step(model)
    compiled_layers.compile_layers(step.execution, fused=True, note=pytest.fail)
    gc.disable()
    try:
        step.run(SHORT).read()
        assert not [name for name, parameter in model.named_parameters() if is_alive(parameter)]
    finally:
        gc.enable()


class _Calls(recording.Recorded):
    """Calls a layer by its recording, or by what stands for dynamo, and counts both."""

    def __init__(self, layer: torch.nn.Module, forms: dict[Any, Any] | None = None) -> None:
        super().__init__(layer, self.cover, lambda _: self.compiled, forms=forms)
        self.recorded, self.by_dynamo = 0, 0

    def cover(self, graph: torch.fx.GraphModule) -> torch.fx.GraphModule:
        self.recorded += 1
        return graph

    def compiled(self, *args: Any, **kwargs: Any) -> Any:
        self.by_dynamo += 1
        return self._module()._call_impl(*args, **kwargs)  # type: ignore[union-attr]


class _Layer(torch.nn.Module):
    """A layer of which `change` is a part."""

    def __init__(self, change: Callable[[Any, torch.Tensor], Any], forms: dict[Any, Any] | None = None) -> None:
        super().__init__()
        self.linear, self.dropout, self.change = torch.nn.Linear(8, 8), torch.nn.Dropout(0.5), change
        self.factor, self.layer_idx, self._hidden, self.settings = 1.0, 0, 1.0, {"scale": [1.0]}
        self.register_buffer("shift", torch.ones(8))
        self._compiled_call_impl: Any = _Calls(self, forms)

    def forward(self, x: torch.Tensor, *, pair: tuple[torch.Tensor, torch.Tensor] | None = None) -> Any:
        y = self.change(self, self.linear(x).view(1, x.shape[1], 2, -1).flatten(2) + self.shift)
        return self.dropout(y), None if pair is None else pair[0] - pair[1]


def _calls(layer: _Layer) -> _Calls:
    found = layer._compiled_call_impl
    assert isinstance(found, _Calls)
    return found


def _plain(layer: _Layer, *args: Any, **kwargs: Any) -> Any:
    return layer._call_impl(*args, **kwargs)


def test_one_recording_serves_every_number_of_tokens_and_weights_as_they_are() -> None:
    layer = _Layer(lambda layer, x: x * layer.factor * x.shape[1]).eval()
    for count in (2, 7, 8, 61, 300):
        x = torch.randn(1, count, 8)
        for weight in (layer.linear.weight, torch.nn.Parameter(torch.randn(8, 8))):
            layer.linear.weight = weight
            for found, expected in zip(layer(x, pair=(x, x + 1)), _plain(layer, x, pair=(x, x + 1)), strict=True):
                assert torch.equal(found, expected)
    assert (_calls(layer).recorded, _calls(layer).by_dynamo) == (1, 0)


def test_another_call_is_recorded_anew() -> None:
    layer, x = _Layer(lambda layer, x: x * layer.factor).eval(), torch.randn(1, 5, 8)
    layer(x)
    layer.factor = 3.0
    assert torch.equal(layer(x)[0], _plain(layer, x)[0])
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(layer(x)[0], _plain(layer, x)[0])
    with torch.inference_mode():
        assert torch.equal(layer(x)[0], _plain(layer, x)[0])
    layer.train()
    assert (layer(torch.ones(1, 300, 8))[0] == 0).any()
    assert (_calls(layer).recorded, _calls(layer).by_dynamo) == (5, 0)


def test_a_cast_to_what_a_tensor_is_stands_for_the_tensor() -> None:
    """To fp32 it is another one under autocast, and a copy is one always."""

    def changed(layer: Any, x: torch.Tensor) -> torch.Tensor:
        return layer.linear(x).float() + x.float() + x.to(torch.float32, copy=True)

    layer, x, casts = _Layer(changed).eval(), torch.randn(1, 5, 8), list[list[int]]()

    def cover(graph: torch.fx.GraphModule) -> torch.fx.GraphModule:
        casts.append([len(graph.graph.find_nodes(op="call_method", target=name)) for name in ("float", "to")])
        return graph

    layer._compiled_call_impl = recording.Recorded(layer, cover, pytest.fail)
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            assert torch.equal(layer(x)[0], _plain(layer, x)[0])
    assert casts == [[0, 1], [1, 1]]


class _Twice(torch.autograd.Function):
    """A function whose gradient is not that of what it computes."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 3


class _Owner:
    """An object of a model's own, which may be in any state."""

    def twice(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


def _kept(layer: Any, x: torch.Tensor) -> torch.Tensor:
    layer.kept = x
    return x


def _counted(layer: Any, x: torch.Tensor) -> torch.Tensor:
    layer.settings["calls"] = layer.settings.get("calls", 0) + 1
    return x


def _added_through_a_view(x: torch.Tensor) -> torch.Tensor:
    view = x.view(-1, 8)
    view += 1
    return x


def _hooked(x: torch.Tensor) -> torch.Tensor:
    x.register_hook(lambda gradient: gradient * 0.1)
    return x


def _in_full(x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return x @ torch.ones(8, 8)


@pytest.mark.parametrize(
    "change",
    [
        lambda layer, x: x * 2 if x.shape[1] > 100 else x,
        lambda layer, x: x / math.sqrt(x.shape[1]),
        lambda layer, x: x.reshape(1, 2 * x.shape[1], -1).view(x.shape),
        lambda layer, x: x + layer.other,
        lambda layer, x: x.mul_(2),
        lambda layer, x: (x + 1) * x.add_(1),
        lambda layer, x: (x + 1) * x.float().add_(1),
        lambda layer, x: x if x.sum() > 0 else -x,
        lambda layer, x: torch.from_numpy(x.detach().numpy() * 2),
        lambda layer, x: _Twice.apply(x),
        lambda layer, x: x * 2 if layer.layer_idx == 2 else x,
        lambda layer, x: x * 2 if x.shape[1] % 16 else x,
        lambda layer, x: _kept(layer, x * 2),
        lambda layer, x: _counted(layer, x),
        lambda layer, x: _added_through_a_view(x * 1),
        lambda layer, x: torch.nn.functional.relu(x * 1, inplace=True),
        lambda layer, x: _hooked(x * 1),
        lambda layer, x: _in_full(x),
        lambda layer, x: layer.owner.twice(x),
    ],
    ids=[
        *(
            "branch",
            "root",
            "multiple",
            "elsewhere",
            "in place",
            "seen",
            "cast",
            "numbers",
            "numpy",
            "gradient",
            "number",
            "even",
        ),
        *("state", "counter", "view", "inplace", "hook", "autocast", "object"),
    ],
)
def test_what_a_recording_does_not_show_is_left_to_the_compiler(change: Any) -> None:
    layer, x = _Layer(change).eval(), torch.randn(1, 5, 8)
    for name, own in {"other": torch.randn(8), "owner": _Owner()}.items():
        if name in change.__code__.co_names:
            vars(layer)[name] = own
    assert torch.equal(layer(x)[0], _plain(layer, x)[0])
    assert (_calls(layer).recorded, _calls(layer).by_dynamo) == (0, 1)
    assert not any(isinstance(each, FakeTensor) for each in vars(layer).values())


def test_hooks_and_other_shapes_are_left_to_the_compiler() -> None:
    layer, x = _Layer(lambda layer, x: x).eval(), torch.randn(1, 5, 8)
    layer(x)
    handle = layer.linear.register_forward_hook(lambda module, given, made: made * 2)
    assert torch.equal(layer(x)[0], _plain(layer, x)[0])
    handle.remove()
    assert _calls(layer).by_dynamo == 1
    layer(x, pair=[x, x])
    layer(x[:, :1])
    assert (_calls(layer).recorded, _calls(layer).by_dynamo) == (2, 2)


def test_layers_of_one_kind_alone_share_a_recording() -> None:
    """Settings at any depth, under any name, and weights that are one tell layers apart; a layer's number does not."""
    forms: dict[Any, Any] = {}

    def scaled(layer: Any, x: torch.Tensor) -> torch.Tensor:
        return x * layer._hidden * layer.settings["scale"][0] + layer.dropout.other(x)

    def make(number: int, hidden: float = 1.0, *, tied: bool = False) -> _Layer:
        layer = _Layer(scaled, forms).eval()
        layer.layer_idx, layer._hidden = number, hidden
        layer.dropout.other = torch.nn.Linear(8, 8, bias=False)
        if tied:
            layer.dropout.other.weight = layer.linear.weight
        return layer

    x = torch.randn(1, 5, 8)
    layers = [make(0), make(1), make(2, 2.0), make(3, tied=True)]
    for layer in layers:
        assert torch.equal(layer(x)[0], _plain(layer, x)[0])
    layers[0].settings["scale"][0] = 3.0
    assert torch.equal(layers[0](x)[0], _plain(layers[0], x)[0])
    assert [_calls(layer).recorded for layer in layers] == [2, 0, 1, 1]
    assert len(forms) == 4


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize("kind", ["bert", "nystromformer", "convbert", "lilt", "xlnet"])
def test_parts_of_layers_on_padded_rows_are_ours(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses and gradients are those of the layers as they are, for rows of two lengths."""
    model, found = tiny_model(kind).train(), list[bool]()
    plain, fused = make_step(copy.deepcopy(model), packed=False), make_step(model, packed=False)
    fuse = fusion.fuse_parts

    def counted(graph: torch.fx.GraphModule) -> Any:
        made = fuse(graph)
        found.append(made is not None)
        return made

    monkeypatch.setattr(fusion, "fuse_parts", counted)
    compiled_layers.fuse_padded_layers(model, layer_lists(model))
    expected, made = (step.run(ROWS.batch(0, packed=False)).read() for step in (plain, fused))
    assert made.loss == pytest.approx(expected.loss, rel=1e-5)
    assert made.grad_norm == pytest.approx(expected.grad_norm, rel=1e-4)
    probed = [step.probe(ROWS.batch(1, packed=False)) for step in (fused, plain)]
    torch.testing.assert_close(probed[0].losses_N, probed[1].losses_N, rtol=1e-5, atol=0.0)
    whole = [torch.cat([each.flatten() for each in other.gradients]) for other in probed]
    assert difference(*whole) < MODEL_FP32
    assert found
    assert all(found)


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize("case", ["frozen", "elsewhere"])
def test_padded_layers_with_frozen_or_shared_weights_run_as_they_are(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("lilt").train()
    layer, found = model.lilt.encoder.layer[0], list[Any]()
    if case == "frozen":
        layer.intermediate.dense.weight.requires_grad = False
    else:
        model.classifier.dense.weight = layer.attention.output.dense.weight
    fuse = fusion.fuse_parts
    monkeypatch.setattr(fusion, "fuse_parts", lambda graph: found.append(fuse(graph)) or found[-1])
    plain = make_step(copy.deepcopy(model), packed=False)
    compiled_layers.fuse_padded_layers(model, layer_lists(model))
    fused = make_step(model, packed=False)
    expected, made = (step.run(ROWS.batch(0, packed=False)).read() for step in (plain, fused))
    assert made.loss == pytest.approx(expected.loss, rel=1e-5)
    assert made.grad_norm == pytest.approx(expected.grad_norm, rel=1e-4)
    if case == "frozen":
        assert [None if form is None else "ours" for form in found][:1] == [None]
    else:
        assert not found


@pytest.mark.parametrize("activation", [lambda x: x, torch.nn.functional.gelu], ids=["linear", "gelu"])
def test_what_a_product_made_may_be_changed_in_place(activation: Any) -> None:
    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = torch.nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = activation(self.up(x))
            y += x
            return y

    layer, x = Layer(), torch.randn(2, 5, 8, requires_grad=True)
    recording.record_calls([layer], fusion.fuse_parts, fixed=True)
    found, expected = layer(x), layer._call_impl(x)
    assert torch.allclose(found, expected, atol=1e-6)
    for one, two in zip(
        *(torch.autograd.grad(y.sum(), [x, *layer.parameters()]) for y in (found, expected)), strict=True
    ):
        assert torch.allclose(one, two, atol=1e-5)

"""Layers on fused kernels against the same layers as they are: which families are covered, losses, gradients, weights.

On the CPU by Triton's interpreter, in fp32 and without dropout; dropout is checked piece by piece in `test_blocks.py`.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch.fx import GraphModule
from transformers import OPTConfig, OPTForSequenceClassification

pytest.importorskip("triton")

from brimful.data.batches.batch import Batch, make_batch
from brimful.data.batches.packing import Budgets
from brimful.kernels import float8
from brimful.kernels.attention.dispatch import Attention, relative_attention, triton_attention
from brimful.kernels.attention.pattern import Pattern
from brimful.models import fusion
from brimful.models.fusion.nodes import is_parameter
from brimful.models.fusion.recording import record_calls
from brimful.models.model_stats import embeddings_of, layers_of
from brimful.models.packed import check_inputs, equivalence, packed_forward, tried_row
from brimful.step.step import Step
from step.test_step import PACKED, TASK, make_step
from tiny import FAMILIES, sequences
from tolerances import MODEL_FP32, difference

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute")  # dynamo looks at inputs' gradients

#: Heads of 16 numbers: the smallest that our attention kernel takes.
WIDE = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 48}

ONE_LAYER = WIDE | {"num_hidden_layers": 1}
#: Every token is interpreted in each layer: few of them, in two shapes with a tail of padding.
FEW = dataclasses.replace(
    PACKED, budgets=Budgets(tokens=(32, 48), fill=1.0), num_slots=4, max_length=32, groups=False
)  # fmt: skip


def batch_of(*lengths: int) -> Batch:
    return make_batch(0, np.arange(len(lengths)), sequences([*lengths]), None, np.arange(len(lengths)) % 3, TASK, FEW)


#: Three samples in one micro-batch of 32 tokens, and five in two, of 48 and 32.
SHORT, LONG = batch_of(5, 17, 2), batch_of(5, 17, 2, 30, 1)


@pytest.fixture(autouse=True)
def our_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our kernels on the CPU too."""
    torch._dynamo.reset()

    def ours(device: torch.device, dtype: torch.dtype, pattern: Pattern, *_: Any) -> Attention:
        return triton_attention if pattern.relative is None else relative_attention

    monkeypatch.setattr(packed_forward, "choose_attention", ours)


def compiled(model: Any) -> list[bool]:
    """Has a model's layers and embeddings recorded, or traced by dynamo where they cannot be; the list gets, for each
    graph, whether it was covered."""
    covered: list[bool] = []

    def cover(graph_module: GraphModule, inputs: Sequence[Any] = ()) -> Callable[..., Any]:
        fused = fusion.fuse(graph_module)
        covered.append(fused is not None)
        return fused or graph_module

    layers = layers_of(model)
    assert layers is not None
    modules = [module for module in (embeddings_of(model), *layers) if module is not None]
    record_calls(modules, cover, backend=cover)
    return covered


#: Families of pre-norm layers, the heads that their keys have, and how many graphs they are traced as. ModernBERT's
#: layers are of three kinds: the first has no norm before its attention, the others see a window or everything.
PRENORM = {"modernbert": (None, 4), "qwen3": (1, 1), "llama": (2, 1), "qwen2": (1, 1)}


def settings_of(family: str, num_layers: int = 1) -> dict[str, Any]:
    """One layer, unless a family's differ by their number: each token is interpreted in each of them."""
    if family == "modernbert":
        return WIDE
    if family == "distilbert":
        return {"dim": 32, "n_heads": 2, "hidden_dim": 48, "n_layers": num_layers}
    keys = {"num_key_value_heads": PRENORM[family][0], "head_dim": 16} if family in PRENORM else {}
    return WIDE | keys | {"num_hidden_layers": num_layers} | ({"embedding_size": 32} if family == "electra" else {})


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize("family", ["bert", "roberta", "electra", "distilbert", "mpnet", "deberta-v2"])
def test_a_fused_step_is_the_plain_one(family: str) -> None:
    model = FAMILIES[family].model(**settings_of(family, num_layers=2 if family == "bert" else 1))
    plain = make_step(copy.deepcopy(model), family=family)
    fused = make_step(model, family=family)
    covered = compiled(model)
    for batch in [LONG, SHORT] if family == "bert" else [SHORT]:
        expected, found = plain.run(batch).read(), fused.run(batch).read()
        assert found.loss == pytest.approx(expected.loss, rel=1e-5)
        assert found.grad_norm == pytest.approx(expected.grad_norm, rel=1e-4)
    assert covered == [family != "deberta-v2", True]  # embeddings; one graph for all layers and numbers of tokens


@pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning", "ignore:invalid value:RuntimeWarning")
def test_a_step_in_fp8() -> None:
    """Near the plain one, with copies of weights renewed at each update; what is not finite is seen and skipped."""
    model = FAMILIES["bert"].model(**ONE_LAYER)
    plain, fused = make_step(copy.deepcopy(model)), make_step(model)
    compiled(model)
    plan = float8.Plan()
    fused.precision = dataclasses.replace(fused.precision, plan=plan)
    weight = model.bert.encoder.layer[0].intermediate.dense.weight
    expected = plain.run(SHORT).read()
    found = fused.run(SHORT).read()
    assert 0 < abs(found.loss - expected.loss) < 0.03 * expected.loss
    assert found.grad_norm == pytest.approx(expected.grad_norm, rel=0.1)
    assert plan.met == {(96, 32): False, (32, 32): False, (48, 32): True, (32, 48): False}  # the up product, to GELU
    copied = plan.weight(weight, transposed=True, keep=True)
    assert torch.equal(copied.restored(), float8.columns_of(weight).restored())
    with torch.no_grad():
        weight[3, 5] = float("inf")
    assert not fused.run(SHORT).read().applied


def float8_check(family: str, **settings: Any) -> tuple[float | None, dict[float8.Shape, bool]]:
    """In fp32 besides: Triton's interpreter has no bf16 to speak of."""
    model = FAMILIES[family].model(**settings).eval()
    form = FAMILIES[family].form
    few = sequences([5, 17, 2])
    row = check_inputs.packed_row(few, model.config, 64)
    logits = packed_forward.PackedModel(model, form, plain=True)(row).logits[: len(few)]
    gradient = tried_row.gradients_of(model, logits)
    num_tokens = sum(len(each) for each in few)
    case = tried_row.TriedRow(
        form=form, row=row, num_tokens=num_tokens, plain=logits.detach(), gradient=gradient, precision="fp32"
    )
    return equivalence._float8_error(model, case)


def test_the_check_of_layers_in_fp8() -> None:
    """Sizes that matrix units do not take are left out."""
    error, shapes = float8_check("bert", **ONE_LAYER | {"intermediate_size": 40})
    assert error is not None
    assert 0.01 < error < 1
    assert set(shapes) == {(96, 32), (32, 32)}


@pytest.mark.parametrize("family", ["llama", "albert"])
def test_layers_without_fused_kernels_have_no_fp8(family: str) -> None:
    """Those that our kernels do not cover, and those that are shared."""
    settings = WIDE | {"num_key_value_heads": 2, "head_dim": 16} if family == "llama" else {}
    assert float8_check(family, **settings) == (None, {})


def gradient(step: Step, batch: Batch) -> tuple[float, torch.Tensor]:
    """The loss of a batch's first micro-batch, and the gradient of all parameters together."""
    model: Any = step.execution.model
    model.zero_grad()
    loss = float(step.accumulate(batch, 0).sum())
    return loss, torch.cat([p.grad.flatten().float() for p in model.parameters() if p.grad is not None])


@pytest.mark.sampled
@pytest.mark.parametrize("family", PRENORM)
def test_fused_pre_norm_layers_have_the_plain_gradient(family: str) -> None:
    """With windows of 9 tokens in segments of 1 to 30; each kind of layer is compiled once for any number of tokens."""
    model = FAMILIES[family].model(**settings_of(family))
    plain, fused = make_step(copy.deepcopy(model), family=family), make_step(model, family=family)
    covered = compiled(model)
    for batch in [LONG, SHORT] if family == "modernbert" else [LONG]:
        (expected, wanted), (loss, found) = gradient(plain, batch), gradient(fused, batch)
        assert loss == pytest.approx(expected, rel=1e-5)
        assert difference(found, wanted) < MODEL_FP32
    assert covered == [True] * PRENORM[family][1]


@pytest.mark.sampled
@pytest.mark.parametrize("family", PRENORM)
def test_each_weight_of_pre_norm_layers_is_read_once(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stream of residuals is what norms give on: what they were given would be made again for it."""
    found, fuse = list[GraphModule](), fusion.fuse
    monkeypatch.setattr(fusion, "fuse", lambda graph: found.append(fused := fuse(graph)) or fused)
    model = FAMILIES[family].model(**settings_of(family))
    compiled(model)
    gradient(make_step(model, family=family), SHORT)
    weights = [node for each in found for node in each.graph.find_nodes(op="placeholder") if is_parameter(node)]
    assert weights
    for node in weights:
        assert [user.target in fusion._OURS for user in node.users] == [True]


@pytest.mark.slow
def test_masks_of_pre_norm_layers_repeat_and_are_those_of_their_seed() -> None:
    model = FAMILIES["modernbert"].model(dropout=0.3, num_hidden_layers=2, **WIDE)
    covered = compiled(model)
    step, other = make_step(model, family="modernbert"), make_step(model, family="modernbert", seed=1)
    (loss, found), (again, same), (another, _) = gradient(step, SHORT), gradient(step, SHORT), gradient(other, SHORT)
    assert loss == again != another
    assert torch.allclose(found, same, atol=1e-7)  # the embeddings' is added atomically
    assert all(covered)


class Late:
    """Stands for the stream beside the backward pass: what is computed there is there when the pass has ended."""

    is_active = True

    def __init__(self) -> None:
        self._made: list[tuple[torch.Tensor, torch.Tensor]] = []

    def run(self, work: Callable[[], Any], inputs: tuple[torch.Tensor, ...]) -> Any:
        found = work()
        parts = [found] if isinstance(found, torch.Tensor) else list(found)
        given = [None if part is None else torch.full_like(part, float("nan")) for part in parts]
        # Views, since autograd takes over what nobody else holds, and copies the rest.
        self._made += [(late.detach(), part) for late, part in zip(given, parts, strict=True) if late is not None]
        return given[0] if isinstance(found, torch.Tensor) else tuple(given)

    def end(self) -> None:
        for late, part in self._made:
            late.copy_(part)


@pytest.mark.sampled
@pytest.mark.parametrize("family", ["bert", "qwen3", "mpnet", "deberta-v2", "one norm twice"])
def test_nothing_reads_what_is_computed_beside_the_backward_pass(family: str) -> None:
    """Parameters that are read twice among it, whose gradients autograd adds."""
    twice = family == "one norm twice"
    family = "bert" if twice else family
    model = FAMILIES[family].model(**settings_of(family))
    if twice:
        for layer in layers_of(model) or ():
            layer.output.LayerNorm = layer.attention.output.LayerNorm
    plain, fused = make_step(copy.deepcopy(model), family=family), make_step(model, family=family)
    covered = compiled(model)
    _, wanted = gradient(plain, SHORT)
    late = Late()
    fused.update.side_stream = late  # type: ignore[assignment]
    model.zero_grad()
    fused.accumulate(SHORT, 0)
    late.end()
    found = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    assert covered[-1]  # all layers
    assert late._made
    assert difference(found, wanted) < MODEL_FP32


@pytest.mark.slow
def test_evaluation_between_steps() -> None:
    """Without gradients and dropout the same layers run on the same kernels."""
    model = FAMILIES["bert"].model(dropout=0.3, **ONE_LAYER)
    plain = copy.deepcopy(model)
    compiled(model)
    step = make_step(model)
    losses = [float(step.accumulate(SHORT, 0).sum())]
    inputs = SHORT.micro_batches[0].inputs
    with torch.no_grad():
        found = packed_forward.PackedModel(model.eval(), step.execution.form)(inputs).logits  # type: ignore[attr-defined]
        expected = packed_forward.PackedModel(plain.eval(), step.execution.form)(inputs).logits  # type: ignore[attr-defined]
    assert torch.allclose(found, expected, atol=1e-5)
    model.train()
    losses.append(float(step.accumulate(SHORT, 0).sum()))
    assert losses[0] == losses[1]  # masks again, the same for one seed


def test_frozen_parameters_get_no_gradient() -> None:
    model = FAMILIES["bert"].model(**ONE_LAYER)
    frozen = [model.bert.embeddings.word_embeddings.weight, model.bert.encoder.layer[0].output.dense.weight]
    for parameter in frozen:
        parameter.requires_grad_(False)
    before = [parameter.clone() for parameter in frozen]
    compiled(model)
    step = make_step(model)
    assert step.run(SHORT).read().applied
    assert all(torch.equal(a, b) for a, b in zip(before, frozen, strict=True))


@pytest.mark.slow
def test_other_layers_are_left_to_the_compiler() -> None:
    """Gemma's gains are learned as what is added to one, and its layers have norms behind what is added."""
    model = FAMILIES["gemma2"].model(num_key_value_heads=2, head_dim=16, **WIDE)
    covered = compiled(model)
    step = make_step(model, family="gemma2")
    assert step.run(SHORT).read().applied
    assert covered
    assert not any(covered)


def graph_of(function: Callable[..., Any], *inputs: Any) -> GraphModule:
    found: list[GraphModule] = []

    def backend(graph_module: GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        found.append(graph_module)
        return graph_module.forward

    torch.compile(function, backend=backend, dynamic=True)(*inputs)
    return found[0]


class Layer(torch.nn.Module):
    """Variations of the layers that patterns look for."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(16, 32), torch.nn.Linear(32, 16, bias=kind != "no bias")
        self.norm = torch.nn.LayerNorm(16, elementwise_affine=kind != "no gain")
        self.kind = kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        approximate = "tanh" if self.kind == "approximate" else "none"
        wide = torch.nn.functional.gelu(self.first(x), approximate=approximate)
        narrow = self.second(wide)
        total = torch.nn.functional.dropout(narrow, 0.0, True) + (x[:, :1] if self.kind == "broadcast" else x)
        if self.kind == "in place":
            x += narrow
            total = x
        out: torch.Tensor = self.norm(total)
        return out + narrow if self.kind == "two readers" else out


@pytest.mark.sampled
@pytest.mark.parametrize("kind", ["plain", "no bias", "no gain", "approximate", "two readers", "broadcast", "in place"])
def test_what_only_looks_like_a_pattern_is_not_taken(kind: str) -> None:
    torch.manual_seed(0)
    layer, x = Layer(kind), torch.randn(1, 20, 16)
    fused = fusion.fuse(graph_of(layer, x))
    assert (fused is not None) == (kind == "plain")


class Stream(torch.nn.Module):
    """Variations of the pre-norm layers that patterns look for."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.wide, self.narrow = torch.nn.Linear(16, 64, bias=False), torch.nn.Linear(32, 16)
        self.norm = torch.nn.LayerNorm(16, bias=kind == "shift")
        self.gain = torch.nn.Parameter(torch.ones(16))
        self.kind = kind

    def rms_norm(self, x: torch.Tensor) -> torch.Tensor:
        axis = 1 if self.kind == "another axis" else -1
        scaled = x * torch.rsqrt(x.pow(4 if self.kind == "fourth power" else 2).mean(axis, keepdim=True) + 1e-6)
        return (1 + self.gain if self.kind == "gain of one more" else self.gain) * scaled

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.norm(x) if self.kind in ("plain", "shift") else self.rms_norm(x)
        a, b = self.wide(rows).chunk(2, dim=-1)
        if self.kind == "gate first":
            a, b = b, a
        gate = torch.nn.functional.silu(a) * b
        out: torch.Tensor = (x[:, :1] if self.kind == "broadcast" else x) + self.narrow(gate)
        return out + rows if self.kind == "two readers" else out


@pytest.mark.sampled
@pytest.mark.parametrize(
    "kind",
    ["plain", "rms", "shift", "another axis", "fourth power", "gain of one more", "gate first", "broadcast",
     "two readers"],
)  # fmt: skip
def test_what_only_looks_like_a_pre_norm_layer_is_not_taken(kind: str) -> None:
    torch.manual_seed(0)
    fused = fusion.fuse(graph_of(Stream(kind), torch.randn(1, 20, 16)))
    assert (fused is not None) == (kind in ("plain", "rms"))


@pytest.mark.sampled
@pytest.mark.parametrize("kind", ["plain", "neighbours", "not minus", "second third", "learned"])
def test_what_only_looks_like_rotary_attention_is_not_taken(kind: str) -> None:
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(3 * 32, 16))
    cos, sin = (torch.randn(1, 1, 20, 16).requires_grad_(kind == "learned") for _ in range(2))

    def turned(x: torch.Tensor) -> torch.Tensor:
        first, second = (x[..., ::2], x[..., 1::2]) if kind == "neighbours" else (x[..., :8], x[..., 8:])
        across = torch.cat((second if kind == "not minus" else -second, first), dim=-1)
        return x * cos + across * sin

    def attention(x: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        q, k, v = torch.nn.functional.linear(x, weight).view(1, 20, 3, -1, 16).unbind(dim=-3)
        q, k, v = (each.transpose(1, 2) for each in ((k, q, v) if kind == "second third" else (q, k, v)))
        seed = torch.zeros((), dtype=torch.int64)
        given = (offsets, seed, 20, 20, 0.25, False, 0, 0.0, 0.0)
        heads = (turned(q).squeeze(0), turned(k).squeeze(0), v.squeeze(0))
        out: torch.Tensor = torch.ops.brimful.varlen_attention.default(*heads, *given)[0]
        return out

    module = graph_of(attention, torch.randn(1, 20, 16), torch.tensor([0, 20], dtype=torch.int32))
    found = fusion.fuse(module)
    assert (found is not None) == (kind == "plain")


def test_embeddings_are_not_the_model() -> None:
    """A module that has the layers too is no table of embeddings."""
    config = OPTConfig(
        vocab_size=99, hidden_size=16, num_hidden_layers=1, ffn_dim=24, num_attention_heads=2, word_embed_proj_dim=16
    )
    assert embeddings_of(OPTForSequenceClassification(config)) is None


def test_all_parameters_of_a_fused_layer_learn() -> None:
    torch.manual_seed(0)
    layer, x = Layer("plain"), torch.randn(1, 20, 16, requires_grad=True)
    layer.compile(backend=partial(fusion.layer_backend, note=pytest.fail), dynamic=True)
    twin = copy.deepcopy(layer)
    leaves, twins = [x, *layer.parameters()], [x.detach().requires_grad_(True), *twin.parameters()]
    found = torch.autograd.grad(layer(x).pow(2).sum(), leaves)
    expected = torch.autograd.grad(twin.forward(twins[0]).pow(2).sum(), twins)
    for one, other in itertools.zip_longest(found, expected):
        assert torch.allclose(one, other, atol=1e-4)


def test_what_nothing_compiles_runs_as_it_is_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise RuntimeError("no compiler here")

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", refuse)
    layer, x, told = Layer("approximate"), torch.randn(1, 20, 16), list[str]()
    expected = layer.forward(x)
    layer.compile(backend=partial(fusion.layer_backend, note=told.append), dynamic=True)
    assert torch.equal(layer(x), expected)
    assert told == ["a layer runs uncompiled: no compiler here"]

"""Experts in bf16: what transformers computes of them one by one, all at once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

import brimful
from brimful.models.half_experts import HALF_EXPERTS, ExpertByExpert, _Biases, halve_experts
from brimful.models.packed.host_reads import how_recorded
from heads.tiny_heads import tiny_model
from tolerances import difference


def tiny(kind: str) -> Any:
    torch.manual_seed(0)
    model: Any = tiny_model(kind).eval()
    model.config.pad_token_id = 0
    return model


def implementation(model: Any) -> str:
    return str(model.config._experts_implementation)


def computed(model: Any, dtype: torch.dtype | None) -> list[Tensor]:
    """Logits and gradient of rows without padding."""
    ids = torch.randint(5, 90, (6, 20), generator=torch.Generator().manual_seed(1))
    with torch.autocast("cpu", dtype, enabled=dtype is not None):
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits.float()
    trained = [p for p in model.parameters() if p.requires_grad]
    gradients = torch.autograd.grad(logits.square().sum(), trained, materialize_grads=True)
    return [logits.detach(), torch.cat([gradient.flatten() for gradient in gradients])]


@pytest.mark.parametrize("kind", ["gpt_oss", "qwen3_moe", "jamba"])
def test_they_are_as_near_to_fp32_as_one_by_one(kind: str) -> None:
    model, half = tiny(kind), torch.bfloat16
    exact, grouped = computed(model, None), computed(model, half)
    model.set_experts_implementation("eager")
    one_by_one = [difference(found, there) for found, there in zip(computed(model, half), exact, strict=True)]
    model.set_experts_implementation("grouped_mm")
    halve_experts(model)
    found = computed(model, half)
    for each, there, most in zip(found, exact, one_by_one, strict=True):
        assert difference(each, there) <= 1.25 * most
    assert not torch.equal(found[1], grouped[1])  # which transformers multiplies in fp32
    for each, there in zip(computed(model, None), exact, strict=True):
        assert torch.equal(each, there)


class _Indexed(TorchDispatchMode):
    """Shapes of what gradients of indexing are added up to."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function._overloadpacket.__name__ in ("index_put", "index_put_", "_index_put_impl_"):
            self.shapes.append(tuple(args[0].shape))
        return function(*args, **(kwargs or {}))


def test_gradients_of_their_biases_are_products() -> None:
    model = tiny("gpt_oss")
    biases = {name: p for name, p in model.named_parameters() if name.endswith("proj_bias")}
    assert len(biases) == 4
    shapes = {tuple(bias.shape) for bias in biases.values()}
    gradients = []
    for ours in (False, True):
        if ours:
            halve_experts(model)
        for bias in biases.values():
            bias.grad = None
        with _Indexed() as indexed, torch.autocast("cpu", torch.bfloat16):
            ids = torch.randint(5, 90, (6, 20), generator=torch.Generator().manual_seed(1))
            loss = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits.float().sum()
        with indexed:
            loss.backward()
        assert bool(shapes & set(indexed.shapes)) is not ours
        gradients.append({name: bias.grad for name, bias in biases.items()})
    for name, expected in gradients[0].items():
        assert expected is not None
        assert expected.abs().amax() > 0
        assert difference(gradients[1][name], expected) < 0.05  # bf16's products differ


def test_the_bias_of_each_token_is_its_experts() -> None:
    """As torch has it, forward and backward; of an expert that nobody chose the gradient is zero."""
    random = torch.Generator().manual_seed(0)
    biases = torch.randn(5, 7, generator=random, requires_grad=True)
    experts, gradient = torch.randint(0, 4, (300,), generator=random), torch.randn(300, 7, generator=random)
    found = _Biases(biases)[experts]
    assert torch.equal(found, biases[experts])
    [ours] = torch.autograd.grad(found, biases, gradient)
    [theirs] = torch.autograd.grad(biases[experts], biases, gradient)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    assert ours[4].eq(0).all()
    with torch.autocast("cpu", torch.bfloat16):
        [within] = torch.autograd.grad(_Biases(biases)[experts], biases, gradient)
    assert torch.equal(within, ours)


def test_expert_by_expert_is_what_torch_multiplies_at_once() -> None:
    """One expert has no tokens, and the last tokens no expert."""
    random = torch.Generator().manual_seed(0)
    tokens = torch.randn(40, 16, generator=random).bfloat16()
    weights = torch.randn(4, 16, 24, generator=random).bfloat16()
    ends = torch.tensor([8, 8, 24, 32], dtype=torch.int32)
    expected = torch.nn.functional.grouped_mm(tokens, weights, offs=ends)
    with ExpertByExpert():
        found = torch.nn.functional.grouped_mm(tokens, weights, offs=ends)
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found[:32], expected[:32], rtol=0.01, atol=0.05)
    assert found[:32].abs().amax() > 1
    assert found[32:].eq(0).all()


class _Grouped(TorchDispatchMode):
    """Counts calls of torch's own kernel on a CPU."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten._grouped_mm.default and not isinstance(args[0], FakeTensor):
            self.calls += args[0].device.type == "cpu"
        return function(*args, **(kwargs or {}))


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize("kind", ["gpt_oss", "jamba"])
def test_what_the_host_reads_is_found_expert_by_expert(kind: str) -> None:
    """All at once takes minutes on a CPU: 255 s of four layers of gpt-oss, 21 since."""
    model = tiny(kind)
    halve_experts(model)
    with _Grouped() as grouped:
        found = how_recorded(model, 32, training=True, half=torch.bfloat16)
    assert found.why_not is None
    assert grouped.calls == 0
    with _Grouped() as grouped, torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        model(input_ids=torch.full((2, 8), 7), use_cache=False)
    assert grouped.calls > 0


@pytest.mark.parametrize("why", ["told otherwise", "rows of 28 bytes"])
def test_others_are_left_alone(why: str) -> None:
    model = tiny("mixtral")
    if why == "told otherwise":
        model.set_experts_implementation("batched_mm")
    else:
        experts: Any = next(module for module in model.modules() if hasattr(module, "down_proj"))
        experts.down_proj = torch.nn.Parameter(experts.down_proj[..., :14])
    halve_experts(model)
    assert implementation(model) == ("batched_mm" if why == "told otherwise" else "grouped_mm")


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize(("kind", "packing"), [("gpt_oss", "auto"), ("qwen3_moe", "auto"), ("qwen3_moe", "off")])
def test_a_loop_learns_by_them_and_gives_the_model_back(kind: str, packing: str) -> None:
    """In bf16, beside the plain fp32 model: a step that differs by more than bf16 costs would be refused."""
    random = np.random.default_rng(0)
    lengths = random.integers(4, 24, 32).tolist()
    rows = [{"input_ids": random.integers(5, 90, length), "labels": length % 2} for length in lengths]
    losses = {}
    for precision in ("fp32", "bf16"):
        model = tiny(kind)
        step = brimful.Step(
            model, num_steps=8, lengths=lengths, batch_size=8, max_length=32,
            learning_rate=1e-3, precision=precision, packing=packing, device="cpu",
        )  # fmt: skip
        assert implementation(model) == (HALF_EXPERTS if precision == "bf16" else "grouped_mm")
        batches = [step.batch(rows[8 * part : 8 * part + 8]) for part in (0, 1, 2, 3, 0, 1)]
        losses[precision] = [step.run(batch).read().loss for batch in batches]
        assert implementation(step.release()) == "grouped_mm"
    assert losses["bf16"] == pytest.approx(losses["fp32"], rel=0.05)
    assert losses["bf16"] != losses["fp32"]

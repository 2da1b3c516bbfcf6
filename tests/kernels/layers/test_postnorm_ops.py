"""Fused pieces of layers against the compositions that they stand for: values, and gradients of all that has one.

On the CPU by Triton's interpreter in fp32; `tests/gpu/test_layers_on_gpu.py` runs the same on a GPU, in bf16 too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from brimful.kernels.layout import PackedShape, make_segments

pytest.importorskip("triton")

from brimful.kernels.dropout import kept_mask_PRC
from brimful.kernels.forward_context import ForwardContext, current
from brimful.kernels.layers import dropout_add_layernorm, gelu, postnorm_ops
from brimful.kernels.layers.dropout_add_layernorm import dropout_add_norm
from brimful.kernels.layers.embedding import embeddings_norm
from brimful.kernels.layers.low_rank import low_rank
from brimful.kernels.split_reduction import add_partial_sums, make_partial_sums, sum_rows

LENGTHS = [5, 70, 1, 33]
SHAPE = PackedShape(num_tokens=150, num_slots=6, max_length=80)
T, H, WIDE, HEADS = 150, 64, 112, 4


class Case:
    """Tensors of one case on a device. half: dtype of products and of Linear parameters; residuals stay fp32."""

    def __init__(self, device: str = "cpu", half: torch.dtype = torch.float32) -> None:
        self.device, self.half = torch.device(device), half
        self._generator = torch.Generator().manual_seed(0)

    def leaf(self, *shape: int, dtype: torch.dtype | None = None, scale: float = 1.0) -> Tensor:
        made = torch.randn(*shape, generator=self._generator) * scale
        return made.to(self.device, dtype or self.half).requires_grad_(True)

    def rows(self, width: int = H) -> Tensor:
        return self.leaf(1, T, width)

    def linear(self, inputs: int, outputs: int) -> tuple[Tensor, Tensor]:
        return self.leaf(outputs, inputs, scale=inputs**-0.5), self.leaf(outputs, scale=0.5)

    def norm(self) -> tuple[Tensor, Tensor]:
        return self.leaf(H, dtype=torch.float32), self.leaf(H, dtype=torch.float32)

    def check(self, ours: Callable[..., Tensor], plain: Callable[..., Tensor], *leaves: Tensor) -> None:
        """Both on the same numbers: the plain one in fp64, ours in its own precision and under autocast."""
        twins = [leaf.detach().cpu().double().requires_grad_(True) for leaf in leaves]
        torch.manual_seed(7)
        with torch.autocast(self.device.type, self.half, enabled=self.half != torch.float32), ForwardContext().active():
            found = ours(*leaves)
            torch.manual_seed(7)
        expected = plain(*twins)
        direction = torch.randn(expected.shape, generator=self._generator, dtype=torch.float64)
        gradients = torch.autograd.grad((found * direction.to(found)).sum(), leaves)
        wanted = torch.autograd.grad((expected * direction).sum(), twins)
        tolerance = 1e-5 if self.half == torch.float32 else 2e-2
        for one, other in [(found, expected), *zip(gradients, wanted, strict=True)]:
            difference = (one.detach().cpu().double() - other.detach()).norm()
            assert difference <= tolerance * other.detach().norm().clamp_min(1e-9)


def seed_of(case: Case) -> Tensor:
    """The seed that a forward context draws after `torch.manual_seed(7)`."""
    torch.manual_seed(7)
    return torch.randint(0, 2**62, (), device=case.device).cpu()


def check_linear(case: Case, bias: bool) -> None:
    w, b = case.linear(H, WIDE)
    leaves = (case.rows(), w, b) if bias else (case.rows(), w)
    case.check(lambda x, w, b=None: postnorm_ops.linear(x, w, b), F.linear, *leaves)


def check_adapter(case: Case) -> None:
    """A linear with what an adapter adds: of a frozen weight there is no gradient."""
    w, b = (each.detach() for each in case.linear(H, WIDE))
    (down, _), (up, _) = case.linear(H, 3), case.linear(3, WIDE)

    def ours(x: Tensor, down: Tensor, up: Tensor) -> Tensor:
        return postnorm_ops.linear(x, w, b, low_rank(x, down, up, 1.7))

    def plain(x: Tensor, down: Tensor, up: Tensor) -> Tensor:
        whole = F.linear(x, w.cpu().double(), b.cpu().double())
        return whole + 1.7 * F.linear(F.linear(x, down), up)

    case.check(ours, plain, case.rows(), down, up)


def check_linear_gelu(case: Case) -> None:
    case.check(
        postnorm_ops.linear_gelu, lambda x, w, b: gelu.bias_gelu(F.linear(x, w), b), case.rows(), *case.linear(H, WIDE)
    )


def check_add_norm(case: Case, p: float) -> None:
    seed = seed_of(case)

    def plain(x: Tensor, w: Tensor, b: Tensor, residual: Tensor, gain: Tensor, shift: Tensor) -> Tensor:
        return dropout_add_norm(F.linear(x, w)[0], b, residual[0], gain, shift, 1e-12, p, seed)[None]

    def ours(*leaves: Tensor) -> Tensor:
        return postnorm_ops.linear_dropout_add_norm(*leaves, 1e-12, p)

    residual = case.leaf(1, T, H, dtype=torch.float32)
    case.check(ours, plain, case.rows(WIDE), *case.linear(WIDE, H), residual, *case.norm())


def check_two_readers(case: Case, *, half: bool) -> None:
    """The normalised rows go on as a residual, in fp32 or as `half` says, and into a product in half precision."""
    second = case.linear(H, WIDE)

    def plain(
        x: Tensor, w: Tensor, b: Tensor, r: Tensor, gain: Tensor, shift: Tensor, w2: Tensor, b2: Tensor
    ) -> Tensor:
        y = F.layer_norm(F.linear(x, w, b) + r, (H,), gain, shift, 1e-12)
        return torch.cat([y, F.linear(y, w2, b2)], -1)

    def ours(x: Tensor, w: Tensor, b: Tensor, r: Tensor, gain: Tensor, shift: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
        with replace(current(), half_residuals=half).active():
            y = postnorm_ops.linear_dropout_add_norm(x, w, b, r, gain, shift, 1e-12, 0.0)
        assert y.dtype == (case.half if half else torch.float32)
        assert (postnorm_ops.halved(y).data_ptr() == y.data_ptr()) == (y.dtype == case.half)
        return torch.cat([y.float(), postnorm_ops.linear(y, w2, b2).float()], -1)

    residual = case.leaf(1, T, H, dtype=None if half else torch.float32)
    case.check(ours, plain, case.rows(WIDE), *case.linear(WIDE, H), residual, *case.norm(), *second)


def check_attention(
    case: Case, p: float, *, bias: bool = True, adjacent: bool = True, typical_length: int = 30
) -> None:
    seed = seed_of(case)
    segments = make_segments(LENGTHS, SHAPE)
    cu_seqlens_N = segments.cu_seqlens_N.to(case.device)
    same_TT = segments.segment_T[:, None] == segments.segment_T
    column_T = torch.arange(T) - segments.cu_seqlens_N.long()[segments.segment_T]
    kept_HTT = kept_mask_PRC(seed, HEADS, T, SHAPE.max_length, p).gather(2, column_T.expand(HEADS, T, T))

    def plain(x: Tensor, weight: Tensor, offset: Tensor) -> Tensor:
        q, k, v = (F.linear(x[0], weight, offset).view(T, 3, HEADS, -1).transpose(0, 2)).unbind(1)
        weights = torch.softmax((q @ k.transpose(1, 2) * 0.25).masked_fill(~same_TT, float("-inf")), -1)
        return torch.where(kept_HTT, weights / (1 - p), 0.0) @ v

    def ours(x: Tensor, weight: Tensor, offset: Tensor) -> Tensor:
        apart = (lambda t: t.chunk(3)) if adjacent else (lambda t: [each.clone() for each in t.chunk(3)])
        biases = apart(offset) if bias else (None, None, None)
        settings = (SHAPE.max_length, typical_length, 0.25, False, 0, 0.0, p)
        return postnorm_ops.projected_attention(x, apart(weight), biases, cu_seqlens_N, HEADS, settings)

    weight, offset = case.linear(H, 3 * H)
    if not bias:
        with torch.no_grad():
            offset.zero_()
        case.check(lambda x, w: ours(x, w, offset), lambda x, w: plain(x, w, torch.zeros(3 * H).double()),
                   case.rows(), weight)  # fmt: skip
        return
    case.check(ours, plain, case.rows(), weight, offset)


def check_embeddings(case: Case, p: float, num_tables: int, padding: int | None, *, half: bool = False) -> None:
    seed = seed_of(case)
    generator = torch.Generator().manual_seed(1)
    sizes = (50, 20, 2)[:num_tables]
    ids = [torch.randint(0, size, (1, T), generator=generator) for size in sizes]
    paddings = [padding, None, None][:num_tables]

    def ours(gain: Tensor, shift: Tensor, *tables: Tensor) -> Tensor:
        placed = [each.to(case.device) for each in ids]
        with replace(current(), half_residuals=half).active():
            y = postnorm_ops.embeddings_norm(placed, tables, paddings, gain, shift, 1e-12, p)
        assert y.dtype == (case.half if half else torch.float32)
        return y

    def plain(gain: Tensor, shift: Tensor, *tables: Tensor) -> Tensor:
        first = tables[0]
        if padding is not None:  # its row is read, and not learned
            stays = torch.arange(len(first))[:, None] != padding
            first = torch.where(stays, first, first.detach())
        return embeddings_norm([each[0] for each in ids], [first, *tables[1:]], gain, shift, 1e-12, p, seed)[None]

    tables = [case.leaf(size, H, dtype=torch.float32) for size in sizes]
    case.check(ours, plain, *case.norm(), *tables)


@pytest.mark.parametrize("bias", [True, False])
def test_linear(bias: bool) -> None:
    check_linear(Case(), bias)


def test_an_adapter() -> None:
    check_adapter(Case("cpu", torch.float32))


def test_linear_gelu() -> None:
    check_linear_gelu(Case())


@pytest.mark.parametrize("p", [0.0, 0.3])
def test_linear_dropout_add_norm(p: float) -> None:
    check_add_norm(Case(), p)


@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize(("rows", "width"), [(1, 16), (77, 200), (601, 64)])
def test_norms_of_many_rows(rows: int, width: int, p: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """In half precision, where the backward kernel takes two rows at a time and programs take several tiles."""
    monkeypatch.setattr(dropout_add_layernorm, "_MANY_ROWS", 0)
    random = torch.Generator().manual_seed(3)
    x, residual, dy = (torch.randn(rows, width, generator=random).half() for _ in range(3))
    bias, gain, shift = (torch.randn(width, generator=random) for _ in range(3))
    seed = torch.tensor(5)
    y, _, statistics = dropout_add_layernorm.fused_forward(
        x, bias, residual, gain, shift, seed, 2, 1e-12, p, False, torch.float16
    )  # fmt: skip
    dx, dresidual, partials = dropout_add_layernorm.fused_backward(
        dy, None, x, bias, residual, gain, statistics, seed, 2, p
    )
    found = y, dx, dresidual, *dropout_add_layernorm.parameter_gradients(partials, torch.float32)
    leaves = [each.double().requires_grad_(True) for each in (x, residual, gain, shift, bias)]
    wanted_y = dropout_add_norm(leaves[0], leaves[4], leaves[1], leaves[2], leaves[3], 1e-12, p, seed, 2)
    wanted = wanted_y, *torch.autograd.grad(wanted_y, leaves, dy.double())
    for one, other in zip(found, wanted, strict=True):
        assert (one.double() - other.detach()).norm() <= 2e-3 * other.detach().norm()


@pytest.mark.parametrize("half", [False, True])
def test_rows_have_two_readers(half: bool) -> None:
    check_two_readers(Case(), half=half)


@pytest.mark.sampled
@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("typical_length", [30, 300], ids=["short", "long"])
def test_projected_attention(p: float, typical_length: int) -> None:
    check_attention(Case(), p, typical_length=typical_length)


def test_projected_attention_without_biases_and_of_scattered_weights() -> None:
    check_attention(Case(), 0.0, bias=False)
    check_attention(Case(), 0.0, adjacent=False)


@pytest.mark.sampled
@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize(("num_tables", "padding"), [(3, 0), (2, None), (1, 3)])
def test_embeddings_norm(p: float, num_tables: int, padding: int | None) -> None:
    check_embeddings(Case(), p, num_tables, padding)


@pytest.mark.parametrize("rows", [1, 127, 300])
def test_sums_of_strips(rows: int) -> None:
    x = torch.randn(rows, 70, generator=torch.Generator().manual_seed(rows))
    first, last = add_partial_sums(make_partial_sums(x), 30, torch.float16)
    assert torch.allclose(first, x.sum(0)[:40], atol=1e-4)
    assert torch.allclose(last, x.sum(0)[40:].half(), atol=1e-2)


@pytest.mark.parametrize("rows", [1, 300, 2049])
def test_sums_of_rows_in_one_stage_and_in_two(rows: int) -> None:
    x = torch.randn(rows, 70).half()
    assert torch.allclose(sum_rows(x, torch.float32), x.float().sum(0), atol=1e-3)


@pytest.mark.parametrize("exact", [True, False])
def test_the_normal_distribution(exact: bool) -> None:
    """The quick one is within 2e-7 of the error function's, far below half precision."""
    dtype = torch.float32 if exact else torch.float16
    x = torch.linspace(-8, 8, 2000)[None]
    found = gelu.fused_forward(x.to(dtype), torch.zeros(2000))
    expected = F.gelu(x.to(dtype).double())
    assert torch.allclose(found.double(), expected, rtol=2e-6 if exact else 1e-3, atol=1e-6)


def test_a_cast_copy_travels_with_its_rows() -> None:
    x: Any = torch.randn(3, 4)
    copy, context = x.bfloat16(), ForwardContext()
    with torch.autocast("cpu", torch.bfloat16), context.active():
        assert postnorm_ops.halved(x).dtype == torch.bfloat16
        assert postnorm_ops.halved(context.with_cast(x, copy)) is copy
        with ForwardContext().active():
            assert postnorm_ops.halved(x) is not copy
    assert postnorm_ops.halved(x) is x


def test_a_cast_copy_of_what_was_changed_is_not_used() -> None:
    x: Any = torch.randn(3, 4)
    context = ForwardContext()
    context.with_cast(x, x.bfloat16())
    x.mul_(0)
    assert not context.cast(x, torch.bfloat16).any()


def test_an_index_that_a_table_does_not_have_is_not_a_number() -> None:
    """And nothing is read or written beside the table: the step is skipped, and its texts are named."""
    tables = [torch.randn(size, H, requires_grad=True) for size in (50, 20)]
    ids = [torch.tensor([[3, 50, 7]]), torch.tensor([[0, 1, -1]])]
    gain, shift = torch.ones(H, requires_grad=True), torch.zeros(H, requires_grad=True)
    out = postnorm_ops.embeddings_norm(ids, tables, [None, None], gain, shift, 1e-12, 0.0)
    assert torch.isfinite(out[0, 0]).all()
    assert not torch.isfinite(out[0, 1:]).any()
    out[0, 0].sum().backward()


def test_a_residual_must_fit() -> None:
    x, (w, b) = torch.randn(1, 6, WIDE), Case().linear(WIDE, H)
    with pytest.raises(ValueError, match="residual"):
        postnorm_ops.linear_dropout_add_norm(x, w, b, torch.randn(1, 1, H), torch.ones(H), torch.zeros(H), 1e-12, 0.0)


def test_parameters_in_storages_of_their_own_are_copied() -> None:
    """Even where an allocator put them side by side."""
    parts = [torch.randn(4, 8) for _ in range(3)]
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(postnorm_ops.side_by_side(parts, dtype), torch.cat(parts).to(dtype))
    whole = torch.randn(12, 8)
    packed = postnorm_ops.side_by_side(list(whole.chunk(3)), torch.float32)
    assert packed.data_ptr() == whole.data_ptr()


def test_rows_are_normalised_in_fp32_behind_a_residual_in_half_precision() -> None:
    """As autocast has it on a GPU."""
    x, (w, b) = torch.randn(1, 6, WIDE).half(), Case(half=torch.float16).linear(WIDE, H)
    residual = torch.randn(1, 6, H).half()
    out = postnorm_ops.linear_dropout_add_norm(x, w, b, residual, torch.ones(H), torch.zeros(H), 1e-12, 0.0)
    assert out.dtype == torch.float32

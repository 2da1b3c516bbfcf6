"""The chosen attention kernels against the reference, call by call, on inputs that no wrong kernel gets away with.

A model's own queries and keys tell little where its weights were hardly trained: all scores are alike, and rounding in
half precision hides a lost window, scale or gradient. Here each kind of call that a model makes (pattern, heads, sizes)
is repeated on random inputs whose scores differ as those of trained models do. Outputs and each gradient are compared
on their own: of queries, keys and values, and of tables of positions.

    in fp32, by the same function, where it takes fp32      within what the order of sums leaves
    in the dtype that runs                                  within three times what the reference loses in it

Tokens of sequences are compared; the row's unused tail is computed and left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from brimful.core.tolerances import TOLERANCES
from brimful.hardware.process_settings import matmul_precision
from brimful.kernels.attention.dispatch import Attention, reference_attention
from brimful.kernels.attention.pattern import Pattern, RelativeBias
from brimful.kernels.layout import Segments

#: A call with a bias by distance has tables, which are inputs too.
_TABLES = tuple(one.name for one in fields(RelativeBias) if one.name != "bucket_W")
_NAMES = {torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass(frozen=True, kw_only=True)
class _Call:
    """One kind of call: the kernel chosen, and what it was given."""

    attend: Attention
    pattern: Pattern
    segments: Segments
    shapes: tuple[torch.Size, torch.Size, torch.Size]
    dtype: torch.dtype
    device: torch.device

    @property
    def key(self) -> tuple[Any, ...]:
        """The same for calls of one kind."""
        relative = self.pattern.relative
        tables = None if relative is None else [_shape(getattr(relative, name)) for name in _TABLES]
        return (repr(replace(self.pattern, relative=None)), str(tables), self.shapes, self.dtype)


@dataclass
class Calls:
    """Kinds of attention calls that a model made. Hears each of them, as `PackedModel` has it."""

    kinds: dict[tuple[Any, ...], _Call] = field(default_factory=dict)

    def __call__(self, attend: Attention, qkv: Sequence[Tensor], segments: Segments, pattern: Pattern) -> None:
        q_HTD, k_KTD, v_KTD = qkv
        call = _Call(
            attend=attend,
            pattern=replace(pattern, dropout=0.0),
            segments=segments,
            shapes=(q_HTD.shape, k_KTD.shape, v_KTD.shape),
            dtype=q_HTD.dtype,
            device=q_HTD.device,
        )
        self.kinds.setdefault(call.key, call)

    def on(self, segments: Segments) -> Calls:
        """The same kinds on another row, with at most two heads of queries, which share keys where those of the model
        do. No kind may have a bias by distance."""
        num_tokens = segments.segment_T.shape[0]
        kinds = dict[tuple[Any, ...], _Call]()
        for key, call in self.kinds.items():
            of_queries, of_keys, _ = (shape[0] for shape in call.shapes)
            heads = min(2, of_queries)
            shared = 1 if of_keys < of_queries else heads
            sizes = zip((heads, shared, shared), call.shapes, strict=True)
            query, keys, values = (torch.Size([number, num_tokens, shape[2]]) for number, shape in sizes)
            kinds[key] = replace(call, segments=segments, shapes=(query, keys, values))
        return Calls(kinds)

    def error(self, num_tokens: int, precision: str) -> tuple[float, str]:
        """The worst difference of any kernel from the reference in units of its tolerance, and where it is.

        num_tokens: of sequences, which come first. NaN counts as infinite. precision: of fp32 products, tf32 or fp32.
        """
        worst = (0.0, "")
        for call in self.kinds.values():
            for found in _errors(call, num_tokens, precision):
                worst = max(worst, found)
        return worst


def _errors(call: _Call, num_tokens: int, precision: str) -> Iterator[tuple[float, str]]:
    """Errors in fp32 where the kernel takes it, then in the dtype that it was called with."""
    inputs = _inputs(call)
    if call.dtype in (torch.bfloat16, torch.float16) or precision == "tf32":
        try:
            yield _error(call, inputs, num_tokens, torch.float32, "fp32")
        except torch.OutOfMemoryError:
            raise
        except Exception:  # kernels of half precision alone say so in many ways, Triton's by resources too
            pass
    yield _error(call, inputs, num_tokens, call.dtype, "tf32" if precision == "tf32" else _NAMES[call.dtype])


def _error(
    call: _Call, inputs: dict[str, Tensor], num_tokens: int, dtype: torch.dtype, precision: str
) -> tuple[float, str]:
    given = {name: tensor.to(dtype) for name, tensor in inputs.items()}
    wide = torch.promote_types(dtype, torch.float32)
    exact = {name: tensor.to(wide) for name, tensor in given.items()}
    with matmul_precision("highest"):
        expected = _results(reference_attention, call, exact, num_tokens)
    with matmul_precision("high" if precision == "tf32" else "highest"):
        is_exact = dtype == wide and precision != "tf32"
        lost = expected if is_exact else _results(reference_attention, call, given, num_tokens)
        found = _results(call.attend, call, given, num_tokens)
    worst = (0.0, "")
    for name, truth in expected.items():
        tolerance = max(TOLERANCES[precision].attention, 3 * _difference(lost[name], truth))
        error = _difference(found[name], truth) / tolerance
        worst = max(worst, (error, f"{name} of {getattr(call.attend, '__name__', 'attention')} in {precision}"))
    return worst


def _difference(found: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm, infinite for what is not finite."""
    error = float((found.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-30))
    return error if error == error else float("inf")


def _inputs(call: _Call) -> dict[str, Tensor]:
    """Random inputs, rounded to the dtype of the call.

    Scores spread by 1; under a soft cap by half of it, where it begins to bend them.
    """
    random = torch.Generator().manual_seed(3)
    pattern, size = call.pattern, call.shapes[0][-1]
    spread = 1.0 if pattern.softcap is None else max(1.0, pattern.softcap / 2)
    found = {
        name: torch.randn(shape, generator=random) for name, shape in zip(("q", "k", "v"), call.shapes, strict=True)
    }
    found["q"] *= spread / (abs(pattern.scale) or 1.0) / size**0.5
    if pattern.relative is not None:
        for name in _TABLES:
            table = getattr(pattern.relative, name)
            if table is not None:
                scale = 1.0 if name == "bias_HR" else size**-0.5
                if name == "keys_HRD":
                    scale *= abs(pattern.scale) * size**0.5  # queries are as much larger
                found[name] = torch.randn(table.shape, generator=random) * scale
    return {name: tensor.to(call.dtype).to(call.device) for name, tensor in found.items()}


def _results(attend: Attention, call: _Call, given: dict[str, Tensor], num_tokens: int) -> dict[str, Tensor]:
    """The output and the gradient of each input, for a random direction."""
    leaves = {name: tensor.detach().clone().requires_grad_(True) for name, tensor in given.items()}
    pattern = call.pattern
    if pattern.relative is not None:
        tables: dict[str, Any] = {name: leaves.get(name) for name in _TABLES}
        pattern = replace(pattern, relative=replace(pattern.relative, **tables))
    with torch.enable_grad():
        out_HTD = attend(leaves["q"], leaves["k"], leaves["v"], call.segments, pattern)[:, :num_tokens]
    direction = torch.randn(out_HTD.shape, generator=torch.Generator().manual_seed(4)).to(out_HTD)
    gradients = torch.autograd.grad(
        out_HTD, list(leaves.values()), direction, allow_unused=True, materialize_grads=True
    )
    return {"output": out_HTD.detach(), **{f"gradient of {n}": g for n, g in zip(leaves, gradients, strict=True)}}


def _shape(table: Tensor | None) -> tuple[int, ...] | None:
    return None if table is None else tuple(table.shape)


#: Hears the calls of attention: the kernel, queries, keys and values, segments and pattern.
Watch = Callable[[Attention, Sequence[Tensor], Segments, Pattern], None]

"""The scan in chunks against the recurrence, on lengths that fill a chunk, none, and several."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.zamba2.modeling_zamba2 import mamba2_chunk_scan

from brimful.kernels.layers.chunked_scan import chunked_scan
from kernels.layers.scan_gradients import CLOSE, check_gradients, difference


def numbers(rows: int, length: int, heads: int, of_head: int, groups: int, states: int) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(0)

    def drawn(*size: int) -> Tensor:
        return torch.randn(size, generator=random)

    return {
        "x": drawn(rows, length, heads, of_head),
        "dt": drawn(rows, length, heads),
        "A": -torch.exp(2 * drawn(heads) - 4),  # some states last for chunks, some for a few positions
        "B": drawn(rows, length, groups, states),
        "C": drawn(rows, length, groups, states),
    }


def by_position(given: dict[str, Tensor], *, softplus: bool, limits: tuple[float, float]) -> Tensor:
    """The recurrence itself."""
    dt = given["dt"] + given["dt_bias"] if "dt_bias" in given else given["dt"]
    dt = (F.softplus(dt) if softplus else dt).clamp(*limits)
    of_group = given["x"].shape[2] // given["B"].shape[2]
    b, c = (given[name].repeat_interleave(of_group, dim=2) for name in ("B", "C"))
    state, found = torch.zeros((), dtype=dt.dtype), []
    for place in range(dt.shape[1]):
        kept = torch.exp(dt[:, place] * given["A"])[..., None, None]
        added = (dt[:, place, :, None] * given["x"][:, place])[..., None] * b[:, place, :, None]
        state = kept * state + added
        found.append((state * c[:, place, :, None]).sum(-1))
    out = torch.stack(found, dim=1)
    return out + given["D"][:, None] * given["x"] if "D" in given else out


@pytest.mark.parametrize("length", [1, 20, 64, 65, 300])
@pytest.mark.parametrize(("groups", "around"), [(1, True), (3, False)])
def test_as_position_by_position(length: int, groups: int, around: bool) -> None:
    """In fp64, and as transformers' own: with what is added around it, and without, and steps held within limits."""
    given = numbers(2, length, 6, 5, groups, 4)
    rest = {"D": torch.randn(6), "dt_bias": torch.randn(6)} if around else {}
    given["dt"] = given["dt"] if around else given["dt"].abs()
    mine = {name: x.clone().requires_grad_() for name, x in (given | rest).items()}
    exact = {name: x.double().requires_grad_() for name, x in (given | rest).items()}
    limits = (0.1, 1.5) if around else (0.0, math.inf)
    first = [mine[name] for name in given]
    found = chunked_scan(*first, D_H=mine.get("D"), bias_H=mine.get("dt_bias"), softplus=around, limits=limits)
    expected = by_position(exact, softplus=around, limits=limits)
    theirs = mamba2_chunk_scan(*given.values(), chunk_size=256, **rest, dt_softplus=around, dt_limit=limits)
    assert found.shape == theirs.shape
    assert difference(found, theirs) < CLOSE
    assert difference(found, expected) < CLOSE
    check_gradients(found, expected, mine, exact, zero="A" if length == 1 else None)


def test_half_precision_gives_fp32() -> None:
    """As transformers' own, and no further from exact numbers: what is half is what it was given."""
    given = numbers(2, 70, 4, 8, 1, 4)
    half = {name: x if name == "A" else x.bfloat16() for name, x in given.items()}
    found, exact = chunked_scan(*half.values(), softplus=True), chunked_scan(*given.values(), softplus=True)
    theirs = mamba2_chunk_scan(*half.values(), chunk_size=64, dt_softplus=True)
    assert found.dtype == theirs.dtype == torch.float32
    assert difference(found, exact) <= 1.05 * difference(theirs, exact) < 2e-2


def test_states_that_are_too_large_for_fp16() -> None:
    """Its autocast is left, that of bf16 is not: there a state may be as large as in fp32."""
    given = list(numbers(2, 70, 4, 8, 1, 4).values())
    given[0] = given[0] * 1e5
    expected = chunked_scan(*given)
    with torch.autocast("cpu", torch.float16):
        assert torch.equal(chunked_scan(*given), expected)
    with torch.autocast("cpu", torch.bfloat16):
        found = chunked_scan(*given)
    assert found.dtype == torch.float32
    assert CLOSE < difference(found, expected) < 2e-2


def test_no_more_pairs_than_a_row_needs() -> None:
    """Of 65 positions: two chunks of 40, not two of 64."""
    given = [x.requires_grad_() for x in numbers(1, 65, 1, 1, 1, 1).values()]
    sizes = set[tuple[int, ...]]()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: (sizes.add(tuple(x.shape)), x)[1], lambda x: x):
        chunked_scan(*given)
    assert (1, 2, 1, 40, 40) in sizes
    assert max(math.prod(size) for size in sizes) == 2 * 40 * 40

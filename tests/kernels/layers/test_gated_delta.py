"""The gated delta rule in chunks against the recurrence, on lengths that fill a chunk, none, and several."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

from brimful.kernels.layers.gated_delta import gated_delta_rule
from kernels.layers.scan_gradients import CLOSE, check_gradients, difference


def numbers(length: int, keys: int, values: int) -> dict[str, Tensor]:
    """Some states last for chunks, some for a few positions."""
    random = torch.Generator().manual_seed(0)

    def drawn(*size: int) -> Tensor:
        return torch.randn(2, length, *size, generator=random)

    return {
        "q": drawn(keys, 8),
        "k": drawn(keys, 8),
        "v": drawn(values, 5),
        "g": -torch.exp(2 * drawn(values) - 4),
        "beta": drawn(values).sigmoid(),
    }


def by_position(given: dict[str, Tensor], *, normed: bool) -> Tensor:
    """The recurrence itself."""
    of_key = given["v"].shape[2] // given["k"].shape[2]
    q, k = (given[name].repeat_interleave(of_key, dim=2) for name in ("q", "k"))
    if normed:
        q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    state, found = torch.zeros_like(k[:, 0, ..., None] * given["v"][:, 0, :, None]), []
    for place in range(q.shape[1]):
        key, step = k[:, place, ..., None], given["beta"][:, place, :, None, None]
        state = state * given["g"][:, place, :, None, None].exp()
        state = state + step * key * (given["v"][:, place, :, None] - (key * state).sum(-2, keepdim=True))
        found.append((q[:, place, ..., None] * q.shape[-1] ** -0.5 * state).sum(-2))
    return torch.stack(found, dim=1)


@pytest.mark.parametrize("length", [1, 20, 64, 65, 200])
@pytest.mark.parametrize(("keys", "normed"), [(4, True), (2, True), (2, False)])
def test_as_position_by_position(length: int, keys: int, normed: bool) -> None:
    """In fp64, and as transformers' own; two heads of values for one of keys. Keys that are not of length 1 are short:
    a state of longer ones grows."""
    given = numbers(length, keys, 4)
    given["k"] = given["k"] if normed else given["k"] / 8
    mine = {name: x.clone().requires_grad_() for name, x in given.items()}
    exact = {name: x.double().requires_grad_() for name, x in given.items()}
    found, expected = gated_delta_rule(*mine.values(), normed=normed), by_position(exact, normed=normed)
    each = {name: x.repeat_interleave(4 // keys, dim=2) if name in "qk" else x for name, x in given.items()}
    theirs, _ = torch_chunk_gated_delta_rule(*each.values(), use_qk_l2norm_in_kernel=normed)
    assert found.shape == theirs.shape
    assert difference(found, theirs) < CLOSE
    assert difference(found, expected) < CLOSE
    check_gradients(found, expected, mine, exact, zero="g" if length == 1 else None)


def test_half_precision_is_that_of_queries() -> None:
    given = numbers(70, 4, 4)
    half = {name: x if name == "g" else x.bfloat16() for name, x in given.items()}
    found, exact = gated_delta_rule(*half.values(), normed=True), gated_delta_rule(*given.values(), normed=True)
    theirs, _ = torch_chunk_gated_delta_rule(*half.values(), use_qk_l2norm_in_kernel=True)
    assert found.dtype == theirs.dtype == torch.bfloat16
    assert difference(found.float(), theirs.float()) < 4e-3
    assert difference(found.float(), exact) < 2e-2


def test_no_more_pairs_than_a_row_needs() -> None:
    """Of 65 positions two chunks of 40; a row that is one chunk reads of no state."""
    for length, chunks, size in ((65, 2, 40), (20, 1, 24)):
        given = [x.requires_grad_() for x in numbers(length, 4, 4).values()]
        sizes = set[tuple[int, ...]]()
        with torch.autograd.graph.saved_tensors_hooks(lambda x, to=sizes: (to.add(tuple(x.shape)), x)[1], lambda x: x):
            gated_delta_rule(*given)
        assert (2, 4, chunks, size, size) in sizes
        assert {each[-1] for each in sizes if each[2:4] == (chunks, size)} <= {1, 5, 8, size, *([13] * (chunks > 1))}

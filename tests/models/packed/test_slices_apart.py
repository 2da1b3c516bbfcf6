"""A loop over slices of one tensor: the same gradient, to the bit, put together once."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._C import _len_torch_function_stack
from torch.utils._python_dispatch import TorchDispatchMode

from brimful.kernels.layout import PaddedInputs
from brimful.models.model_stats import layers_of
from brimful.models.packed.host_decisions import HostDecisions
from brimful.models.packed.packed_forward import PaddedModel
from brimful.models.packed.recompute import recompute
from brimful.models.packed.slices_apart import has_loops, slices_apart
from heads.tiny_heads import tiny_model

LENGTH = 24


class _Filled(TorchDispatchMode):
    """Counts numbers of gradients of single slices, each of which is as large as the whole tensor."""

    numbers = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        if function._overloadpacket.__name__ == "select_backward":
            self.numbers += out.numel()
        return out


def rows(model: Any) -> PaddedInputs:
    ids_RL = torch.randint(5, model.config.vocab_size, (3, LENGTH), generator=torch.Generator().manual_seed(0))
    mask_RL = torch.ones_like(ids_RL)
    mask_RL[1, 9:] = 0
    return PaddedInputs(ids_RL=ids_RL, mask_RL=mask_RL, types_RL=None)


def test_what_torch_compiles_is_left_alone() -> None:
    """It would trace the mode's own code."""
    model, depths = tiny_model("jamba").train(), list[int]()
    layer = model.base_model.layers[0]
    layer.register_forward_hook(lambda *_: depths.append(_len_torch_function_stack()))
    execution = PaddedModel(model)
    execution(rows(model))
    layer._compiled_call_impl = layer._call_impl
    execution(rows(model))
    assert depths[0] == depths[1] + 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["jamba", "zamba"])
@pytest.mark.parametrize("how", ["by itself", "recorded", "computed again"])
def test_a_scan_has_the_gradient_of_the_plain_model(kind: str, how: str) -> None:
    model = tiny_model(kind).train()
    plain, inputs = copy.deepcopy(model), rows(model)
    plain.config.use_cache = False
    with _Filled() as of_plain:
        plain(input_ids=inputs.ids_RL, attention_mask=inputs.mask_RL).logits.sum().backward()
    execution = PaddedModel(model)
    execution.decisions = HostDecisions() if how == "recorded" else None
    if how == "computed again":
        layers = list(layers_of(model))
        recompute(layers, range(len(layers)))
    with _Filled() as found:
        execution(inputs).logits.sum().backward()
    assert found.numbers < 2 * of_plain.numbers / LENGTH
    for own, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert (own.grad is None) is (theirs.grad is None)
        assert own.grad is None or torch.equal(own.grad, theirs.grad)


def test_models_without_a_loop_are_left_alone() -> None:
    assert not has_loops(tiny_model("bert"))
    assert not has_loops(tiny_model("qwen3_next"))


def walked(states: Tensor, places: Any) -> Tensor:
    return torch.stack([states[:, place] * (2 + number) for number, place in enumerate(places)])


@pytest.mark.parametrize(
    "read",
    [
        lambda states: walked(states, range(6)),
        lambda states: walked(states, range(3)),
        lambda states: walked(states, [0, 1, 1, 3, 2]),
        lambda states: walked(states, [0, 5, 4, 3]),
        lambda states: walked(states, [1, 2, -1, 0]),
        lambda states: walked(states, [0, 1, -1, 2]),
        lambda states: torch.cat([walked(states, range(6)), walked(states, range(6))]),
        lambda states: torch.stack([states[:, place] + states[:, :, place] for place in range(4)]),
        lambda states: torch.stack([states[place, :, 0] + states[..., place] for place in range(2)]),
        lambda states: torch.stack([states[:, place : place + 1] * states[:, None, place] for place in range(3)]),
    ],
    ids=[
        "all",
        "a part",
        "again",
        "back",
        "from the end",
        "mixed",
        "twice",
        "two dims",
        "two numbers",
        "other indices",
    ],
)
def test_slices_are_torchs(read: Callable[[Tensor], Tensor]) -> None:
    found, expected = (
        torch.randn(6, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
        for _ in range(2)
    )
    with slices_apart():
        own = read(found * 1.0)
    theirs = read(expected * 1.0)
    assert torch.equal(own, theirs)
    own.square().sum().backward()
    theirs.square().sum().backward()
    assert found.grad is not None
    torch.testing.assert_close(found.grad, expected.grad, rtol=1e-14, atol=0)


def test_places_past_the_end_are_refused() -> None:
    states = torch.zeros(2, 3, requires_grad=True)
    with slices_apart():
        for place in range(3):
            states[:, place]
        with pytest.raises(IndexError):
            states[:, 3]


def test_what_was_walked_is_forgotten() -> None:
    """A tensor lives no longer than without this: its parts until its end, and one that was read once not at all."""
    read, walked_through = (torch.zeros(2, 3, requires_grad=True) * 1 for _ in range(2))
    alive = [weakref.ref(read), weakref.ref(walked_through)]
    with slices_apart():
        read[:, 0]
        for place in range(3):
            walked_through[:, place]
        del read, walked_through
        gc.collect()
        assert [each() for each in alive] == [None, None]


class _Parted(TorchDispatchMode):
    """Counts tensors that are taken apart."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += function._overloadpacket.__name__ == "unbind"
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("requires_grad", [True, False])
def test_what_has_no_gradient_is_not_taken_apart(requires_grad: bool) -> None:
    states = torch.zeros(2, 3, requires_grad=requires_grad)
    with _Parted() as parted, slices_apart():
        walked(states, range(3))
    assert parted.count == requires_grad


@pytest.mark.parametrize("kind", ["jamba", "bert"])
@pytest.mark.parametrize("has_gradient", [True, False])
def test_passes_that_gain_nothing_have_no_mode(kind: str, has_gradient: bool) -> None:
    """Each of torch's functions goes through it, in Python."""
    model, seen = tiny_model(kind), list[int]()
    model.base_model.register_forward_hook(lambda *_: seen.append(_len_torch_function_stack()))
    with torch.set_grad_enabled(has_gradient):
        PaddedModel(model)(rows(model))
        PaddedModel(model, plain=True)(rows(model))
    assert seen == [int(has_gradient and kind == "jamba"), 0]


def test_what_is_written_into_the_whole_is_read() -> None:
    """Also between two slices, after which torch takes them."""
    found, expected = (torch.arange(6.0).reshape(2, 3).requires_grad_() for _ in range(2))
    with slices_apart():
        own = _written(found * 1.0)
    theirs = _written(expected * 1.0)
    assert torch.equal(own, theirs)
    own.sum().backward()
    theirs.sum().backward()
    assert found.grad is not None
    assert expected.grad is not None
    assert torch.equal(found.grad, expected.grad)


def _written(states: Tensor) -> Tensor:
    first = states[:, 0] + states[:, 1]
    states[:, 2] = 5.0
    return first + states[:, 2] + states[:, 1]

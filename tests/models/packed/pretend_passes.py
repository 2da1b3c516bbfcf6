"""Captured passes of models on a device that refuses what a GPU refuses in a capture, beside the plain ones."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor

from brimful.kernels.layout import map_tensors
from brimful.models.model_stats import layers_of
from brimful.models.packed import packed_forward
from brimful.models.packed.host_decisions import HostDecisions
from brimful.models.packed.packed_forward import PaddedModel
from brimful.models.packed.recompute import recompute
from models.packed.test_host_decisions import rows_of, without_dropout
from models.packed.test_host_reads import (
    SMALL,
    choice,
    columns,
    gaps,
    gaps_of_a_tensor,
    listed,
    longformer,
    number,
    t5,
    table,
)
from pretend_device import OnDevice, PretendDevice, register, to_pretend
from tiny import FAMILIES

DEVICE = "pretend:0"


def copying(copy_numbers: Callable[[Tensor], Tensor]) -> Any:
    """A model whose code copies numbers of the host, in its layers and outside of them."""
    model = FAMILIES["bert"].model()
    for place in (model.bert.encoder.layer[0].output, model.bert.embeddings):
        place.register_forward_hook(lambda *given: copy_numbers(given[2]))
    return model


def tapas() -> Any:
    config = transformers.TapasConfig(
        **SMALL, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, intermediate_size=24
    )
    return transformers.TapasForSequenceClassification(config)


def mvp() -> Any:
    config = transformers.MvpConfig(
        **SMALL | {"bos_token_id": 1, "forced_eos_token_id": 2}, d_model=16, encoder_layers=2, decoder_layers=2,
        encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=24, decoder_ffn_dim=24,
        decoder_start_token_id=2,
    )  # fmt: skip
    return transformers.MvpForSequenceClassification(config)


def computed_again() -> Any:
    """A model whose layers ask, and ask again in the backward pass."""
    model = longformer()
    recompute(layers_of(model), {0})
    return model


COPYING = (number, table, columns, choice, gaps, gaps_of_a_tensor, listed)
MODELS: dict[str, Callable[[], Any]] = {
    "t5": t5,
    "longformer": longformer,
    "longformer, computed again": computed_again,
    "tapas": tapas,
    "mvp": mvp,
    **{each.__name__: lambda each=each: copying(each) for each in COPYING},
}


def differences() -> dict[str, tuple[bool, float, float]]:
    """By model: whether a capture of its plain pass is refused; differences of logits and gradient of one with
    decisions from the plain ones."""
    register()
    return {name: _differences(without_dropout(make())) for name, make in MODELS.items()}


def _differences(model: Any) -> tuple[bool, float, float]:
    first, other = rows_of([40, 5, 17], 0), rows_of([9, 33, 31], 1)
    plain, device = PaddedModel(copy.deepcopy(model), "eager"), PretendDevice()
    expected = plain(other).logits
    gradient = _gradient(plain.model, expected)
    packed_forward.is_capturing = lambda: device.is_capturing  # type: ignore[assignment]
    with device:
        there = PaddedModel(to_pretend(model), "eager")
        sent = [map_tensors(each, lambda tensor: tensor.to(DEVICE)) for each in (first, other)]
        try:
            with device.capturing():
                there(sent[1])
            refused = False
        except Exception as refusal:  # or torch copies where this device cannot see it
            refused = "captur" in str(refusal) or isinstance(refusal, NotImplementedError)
        there.decisions = HostDecisions(torch.device(DEVICE))
        there(sent[0])
        with device.capturing():
            logits = there(sent[1]).logits
            found = _gradient(there.model, logits)
    return refused, _distance(_held(logits), expected), _distance(found, gradient)


def _gradient(model: Any, logits: Tensor) -> Tensor:
    logits.square().sum().backward()  # type: ignore[no-untyped-call]
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return torch.cat([_held(each).flatten() for each in gradients])


def _held(tensor: Tensor) -> Tensor:
    return tensor.held if isinstance(tensor, OnDevice) else tensor.detach()


def _distance(found: Tensor, expected: Tensor) -> float:
    return float((found - expected.detach()).norm() / expected.detach().norm())

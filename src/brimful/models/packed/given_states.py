"""Hidden states that were computed already, given to a model's own classification code in place of its base model's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPoolingAndCrossAttentions

from brimful.kernels.layout import PackedInputs


@dataclass
class _States(BaseModelOutputWithPoolingAndCrossAttentions):  # type: ignore[misc]
    """Outputs of a base model. entity_hidden_states: LUKE's, which has none for texts alone."""

    entity_hidden_states: Tensor | None = None


class GivenStates(nn.Module):
    """Stands where the base model stands, and answers with hidden states that were computed already."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        object.__setattr__(self, "base", base)  # not a submodule: its parameters are the classifier's already
        self.states_S1H: Tensor | None = None

    def forward(self, *args: Any, **kwargs: Any) -> _States:
        assert self.states_S1H is not None
        pooled_SH = _pooled_output(cast(nn.Module, self.base), self.states_S1H)
        return _States(last_hidden_state=self.states_S1H, pooler_output=pooled_SH)


def _pooled_output(base: nn.Module, states_S1H: Tensor) -> Tensor | None:
    """The pooler's output where a base model has one. In ALBERT and BigBird it is a linear layer with its activation
    beside it."""
    pooler = getattr(base, "pooler", None)
    if pooler is None:
        return None
    if isinstance(pooler, nn.Linear):
        activation: Any = getattr(base, "pooler_activation", None) or base.activation
        pooled: Tensor = activation(pooler(states_S1H[:, 0]))
    else:
        pooled = pooler(states_S1H)
    return pooled


def means_SX(x_TX: Tensor, inputs: PackedInputs) -> Tensor:
    """Mean over the tokens of each sequence."""
    num_slots, num_segments = inputs.first_S.shape[0], inputs.segments.cu_seqlens_N.shape[0] - 1
    sums_NX = x_TX.new_zeros(num_segments, x_TX.shape[1])
    sums_SX = sums_NX.index_add(0, inputs.segments.segment_T, x_TX)[:num_slots]
    counts_S = inputs.segments.cu_seqlens_N.diff()[:num_slots].clamp(min=1)
    return sums_SX / counts_S[:, None].to(sums_SX.dtype)

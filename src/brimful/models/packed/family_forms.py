"""Families whose own modules are told of a packed row, and how a model is told.

Families are found by their model type and the names of their modules; the equivalence check says whether the result
is right.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.masking_utils import AttentionMaskInterface

from brimful.kernels.layout import PackedInputs
from brimful.models.packed import own_attention, relative_bias
from brimful.models.packed.packed_row import Attend, Buckets, Form, Listener, PackedRow

#: An implementation of attention whose mask is of one pair: for models that convert whatever mask they have made.
ONE_PAIR = "brimful_one_pair"
AttentionMaskInterface.register(ONE_PAIR, lambda *args, **kwargs: torch.zeros(1, 1, 1, 1, dtype=torch.bool))

#: Model type -> name of a module's class -> what comes in front of it.
_FORMS: Mapping[str, Mapping[str, type[Form]]] = {
    **relative_bias.FORMS,
    **own_attention.FORMS,
    **own_attention.INTERFACE_FORMS,
}


def has_form(config: Any) -> bool:
    """True if a model has a packed form here."""
    return config.model_type in _FORMS


def uses_attention_interface(model: nn.Module) -> bool:
    """True if a model says so, or the module of its code imports the interface's functions."""
    if getattr(model, "_supports_attention_backend", True):
        return True
    return hasattr(sys.modules[type(model).__module__], "ALL_ATTENTION_FUNCTIONS")


def recurrent_layers(config: Any) -> bool:
    """True if some layers carry a state from token to token, which no attention could be told to drop."""
    text = config.get_text_config()
    kinds = {kind for name in ("layer_types", "layers_block_type") for kind in getattr(text, name, None) or ()}
    return bool(kinds & {"linear_attention", "mamba", "hybrid", "recurrent"})


def has_state_space(config: Any) -> bool:
    """True if some layers are Mamba's or gated delta nets', whose code makes a state of each token."""
    if config is None or not recurrent_layers(config):
        return False
    text = config.get_text_config()
    return any(hasattr(text, name) for name in ("mamba_d_conv", "linear_conv_kernel_dim"))


def uses_interface(config: Any) -> bool:
    """True if a model's attention goes through `AttentionInterface`, whether or not other modules have a form here."""
    return not has_form(config) or config.model_type in own_attention.INTERFACE_FORMS


def farthest_bucket(config: Any) -> int | None:
    """Tokens from which on all distances are one to the model; None if its attention has no bias by distance.

    Where a bias has no end, those that the longest sequence of the equivalence check shall have.
    """
    if config.model_type in ("mpnet", "bloom", "mpt"):
        return 128
    if config.model_type in ("t5", "mt5", "umt5"):
        return int(config.relative_attention_max_distance)
    if config.model_type not in ("deberta", "deberta-v2") or not (config.relative_attention and config.pos_att_type):
        return None
    given = getattr(config, "max_relative_positions", -1)
    return int(given if given > 0 else config.max_position_embeddings)


def full_attention_limit(config: Any) -> int | None:
    """Tokens up to which attention is full in a model that has another one beyond; None if it has one only."""
    if config.model_type == "big_bird" and config.attention_type == "block_sparse":
        return int((5 + 2 * config.num_random_blocks) * config.block_size)
    return None


class FamilyForm:
    """A model that can be told of a packed row. Its modules get our classes in front of theirs, in place.

    mask: the implementation of attention whose mask the model is to make; None for one that makes none.
    """

    def __init__(self, model: Any, attend: Attend) -> None:
        self._attend, self._config = attend, model.config
        self.mask = ONE_PAIR if model.config.model_type == "mpt" else None
        if full_attention_limit(model.config) is not None:  # as transformers does for short texts
            model.base_model.set_attention_type("original_full")
        forms = _FORMS[model.config.model_type]
        for module in model.base_model.modules():
            form = forms.get(type(module).__name__)
            if form is not None and not isinstance(module, form):
                module.__class__ = _in_front(form, type(module))  # type: ignore[arg-type]
                module.came_in_front()
        self._listening = [module for module in model.base_model.modules() if isinstance(module, Listener)]
        self._known: dict[tuple[int, int, torch.device], Buckets | None] = {}

    def rows(self, inputs: PackedInputs, positions_T: Tensor, *, plain: bool) -> list[PackedRow]:
        """One packed row, as each module is told of it. positions_T: as the model numbers them."""
        full = full_attention_limit(self._config)
        if full is not None and inputs.segments.max_length > full:
            raise TypeError(f"beyond {full} tokens its attention is sparse")
        row = PackedRow(inputs=inputs, plain=plain, attend=self._attend, positions_1T=positions_T[None])
        return [replace(row, buckets=self._buckets(number, inputs)) for number in range(len(self._listening))]

    @contextmanager
    def told(self, rows: Sequence[PackedRow], implementation: str) -> Iterator[None]:
        """Within, the model runs on one packed row: in its forward pass, and where a layer is recomputed after it.

        implementation: of attention where the model asks for one, so that it makes no mask of T x T.
        """
        before, was = [module.told for module in self._listening], self._config._attn_implementation
        self._config._attn_implementation = self.mask or implementation
        for module, row in zip(self._listening, rows, strict=True):
            module.told = row
        try:
            yield
        finally:
            self._config._attn_implementation = was
            for module, told in zip(self._listening, before, strict=True):
                module.told = told

    def _buckets(self, number: int, inputs: PackedInputs) -> Buckets | None:
        """On the inputs' device; made once for all passes, those that are captured or differentiated among them."""
        key = (number, inputs.segments.max_length, inputs.ids_T.device)
        if key not in self._known:
            with torch.inference_mode(False):
                made = self._listening[number].buckets(inputs.segments.max_length)
                self._known[key] = made and replace(made, bucket_W=made.bucket_W.to(inputs.ids_T.device))
        return self._known[key]


@functools.cache
def _in_front(form: type[Form], family: type[nn.Module]) -> type[nn.Module]:
    """A class that is `form` first and `family` for the rest, under the family's name."""
    return type(family.__name__, (form, family), {"__module__": family.__module__, "__qualname__": family.__qualname__})


def decoder_ids_T(inputs: PackedInputs, config: Any) -> Tensor:
    """Inputs of the decoder, which are those of the encoder one place later in each sequence.

    In front stands the token that decoders start with; mBART and PLBART take the last one of a sequence, at the place
    that its number of tokens without padding gives.
    """
    if config.model_type in ("mbart", "plbart"):
        starts_N, segment_T = inputs.segments.cu_seqlens_N[:-1].long(), inputs.segments.segment_T
        real_N = torch.zeros_like(starts_N).index_add(0, segment_T, (inputs.ids_T != config.pad_token_id).long())
        place_N = (starts_N + real_N - 1).clamp(min=0, max=len(inputs.ids_T) - 1)
        start_T = inputs.ids_T[place_N[segment_T]]
    else:
        start_T = torch.full_like(inputs.ids_T, config.decoder_start_token_id)
    return torch.where(inputs.positions_T == 0, start_T, inputs.ids_T.roll(1))

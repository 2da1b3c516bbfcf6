"""Packed form of families whose attention adds a bias by distance and does not go through `AttentionInterface`.

Their encoders make something T x T out of a row of T tokens (distances in DeBERTa, scores in MPNet) and hand it on to
every layer. Here an encoder that was told of a packed row hands on a `PackedRow` in its place, and attention that is
given one computes variable-length attention with the family's own projections and position tables. Without a packed
row everything is as it was: the classes below come in front of the family's, and call it.

    encoder.get_rel_pos, .compute_position_bias  ->  PackedRow  ->  layers  ->  attention.forward

Families are found by their model type and the names of their modules; the equivalence check says whether the result
is right.
"""

# What `super` has in the classes below is known when they are put in front of a family's.
# mypy: disable-error-code="misc, no-any-return"

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from brimful.kernels.attention.pattern import Pattern, RelativeBias
from brimful.kernels.layout import Segments

#: (queries, keys and values (H, T, D); segments; pattern; whether to use the reference attention) -> (H, T, D).
Attend = Callable[[Tensor, Tensor, Tensor, Segments, Pattern, bool], Tensor]

#: Distances are rounded up to a multiple of this, so that products with positions have sizes that GPUs like.
_TILE = 8


@dataclass(frozen=True, kw_only=True)
class Buckets:
    """Rows of a position table that sequences of some length read, and which of them each distance reads.

    first, last: the rows, from first up to last. bucket_W: row less first, by distance key - query, as `RelativeBias`
    has it.
    """

    first: int
    last: int
    bucket_W: Tensor


@dataclass(frozen=True, kw_only=True)
class PackedRow:
    """Packed row, passed to attention in place of distances or a bias between all tokens.

    buckets: None in a model without relative positions. bias_HR: MPNet's table for all layers.
    """

    segments: Segments
    plain: bool
    attend: Attend
    buckets: Buckets | None = None
    bias_HR: Tensor | None = None

    def context(self, heads: tuple[Tensor, Tensor, Tensor], pattern: Pattern) -> Tensor:
        """Attention of queries, keys and values (1, T, H, D), as (1, T, H * D)."""
        q_HTD, k_HTD, v_HTD = (x[0].transpose(0, 1) for x in heads)
        out_HTD = self.attend(q_HTD, k_HTD, v_HTD, self.segments, pattern, self.plain)
        return out_HTD.transpose(0, 1).flatten(1)[None]


# --- encoders: they are told of the packed row -----------------------------------------------------------------------


class _Form:
    """Base of a family's packed form, mixed into the family's class."""

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def came_in_front(self) -> None:
        """Called once: for what a forward pass shall not do each time."""


class _Listener(_Form):
    """A module that can be told of a packed row. told: that row, while the model runs on it."""

    told: PackedRow | None = None

    def buckets(self, max_length: int) -> Buckets | None:
        """The rows of the position table that sequences of up to `max_length` tokens read; None without such a table.

        Made on the CPU, where the equivalence check's plain model is run: devices round logarithms differently.
        """
        return None


class _DebertaEncoder(_Listener):
    def buckets(self, max_length: int) -> Buckets | None:
        if not self.relative_attention:
            return None
        reach = _reach(max_length)
        one, all_ = torch.empty(1, 1, 1), torch.empty(1, reach + 1, 1)
        ask = functools.partial(super().get_rel_pos, relative_pos=None)
        behind, ahead = ask(one, query_states=all_).flatten(), ask(all_, query_states=one).flatten()
        distance_W = torch.cat([behind.flip(0), ahead[1:-1]])  # query - key, in the buckets of the family
        span = self.rel_embeddings.num_embeddings // 2
        return _used((distance_W + span).clamp(0, 2 * span - 1))

    def get_rel_pos(self, hidden_states: Tensor, query_states: Tensor | None = None, relative_pos: Any = None) -> Any:
        if self.told is None:
            return super().get_rel_pos(hidden_states, query_states, relative_pos)
        if query_states is not None:
            raise TypeError("packed attention does not know queries that are not the keys")
        return self.told

    def get_attention_mask(self, attention_mask: Tensor) -> Tensor:
        """A packed row needs none, T x T least of all."""
        return attention_mask if self.told is not None else super().get_attention_mask(attention_mask)


class _DebertaV2Convolution(_Listener):
    """The convolution beside the first layer of DeBERTa-v2-xlarge: zeros stand between the sequences of a row."""

    def forward(self, hidden_states: Tensor, residual_states: Tensor, input_mask: Tensor) -> Tensor:
        if self.told is None:
            return super().forward(hidden_states, residual_states, input_mask)
        segments, convolution = self.told.segments, self.conv
        gap = convolution.padding[0]
        place_T = torch.arange(hidden_states.shape[1], device=hidden_states.device) + gap * segments.segment_T
        num_places = hidden_states.shape[1] + gap * (segments.cu_seqlens_N.shape[0] - 1)
        apart_PC = hidden_states.new_zeros(num_places, hidden_states.shape[2]).index_copy(0, place_T, hidden_states[0])
        found_PC = convolution(apart_PC.T[None])[0].T
        found_1TC = found_PC.index_select(0, place_T)[None]
        activated = ACT2FN[self.conv_act](self.dropout(found_1TC))
        summed = residual_states + activated
        normed: Tensor = self.LayerNorm(summed).to(summed)
        return normed


class _MPNetEncoder(_Listener):
    def buckets(self, max_length: int) -> Buckets | None:
        reach = _reach(max_length)
        return _used(self.relative_position_bucket(torch.arange(-reach, reach)))

    def compute_position_bias(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.told is None:
            return super().compute_position_bias(x, *args, **kwargs)
        assert self.told.buckets is not None
        table_RH = self.relative_attention_bias.weight[self.told.buckets.first : self.told.buckets.last]
        return replace(self.told, bias_HR=table_RH.T)


def _reach(max_length: int) -> int:
    return -(-max_length // _TILE) * _TILE


def _used(row_W: Tensor) -> Buckets:
    first, last = int(row_W.min()), int(row_W.max()) + 1
    return Buckets(first=first, last=last, bucket_W=row_W - first)


# --- attention: it is handed the packed row --------------------------------------------------------------------------


class _DebertaV2Attention(_Form):
    def came_in_front(self) -> None:
        # The root is DeBERTa's, in fp32 whatever the dtype of the model is.
        squared = torch.tensor(self.attention_head_size * (1 + self._num_terms()), dtype=torch.float32)
        self.packed_scale = 1.0 / float(squared.sqrt())

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor,
        output_attentions: bool = False,
        query_states: Tensor | None = None,
        relative_pos: Any = None,
        rel_embeddings: Tensor | None = None,
    ) -> Any:
        if not isinstance(relative_pos, PackedRow):
            return super().forward(
                hidden_states, attention_mask, output_attentions, query_states, relative_pos, rel_embeddings
            )
        heads = self._heads(hidden_states)
        relative = None
        if self.pos_att_type and relative_pos.buckets is not None and rel_embeddings is not None:
            relative = self._relative(relative_pos.buckets, rel_embeddings)
        pattern = Pattern(scale=self.packed_scale, dropout=_probability(self.dropout), relative=relative)
        return relative_pos.context(heads, pattern), None

    def _heads(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (
            projection(hidden_states).unflatten(-1, (self.num_attention_heads, -1))
            for projection in (self.query_proj, self.key_proj, self.value_proj)
        )
        return q, k, v

    def _num_terms(self) -> int:
        """Terms of the score besides the product of tokens, by which it is scaled."""
        return len([term for term in ("c2p", "p2c") if term in self.pos_att_type])

    def _relative(self, buckets: Buckets, rel_embeddings: Tensor) -> RelativeBias:
        """Positions' keys and queries, scaled as products are. Dropout is on the table, as the family has it."""
        table_RX = self.pos_dropout(rel_embeddings)[buckets.first : buckets.last]
        key, query = self._position_projections()
        terms: Any = self.pos_att_type
        return RelativeBias(
            bucket_W=buckets.bucket_W,
            keys_HRD=self._position_heads(key, table_RX) * self.packed_scale if "c2p" in terms else None,
            queries_HRD=self._position_heads(query, table_RX) * self.packed_scale if "p2c" in terms else None,
        )

    def _position_projections(self) -> tuple[Any, Any]:
        if self.share_att_key:
            return self.key_proj, self.query_proj
        return getattr(self, "pos_key_proj", None), getattr(self, "pos_query_proj", None)

    def _position_heads(self, projection: Any, table_RX: Tensor) -> Tensor:
        heads: Tensor = projection(table_RX).unflatten(-1, (self.num_attention_heads, -1)).transpose(0, 1)
        return heads


class _DebertaAttention(_DebertaV2Attention):
    """The first DeBERTa has one projection whose rows are ordered by head, and two biases."""

    def _heads(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if self.talking_head:
            raise TypeError("packed attention does not know heads that are mixed (talking_head)")
        projected = self.in_proj(hidden_states).unflatten(-1, (self.num_attention_heads, -1))
        q, k, v = projected.chunk(3, dim=-1)
        query_bias, value_bias = (b.unflatten(0, (self.num_attention_heads, -1)) for b in (self.q_bias, self.v_bias))
        return q + query_bias, k, v + value_bias

    def _num_terms(self) -> int:
        return len(self.pos_att_type)

    def _position_projections(self) -> tuple[Any, Any]:
        return getattr(self, "pos_proj", None), getattr(self, "pos_q_proj", None)


class _MPNetAttention(_Form):
    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_bias: Any = None,
        output_attentions: bool = False,
        **kwargs: Any,
    ) -> Any:
        if not isinstance(position_bias, PackedRow):
            return super().forward(hidden_states, attention_mask, position_bias, output_attentions, **kwargs)
        assert position_bias.buckets is not None
        q, k, v = (
            projection(hidden_states).unflatten(-1, (self.num_attention_heads, -1))
            for projection in (self.q, self.k, self.v)
        )
        relative = RelativeBias(bucket_W=position_bias.buckets.bucket_W, bias_HR=position_bias.bias_HR)
        scale = float(self.attention_head_size) ** -0.5
        pattern = Pattern(scale=scale, dropout=_probability(self.dropout), relative=relative)
        return (self.o(position_bias.context((q, k, v), pattern)),)


def _probability(dropout: Any) -> float:
    return float(dropout.p) if dropout.training else 0.0


# --- models ----------------------------------------------------------------------------------------------------------

#: Model type -> name of a module's class -> what comes in front of it.
_FORMS: dict[str, dict[str, type[_Form]]] = {
    "deberta": {"DebertaEncoder": _DebertaEncoder, "DisentangledSelfAttention": _DebertaAttention},
    "deberta-v2": {
        "DebertaV2Encoder": _DebertaEncoder,
        "DisentangledSelfAttention": _DebertaV2Attention,
        "ConvLayer": _DebertaV2Convolution,
    },
    "mpnet": {"MPNetEncoder": _MPNetEncoder, "MPNetSelfAttention": _MPNetAttention},
}


def has_form(config: Any) -> bool:
    """True if a model has a packed form here."""
    return config.model_type in _FORMS


def farthest_bucket(config: Any) -> int | None:
    """Tokens from which on all distances are one to the model; None if its attention has no bias by distance."""
    if config.model_type == "mpnet":
        return 128
    if not has_form(config) or not (config.relative_attention and config.pos_att_type):
        return None
    given = getattr(config, "max_relative_positions", -1)
    return int(given if given > 0 else config.max_position_embeddings)


class RelativeForm:
    """A model whose encoder can be told of a packed row. Its modules get our classes in front of theirs, in place."""

    def __init__(self, model: Any, attend: Attend) -> None:
        self._attend = attend
        forms = _FORMS[model.config.model_type]
        for module in model.base_model.modules():
            form = forms.get(type(module).__name__)
            if form is not None and not isinstance(module, form):
                module.__class__ = _in_front(form, type(module))  # type: ignore[arg-type]
                module.came_in_front()
        self._listening = [module for module in model.base_model.modules() if isinstance(module, _Listener)]
        self._known: dict[tuple[int, torch.device], Buckets | None] = {}

    @contextmanager
    def told(self, segments: Segments, *, plain: bool) -> Iterator[None]:
        """Within, the model runs on one packed row of these segments."""
        row = PackedRow(segments=segments, plain=plain, attend=self._attend, buckets=self._buckets(segments))
        for module in self._listening:
            module.told = row
        try:
            yield
        finally:
            for module in self._listening:
                module.told = None

    def _buckets(self, segments: Segments) -> Buckets | None:
        """On the segments' device; made once for all passes, those that are captured or differentiated among them."""
        key = (segments.max_length, segments.segment_T.device)
        if key not in self._known:
            with torch.inference_mode(False):
                found = [module.buckets(segments.max_length) for module in self._listening]
                made = next((buckets for buckets in found if buckets is not None), None)
                self._known[key] = made and replace(made, bucket_W=made.bucket_W.to(key[1]))
        return self._known[key]


@functools.cache
def _in_front(form: type[_Form], family: type[nn.Module]) -> type[nn.Module]:
    """A class that is `form` first and `family` for the rest, under the family's name."""
    return type(family.__name__, (form, family), {"__module__": family.__module__, "__qualname__": family.__qualname__})

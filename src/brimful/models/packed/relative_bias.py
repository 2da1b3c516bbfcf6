"""Packed form of encoders whose attention adds a bias by distance: DeBERTa, DeBERTa-v2, MPNet, T5.

Their encoders make something T x T out of a row of T tokens (distances in DeBERTa, scores in MPNet) and hand it on to
every layer. Here an encoder that was told of a packed row hands on a `PackedRow` in its place, and attention that is
given one computes variable-length attention with the family's own projections and position tables.

    encoder.get_rel_pos, .compute_position_bias  ->  PackedRow  ->  layers  ->  attention.forward
"""

# What `super` has in the classes below is known when they are put in front of a family's.
# mypy: disable-error-code="misc, no-any-return, override"

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers.activations import ACT2FN

from brimful.kernels.attention.pattern import Pattern, RelativeBias
from brimful.models.packed.packed_row import (
    Buckets,
    Form,
    Listener,
    PackedRow,
    causal,
    in_heads,
    probability,
    reach,
    used,
)


class _DebertaEncoder(Listener):
    def buckets(self, max_length: int) -> Buckets | None:
        if not self.relative_attention:
            return None
        far = reach(max_length)
        one, all_ = torch.empty(1, 1, 1), torch.empty(1, far + 1, 1)
        ask = functools.partial(super().get_rel_pos, relative_pos=None)
        behind, ahead = ask(one, query_states=all_).flatten(), ask(all_, query_states=one).flatten()
        distance_W = torch.cat([behind.flip(0), ahead[1:-1]])  # query - key, in the buckets of the family
        span = self.rel_embeddings.num_embeddings // 2
        return used((distance_W + span).clamp(0, 2 * span - 1))

    def get_rel_pos(self, hidden_states: Tensor, query_states: Tensor | None = None, relative_pos: Any = None) -> Any:
        if self.told is None:
            return super().get_rel_pos(hidden_states, query_states, relative_pos)
        if query_states is not None:
            raise TypeError("packed attention does not know queries that are not the keys")
        return self.told

    def get_attention_mask(self, attention_mask: Tensor) -> Tensor:
        """A packed row needs none, T x T least of all."""
        return attention_mask if self.told is not None else super().get_attention_mask(attention_mask)


class _DebertaV2Convolution(Listener):
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


class _MPNetEncoder(Listener):
    def buckets(self, max_length: int) -> Buckets | None:
        far = reach(max_length)
        return used(self.relative_position_bucket(torch.arange(-far, far)))

    def compute_position_bias(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.told is None:
            return super().compute_position_bias(x, *args, **kwargs)
        assert self.told.buckets is not None
        table_RH = self.relative_attention_bias.weight[self.told.buckets.first : self.told.buckets.last]
        return replace(self.told, bias_HR=table_RH.T)


# --- attention: it is handed the packed row --------------------------------------------------------------------------


class _DebertaV2Attention(Form):
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
        pattern = Pattern(scale=self.packed_scale, dropout=probability(self.dropout), relative=relative)
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


class _MPNetAttention(Form):
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
        pattern = Pattern(scale=scale, dropout=probability(self.dropout), relative=relative)
        return (self.o(position_bias.context((q, k, v), pattern)),)


# --- T5: an encoder and a decoder ------------------------------------------------------------------------------------


class _UMT5Attention(Listener):
    """Attention of UMT5's encoder, of its decoder, and from the decoder to the encoder. Each layer has a table."""

    def buckets(self, max_length: int) -> Buckets | None:
        if not self.has_relative_attention_bias:
            return None
        far = reach(max_length)
        return used(self._row_of(torch.arange(-far, far)))

    def _row_of(self, distance_W: Tensor) -> Tensor:
        return self._relative_position_bucket(distance_W)

    def forward(self, hidden_states: Tensor, encoder_hidden_states: Any = None, *args: Any, **kwargs: Any) -> Any:
        if self.told is None:
            return super().forward(hidden_states, encoder_hidden_states, *args, **kwargs)
        relative = self._bias(self.told) if encoder_hidden_states is None else None
        return self._attend(hidden_states, encoder_hidden_states, relative), None

    def _attend(self, states: Tensor, encoded: Tensor | None, relative: RelativeBias | None) -> Tensor:
        assert self.told is not None
        seen = states if encoded is None else encoded
        heads = in_heads(self.n_heads, self.q(states), self.k(seen), self.v(seen))
        pattern = Pattern(scale=1.0, dropout=self.dropout if self.training else 0.0, relative=relative)
        return self.o(self.told.context(heads, pattern))

    def _bias(self, row: PackedRow) -> RelativeBias:
        assert row.buckets is not None
        table_RH = self.relative_attention_bias.weight[row.buckets.first : row.buckets.last]
        bucket_W, bias_HR = row.buckets.bucket_W, table_RH.T
        if self.is_decoder:
            bucket_W, bias_HR = causal(bucket_W, bias_HR)
        return RelativeBias(bucket_W=bucket_W, bias_HR=bias_HR)


class _T5Attention(_UMT5Attention):
    """T5's, where the first layer hands its bias on to all."""

    def _row_of(self, distance_W: Tensor) -> Tensor:
        return self._relative_position_bucket(
            distance_W,
            bidirectional=not self.is_decoder,
            num_buckets=self.relative_attention_num_buckets,
            max_distance=self.relative_attention_max_distance,
        )

    def forward(
        self,
        hidden_states: Tensor,
        mask: Any = None,
        key_value_states: Tensor | None = None,
        position_bias: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if self.told is None:
            return super(_UMT5Attention, self).forward(
                hidden_states, mask, key_value_states, position_bias, *args, **kwargs
            )
        if key_value_states is None and position_bias is None:
            position_bias = self._bias(self.told)
        return self._attend(hidden_states, key_value_states, position_bias), position_bias, None


FORMS: Mapping[str, Mapping[str, type[Form]]] = {
    "deberta": {"DebertaEncoder": _DebertaEncoder, "DisentangledSelfAttention": _DebertaAttention},
    "deberta-v2": {
        "DebertaV2Encoder": _DebertaEncoder,
        "DisentangledSelfAttention": _DebertaV2Attention,
        "ConvLayer": _DebertaV2Convolution,
    },
    "mpnet": {"MPNetEncoder": _MPNetEncoder, "MPNetSelfAttention": _MPNetAttention},
    "mt5": {"MT5Attention": _T5Attention},
    "t5": {"T5Attention": _T5Attention},
    "umt5": {"UMT5Attention": _UMT5Attention},
}

"""Packed form of families with attention of their own and positions by place: BERT's relatives and older decoders.

Each attention module computes variable-length attention with its own projections; position tables that count places are
given positions that restart.
"""

# What `super` has in the classes below is known when they are put in front of a family's.
# mypy: disable-error-code="misc, no-any-return, override"

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from brimful.kernels.attention.pattern import Pattern, RelativeBias
from brimful.models.packed.packed_row import Buckets, Form, Listener, PackedRow, causal, in_heads, probability, reach


class BertAttention(Listener):
    """Attention of RemBERT, Megatron-BERT, BigBird (not its sparse one) and LUKE without entities."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.told is None:
            return super().forward(hidden_states, *args, **kwargs)
        heads = in_heads(self.num_attention_heads, *(p(hidden_states) for p in (self.query, self.key, self.value)))
        return self.told.context(heads, self._pattern()), None

    def _pattern(self) -> Pattern:
        return Pattern(scale=self.attention_head_size**-0.5, dropout=probability(self.dropout))


class RoFormerAttention(BertAttention):
    """The same with queries and keys turned by their positions."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.told is None:
            return super().forward(hidden_states, *args, **kwargs)
        turns = kwargs["sinusoidal_pos"] if "sinusoidal_pos" in kwargs else args[1]
        heads = in_heads(self.num_attention_heads, *(p(hidden_states) for p in (self.query, self.key, self.value)))
        q, k, v = (x.transpose(1, 2) for x in heads)
        turned = (q, k, v) if self.rotary_value else (q, k)
        q, k, *rest = self.apply_rotary_position_embeddings(turns, *turned)
        heads = tuple(x.transpose(1, 2) for x in (q, k, rest[0] if rest else v))
        return self.told.context(heads, self._pattern()), None


class RoFormerPositions(Listener):
    """Sines by position."""

    @torch.no_grad()
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.told is None:
            return super().forward(*args, **kwargs)
        return F.embedding(self.told.positions_1T[0], self.weight)


class ShiftedPositions(Listener):
    """BART's table of positions, which begins with two unused rows."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.told is None:
            return super().forward(*args, **kwargs)
        return F.embedding(self.told.positions_1T + self.offset, self.weight)


class LukeAttention(BertAttention):
    """LUKE's, which answers for words and for entities; there are none."""

    def forward(self, word_hidden_states: Tensor, entity_hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        if self.told is None or entity_hidden_states is not None:
            return super(BertAttention, self).forward(word_hidden_states, entity_hidden_states, *args, **kwargs)
        heads = in_heads(self.num_attention_heads, *(p(word_hidden_states) for p in (self.query, self.key, self.value)))
        return self.told.context(heads, self._pattern()), None


class SqueezeBertAttention(BertAttention):
    """SqueezeBERT's, whose projections are convolutions of width one over channels and places."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.told is None:
            return super(BertAttention, self).forward(hidden_states, *args, **kwargs)
        projected = (p(hidden_states).transpose(1, 2) for p in (self.query, self.key, self.value))
        heads = in_heads(self.num_attention_heads, *projected)
        return {"context_layer": self.told.context(heads, self._pattern()).transpose(1, 2)}


class XLMAttention(Listener):
    """Attention of XLM and FlauBERT."""

    def forward(self, input: Tensor, mask: Any, *args: Any, **kwargs: Any) -> Any:
        if self.told is None:
            return super().forward(input, mask, *args, **kwargs)
        heads = in_heads(self.n_heads, *(p(input) for p in (self.q_lin, self.k_lin, self.v_lin)))
        pattern = Pattern(scale=self.head_dim**-0.5, dropout=self.dropout if self.training else 0.0)
        return (self.out_lin(self.told.context(heads, pattern)),)


class MobileBertEmbeddings(Listener):
    """Embeddings of a token and its neighbours: none where a sequence begins or ends."""

    def forward(self, input_ids: Tensor, token_type_ids: Tensor | None, position_ids: Tensor, **kwargs: Any) -> Any:
        if self.told is None or not self.trigram_input:
            return super().forward(
                input_ids=input_ids, token_type_ids=token_type_ids, position_ids=position_ids, **kwargs
            )
        segment_T = self.told.segments.segment_T
        apart_1T1 = (segment_T[1:] != segment_T[:-1])[None, :, None]
        words = self.word_embeddings(input_ids)
        after = F.pad(words[:, 1:].masked_fill(apart_1T1, 0.0), [0, 0, 0, 1])
        before = F.pad(words[:, :-1].masked_fill(apart_1T1, 0.0), [0, 0, 1, 0])
        embedded = self.embedding_transformation(torch.cat([after, words, before], dim=2))
        types = torch.zeros_like(input_ids) if token_type_ids is None else token_type_ids
        summed = embedded + self.position_embeddings(position_ids) + self.token_type_embeddings(types)
        return self.dropout(self.LayerNorm(summed))


# --- decoders --------------------------------------------------------------------------------------------------------


class GPTJAttention(Listener):
    """Causal attention behind rotary embeddings of the family's own."""

    def _attn(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None) -> Any:
        if self.told is None:
            return super()._attn(query, key, value, attention_mask)
        pattern = Pattern(scale=self.head_dim**-0.5, causal=True, dropout=probability(self.attn_dropout))
        return _on_heads(self.told, (query, key, value), pattern), None


class GPTNeoAttention(Listener):
    """Causal attention without a scale, in every other layer within a window."""

    def _attn(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None) -> Any:
        if self.told is None:
            return super()._attn(query, key, value, attention_mask)
        window = self.config.window_size if self.attention_type == "local" else None
        pattern = Pattern(scale=1.0, causal=True, window=window, dropout=probability(self.attn_dropout))
        return _on_heads(self.told, (query, key, value), pattern), None


class OpenAIAttention(Listener):
    """Causal attention of the first GPT."""

    def _attn(self, q: Tensor, k: Tensor, v: Tensor, attention_mask: Any = None, output_attentions: Any = False) -> Any:
        if self.told is None:
            return super()._attn(q, k, v, attention_mask, output_attentions)
        scale = v.shape[-1] ** -0.5 if self.scale else 1.0
        pattern = Pattern(scale=scale, causal=True, dropout=probability(self.attn_dropout))
        return [_on_heads(self.told, (q, k.transpose(2, 3), v), pattern)]


def _on_heads(row: PackedRow, heads: tuple[Tensor, Tensor, Tensor], pattern: Pattern) -> Tensor:
    """Attention of (1, H, T, D), in the same shape."""
    q, k, v = (x.transpose(1, 2) for x in heads)
    return row.context((q, k, v), pattern).unflatten(-1, (q.shape[2], -1)).transpose(1, 2)


class FalconAttention(Listener):
    """Causal attention with one projection for all, behind rotary embeddings of the family's own; not with ALiBi."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.told is None:
            return super().forward(hidden_states, *args, **kwargs)
        if kwargs.get("alibi") is not None:
            raise TypeError("packed attention does not know falcon's alibi")
        from transformers.models.falcon.modeling_falcon import apply_rotary_pos_emb  # loaded with the model, not before

        q, k, v = (x.transpose(1, 2) for x in self._split_heads(self.query_key_value(hidden_states)))
        q, k = apply_rotary_pos_emb(q, k, *kwargs["position_embeddings"])
        context = _on_heads(self.told, (q, k, v), Pattern(scale=self.head_dim**-0.5, causal=True))
        return self.dense(context.transpose(1, 2).flatten(2)), None


class _LinearBias(Listener):
    """Attention with a bias that falls linearly with the distance to keys before a query; there are none behind it."""

    def buckets(self, max_length: int) -> Buckets:
        far = reach(max_length)
        return Buckets(first=0, last=far + 1, bucket_W=torch.arange(2 * far).clamp(max=far))

    def _relative(self, slopes_H: Tensor) -> RelativeBias:
        assert self.told is not None
        assert self.told.buckets is not None
        bucket_W, num_rows = self.told.buckets.bucket_W, self.told.buckets.last
        distance_R = torch.arange(1 - num_rows, 1, device=slopes_H.device)
        bucket_W, bias_HR = causal(bucket_W, slopes_H[:, None] * distance_R)
        return RelativeBias(bucket_W=bucket_W, bias_HR=bias_HR)


class BloomAttention(_LinearBias):
    """BLOOM's attention, whose one projection is ordered by head."""

    def forward(self, hidden_states: Tensor, residual: Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.told is None:
            return super().forward(hidden_states, residual, *args, **kwargs)
        if self.pretraining_tp > 1 and self.slow_but_exact:
            raise TypeError("packed attention does not know slow_but_exact")
        alibi_H1T = kwargs["alibi"].float()
        heads = tuple(x.transpose(1, 2) for x in self._reshape(self.query_key_value(hidden_states)))
        pattern = Pattern(
            scale=self.inv_norm_factor,
            dropout=probability(self.attention_dropout),
            relative=self._relative(alibi_H1T[:, 0, 1] - alibi_H1T[:, 0, 0]),
        )
        found = self.dense(self.told.context(heads, pattern))
        return F.dropout(found, self.hidden_dropout, self.training) + residual, None


class MptAttention(_LinearBias):
    """MPT's attention."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.told is None:
            return super().forward(hidden_states, *args, **kwargs)
        projected = self.Wqkv(hidden_states)
        if self.clip_qkv:
            projected = projected.clamp(min=-self.clip_qkv, max=self.clip_qkv)
        bias_H1T = kwargs["position_bias"]
        pattern = Pattern(
            scale=self.softmax_scale,
            dropout=self.attn_dropout_p if self.training else 0.0,
            relative=self._relative(bias_H1T[:, 0, -1] - bias_H1T[:, 0, -2]),
        )
        return self.out_proj(self.told.context(in_heads(self.n_heads, *projected.chunk(3, dim=2)), pattern)), None


FORMS: Mapping[str, Mapping[str, type[Form]]] = {
    "big_bird": {"BigBirdSelfAttention": BertAttention},
    "bloom": {"BloomAttention": BloomAttention},
    "falcon": {"FalconAttention": FalconAttention},
    "flaubert": {"MultiHeadAttention": XLMAttention},
    "gpt_neo": {"GPTNeoSelfAttention": GPTNeoAttention},
    "gptj": {"GPTJAttention": GPTJAttention},
    "luke": {"LukeSelfAttention": LukeAttention},
    "megatron-bert": {"MegatronBertSelfAttention": BertAttention},
    "mpt": {"MptAttention": MptAttention},
    "openai-gpt": {"Attention": OpenAIAttention},
    "rembert": {"RemBertSelfAttention": BertAttention},
    "roformer": {
        "RoFormerSelfAttention": RoFormerAttention,
        "RoFormerSinusoidalPositionalEmbedding": RoFormerPositions,
    },
    "squeezebert": {"SqueezeBertSelfAttention": SqueezeBertAttention},
    "xlm": {"MultiHeadAttention": XLMAttention},
}
#: The same for families whose attention goes through `AttentionInterface`.
INTERFACE_FORMS: Mapping[str, Mapping[str, type[Form]]] = {
    "bart": {"BartLearnedPositionalEmbedding": ShiftedPositions},
    "mbart": {"MBartLearnedPositionalEmbedding": ShiftedPositions},
    "mobilebert": {"MobileBertEmbeddings": MobileBertEmbeddings},
    "plbart": {"PLBartLearnedPositionalEmbedding": ShiftedPositions},
}

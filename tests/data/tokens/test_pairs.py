"""Pairs put together from ids: id for id what the tokenizer makes of each pair, cut as the zero-shot pipeline cuts."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, processors

import trained_tokenizers
from brimful.core.errors import OptionError
from brimful.data.tokens.encoder import Encoder, Tokens
from brimful.data.tokens.pairs import PairTemplate, assemble, assembly_is_exact, encode_pairs, every_pair, find_template

texts = st.text(max_size=40) | st.text(alphabet="ab Ä\u0301ß中🙂\u200d'.,\n\t[]<>", max_size=80)
labels = st.text(alphabet="abc de", max_size=8)
HYPOTHESES = ["This example is sports.", "This example is politics.", "x"]
TEXTS = ["hello world", "", "much longer, so that it will be cut, whatever it says of sports " * 3, " \x00 ", "שלום 🙂"]


@cache
def made(name: str, side: str) -> tuple[Encoder, Encoder]:
    """An encoder of pairs of 30 tokens, and the one for their parts."""
    encoder = encoder_of(trained_tokenizers.make(name, side), 30)
    return encoder, encoder.without_special_tokens()


def encoder_of(tokenizer: Any, max_length: int) -> Encoder:
    return Encoder.from_tokenizer(tokenizer, max_length, with_types=True, truncation="only_first")


def template_of(encoder: Encoder) -> PairTemplate:
    template = find_template(encoder)
    assert template is not None
    return template


def assembled(encoder: Encoder, texts: list[str], hypotheses: list[str], pairs: Any) -> Tokens:
    bare = encoder.without_special_tokens()
    return assemble(template_of(encoder), bare.encode(texts), bare.encode(hypotheses), *pairs)


def rows(tokens: Tokens) -> list[list[int]]:
    return [tokens.sequence(i).tolist() for i in range(len(tokens))]


@pytest.mark.sampled
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("name", trained_tokenizers.NAMES)
@given(texts=st.lists(texts, min_size=1, max_size=3), labels=st.lists(labels, min_size=1, max_size=3))
@example(texts=TEXTS, labels=["", "a b c d"])
def test_the_tokenizers_own_pairs(name: str, side: str, texts: list[str], labels: list[str]) -> None:
    tokenizer = trained_tokenizers.make(name, side)
    encoder, bare = made(name, side)
    hypotheses = [f"is {label}." for label in labels]
    pairs = every_pair(len(texts), len(hypotheses))
    found = assemble(template_of(encoder), bare.encode(texts), bare.encode(hypotheses), *pairs)
    together = [[text, hypothesis] for text in texts for hypothesis in hypotheses]
    expected = tokenizer(together, truncation="only_first", max_length=30)
    assert rows(found) == expected["input_ids"]
    assert [found.sequence_types(i).tolist() for i in range(len(found))] == expected["token_type_ids"]  # type: ignore[union-attr]
    whole = tokenizer(together, truncation=False, verbose=False)["input_ids"]
    assert found.truncated.tolist() == [len(ids) > 30 for ids in whole]


@pytest.mark.parametrize(
    ("name", "before", "between", "behind"),
    [
        ("minilm", [101], [102], [102]),
        ("byte_level", [0], [2, 2], [2]),
        ("bare_byte_level", [], [], []),
        ("unigram", [0], [2, 2], [2]),
    ],
)
def test_templates(name: str, before: list[int], between: list[int], behind: list[int]) -> None:
    template = template_of(encoder_of(trained_tokenizers.make(name), 64))
    found = [part[0].tolist() for part in (template.before, template.between, template.behind)]
    assert found == [before, between, behind]
    assert template.num_special_tokens == len(before + between + behind)


def test_candidate_labels_of_each_row() -> None:
    """Texts with labels of their own: pairs are given by number, some texts and hypotheses never, some twice."""
    encoder = encoder_of(trained_tokenizers.make("minilm"), 24)
    pairs = np.array([2, 0, 0, 4]), np.array([1, 0, 1, 1])
    assert rows(assembled(encoder, TEXTS, HYPOTHESES, pairs)) == rows(encode_pairs(encoder, TEXTS, HYPOTHESES, *pairs))


def test_no_pairs() -> None:
    encoder = encoder_of(trained_tokenizers.make("minilm"), 24)
    found = assembled(encoder, TEXTS, HYPOTHESES, every_pair(0, 3))
    assert (len(found), found.ids.dtype, len(found.truncated)) == (0, np.int32, 0)


def test_without_types() -> None:
    tokenizer = trained_tokenizers.make("minilm")
    encoder = Encoder.from_tokenizer(tokenizer, 24, with_types=False, truncation="only_first")
    assert assembled(encoder, TEXTS, HYPOTHESES, every_pair(5, 3)).types is None
    assert assembly_is_exact(template_of(encoder), encoder, TEXTS, HYPOTHESES)


@pytest.mark.parametrize("name", ["minilm", "byte_level"])
def test_a_hypothesis_without_room_for_a_text(name: str) -> None:
    """The pipeline would hand the model more than it has positions for."""
    encoder = encoder_of(trained_tokenizers.make(name), 12)
    long = ["this example is about sports and politics and words and numbers and everything"]
    with pytest.raises(OptionError, match=r"a hypothesis has 1\d tokens, which leaves no room for the text"):
        assembled(encoder, ["hello world"], long, every_pair(1, 1))
    with pytest.raises(OptionError, match="leaves no room for the first one: the longest pair has 12 tokens"):
        encode_pairs(encoder, ["hello world"], long, *every_pair(1, 1))


def test_as_long_as_can_be_without_a_text() -> None:
    encoder = encoder_of(trained_tokenizers.make("minilm"), 8)
    assert assembly_is_exact(template_of(encoder), encoder, [""], ["one two three four five"])
    with pytest.raises(OptionError):
        assembly_is_exact(template_of(encoder), encoder, ["a"], ["one two three four five"])


def test_what_is_not_exact_is_seen() -> None:
    encoder = encoder_of(trained_tokenizers.make("minilm"), 24)
    template = template_of(encoder)
    for wrong in (
        dataclasses.replace(template, between=template_of(encoder_of(trained_tokenizers.make("unigram"), 24)).between),
        dataclasses.replace(template, hypothesis_type=0),
        dataclasses.replace(template, from_left=True),
        dataclasses.replace(template, max_length=23),
    ):
        assert not assembly_is_exact(wrong, encoder, TEXTS, HYPOTHESES)
    assert assembly_is_exact(template, encoder, TEXTS, HYPOTHESES)


def test_a_hypothesis_before_its_text_has_no_template() -> None:
    encoder = encoder_of(trained_tokenizers.make("minilm"), 24)
    encoder.backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $B [SEP] $A [SEP]", special_tokens=[("[CLS]", 101), ("[SEP]", 102)]
    )
    assert isinstance(encoder.backend, Tokenizer)
    assert find_template(encoder) is None

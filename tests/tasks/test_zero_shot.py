"""Zero-shot classification: the answers of transformers' own pipeline, and each row's own labels."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from brimful.core.errors import DataError, ModelError, OptionError
from brimful.tasks.candidates import Candidates, parse_labels
from brimful.tasks.zero_shot import DEFAULT_TEMPLATE, ZeroShotForm, zero_shot_form
from same import same_objects, types_of
from tiny_files import BAD, GOOD, review, save_classifier

TEXTS = [review(i % 3 == 0, i) for i in range(6)] + ["good"]
NLI = {
    "last": ["contradiction", "neutral", "entailment"],
    "first": ["entailment", "neutral", "contradiction"],
    "middle, upper case": ["NEUTRAL", "ENTAILMENT", "CONTRADICTION"],
    "two": ["entailment", "not_entailment"],
    "missing": ["LABEL_0", "LABEL_1", "LABEL_2"],
}
LABELS: list[Any] = ["good", ["bad", "good"], GOOD + BAD, " the film ,very long, story"]


class PlainNli:
    """A saved NLI classifier as transformers runs it: its pipeline, and its model, one pair at a time."""

    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.pipeline = transformers.pipeline(
            "zero-shot-classification", model=self.model, tokenizer=self.tokenizer, device="cpu"
        )

    def logits_PC(self, texts: Sequence[str], form: ZeroShotForm, candidates: Candidates) -> np.ndarray:
        hypotheses = form.hypotheses(candidates.names).to_pylist()
        rows = np.repeat(np.arange(len(texts)), np.diff(candidates.offsets_N1))
        pairs = [(texts[row], hypotheses[i]) for row, i in zip(rows, candidates.indices_P, strict=True)]
        with torch.no_grad():
            logits = [self.model(**self.tokenizer(*pair, return_tensors="pt")).logits for pair in pairs]
        return torch.cat(logits).numpy()


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize("order", NLI)
def test_objects_are_those_of_the_pipeline(order: str, tmp_path: Path) -> None:
    plain = PlainNli(save_classifier(tmp_path, NLI[order]))
    for labels in LABELS:
        for multi_label in (False, True):
            form = zero_shot_form(plain.model.config, multi_label=multi_label)
            candidates = Candidates.of_every_row(parse_labels(labels), len(TEXTS))
            found = form.objects(plain.logits_PC(TEXTS, form, candidates), candidates, TEXTS)
            same_objects(found, plain.pipeline(TEXTS, candidate_labels=labels, multi_label=multi_label))
            same_objects(found[0], plain.pipeline(TEXTS[0], candidate_labels=labels, multi_label=multi_label))


@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_another_template_on_padded_batches(family: str, tmp_path: Path) -> None:
    plain, template = PlainNli(save_classifier(tmp_path, NLI["last"], family)), "it felt {} and {{very}} long ."
    form = zero_shot_form(plain.model.config, template=template)
    candidates = Candidates.of_every_row(GOOD, len(TEXTS))
    found = form.objects(plain.logits_PC(TEXTS, form, candidates), candidates, TEXTS)
    same_objects(found, plain.pipeline(TEXTS, candidate_labels=GOOD, hypothesis_template=template, batch_size=4))


@pytest.mark.parametrize("multi_label", [False, True])
def test_each_row_may_have_its_own_labels(multi_label: bool, tmp_path: Path) -> None:
    plain = PlainNli(save_classifier(tmp_path, NLI["last"]))
    form = zero_shot_form(plain.model.config, multi_label=multi_label)
    own = [["good"], ["bad", "good"], [], GOOD + BAD, ["bad", "dull"], ["sad", "good", "film"], ["film"]]
    candidates = Candidates.from_column(pa.array(own))
    found = form.objects(plain.logits_PC(TEXTS, form, candidates), candidates, TEXTS)
    for text, labels, answer in zip(TEXTS, own, found, strict=True):
        if labels:
            same_objects(answer, plain.pipeline(text, candidate_labels=labels, multi_label=multi_label))
        else:
            assert answer == {"sequence": text, "labels": [], "scores": []}


def test_ties_come_in_the_order_of_the_pipeline(tmp_path: Path) -> None:
    plain = PlainNli(save_classifier(tmp_path, NLI["last"]))
    with torch.no_grad():
        plain.model.classifier.weight.zero_()
    for labels in (GOOD, [f"{word} {i}" for i in range(5) for word in GOOD + BAD]):
        form, candidates = zero_shot_form(plain.model.config), Candidates.of_every_row(labels, 1)
        found = form.objects(plain.logits_PC(TEXTS[:1], form, candidates), candidates, TEXTS[:1])
        same_objects(found[0], plain.pipeline(TEXTS[0], candidate_labels=labels))


# --- which output is entailment -------------------------------------------------------------------------------------


def config(names: Sequence[str]) -> Any:
    return SimpleNamespace(label2id={name: i for i, name in enumerate(names)}, num_labels=len(names))


def test_a_model_that_names_no_entailment_is_guessed_and_said() -> None:
    form = zero_shot_form(config(["LABEL_0", "LABEL_1"]))
    assert (form.entailment, form.contradiction) == (-1, 0)
    assert (
        form.guess
        == "no label of the model begins with 'entail' (LABEL_0, LABEL_1): its last output is taken for entailment"
    )
    assert zero_shot_form(config(["Entails", "no"])).guess is None


@pytest.mark.parametrize("names", [["entailment"], ["LABEL_0"]])
def test_a_model_of_one_output_cannot(names: list[str]) -> None:
    with pytest.raises(ModelError, match="of a model that has 1") as raised:
        zero_shot_form(config(names))
    assert "natural-language inference" in str(raised.value.hint)


@pytest.mark.parametrize("template", ["no place", "{} {}", "{name}", "{", "{1}", "{.x}", "{[x]}", "{{}}"])
def test_a_template_without_a_place_for_a_label(template: str) -> None:
    with pytest.raises(OptionError, match="--hypothesis-template"):
        zero_shot_form(config(NLI["last"]), template=template)


# --- candidate labels -----------------------------------------------------------------------------------------------


def labels_of(candidates: Candidates) -> list[list[str]]:
    flat = candidates.names.take(pa.array(candidates.indices_P)).to_pylist()
    ends = candidates.offsets_N1.tolist()
    return [flat[a:b] for a, b in pairwise(ends)]


@pytest.mark.parametrize(
    ("column", "expected"),
    [
        (pa.array(["a, b", "", None, " ,a,", "b"]), [["a", "b"], [], [], ["a"], ["b"]]),
        (pa.array(["x", "a,b", None, "c"]).slice(1), [["a", "b"], [], ["c"]]),
        (pa.array(["a,b", "c", "a,b"]).dictionary_encode(), [["a", "b"], ["c"], ["a", "b"]]),
        (pa.array([["a", "b"], [], None, [None, "c", "c"]]), [["a", "b"], [], [], ["c", "c"]]),
        (pa.array([["z"], ["a, b"], None, ["c"]]).slice(1), [["a, b"], [], ["c"]]),
        (pa.array([["a"]], pa.large_list(pa.large_string())), [["a"]]),
        (pa.array([["", "a", " ", " b"], [""]]), [["a", " b"], []]),
        (pa.array([None, None]), [[], []]),
        (pa.array([[], None]), [[], []]),
        (pa.chunked_array([["a"], ["b,a"]]), [["a"], ["b", "a"]]),
        (pa.chunked_array([], pa.string()), []),
    ],
)
def test_a_column_of_labels(column: Any, expected: list[list[str]]) -> None:
    candidates = Candidates.from_column(column)
    assert labels_of(candidates) == expected
    assert len(set(candidates.names.to_pylist())) == len(candidates.names)


def test_labels_of_some_rows() -> None:
    column = pa.array([["b", "a"], None, ["c", "a"], [], ["b"]])
    candidates = Candidates.from_column(column)
    for rows in ([2, 0], [1, 3], [], [4, 4, 0, 2], range(5)):
        taken, alone = (
            candidates.take(np.array(rows, np.int64)),
            Candidates.from_column(column.take(pa.array(rows, pa.int64()))),
        )
        assert labels_of(taken) == labels_of(alone)
        assert set(taken.names.to_pylist()) == set(alone.names.to_pylist())
    for start, number in ((0, 2), (1, 3), (2, 9), (5, 1)):
        assert labels_of(candidates.slice(start, number)) == labels_of(candidates)[start : start + number]
    assert labels_of(candidates.only(np.arange(5) % 4 == 0)) == [["b", "a"], [], [], [], ["b"]]


def test_rows_whose_labels_have_one_twice() -> None:
    column = pa.array([["b", "a"], ["a", "b", "a"], None, [], ["b", "b\x1b", "b\x1b"], ["a", None, None]])
    said = ["the candidate label 'a' is there twice", "the candidate label 'b\\x1b' is there twice"]
    assert Candidates.from_column(column).faults().to_pylist() == [None, said[0], None, None, said[1], None]
    assert Candidates.from_column(pa.array(["a, b", "a,b , a"])).faults().to_pylist() == [None, said[0]]
    assert Candidates.from_column(pa.nulls(2)).faults().to_pylist() == [None, None]
    assert Candidates.from_column(pa.array([], pa.string())).faults().to_pylist() == []


@pytest.mark.parametrize("column", [pa.array([1, 2]), pa.array([[1.5]]), pa.array([{"a": 1}])])
def test_a_column_that_holds_no_labels(column: pa.Array) -> None:
    with pytest.raises(DataError, match="the column of candidate labels holds"):
        Candidates.from_column(column)


def test_labels_of_a_call() -> None:
    assert parse_labels(" a ,b,c d ") == ("a", "b", "c d")
    assert parse_labels(["a, b", " c"]) == ("a, b", " c")


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        *((nothing, "there are no candidate labels") for nothing in ("", " , ", [], [""])),
        *((blank, "'' is no candidate label") for blank in ("a,,b", "a, ,b", "a,b,", ["a", ""])),
        (["a", " "], "' ' is no candidate label"),
        (["a", 3], "3 is no candidate label"),
        *((half, r"'b\\ud800' is no candidate label") for half in ("a,b\ud800", ["a", "b\ud800"])),
        *((twice, "'a' is there twice") for twice in ("a,a", "b, a,c,a ", ["a", "a"])),
    ],
)
def test_labels_that_cannot_be_meant(labels: Any, said: str) -> None:
    with pytest.raises(OptionError, match=said) as raised:
        parse_labels(labels)
    assert str(raised.value.hint).startswith("name ")


# --- columns --------------------------------------------------------------------------------------------------------

numbers = st.floats(-30, 30, width=32) | st.sampled_from([float("nan"), float("inf"), 0.0])


@st.composite
def many_pairs(draw: st.DrawFn) -> tuple[np.ndarray, Candidates]:
    own = draw(st.lists(st.lists(st.sampled_from("abcdef"), max_size=4), max_size=6))
    num_pairs = sum(map(len, own))
    flat = draw(st.lists(numbers, min_size=3 * num_pairs, max_size=3 * num_pairs))
    column = pa.array(own, pa.list_(pa.string()))
    return np.array(flat, dtype=np.float32).reshape(num_pairs, 3), Candidates.from_column(column)


@given(
    pairs=many_pairs(), multi_label=st.booleans(), top_k=st.integers(0, 5), threshold=st.none() | st.floats(0.01, 0.99)
)
def test_columns_and_objects_agree(
    pairs: tuple[np.ndarray, Candidates], multi_label: bool, top_k: int, threshold: float | None
) -> None:
    logits_PC, candidates = pairs
    num_rows = len(candidates.offsets_N1) - 1
    form = zero_shot_form(config(NLI["last"]), multi_label=multi_label, top_k=top_k, threshold=threshold, logits=True)
    table = pa.table(form.columns(logits_PC, candidates))
    assert table.schema.equals(types_of(form))
    answers = form.objects(logits_PC, candidates, [DEFAULT_TEMPLATE] * num_rows)
    counts = form.counts(logits_PC, candidates)

    assert sum(counts.confidences) == sum(bool(answer["labels"]) for answer in answers)
    for row, answer, (begin, end) in zip(table.to_pylist(), answers, pairwise(candidates.offsets_N1), strict=True):
        if not np.isfinite(logits_PC[begin:end]).all() or begin == end:
            assert set(row.values()) == {None}
            assert not answer["labels"]
            continue
        every = list(zip(answer["labels"], answer["scores"], strict=True))
        given_labels = [pair for pair in every if pair[1] >= (form.least or 0)]
        assert [(each["label"], each["score"]) for each in row["scores"]] == every[: top_k or None]
        assert row["logits"] == logits_PC[begin:end].tolist()
        if multi_label:
            assert list(zip(row["label"], row["score"], strict=True)) == given_labels
        else:
            assert (row["label"], row["score"]) == (every[0][0] if given_labels else None, every[0][1])


def test_logits_beyond_88_have_a_score() -> None:
    form, candidates = zero_shot_form(config(NLI["last"])), Candidates.of_every_row(["a", "b"], 1)
    [answer] = form.objects(np.array([[0, 0, 100], [0, 0, 99]], dtype=np.float32), candidates, ["text"])
    assert answer["scores"] == pytest.approx([0.731059, 0.268941], abs=1e-5)

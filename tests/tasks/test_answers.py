"""Answers from logits: those of transformers' own pipeline as objects, and the same as columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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

from brimful.core.classification import CONFIDENCE_BINS
from brimful.core.errors import OptionError
from brimful.tasks.answers import AnswerForm, answer_form, objects
from brimful.tasks.ranking import shortest
from same import SCORE, same_objects, types_of
from tiny_files import review, save_classifier

TEXTS = [review(i % 3 == 0, i) for i in range(8)] + ["good", "the ." * 5]
PAIRS = [{"text": a, "text_pair": b} for a, b in zip(TEXTS, TEXTS[::-1], strict=True)]
HEADS: dict[str, tuple[list[str], str | None]] = {
    "one label": (["bad", "fair", "good"], None),
    "one label, stated": (["bad", "fair", "good"], "single_label_classification"),
    "two outputs of one name": (["bad", "good", "good"], None),
    "several labels": (["bad", "fair", "good"], "multi_label_classification"),
    "one of several labels": (["bad"], "multi_label_classification"),
    "one output, no task": (["relevant"], None),
    "a number": (["stars"], "regression"),
    "several numbers": (["x", "y", "z"], "regression"),
}
CALLS: list[dict[str, Any]] = [
    *({"top_k": top_k} for top_k in (None, 0, 1, 2, 10)),
    *({"function_to_apply": function} for function in ("sigmoid", "softmax", "none", "NONE")),
    {"function_to_apply": "sigmoid", "top_k": None},
    {"function_to_apply": "none", "top_k": 2},
    {},
]


class Plain:
    """A saved classifier as transformers runs it: its pipeline, and its model, one text at a time."""

    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)

    def pipeline(self, task: str = "text-classification") -> Any:
        return transformers.pipeline(task, model=self.model, tokenizer=self.tokenizer, device="cpu")

    def logits_NC(self, inputs: Sequence[str | Mapping[str, str]]) -> np.ndarray:
        rows = [{"text": each} if isinstance(each, str) else each for each in inputs]
        with torch.no_grad():
            logits = [self.model(**self.tokenizer(**row, return_tensors="pt")).logits for row in rows]
        return torch.cat(logits).numpy()


def config(labels: Sequence[str], problem_type: str | None = None) -> Any:
    return SimpleNamespace(id2label=dict(enumerate(labels)), num_labels=len(labels), problem_type=problem_type)


# --- objects against the pipeline -----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize("head", HEADS)
def test_objects_are_those_of_the_pipeline(head: str, tmp_path: Path) -> None:
    labels, problem_type = HEADS[head]
    plain = Plain(save_classifier(tmp_path, labels, problem_type=problem_type, type_vocab_size=2))
    form, pipeline = answer_form(plain.model.config), plain.pipeline()
    logits_NC, pair_logits_NC = plain.logits_NC(TEXTS), plain.logits_NC(PAIRS)

    for call in CALLS:
        same_objects(objects(form.space, logits_NC, **call), pipeline(TEXTS, **call))
        same_objects(objects(form.space, logits_NC[:1], **call, given="text"), pipeline(TEXTS[0], **call))
        same_objects(objects(form.space, logits_NC[:1], **call), pipeline(TEXTS[:1], **call))
        same_objects(objects(form.space, pair_logits_NC, **call), pipeline(PAIRS, **call))
        same_objects(objects(form.space, pair_logits_NC[:1], **call, given="pair"), pipeline(PAIRS[0], **call))


@pytest.mark.parametrize("family", ["bert", "roberta", "gpt2", "modernbert", "qwen3"])
def test_objects_are_those_of_the_pipeline_on_padded_batches(family: str, tmp_path: Path) -> None:
    plain = Plain(save_classifier(tmp_path, ["a", "b", "c"], family))
    found = objects(answer_form(plain.model.config).space, plain.logits_NC(TEXTS), top_k=None)
    same_objects(found, plain.pipeline()(TEXTS, top_k=None, batch_size=4))


def test_ties_go_to_the_label_that_the_pipeline_takes(tmp_path: Path) -> None:
    plain = Plain(save_classifier(tmp_path, ["a", "b", "c"], problem_type="multi_label_classification"))
    with torch.no_grad():
        plain.model.classifier.weight.zero_()
        plain.model.classifier.bias.copy_(torch.tensor([20.0, 21.0, 22.0]))  # each is 1 in fp32
    space, logits_NC = answer_form(plain.model.config).space, plain.logits_NC(TEXTS)
    for call in CALLS:
        same_objects(objects(space, logits_NC, **call), plain.pipeline()(TEXTS, **call))
    assert objects(space, logits_NC)[0] == {"label": "a", "score": 1.0}


def test_logits_far_from_zero_are_no_warning_and_no_nan() -> None:
    extreme_NC = np.array([[1e4, -1e4], [3e38, 3e38], [-3e38, 3e38]], dtype=np.float32)
    for function in ("softmax", "sigmoid"):
        for answer in objects(answer_form(config("ab")).space, extreme_NC, top_k=None, function_to_apply=function):
            assert all(0 <= label["score"] <= 1 for label in answer)


def test_rows_without_an_answer_keep_their_place_among_objects() -> None:
    space, logits_NC = answer_form(config("ab")).space, np.array([[np.nan, 1], [0, 1], [np.inf, 1]], dtype=np.float32)
    nothing = {"label": None, "score": None}
    assert [a == nothing for a in objects(space, logits_NC)] == [True, False, True]
    assert [len(a) for a in objects(space, logits_NC, top_k=None)] == [0, 2, 0]
    assert objects(space, logits_NC[:1], given="pair") == nothing
    assert objects(space, logits_NC[:0]) == []


def test_mistakes_in_a_call() -> None:
    space, logits_NC = answer_form(config("ab")).space, np.zeros((1, 2), dtype=np.float32)
    with pytest.raises(OptionError, match="top_k is -1: it must be at least 0"):
        objects(space, logits_NC, top_k=-1)
    with pytest.raises(OptionError, match="'softmin': there is no such function"):
        objects(space, logits_NC, function_to_apply="softmin")
    with pytest.raises(OptionError, match="outputs are numbers"):
        answer_form(config(["stars"], "regression"), threshold=0.5)


# --- columns --------------------------------------------------------------------------------------------------------

LOGITS_NC = np.array([[0, 2, 1], [np.nan, 0, 0], [3, -1, 0.5], [-4, -4, -4]], dtype=np.float32)
NAMES = ("bad", "fair", "good")


def near(score: Any) -> Any:
    return pytest.approx(score, abs=SCORE)


def rows(form: AnswerForm, logits_NC: np.ndarray = LOGITS_NC) -> list[dict[str, Any]]:
    table = pa.table(form.columns(logits_NC))
    assert table.schema.equals(types_of(form, form.space.num_outputs))
    return list(table.to_pylist())


def test_one_label() -> None:
    assert rows(answer_form(config(NAMES))) == [
        {"label": "fair", "score": near(0.66524)},
        {"label": None, "score": None},
        {"label": "bad", "score": near(0.90876)},
        {"label": "bad", "score": near(1 / 3)},
    ]


def test_below_the_threshold_there_is_a_score_and_no_label() -> None:
    found = rows(answer_form(config(NAMES), threshold=0.7))
    assert [row["label"] for row in found] == [None, None, "bad", None]
    assert [row["score"] for row in found] == [row["score"] for row in rows(answer_form(config(NAMES)))]


@pytest.mark.parametrize(("threshold", "given"), [(None, ["fair", "good", "bad"]), (0.6, ["fair", "good"])])
def test_several_labels(threshold: float | None, given: list[str]) -> None:
    first, absent, second, none = rows(
        answer_form(config(NAMES, "multi_label_classification"), threshold=threshold, top_k=1)
    )
    assert (first["label"], first["score"]) == (given, near([0.880797, 0.731059, 0.5][: len(given)]))
    assert first["scores"] == [{"label": "fair", "score": near(0.880797)}]
    assert absent == {"label": None, "score": None, "scores": None}
    assert second["label"] == ["bad", "good"]
    assert (none["label"], none["score"]) == ([], [])


def test_one_output_without_a_task_is_scored_whatever_it_is() -> None:
    assert rows(answer_form(config(["relevant"])), LOGITS_NC[:, :1]) == [
        {"label": "relevant", "score": 0.5},
        {"label": None, "score": None},
        {"label": "relevant", "score": near(0.952574)},
        {"label": "relevant", "score": near(0.017986)},
    ]
    assert rows(answer_form(config(["relevant"]), threshold=0.5), LOGITS_NC[3:, :1])[0]["label"] is None


def test_numbers() -> None:
    one = rows(answer_form(config(["stars"], "regression"), top_k=0, logits=True), LOGITS_NC[:, 2:])
    assert one[0] == {"score": 1.0, "scores": [{"label": "stars", "score": 1.0}], "logits": [1.0]}
    several = rows(answer_form(config(NAMES, "regression"), top_k=0))
    assert several[0] == {
        "score": [0.0, 2.0, 1.0],
        "scores": [{"label": "bad", "score": 0.0}, {"label": "fair", "score": 2.0}, {"label": "good", "score": 1.0}],
    }
    assert several[1] == {"score": None, "scores": None}


def test_raw_logits_are_not_rounded() -> None:
    column = answer_form(config(NAMES), logits=True).columns(LOGITS_NC / 3)["logits"]
    assert column.is_valid().to_pylist() == [True, False, True, True]
    assert column.flatten().to_numpy().tolist() == (LOGITS_NC[[0, 2, 3]] / 3).ravel().tolist()


def test_counts_are_of_what_was_given() -> None:
    counts = answer_form(config(NAMES)).counts(LOGITS_NC)
    assert counts.labels == {"fair": 1, "bad": 2}
    assert [(i / CONFIDENCE_BINS, n) for i, n in enumerate(counts.confidences) if n] == [(0.3, 1), (0.65, 1), (0.9, 1)]
    assert answer_form(config(NAMES), threshold=0.7).counts(LOGITS_NC).labels == {"bad": 1}
    several = answer_form(config(NAMES, "multi_label_classification")).counts(LOGITS_NC)
    assert several.labels == {"bad": 2, "fair": 1, "good": 2}
    assert sum(several.confidences) == 3
    assert answer_form(config(NAMES, "regression")).counts(LOGITS_NC).confidences == ()
    assert answer_form(config(["x", "x"])).counts(np.eye(2, dtype=np.float32)).labels == {"x": 2}
    assert sum(answer_form(config(NAMES)).counts(1000 * LOGITS_NC).confidences) == 3  # a probability of 1 is in a class


# --- columns and objects say the same -------------------------------------------------------------------------------

numbers = st.floats(-30, 30, width=32) | st.sampled_from([float("nan"), float("inf"), -80.0, 20.0, 21.0])


@st.composite
def many_logits(draw: st.DrawFn) -> np.ndarray:
    num_rows, num_outputs = draw(st.integers(0, 6)), draw(st.integers(1, 5))
    flat = draw(st.lists(numbers, min_size=num_rows * num_outputs, max_size=num_rows * num_outputs))
    return np.array(flat, dtype=np.float32).reshape(num_rows, num_outputs)


@given(
    logits_NC=many_logits(),
    problem_type=st.sampled_from([None, "multi_label_classification", "regression"]),
    top_k=st.integers(0, 6),
    threshold=st.none() | st.floats(0.01, 0.99),
)
def test_columns_and_objects_agree(
    logits_NC: np.ndarray, problem_type: str | None, top_k: int, threshold: float | None
) -> None:
    numeric = problem_type == "regression"
    threshold = None if numeric else threshold
    names = [f"label {i % 4}" for i in range(logits_NC.shape[1])]
    form = answer_form(config(names, problem_type), top_k=top_k, threshold=threshold, logits=True)
    found = rows(form, logits_NC)
    every = objects(form.space, logits_NC, top_k=None)
    some = objects(form.space, logits_NC, top_k=top_k or None)
    best = objects(form.space, logits_NC)

    assert len(found) == len(logits_NC)
    for row, all_labels, top_labels, top in zip(found, every, some, best, strict=True):
        if top["label"] is None:
            assert set(row.values()) == {None}
        elif numeric:
            assert sorted(label["score"] for label in row["scores"]) == sorted(label["score"] for label in all_labels)
        else:
            assert row["scores"] == top_labels
            least = threshold or (0.5 if form.listed else 0)
            given = [label for label in all_labels if label["score"] >= least]
            if form.listed:
                assert [{"label": a, "score": b} for a, b in zip(row["label"], row["score"], strict=True)] == given
            else:
                assert (row["label"], row["score"]) == (top["label"] if given else None, top["score"])


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False)))
def test_the_shortest_digits_are_those_that_text_has(values: list[float]) -> None:
    numbers = np.array(values, dtype=np.float32)
    assert shortest(numbers).tolist() == [float(str(number)) for number in numbers]


def test_the_shortest_digits_of_every_size() -> None:
    bits = np.random.default_rng(0).integers(0, 1 << 32, 20_000, dtype=np.uint32)
    powers = np.concatenate([np.float32(2) ** np.arange(-149, 128), np.float32(10) ** np.arange(-45, 39)])
    numbers = np.concatenate([bits.view(np.float32), powers.astype(np.float32), np.float32([0, 1, -1])])
    numbers = numbers[np.isfinite(numbers)]
    assert np.array_equal(shortest(numbers), numbers.astype(np.str_).astype(np.float64))

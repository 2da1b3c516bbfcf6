"""Labels of outputs: every rule, and every refusal."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import BertConfig

from brimful.core.errors import OptionError
from brimful.core.records import LabelSpace
from brimful.models.hub.inspection import ModelFacts, inspect_model
from brimful.models.hub.label_alignment import align_labels, read_label_map

MOODS = ("negative", "neutral", "positive")


def model(*labels: str, head: bool = True, problem: str | None = None, numbered: bool = True) -> ModelFacts:
    """A model by its facts, as an inspection would give them."""
    return ModelFacts(
        name="some/model",
        folder=Path("model"),
        config=BertConfig(id2label=dict(enumerate(labels)), problem_type=problem),
        model_type="bert",
        label_names=labels if head and numbered else None,
        labels_are_placeholders=all(label.startswith("LABEL_") for label in labels),
        has_head=head,
        head_note="its weights have classifier.weight" if head else "its weights have no classifier.weight",
        max_positions=512,
        weight_files=(),
        weight_bytes=0,
        num_parameters=0,
        runs_own_code=False,
    )


def data(*labels: str, task: str = "single_label") -> LabelSpace:
    values = {} if task == "regression" else {label: index for index, label in enumerate(labels)}
    return LabelSpace(task=task, names=labels, values=values)


def align(space, facts, *, label_map=None, new_head=False):
    return align_labels(space, facts, label_map=label_map, new_head=new_head)


def test_a_base_model_gets_a_new_head():
    for new_head in (False, True):
        found = align(data("ham", "spam"), model("LABEL_0", "LABEL_1", head=False), new_head=new_head)
        assert (found.head, found.space) == ("new", data("ham", "spam"))
        assert found.reason == "its weights have no classifier.weight"


def test_a_real_base_model(minilm):
    facts = inspect_model(str(minilm), trust_remote_code=False, allow_pickle=False)
    found = align(data("ham", "spam"), facts)
    assert (found.head, found.reason) == ("new", "its weights have no classifier.weight, classifier.bias")


def test_a_new_head_when_asked_for():
    found = align(data("ham", "spam"), model(*MOODS), new_head=True)
    assert (found.head, found.space, found.reason) == ("new", data("ham", "spam"), "asked for: --new-head")


@pytest.mark.parametrize("task", ["single_label", "multi_label"])
def test_equal_names_in_the_order_of_the_model(task):
    found = align(data("positive", "negative", "neutral", task=task), model(*MOODS))
    assert found.space == LabelSpace(task=task, names=MOODS, values={"positive": 2, "negative": 0, "neutral": 1})
    assert (found.head, found.reason) == ("kept", "it has the labels of the data")


def test_several_texts_of_one_label_stay_together():
    space = LabelSpace(task="single_label", names=("no", "yes"), values={"no": 0, "yes": 1, "true": 1, "false": 0})
    assert align(space, model("yes", "no")).space.values == {"no": 1, "yes": 0, "true": 0, "false": 1}


def test_names_that_differ_in_case():
    found = align(data("Negative", "POSITIVE", "neutral"), model(*MOODS))
    assert found.space.names == MOODS
    assert found.space.values == {"Negative": 0, "POSITIVE": 2, "neutral": 1}
    assert found.reason == "it has the labels of the data, but for upper and lower case"


def test_case_is_regarded_first():
    found = align(data("US", "us"), model("us", "US"))
    assert found.space.values == {"US": 1, "us": 0}


def test_case_that_tells_labels_apart_is_not_ignored(refused):
    with refused("the labels of the data are not those of some/model: 'Us', 'we' against 'us', 'US', 'we'", hint="map"):
        align(data("Us", "we"), model("us", "US", "we"))


def test_fewer_labels_than_outputs():
    found = align(data("positive", "negative"), model(*MOODS))
    assert found.space == LabelSpace(task="single_label", names=MOODS, values={"positive": 2, "negative": 0})
    assert (found.head, found.reason) == ("kept", "it has the labels of the data and 1 more")
    found = align(data("Positive"), model(*MOODS))
    assert found.reason == "it has the labels of the data, but for upper and lower case and 2 more"


def test_placeholders_take_the_labels_in_sorted_order():
    found = align(data("spam", "ham"), model("LABEL_0", "LABEL_1"))
    assert found.space == LabelSpace(task="single_label", names=("ham", "spam"), values={"spam": 1, "ham": 0})
    assert found.head == "kept"
    assert found.reason == (
        "its outputs have no names of their own, and take the labels in sorted order: LABEL_0=ham, LABEL_1=spam"
    )


def test_placeholders_take_numbers_by_size():
    labels = ("0", "1", "10", "2", "3", "4", "5", "6", "7", "8", "9")
    found = align(data(*labels), model(*(f"LABEL_{index}" for index in range(11))))
    assert found.space.values == {str(index): index for index in range(11)}


def test_placeholders_in_the_data_are_names():
    assert align(data("LABEL_1", "LABEL_0"), model("LABEL_0", "LABEL_1")).space.values == {"LABEL_0": 0, "LABEL_1": 1}


@pytest.mark.parametrize(
    ("labels", "names", "message", "suggestion"),
    [
        (("ham", "spam"), MOODS, "'ham', 'spam' against 'negative', 'neutral', 'positive'", "ham=...,spam=..."),
        (("0", "1", "2"), MOODS, "'0', '1', '2' against", "0=negative,1=neutral,2=positive maps"),
        (("0", "2"), ("LABEL_0", "LABEL_1", "LABEL_2"), "'0', '2' against 'LABEL_0'", "0=LABEL_0,2=LABEL_2 maps"),
        (("a", "b", "c", "d"), MOODS, "'a', 'b', 'c', 'd' against", "a=...,b=...,c=...,... maps"),
        (tuple("abcdefghij"), MOODS, "'h' and 2 more against", "a=...,b=...,c=...,... maps"),
        (("\x1b[31m", "b"), MOODS, r"'\\x1b[31m', 'b' against", "b=..."),
    ],
)
def test_labels_of_another_kind(refused, labels, names, message, suggestion):
    with refused("the labels of the data are not those of some/model: ", message, hint=suggestion):
        align(data(*labels), model(*names))
    with refused(message, hint="--new-head replaces the head by a new one for these labels"):
        align(data(*labels), model(*names))


def test_heads_whose_names_are_of_no_use(refused):
    with refused("id2label in config.json does not number its labels from 0", hint="--new-head"):
        align(data("a"), model("a", "b", numbered=False))
    with refused("two outputs are named 'a'", hint="--new-head"):
        align(data("a", "b"), model("a", "a", "b"))
    assert align(data("a"), model("a", "b", numbered=False), new_head=True).head == "new"


# --label-map


def test_a_map():
    found = align(data("bad", "good"), model(*MOODS), label_map="good=positive, bad = negative")
    assert found.space == LabelSpace(task="single_label", names=MOODS, values={"bad": 0, "good": 2})
    assert (found.head, found.reason) == ("kept", "its labels are mapped by --label-map")


def test_a_map_can_merge_classes_but_not_columns(refused):
    found = align(data("awful", "bad", "good"), model("neg", "pos"), label_map="awful=neg,bad=neg,good=pos")
    assert found.space.values == {"awful": 0, "bad": 0, "good": 1}
    with refused("--label-map maps two columns to one output", hint="its own output", kind=OptionError):
        align(data("bad", "good", task="multi_label"), model("neg", "pos"), label_map="bad=neg,good=neg")


def test_a_map_in_a_file(tmp_path):
    path = tmp_path / "map.json"
    path.write_text('{"a=b,c": "negative", "other": "positive", "2": 2}')
    found = align(data("a=b,c"), model(*MOODS), label_map=str(path))
    assert found.space.values == {"a=b,c": 0}


@pytest.mark.parametrize(
    ("label_map", "message", "hint"),
    [
        ("bad=negative", "says nothing of the label 'good'", "add good=..., one of 'negative', 'neutral', 'positive'"),
        ("bad=negative,Godo=positive", "says nothing of the label 'good'", "did you mean 'Godo'?"),
        ("bad=Negative,good=positive", "maps 'bad' to 'Negative', which is no label", "did you mean 'negative'?"),
        ("bad=x,good=positive", "maps 'bad' to 'x', which is no label", "the model has 'negative', 'neutral'"),
        ("bad", "'bad' is not of the form data label=model label", "as pos=POSITIVE,neg=NEGATIVE"),
        ("bad=,good=positive", "'bad=' is not of the form", "go into a JSON file"),
        ("bad=negative,bad=positive", "names 'bad' twice", "map each label once"),
        ("nowhere.json", "there is no file nowhere.json", "or give it as a=X,b=Y"),
    ],
)
def test_maps_that_do_not_fit(refused, label_map, message, hint):
    with refused("--label-map", message, hint=hint, kind=OptionError):
        align(data("bad", "good"), model(*MOODS), label_map=label_map)


def test_a_map_in_a_broken_file(refused, tmp_path):
    (tmp_path / "map.json").write_text("{")
    with refused("map.json is not JSON", hint='it holds {"data label": "model label", ...}', kind=OptionError):
        read_label_map(str(tmp_path / "map.json"))


def test_a_map_where_there_is_nothing_to_map(refused):
    with refused("maps to the labels of a head, and some/model has none", hint="leave it out", kind=OptionError):
        align(data("a"), model("b", head=False), label_map="a=b")
    with refused("--label-map and --new-head are both given", hint="takes the labels", kind=OptionError):
        align(data("a"), model("b"), label_map="a=b", new_head=True)
    with refused("--label-map is for classes", hint="leave it out", kind=OptionError):
        align(data("stars", task="regression"), model("score"), label_map="stars=score")


# Regression


def test_regression_keeps_a_head_of_as_many_outputs():
    found = align(data("stars", task="regression"), model("LABEL_0", problem="regression"))
    assert (found.head, found.space) == ("kept", data("stars", task="regression"))
    assert found.reason == "it has as many outputs as the data has columns of numbers"
    assert align(data("stars", task="regression"), model("LABEL_0")).head == "kept"
    assert align(data("x", "y", task="regression"), model("LABEL_0", "LABEL_1")).space.names == ("x", "y")


def test_regression_takes_columns_in_the_order_of_the_model():
    found = align(data("Arousal", "Valence", task="regression"), model("valence", "arousal", problem="regression"))
    assert (found.space.names, found.space.values) == (("Valence", "Arousal"), {})
    assert found.reason == "it has the columns of the data"


def test_regression_on_another_head(refused):
    with refused("the head of some/model has 3 outputs, and the data has 1 columns of numbers", hint="--new-head"):
        align(data("stars", task="regression"), model(*MOODS))
    with refused("the head of some/model is for single_label_classification", hint="--new-head"):
        align(data("x", "y", task="regression"), model("a", "b", problem="single_label_classification"))
    assert align(data("stars", task="regression"), model(*MOODS), new_head=True).head == "new"
    assert align(data("stars", task="regression"), model("LABEL_0", head=False)).head == "new"

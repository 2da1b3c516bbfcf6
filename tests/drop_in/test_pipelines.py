"""Calls of `brimful.pipeline` beside the same calls of transformers': equal shapes, keys, labels and order."""

from __future__ import annotations

import copy
import importlib
import itertools
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import transformers
from torch.utils.data import Dataset
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from transformers.pipelines.pt_utils import KeyDataset
from transformers.pipelines.text_classification import ClassificationFunction

import brimful
from brimful.drop_in.pipelines import TextPipeline, ZeroShotPipeline
from tiny_files import OTHER, review, save_classifier

TEXTS = ["the film was good .", "it felt very long", "a story of two friends", "", "dull"]
PAIR = {"text": "the film was good", "text_pair": "it felt sad"}
#: Problem type and number of outputs of each model.
MODELS: dict[str, tuple[str | None, int]] = {
    "classes": ("single_label_classification", 3),
    "unstated": (None, 3),
    "labels": ("multi_label_classification", 3),
    "one": (None, 1),
    "number": ("regression", 1),
    "numbers": ("regression", 2),
}
Make = Callable[..., tuple[Any, Any]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    found = {
        name: save_classifier(folder / name, [f"label {i}" for i in range(outputs)], problem_type=problem)
        for name, (problem, outputs) in MODELS.items()
    }
    found["nli"] = save_classifier(folder / "nli", ["contradiction", "neutral", "entailment"])
    found["nli first"] = save_classifier(folder / "nli first", ["Entailment", "other"])
    return found


@pytest.fixture(scope="module")
def both(models: dict[str, Path]) -> Make:
    """Ours and transformers' pipeline of one model, made once for each set of arguments."""
    made: dict[str, tuple[Any, Any]] = {}

    def make(name: str, task: str | None = "text-classification", **options: Any) -> tuple[Any, Any]:
        key = repr((name, task, options))
        if key not in made:
            given = {"model": str(models[name]), "device": "cpu", **options}
            made[key] = brimful.pipeline(task, **given), transformers.pipeline(task, **given)
        return made[key]

    return make


def same(found: Any, expected: Any) -> None:
    """Equal but for rounding of scores."""
    assert type(found) is type(expected)
    if isinstance(expected, dict):
        assert list(found) == list(expected)
        for key in expected:
            same(found[key], expected[key])
    elif isinstance(expected, list):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            same(one, other)
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-6)
    else:
        assert found == expected


INPUTS = {
    "one": TEXTS[0],
    "list": TEXTS,
    "list of one": TEXTS[:1],
    "pair": PAIR,
    "dictionary": {"text": "the film"},
    "pairs": [PAIR, {"text": "dull", "text_pair": ""}, {"text": "sad"}, "a text"],
    "old pair": [[["the film was good", "it felt sad"]]],
    "empty": "",
}
CALLS: list[dict[str, Any]] = [{}, {"top_k": None}, {"top_k": 1}, {"top_k": 2}, {"function_to_apply": "none"}]
CALLS += [{"top_k": None, "function_to_apply": "sigmoid"}, {"function_to_apply": ClassificationFunction.NONE}]
CALLS += [{"function_to_apply": "softmax", "batch_size": 2}]


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize("name", MODELS)
def test_all_forms_of_inputs_and_answers(both: Make, name: str) -> None:
    ours, theirs = both(name)
    assert isinstance(ours, TextPipeline)
    calls = CALLS if name in ("classes", "labels") else CALLS[:5:2]
    for inputs, call in itertools.product(INPUTS.values(), calls):
        same(ours(inputs, **call), theirs(inputs, **call))


@pytest.mark.sampled
@pytest.mark.parametrize(
    "made", [{"top_k": None}, {"top_k": 2}, {"function_to_apply": "none", "batch_size": 4}], ids=str
)
def test_arguments_given_when_it_is_made(both: Make, made: dict[str, Any]) -> None:
    ours, theirs = both("classes", "sentiment-analysis", **made)
    assert ours.task == theirs.task == "sentiment-analysis"
    for inputs, call in itertools.product(INPUTS.values(), [*CALLS[:3], {"top_k": "", "function_to_apply": None}]):
        same(ours(inputs, **call), theirs(inputs, **call))


class Rows(Dataset[dict[str, str]]):
    """A data set with a length and no iterator."""

    def __len__(self) -> int:
        return len(TEXTS)

    def __getitem__(self, index: int) -> dict[str, str]:
        return {"text": TEXTS[index], "text_pair": "sad"}


def test_generators_and_data_sets_are_answered_one_after_another(both: Make) -> None:
    ours, theirs = both("classes")
    for give in (lambda: iter_texts(), lambda: Rows(), lambda: KeyDataset(Rows(), "text")):
        found, expected = ours(give(), top_k=2), theirs(give(), top_k=2)
        assert not isinstance(found, list)
        same(list(found), list(expected))
    assert len(ours(KeyDataset(Rows(), "text"))) == len(TEXTS)
    read: list[int] = []

    def counted() -> Iterator[str]:
        for number in range(40):
            read.append(number)
            yield review(True, number)

    answers = iter(ours(counted()))
    next(answers)
    assert read == [0]
    next(answers)
    assert len(read) == 3
    with pytest.raises(ValueError, match="inputs is a table of 1 columns"):
        ours(pd.DataFrame({"text": ["a"]}))
    alone = iter(ours(iter_texts(), batch_size=1))
    assert len([next(alone) for _ in range(3)]) == 3


def iter_texts() -> Iterator[str]:
    yield from TEXTS


@pytest.mark.slow
def test_where_texts_are_cut(both: Make, recwarn: pytest.WarningsRecorder) -> None:
    ours, theirs = both("classes")
    long = " ".join(OTHER * 8)
    cut = {"truncation": True, "max_length": 7}
    same(ours([long, "dull"], **cut), theirs([long, "dull"], **cut))
    same(ours([long[:100]]), theirs([long[:100]]))
    same(ours(long, truncation=True, max_length=3), theirs(long, truncation=True, max_length=3))
    assert not recwarn
    with pytest.warns(UserWarning, match="longer than 80 tokens"):
        assert ours(long)  # transformers' fails
    with pytest.raises(ValueError, match="truncation is only_second"):
        ours("dull", truncation="only_second")
    same(ours(long, **cut | {"truncation": "only_first"}), theirs(long, **cut | {"truncation": "only_first"}))
    with pytest.raises(ValueError, match="truncation is only_first, and a pair was given"):
        ours(PAIR, truncation="only_first")


LABELS = ["good", "bad", "a story"]


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize("name", ["nli", "nli first"])
def test_zero_shot(both: Make, name: str) -> None:
    ours, theirs = both(name, "zero-shot-classification")
    assert isinstance(ours, ZeroShotPipeline)
    forms: list[dict[str, Any]] = [{}, {"multi_label": True}, {"hypothesis_template": "the film was {} ."}]
    for inputs, form in itertools.product([TEXTS[0], TEXTS[:3], TEXTS[:1]], forms):
        same(ours(inputs, LABELS, **form), theirs(inputs, LABELS, **form))
    same(ours(TEXTS[0], candidate_labels="good, bad,"), theirs(TEXTS[0], candidate_labels="good, bad,"))
    same(ours(TEXTS[0], ["good"]), theirs(TEXTS[0], ["good"]))
    same(ours(TEXTS[0], np.array(LABELS)), theirs(TEXTS[0], LABELS))
    assert ours.entailment_id == theirs.entailment_id
    found, expected = ours(iter_texts(), candidate_labels=LABELS), theirs(iter_texts(), candidate_labels=LABELS)
    same(list(itertools.islice(found, 3)), list(itertools.islice(expected, 3)))
    for labels in (["good", "good"], [1, 2]):
        ours._said.clear()
        with pytest.warns(UserWarning, match="answers such calls: labels are numbers, or one is there twice"):
            found = ours(TEXTS[:2], labels)
        same(found, theirs(TEXTS[:2], labels))
    kept = both(name, "zero-shot-classification", candidate_labels=LABELS, multi_label=True)
    same(*(each(TEXTS[0]) for each in kept))
    for wrong in (
        {},
        {"candidate_labels": []},
        *({"candidate_labels": LABELS, "hypothesis_template": each} for each in ("none", "{label}")),
    ):
        with pytest.raises(ValueError, match=r"label"):
            ours(TEXTS[0], **wrong)


def test_a_label_as_long_as_the_tokenizer_cuts(models: dict[str, Path]) -> None:
    """transformers reads such a pair whole, and cuts those of other labels."""
    labels = ["good", " ".join(OTHER), "a story"]
    texts = [" ".join(OTHER * 2), "dull"]
    made = []
    for make in (transformers.pipeline, brimful.pipeline):
        tokenizer = AutoTokenizer.from_pretrained(models["nli"], model_max_length=16)
        made.append(make("zero-shot-classification", str(models["nli"]), tokenizer=tokenizer, device="cpu"))
    theirs, ours = made
    same(ours(texts, labels[::2]), theirs(texts, labels[::2]))
    with pytest.warns(UserWarning, match="transformers' own pipeline answers such calls: a label leaves no room"):
        found = ours(texts, labels)
    same(found, theirs(texts, labels))
    same(ours(texts[0], labels, multi_label=True), theirs(texts[0], labels, multi_label=True))
    with pytest.raises(ValueError, match="leaves no room for the text"):
        ours(" ".join(OTHER * 5), labels)  # longer than the model's positions, where transformers' fails


def test_models_in_memory_and_other_tokenizers(models: dict[str, Path], tmp_path: Path) -> None:
    model = AutoModelForSequenceClassification.from_pretrained(models["classes"])
    tokenizer = AutoTokenizer.from_pretrained(models["labels"])
    tokenizer.model_max_length = 6
    expected = transformers.pipeline("text-classification", model=model, tokenizer=tokenizer, device="cpu")
    for given in (model, str(models["classes"])):
        ours = brimful.pipeline("text-classification", model=given, tokenizer=tokenizer, device=-1)
        same(ours(TEXTS, truncation=True), expected(TEXTS, truncation=True))
    assert ours.tokenizer.model_max_length == 6
    assert ours.model.config.num_labels == 3
    assert ours.device == torch.device("cpu")
    same(ours.predict(TEXTS), expected(TEXTS))


SETTINGS: list[dict[str, Any]] = [{"truncation_side": "left"}, {"split_special_tokens": True}]
SETTINGS += [{"model_max_length": 5}, {"model_input_names": ["input_ids", "attention_mask"]}]


@pytest.mark.sampled
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_settings_of_a_tokenizer_are_those_of_now(models: dict[str, Path], settings: dict[str, Any]) -> None:
    texts = ["good [SEP] film was a story and it felt long", PAIR]
    call = {"truncation": True, "max_length": None if "model_max_length" in settings else 9, "top_k": None}
    expected = list[Any]()
    for make in (transformers.pipeline, brimful.pipeline):
        tokenizer = AutoTokenizer.from_pretrained(models["classes"])
        before = make("text-classification", str(models["classes"]), device="cpu")
        usual = before(texts, **call)
        for name, value in settings.items():
            setattr(tokenizer, name, value)
            setattr(before.tokenizer, name, value)
        given = make("text-classification", str(models["classes"]), tokenizer=tokenizer, device="cpu")
        assert given.tokenizer is tokenizer
        expected.append([usual, before(texts, **call), given(texts, **call)])
        before.tokenizer = AutoTokenizer.from_pretrained(models["classes"])
        expected[-1].append(before(texts, **call))
    same(expected[1], expected[0])
    assert expected[1][0] == expected[1][3] != expected[1][1]


@pytest.fixture(scope="module")
def adapter(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of an adapter as peft saves it, beside a tokenizer; its base model is a folder."""
    folder = tmp_path_factory.mktemp("adapter")
    wrapped(AutoModelForSequenceClassification.from_pretrained(models["classes"])).save_pretrained(folder)
    AutoTokenizer.from_pretrained(models["classes"]).save_pretrained(folder)
    assert not (folder / "config.json").exists()
    return folder


def wrapped(model: Any) -> Any:
    """A model in an adapter of peft, which changes its answers."""
    import peft

    torch.manual_seed(3)
    config = peft.LoraConfig(task_type="SEQ_CLS", init_lora_weights=False, target_modules=["query", "dense"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft asks transformers for names that it is to leave
        return peft.get_peft_model(model, config).eval()


@pytest.mark.slow
def test_the_folder_of_an_adapter(models: dict[str, Path], adapter: Path) -> None:
    other = AutoTokenizer.from_pretrained(models["classes"])
    other.add_tokens(["zebra"])
    for tokenizer in (None, other):
        given = {"model": str(adapter), "tokenizer": tokenizer, "device": "cpu", "top_k": None}
        ours, theirs = (make("text-classification", **given) for make in (brimful.pipeline, transformers.pipeline))
        assert isinstance(ours, TextPipeline)
        same(ours(TEXTS), theirs(TEXTS))
        assert len(ours.tokenizer) == len(theirs.tokenizer)
    base = brimful.pipeline("text-classification", str(models["classes"]), device="cpu", top_k=None)
    assert base(TEXTS[:1])[0][0]["score"] != pytest.approx(ours(TEXTS[:1])[0][0]["score"], abs=1e-3)
    encoded = ours.tokenizer(TEXTS[0], return_tensors="pt")
    torch.testing.assert_close(ours.model(**encoded).logits, theirs.model(**encoded).logits)


class Turned(transformers.BertForSequenceClassification):
    """A classifier with a forward of its own."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        found = super().forward(*args, **kwargs)
        found.logits = -found.logits
        return found


def turned(model: Any) -> Any:
    found = Turned(model.config)
    found.load_state_dict(model.state_dict())
    return found


def hooked(model: Any) -> Any:
    model.classifier.register_forward_hook(lambda module, given, found: -found)
    return model


def with_forward(model: Any) -> Any:
    plain = model.classifier.forward
    model.classifier.forward = lambda given: -plain(given)
    return model


def with_head(model: Any) -> Any:
    model.classifier = torch.nn.Sequential(model.classifier, torch.nn.Softsign())
    return model


def with_activation(model: Any) -> Any:
    model.bert.encoder.layer[0].intermediate.intermediate_act_fn = torch.nn.Tanh()
    return model


def with_adapter(model: Any) -> Any:
    import peft

    model.add_adapter(peft.LoraConfig(init_lora_weights=False, target_modules=["query"]))
    return model


CHANGED = [
    (turned, "the model's class, Turned, is not transformers' own"),
    (hooked, "classifier has forward hooks"),
    (with_forward, "classifier has a forward of its own"),
    (with_head, "classifier is not that of a BertForSequenceClassification"),
    (with_activation, "intermediate_act_fn is not that of a BertForSequenceClassification"),
    (with_adapter, "has an adapter of peft"),
    (wrapped, "has an adapter of peft"),
]


@pytest.mark.parametrize(("change", "said"), CHANGED, ids=[change.__name__ for change, _ in CHANGED])
def test_a_model_that_was_changed_in_memory_answers_as_it_is(
    models: dict[str, Path], change: Callable[[Any], Any], said: str
) -> None:
    given = {"tokenizer": AutoTokenizer.from_pretrained(models["classes"]), "device": "cpu"}
    model = change(AutoModelForSequenceClassification.from_pretrained(models["classes"])).eval()
    expected = transformers.pipeline("text-classification", model=model, **given)
    with pytest.warns(UserWarning, match=f"transformers' own pipeline runs: .*{said}"):
        ours = brimful.pipeline("text-classification", model=model, **given)
    same(ours(TEXTS, top_k=None), expected(TEXTS, top_k=None))


@pytest.mark.slow
def test_a_model_in_memory_keeps_its_weights_of_now(models: dict[str, Path]) -> None:
    given = {"tokenizer": AutoTokenizer.from_pretrained(models["classes"]), "device": "cpu"}
    model = AutoModelForSequenceClassification.from_pretrained(models["classes"])
    made = AutoModelForSequenceClassification.from_config(model.config)
    merged = wrapped(model).merge_and_unload()
    for each in (merged, made.eval(), brimful.packed(copy.deepcopy(merged))):
        expected = transformers.pipeline("text-classification", model=each, **given)(TEXTS, top_k=None)
        ours = brimful.pipeline("text-classification", model=each, **given)
        assert isinstance(ours, TextPipeline)
        same(ours(TEXTS, top_k=None), expected)


def renamed(model: Any) -> None:
    model.config.id2label = {0: "a", 1: "b", 2: "c"}


def several(model: Any) -> None:
    model.config.problem_type = "multi_label_classification"


def leaning(model: Any) -> None:
    with torch.no_grad():
        model.classifier.bias[0] += 5


def doubled(model: Any) -> None:
    model.register_forward_hook(lambda module, given, found: type(found)(logits=2 * found.logits))


@pytest.mark.sampled
@pytest.mark.parametrize("change", [renamed, several, leaning, doubled])
def test_answers_follow_the_model_that_was_asked_for(models: dict[str, Path], change: Callable[[Any], None]) -> None:
    """Its configuration and its weights; what no file holds leads to transformers."""
    given: dict[str, Any] = {"model": str(models["classes"]), "device": "cpu", "top_k": 2}
    ours, theirs = (make("text-classification", **given) for make in (brimful.pipeline, transformers.pipeline))
    before = ours(TEXTS)
    for each in (ours, theirs):
        change(each.model)
    if change is doubled:
        with pytest.warns(UserWarning, match="transformers' own pipeline answers such calls: the model has forward"):
            found = ours(TEXTS)
    else:
        found = ours(TEXTS)
    assert found != before
    same(found, theirs(TEXTS))
    same(ours(TEXTS[0]), theirs(TEXTS[0]))


def test_what_callers_use_besides_calls(both: Make, tmp_path: Path) -> None:
    for task, name in (("text-classification", "classes"), ("zero-shot-classification", "nli")):
        ours, theirs = both(name, task)
        assert (ours.dtype, ours.torch_dtype) == (theirs.dtype, theirs.dtype)
        before, labels = ours.call_count, [["good", "bad"]] if name == "nli" else []
        ours(TEXTS[0], *labels)
        assert ours.call_count == before + 1
        ours.save_pretrained(tmp_path / name)
        again = transformers.pipeline(task, model=str(tmp_path / name), device="cpu")
        same(ours(TEXTS[:2], *labels), again(TEXTS[:2], *labels))
        with pytest.raises(AttributeError, match="has no attribute 'framework'"):
            _ = ours.framework
    ours, theirs = both("classes")
    same(*(each.postprocess(each.forward(each.preprocess(TEXTS[0]))) for each in (ours, theirs)))
    same(ours(TEXTS, top_k=-1), theirs(TEXTS, top_k=-1))


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("dtype", "precision"), [("auto", "fp32"), (None, "fp32"), ("bfloat16", "bf16"), (torch.float16, "fp16")]
)
def test_dtype_is_the_precision(models: dict[str, Path], dtype: Any, precision: str) -> None:
    ours = brimful.pipeline(model=str(models["classes"]), dtype=dtype, device="cpu")
    assert ours(TEXTS[0])[0]["label"].startswith("label")
    assert ours._classifier.recipe.value("precision") == precision
    ours = brimful.pipeline(model=str(models["classes"]), torch_dtype=dtype, device="cpu")
    assert ours._options["precision"] == precision
    ours = brimful.pipeline(model=str(models["classes"]), dtype="float32", torch_dtype=dtype, device="cpu")
    assert ours._options["precision"] == "fp32"


@pytest.mark.parametrize(
    ("task", "given", "said"),
    [
        ("fill-mask", {}, "its task is fill-mask"),
        ("text-classification", {"device_map": "cpu", "device": None}, "device_map is given"),
        ("text-classification", {"model_kwargs": {"use_cache": False}}, "model_kwargs has use_cache"),
        ("text-classification", {"dtype": torch.float64, "verify": 3}, "its dtype is torch.float64"),
        ("text-classification", {"torch_dtype": torch.float64}, "its dtype is torch.float64"),
        ("text-classification", {"add_special_tokens": False}, "add_special_tokens is given"),
        ("text-classification", {"truncation": "only_second"}, "truncation='only_second' is given"),
        ("zero-shot-classification", {"add_special_tokens": False}, "add_special_tokens is given"),
    ],
)
def test_what_has_no_form_here_is_handed_to_transformers(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch, task: str, given: dict[str, Any], said: str
) -> None:
    calls: list[dict[str, Any]] = []
    theirs = importlib.import_module("transformers")  # its module is made anew while it is imported
    monkeypatch.setattr(theirs, "pipeline", lambda task, **options: calls.append({"task": task, **options}))
    with pytest.warns(UserWarning, match=f"transformers' own pipeline runs: {said}"):
        brimful.pipeline(task, model=str(models["classes"]), top_k=3, **given)
    [call] = calls
    assert call["task"] == task
    assert call["model"] == str(models["classes"])
    assert call["top_k"] == 3
    assert all(call[name] == value for name, value in given.items() if name != "verify")
    assert "verify" not in call


def test_a_pipeline_that_is_handed_over_answers(models: dict[str, Path]) -> None:
    with pytest.warns(UserWarning, match="transformers' own pipeline runs: its dtype"):
        found = brimful.pipeline("text-classification", str(models["classes"]), dtype=torch.float64, device="cpu")
    assert isinstance(found, transformers.TextClassificationPipeline)
    assert len(found(TEXTS)) == len(TEXTS)


def test_mistakes_are_one_line_with_a_hint(both: Make, models: dict[str, Path]) -> None:
    ours, _ = both("classes")
    wrong: list[tuple[Any, dict[str, Any], str]] = [
        ([["a", "b"]], {}, r"inputs\[0\] is no text"),
        ([None], {}, r"inputs\[0\] is no text"),
        (3, {}, "inputs are int"),
        ("a", {"topk": 3}, "takes no topk"),
        ("a", {"function_to_apply": "tanh"}, "function_to_apply is 'tanh'"),
        ("a", {"max_length": 2}, "max_length is 2, and the tokenizer adds 2 special tokens to a text"),
        (PAIR, {"max_length": 3}, "max_length is 3, and the tokenizer adds 3 special tokens to a pair of texts"),
    ]
    for inputs, call, said in wrong:
        with pytest.raises(ValueError, match=said) as caught:
            ours(inputs, **call)
        assert isinstance(caught.value, brimful.BrimfulError)
        assert caught.value.hint
        assert "--" not in str(caught.value)
    with pytest.raises(brimful.ModelError, match="there is no folder"):
        brimful.pipeline("text-classification", model=str(models["classes"] / "missing"))

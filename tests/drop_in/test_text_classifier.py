"""The estimator in scikit-learn's own tools, on a tiny model, and its inputs, weights and folders."""

from __future__ import annotations

import copy
import dataclasses
import gc
import inspect
import pickle
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.metrics import accuracy_score
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer

import brimful
from brimful.core.errors import ArgumentError
from brimful.core.options.train import TrainOptions
from brimful.drop_in.given_rows import given_labels, given_texts, given_weights
from tiny_files import review, save_base

TEXTS = [review(bool(i % 2), i) for i in range(40)]
LABELS = np.array(["bad", "good"])[np.arange(40) % 2]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_base(tmp_path_factory.mktemp("models") / "base")


def make(base: Path, **options: Any) -> brimful.TextClassifier:
    fixed: dict[str, Any] = {"num_train_epochs": 8, "learning_rate": 1e-2, "batch_size": 8, "max_length": 32}
    return brimful.TextClassifier(base, device="cpu", precision="fp32", **fixed | options)


@pytest.fixture(scope="module")
def fitted(base: Path, tmp_path_factory: pytest.TempPathFactory) -> brimful.TextClassifier:
    return make(base, output=tmp_path_factory.mktemp("fits")).fit(TEXTS, LABELS)


# --- what it learns and answers --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_it_learns_and_answers_as_the_functions_of_the_library(fitted: brimful.TextClassifier, tmp_path: Path) -> None:
    assert fitted.classes_.tolist() == ["bad", "good"]
    assert fitted.score(TEXTS, LABELS) == accuracy_score(LABELS, fitted.predict(TEXTS)) > 0.9
    probabilities = fitted.predict_proba(TEXTS)
    assert probabilities.shape == (40, 2)
    assert probabilities.sum(axis=1) == pytest.approx(1)
    run = brimful.train(
        TEXTS, labels=list(LABELS), model=fitted.model, output=tmp_path / "run", num_train_epochs=8,
        learning_rate=1e-2, batch_size=8, max_length=32, device="cpu", precision="fp32", eval_split=0,
    )  # fmt: skip
    logits = brimful.Classifier(tmp_path / "run" / "model", device="cpu", precision="fp32").logits(TEXTS)
    assert (brimful.Classifier(fitted.model_.path, device="cpu", precision="fp32").logits(TEXTS) == logits).all()
    assert np.exp(logits[:, 1] - logits[:, 0]) == pytest.approx(probabilities[:, 1] / probabilities[:, 0], rel=1e-5)
    assert run.steps == fitted.run_.steps == 40


@pytest.mark.slow
def test_several_labels_by_the_names_of_columns(base: Path) -> None:
    flags = pd.DataFrame({"dull": np.arange(40) % 2 == 0, "long": np.arange(40) % 3 == 0}).astype(int)
    found = make(base, max_steps=2).fit(pd.DataFrame({"review": TEXTS}), flags)
    assert found.classes_.tolist() == ["dull", "long"]
    assert found.run_.labels.names == ("dull", "long")
    probabilities = found.predict_proba(TEXTS)
    assert (found.predict(TEXTS) == (probabilities > 0.5)).all()
    assert found.score(TEXTS, flags) == accuracy_score(flags, found.predict(TEXTS))


def test_pairs_and_classes_that_are_numbers(base: Path) -> None:
    pairs = list(zip(TEXTS, TEXTS[::-1], strict=True))
    found = make(base, max_steps=2, class_weight={3: 2.0}).fit(pairs, np.arange(40) % 2 * 4 - 1)
    assert found.classes_.tolist() == [-1, 3]
    assert set(found.predict(np.array(pairs))) <= {-1, 3}
    assert found.run_.labels.names == ("-1", "3")
    assert found.run_.options["class_weights"] == '{"-1": 1.0, "3": 2.0}'
    assert found.run_.data["inputs"]["pair_column"] == "text_pair"


@pytest.mark.thorough
def test_a_cut_that_was_asked_for_is_no_warning_and_another_is_one(base: Path) -> None:
    long = [" ".join([text] * 9) for text in TEXTS]
    make(base, max_steps=1).fit(TEXTS, LABELS).predict(long)
    found = make(base, max_steps=1, max_length=None).fit(TEXTS, LABELS)
    with pytest.warns(UserWarning, match="longer than 80 tokens"):
        found.predict(long)


# --- weights ---------------------------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_a_weight_of_0_is_a_row_that_is_not_there(base: Path) -> None:
    weights = np.where(np.arange(40) % 5 == 0, 0.0, 1.5)
    one = make(base, max_steps=3).fit(TEXTS, LABELS, sample_weight=weights)
    kept = weights > 0
    other = make(base, max_steps=3).fit(np.array(TEXTS)[kept], LABELS[kept], pd.Series(weights[kept]))
    alike = make(base, max_steps=3).fit(np.array(TEXTS)[kept], LABELS[kept])
    assert (one.predict_proba(TEXTS) == other.predict_proba(TEXTS)).all()
    assert one.predict_proba(TEXTS) == pytest.approx(alike.predict_proba(TEXTS), rel=1e-5)  # all weigh alike


@pytest.mark.slow
def test_a_class_of_weight_0_is_rows_that_are_not_there(base: Path) -> None:
    y = np.arange(40) % 3
    made = {"max_steps": 3, "class_weight": {0: 0, 1: 1, 2: 2}}
    with pytest.warns(UserWarning, match="no training row has the label '0'"):
        one = make(base, **made).fit(TEXTS, y)
    with pytest.warns(UserWarning, match="no training row has the label '0'"):
        other = make(base, max_steps=3).fit(TEXTS, y, sample_weight=y)
    assert one.classes_.tolist() == [0, 1, 2]
    assert one.predict_proba(TEXTS) == pytest.approx(other.predict_proba(TEXTS), rel=1e-5)
    for wrong, said in ({0: 0, 1: 0, 2: 0}, "is 0 for the classes of all"), ({0: 0}, "labels are smoothed"):
        smoothing = 0.1 if "smoothed" in said else 0.0
        with pytest.raises(ValueError, match=said):
            make(base, class_weight=wrong, label_smoothing_factor=smoothing).fit(TEXTS, y)


@pytest.mark.parametrize(
    ("weights", "said"),
    [([1, 2], "1D array or scalar"), ([-1, 1, 1], "negative"), ([0, 0, 0], "zero"), ([1, np.nan, 1], "not finite")],
)
def test_weights_that_are_none(weights: list[float], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        given_weights(weights, 3)
    assert given_weights(2, 3) == pytest.approx([2, 2, 2])


# --- scikit-learn's tools --------------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_cross_validation_search_and_pipeline(base: Path) -> None:
    quick = make(base, max_steps=2)
    assert cross_val_score(quick, TEXTS, LABELS, cv=2, error_score="raise").shape == (2,)
    steps = make_pipeline(FunctionTransformer(_lower), quick)
    search = GridSearchCV(steps, {"textclassifier__learning_rate": np.array([1e-3, 1e-2])}, cv=2, scoring="roc_auc")
    search.fit(np.array(TEXTS, dtype=object), LABELS, textclassifier__sample_weight=np.ones(40))
    assert search.best_params_["textclassifier__learning_rate"] in (1e-3, 1e-2)
    assert search.predict(["THE FILM WAS GOOD"]).shape == (1,)


def _lower(texts: Any) -> list[str]:
    return [text.lower() for text in texts]


def test_parameters_are_the_options_of_training(base: Path) -> None:
    found = brimful.TextClassifier().get_params()
    defaults = {name: getattr(TrainOptions, name) for name in found if hasattr(TrainOptions, name)}
    assert {"eval_split"} == {name for name, value in defaults.items() if found[name] != value}
    assert set(found) - set(defaults) == {"model", "output", "class_weight", "random_state", "verbose"}
    assert clone(make(base, peft="lora")).get_params() == make(base, peft="lora").get_params()
    assert make(base).set_params(learning_rate=1.0).learning_rate == 1.0
    with pytest.raises(ValueError, match="Invalid parameter 'epochs'"):
        make(base).set_params(epochs=3)
    with pytest.raises(brimful.OptionError, match="--learning-rate is -1"):
        make(base, learning_rate=-1.0).fit(TEXTS, LABELS)


def test_partial_fit_is_refused_with_a_hint(base: Path) -> None:
    assert not hasattr(make(base), "partial_fit")
    assert not hasattr(make(base), "transform")
    with pytest.raises(AttributeError, match="hint: fit on all rows"):
        make(base).partial_fit(TEXTS, LABELS)
    with pytest.raises(NotFittedError):
        make(base).predict(TEXTS)


def test_random_state_is_the_seed(base: Path) -> None:
    def seed(state: Any) -> Any:
        return make(base, max_steps=1, random_state=state).fit(TEXTS, LABELS).run_.options["seed"]

    assert seed(np.int64(7)) == 7
    expected = np.random.RandomState(5).randint(np.iinfo(np.int32).max)
    assert seed(np.random.RandomState(5)) == expected


# --- folders ---------------------------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_a_pickle_refers_to_the_folder_of_the_model(fitted: brimful.TextClassifier, tmp_path: Path) -> None:
    written = pickle.dumps(fitted)
    assert len(written) < 20_000
    loaded = pickle.loads(written)
    assert (loaded.predict_proba(TEXTS) == fitted.predict_proba(TEXTS)).all()
    assert loaded.model_.path == fitted.model_.path
    assert loaded.model_.path.parent.name.startswith("fit-")
    loaded.model_.folder.path = tmp_path
    with pytest.raises(ArgumentError, match="refers to its model's folder"):
        pickle.loads(pickle.dumps(loaded)).predict(TEXTS)


@pytest.mark.thorough
def test_a_temporary_folder_goes_with_the_last_estimator_unless_it_was_pickled(base: Path) -> None:
    one = make(base, max_steps=1).fit(TEXTS, LABELS)
    path, other = one.model_.path, copy.deepcopy(one)
    assert not (path.parent / "checkpoints").exists()
    del one
    gc.collect()
    assert other.predict(TEXTS[:1]).shape == (1,)
    with pytest.warns(UserWarning, match="now stays"):
        written = pickle.dumps(other)
    del other
    gc.collect()
    last = pickle.loads(written)
    assert last.predict(TEXTS[:1]).shape == (1,)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pickle.dumps(last)
    again = make(base, max_steps=1).fit(TEXTS, LABELS)
    gone = again.model_.path
    del again
    gc.collect()
    assert not gone.exists()


def test_each_fit_has_a_folder_of_its_own(base: Path, tmp_path: Path) -> None:
    found = make(base, max_steps=1, output=tmp_path / "fits").fit(TEXTS, LABELS)
    first = found.model_.path
    second = found.fit(TEXTS, LABELS).model_.path
    assert [first.parent.name, second.parent.name] == ["fit-1", "fit-2"]
    assert (first / "config.json").exists()
    assert (second.parent / "run.json").exists()


# --- inputs ----------------------------------------------------------------------------------------------------------


def forms() -> Iterator[Any]:
    two = ["a", "b"]
    yield from (two, tuple(two), np.array(two), np.array(two, dtype=object), np.array([["a"], ["b"]]))
    yield from (pd.Series(two), pd.Series(two, index=[7, 3]), pd.Series(two, dtype="category"))
    yield from (pd.DataFrame({"x": two}), pl.Series(two), pl.DataFrame({"x": two}), pa.array(two))
    yield from ([{"text": "a"}, {"text": "b"}], [["a"], ["b"]], iter(two))


@pytest.mark.parametrize("given", list(forms()), ids=lambda given: type(given).__name__)
def test_forms_of_texts(given: Any) -> None:
    found = given_texts(given)
    assert (found.texts, found.pairs) == (["a", "b"], None)


@pytest.mark.parametrize(
    "given",
    [
        [("a", "c"), ("b", "d")],
        np.array([["a", "c"], ["b", "d"]]),
        pd.DataFrame({"x": ["a", "b"], "y": ["c", "d"]}),
        pl.DataFrame({"x": ["a", "b"], "y": ["c", "d"]}),
        [{"text": "a", "text_pair": "c"}, {"text": "b", "text_pair": "d"}],
    ],
    ids=["tuples", "array", "pandas", "polars", "mappings"],
)
def test_forms_of_pairs(given: Any) -> None:
    found = given_texts(given)
    assert (found.texts, found.pairs) == (["a", "b"], ["c", "d"])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("a text", "X is one text"),
        ([], "0 samples"),
        (["a", None], r"X\[1\] has no text"),
        (["a", float("nan")], r"X\[1\] has no text"),
        (pd.Series(["a", pd.NA]), r"X\[1\] has no text"),
        ([1, 2], r"X\[0\] is no text: it is of type int"),
        (np.zeros((3, 4)), "rows of X have 4 values"),
        (3, "X is int"),
    ],
)
def test_texts_that_are_none(given: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said) as caught:
        given_texts(given)
    assert isinstance(caught.value, brimful.OptionError)
    assert caught.value.hint


@pytest.mark.parametrize(
    ("y", "classes", "names"),
    [
        ([2, 1, 2], [1, 2], ("1", "2")),
        ([1.0, 0.0, 1.0], [0, 1], ("0", "1")),
        ([True, False, True], [False, True], ("False", "True")),
        (["b", "a", "a"], ["a", "b"], ("a", "b")),
        (["1.0", "2.0", "1.0"], ["1.0", "2.0"], ("class 0", "class 1")),
        (["", "x", "x"], ["", "x"], ("class 0", "class 1")),
        (["nan", "inf", "1"], ["1", "inf", "nan"], ("class 0", "class 1", "class 2")),
        (pd.Series(["a|b", "c", "a|b"]), ["a|b", "c"], ("a|b", "c")),
    ],
)
def test_names_of_classes(y: Any, classes: list[Any], names: tuple[str, ...]) -> None:
    found = given_labels(y, 3)
    assert found.classes_C.tolist() == classes
    assert found.classes_C.dtype == np.unique(y).dtype
    assert found.names == names


@pytest.mark.parametrize(
    ("columns", "names"),
    [
        (["a", " b"], ("a", "b")),
        (["a", " a"], ("label 0", "label 1")),
        (["a", 'the "b"'], ("label 0", "label 1")),
        (["text", "b"], ("label 0", "label 1")),
    ],
)
def test_names_of_several_labels(columns: list[str], names: tuple[str, ...]) -> None:
    found = given_labels(pd.DataFrame([[0, 1], [1, 0], [1, 1]], columns=columns), 3)
    assert found.classes_C.tolist() == columns
    assert found.names == names


@pytest.mark.parametrize(
    ("y", "said"),
    [
        ([0.5, 1.5, 2.5], "Unknown label type: continuous"),
        (["a", "a", "a"], "y has one class, a"),
        (["a", "b"], "inconsistent numbers of samples"),
        (None, "requires y to be passed"),
        ([1.0, float("nan"), 0.0], "NaN"),
        (["a", None, "b"], r"y\[1\] has no label \(None or NaN\)"),
        (pd.Series(["a", float("nan"), None]), r"y\[1\] has no label \(None or NaN\), as 1 more have"),
        (pd.DataFrame([[0, 1], [1, 0], [1, 1]], columns=["a", "a"]), "y has several columns 'a'"),
    ],
)
def test_labels_that_are_none(y: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        given_labels(y, 3)


#: Options of files, checkpoints and processes, and those that an estimator has in another form.
NOT_PARAMETERS = frozenset(
    {"data", "eval_data", "text_column", "pair_column", "label_column", "weight_column", "header", "column_names"}
    | {"delimiter", "encoding", "sheet", "task", "missing_labels", "limit", "target_scaling", "label_map", "merge"}
    | {"class_weights", "seed", "eval_steps", "save_steps", "save_total_limit", "logging_steps", "baselines", "report"}
    | {"push_to_hub", "transform", "gpus", "launcher", "num_processes", "reduce_dtype", "sharding", "offload_folder"}
    | {"tensor_parallel", "hang_timeout", "peer_copies", "resume", "dry_run", "report_to", "quiet", "json"}
)


def test_all_that_decides_what_is_learned_is_a_parameter() -> None:
    parameters = set(inspect.signature(brimful.TextClassifier).parameters)
    names = {field.name for field in dataclasses.fields(TrainOptions)}
    assert names - parameters == NOT_PARAMETERS
    assert parameters - names == {"class_weight", "random_state", "verbose"}


def test_levers_of_memory_are_parameters(base: Path) -> None:
    small = {"optimizer_in_backward": True, "max_grad_norm": 0.0, "optimizer_state_dtype": "8bit"}
    fitted = make(base, num_train_epochs=None, max_steps=2, **small).fit(TEXTS, LABELS)
    assert fitted.run_.options["optimizer_state_dtype"] == "8bit"
    assert clone(fitted).get_params()["optimizer_in_backward"] is True

"""scikit-learn's own estimator checks: those that make sense for text pass, docs/guides/scikit-learn.md has them all.

Checks that make their own rows make numbers. Here each number is a word, and the estimator is the same otherwise.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression
from sklearn.utils import estimator_checks

import brimful
from tiny_files import BAD, GOOD, OTHER, save_base

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "scikit-learn.md"
#: Checks of the estimator as it is, and those that need rows.
AS_IT_IS = [
    "check_estimator_tags_renamed",
    "check_valid_tag_types",
    "check_estimator_repr",
    "check_no_attributes_set_in_init",
    "check_do_not_raise_errors_in_init_or_set_params",
    "check_mixin_order",
    "check_parameters_default_constructible",
    "check_get_params_invariance",
    "check_set_params",
    "check_estimators_partial_fit_n_features",
]
ON_WORDS = [
    "check_all_zero_sample_weights_error",
    "check_classifiers_one_label",
    "check_classifiers_one_label_sample_weights",
    "check_classifiers_regression_target",
    "check_decision_proba_consistency",
    "check_dict_unchanged",
    "check_dont_overwrite_parameters",
    "check_estimator_sparse_array",
    "check_estimator_sparse_matrix",
    "check_estimator_sparse_tag",
    "check_estimators_fit_returns_self",
    "check_estimators_overwrite_params",
    "check_estimators_pickle",
    "check_estimators_unfitted",
    "check_fit1d",
    "check_fit2d_1sample",
    "check_fit_check_is_fitted",
    "check_fit_idempotent",
    "check_fit_score_takes_y",
    "check_methods_subset_invariance",
    "check_non_transformer_estimators_n_iter",
    "check_pipeline_consistency",
    "check_requires_y_none",
    "check_sample_weights_list",
    "check_sample_weights_not_overwritten",
    "check_sample_weights_shape",
    "check_supervised_y_no_nan",
]
WORDS = GOOD + BAD + OTHER


class OnWords(brimful.TextClassifier):
    """The estimator on rows of numbers, each of which is a word of a text."""

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Any:
        return super().fit(_in_words(X), y, sample_weight)

    def predict_proba(self, X: Any) -> np.ndarray:
        return super().predict_proba(_in_words(X))

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.one_d_array = tags.input_tags.string = False
        tags.input_tags.two_d_array = True
        return tags


def _in_words(X: Any) -> Any:
    numbers = X if hasattr(X, "tocsr") else np.asarray(X)
    if hasattr(X, "tocsr") or numbers.ndim != 2 or numbers.dtype.kind not in "fiu":
        return X
    return [" ".join(WORDS[int(abs(value) * 4) % len(WORDS)] for value in row[:12]) for row in numbers]


def name_of(check: Any) -> str:
    while isinstance(check, partial):
        check = check.func
    return str(check.__name__)


def checks() -> dict[str, Callable[..., None]]:
    """All checks of a classifier that takes weights, by name; of several of one name the first."""
    found: dict[str, Callable[..., None]] = {}
    for check in estimator_checks._yield_all_checks(LogisticRegression(), legacy=True):
        found.setdefault(name_of(check), check)
    return found


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_base(tmp_path_factory.mktemp("models") / "base")


@pytest.mark.parametrize("name", AS_IT_IS)
def test_of_the_estimator_as_it_is(name: str) -> None:
    checks()[name]("TextClassifier", brimful.TextClassifier())


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize("name", ON_WORDS)
def test_on_rows_of_words(name: str, base: Path) -> None:
    made = OnWords(base, max_steps=1, max_length=32, device="cpu", precision="fp32", learning_rate=1e-2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of rows that are too few and too much alike
        checks()[name]("TextClassifier", made)


def test_the_guide_has_every_check() -> None:
    rows = re.findall(r"^\| `(check_\w+)` \| (.+?) \|$", GUIDE.read_text(encoding="utf-8"), re.MULTILINE)
    said = dict(rows)
    assert len(rows) == len(said)
    assert not set(checks()) - set(said), "new in this version of scikit-learn"
    assert {name for name, how in said.items() if how == "passes"} == set(AS_IT_IS)
    assert {name for name, how in said.items() if how == "passes on words"} == set(ON_WORDS)

"""Baselines: what a model must beat to have learned anything, and what a linear model makes of the same rows.

    constant        always the most frequent label (labels that most rows have; the mean) of the training rows
    tfidf_linear    TF-IDF of words and pairs of words, with logistic regression (numbers: ridge), by scikit-learn

The second takes a second or two: logistic regression is fitted by stochastic gradient descent (5 to 20 times as fast
as L-BFGS on such features, and within a point of it), and of much data it sees a sample, which its note says.

Legend: N rows, C outputs.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from brimful.core.evaluation import CONSTANT, LINEAR, Baseline
from brimful.core.records import LabelSpace
from brimful.core.units import target_text
from brimful.tasks.label_rows import Targets, dense, label_counts, row_blocks
from brimful.tasks.scoring.choose import make_scorer
from brimful.tasks.scoring.labels import MultiLabelScorer, SingleLabelScorer

#: Most rows that the linear model learns from, and that it is scored on; rows x outputs of those; characters in all.
_MOST_ROWS, _MOST_TARGETS, _MOST_CHARACTERS = 20_000, 2_000_000, 4_000_000
#: Characters of each text that are read at most, and at least where there are many.
_LONGEST, _SHORTEST = 4_000, 200
_MOST_FEATURES = 20_000
#: Passes over the rows, and rows seen in all of them where they are few.
_FEWEST_PASSES, _MOST_PASSES, _ROWS_SEEN = 20, 200, 200_000
#: Rows from which a word must be in two texts.
_MANY_ROWS = 1_000
#: Logit of a label that no training row has.
_NEVER = -30.0


@dataclass(frozen=True, kw_only=True)
class Labelled:
    """Texts, pairs joined to one, with their targets. texts: takes row numbers, so that only those read are made."""

    texts: Callable[[npt.NDArray[np.int64]], Sequence[str]]
    targets_N: Targets

    def __len__(self) -> int:
        return len(self.targets_N)


def constant_baseline(space: LabelSpace, training: Targets, targets_N: Targets) -> Baseline:
    """The same answer for every row. training, targets_N: targets of the rows it is taken from, and is scored on."""
    began, rows = time.perf_counter(), np.arange(len(targets_N))
    scorer = make_scorer(space, targets_N, seed=0, resamples=0)
    if isinstance(scorer, SingleLabelScorer):
        most = int(np.bincount(dense(training).astype(np.int64), minlength=space.num_outputs).argmax())
        scorer.add_answers(rows, np.full(len(rows), most), None)
        answer = space.names[most]
    elif isinstance(scorer, MultiLabelScorer):
        given_C = 2 * label_counts(training, np.ones(len(training))) > len(training)
        for part in row_blocks(len(rows), len(given_C)):
            scorer.add_answers(rows[part], np.broadcast_to(given_C, (len(rows[part]), len(given_C))))
        answer = ", ".join(space.names[i] for i in np.flatnonzero(given_C)) or "no label"
    else:
        means_C = dense(training).reshape(len(training), -1).mean(0, dtype=np.float64)
        scorer.add(rows, np.broadcast_to(means_C.astype(np.float32), (len(rows), len(means_C))))
        answer = ", ".join(target_text(mean) for mean in means_C)
    return Baseline(
        name=CONSTANT,
        answer=answer,
        metrics=_known(scorer.values()),
        num_rows=len(training),
        train_s=time.perf_counter() - began,
    )


@dataclass(frozen=True, kw_only=True)
class LinearTask:
    """Rows that the linear model learns from and is scored on, drawn and shortened: plain data, for any process.

    limits: what was left out of them, in words. most_characters: as of `Baseline`.
    """

    space: LabelSpace
    texts: Sequence[str]
    targets_N: npt.NDArray[Any]
    eval_texts: Sequence[str]
    eval_targets_N: npt.NDArray[Any]
    seed: int
    limits: tuple[str, ...]
    most_characters: int | None = None

    def fit(self) -> Baseline | None:
        """Train the model and score it. None where there is nothing to learn from: no words, or a single label."""
        from sklearn.exceptions import ConvergenceWarning
        from sklearn.feature_extraction.text import TfidfVectorizer

        began = time.perf_counter()
        words = TfidfVectorizer(
            sublinear_tf=True,
            ngram_range=(1, 2),
            min_df=2 if len(self.texts) >= _MANY_ROWS else 1,
            max_features=_MOST_FEATURES,
            dtype=np.float32,
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            warnings.simplefilter("ignore", UserWarning)  # of labels that each row has
            try:
                features = words.fit_transform(self.texts)
                predict = _fitted(self.space, features, self.targets_N, self.seed)
            except ValueError:  # no words, or one label only
                return None
            logits_NC = predict(words.transform(self.eval_texts))
        scorer = make_scorer(self.space, self.eval_targets_N, seed=self.seed, resamples=0)
        scorer.add(np.arange(len(self.eval_texts)), logits_NC.astype(np.float32))
        return Baseline(
            name=LINEAR,
            metrics=_known(scorer.values()),
            num_rows=len(self.texts),
            train_s=time.perf_counter() - began,
            note="; ".join(self.limits) or None,
            most_characters=self.most_characters,
        )


def linear_task(space: LabelSpace, training: Labelled, evaluation: Labelled, *, seed: int) -> LinearTask:
    """Draw the rows of a linear model."""
    draw = np.random.default_rng([seed, 4])
    rows, eval_rows = (_sample(len(part), space.num_outputs, draw) for part in (training, evaluation))
    texts, eval_texts = training.texts(rows), evaluation.texts(eval_rows)
    longest = max(_SHORTEST, min(_LONGEST, _MOST_CHARACTERS // max(1, len(texts))))
    limits = [
        f"{did} {len(some):,} of {len(part):,} rows"
        for did, some, part in (("learned from", rows, training), ("scored on", eval_rows, evaluation))
        if len(some) < len(part)
    ]
    shortened = any(len(text) > longest for text in texts)
    limits += [f"read the first {longest:,} characters of a text"] if shortened else []
    return LinearTask(
        space=space,
        texts=[text[:longest] for text in texts],
        targets_N=training.targets_N[rows],
        eval_texts=[text[:longest] for text in eval_texts],
        eval_targets_N=evaluation.targets_N[eval_rows],
        seed=seed,
        limits=tuple(limits),
        most_characters=longest if shortened else None,
    )


def linear_baseline(space: LabelSpace, training: Labelled, evaluation: Labelled, *, seed: int) -> Baseline | None:
    """A linear model of the words. None where there is nothing to learn from: no words, or a single label."""
    return linear_task(space, training, evaluation, seed=seed).fit()


def _known(values: dict[str, float]) -> dict[str, float | None]:
    return {
        name: value + 0.0 if np.isfinite(value) else None for name, value in values.items() if not name.endswith("_of")
    }


def _sample(num_rows: int, num_outputs: int, draw: np.random.Generator) -> npt.NDArray[np.int64]:
    most = max(100, min(_MOST_ROWS, _MOST_TARGETS // max(1, num_outputs)))
    if num_rows <= most:
        return np.arange(num_rows)
    return np.sort(draw.choice(num_rows, most, replace=False))


def _fitted(
    space: LabelSpace, features: Any, targets_N: npt.NDArray[Any], seed: int
) -> Callable[[Any], npt.NDArray[Any]]:
    """Train the linear model; return the function from features to logits, or to numbers.

    Raises: ValueError for one label only.
    """
    from sklearn.linear_model import Ridge

    if space.task == "regression":
        ridge = Ridge().fit(features, targets_N.reshape(len(targets_N), -1))
        return lambda given: np.asarray(ridge.predict(given)).reshape(given.shape[0], -1)
    if space.task == "multi_label":
        each = [_logistic(features, column, seed) if 0 < column.mean() < 1 else column[0] for column in targets_N.T]
        return lambda given: np.stack([_logits_of(label, given) for label in each], axis=1)
    one = _logistic(features, targets_N, seed)

    def logits(given: Any) -> npt.NDArray[Any]:
        found = np.full((given.shape[0], space.num_outputs), _NEVER)
        with np.errstate(divide="ignore"):
            found[:, one.classes_] = np.maximum(np.log(one.predict_proba(given)), _NEVER)
        return found

    return logits


def _logistic(features: Any, targets_N: npt.NDArray[Any], seed: int) -> Any:
    from sklearn.linear_model import SGDClassifier

    passes = max(_FEWEST_PASSES, min(_MOST_PASSES, _ROWS_SEEN // max(1, len(targets_N))))
    return SGDClassifier(loss="log_loss", alpha=1e-5, max_iter=passes, random_state=seed % (1 << 32)).fit(
        features, targets_N
    )


def _logits_of(label: Any, features: Any) -> npt.NDArray[Any]:
    """Logits of one label of several. label: its model, or the target that all training rows have."""
    if hasattr(label, "decision_function"):
        return np.asarray(label.decision_function(features))
    return np.full(features.shape[0], -_NEVER if label else _NEVER)

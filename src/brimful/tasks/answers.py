"""Answers from the logits of a classifier: columns of a file, counts, and the objects of transformers'
pipeline.

    form = answer_form(config, threshold=0.9)
    form.columns(logits_NC)                     {"label": ..., "score": ...}, arrays of N
    objects(form.space, logits_NC, top_k=None)  what pipeline("text-classification") returns

Scores are computed in fp32, as the pipeline does: what is a tie there is a tie here, and goes to the same label. A row
has an answer if all its logits are finite; one that could not be classified is handed over as NaN.

Legend: N rows, P sequences: one a row, or of zero-shot one a candidate label; C outputs, G rows with M labels each.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from brimful.core.classification import CONFIDENCE_BINS, Counts
from brimful.core.errors import OptionError, printable
from brimful.core.records import LabelSpace, TaskName
from brimful.tasks.candidates import Candidates
from brimful.tasks.ranking import Ranking, Singles, as_lists, finite_rows, offsets_of, ranked

#: Probability from which a label is given where a text may have several of them.
DEFAULT_THRESHOLD = 0.5


def label_space(config: Any) -> LabelSpace:
    """Label space of a model by its configuration, as transformers' pipeline reads it.

    A single output is a label that is true or not (multi_label) unless the configuration says that it is a number.
    """
    names = tuple(str(config.id2label.get(i, f"LABEL_{i}")) for i in range(config.num_labels))
    problem = getattr(config, "problem_type", None)
    task: TaskName = "single_label"
    if problem == "regression":
        task = "regression"
    elif problem == "multi_label_classification" or len(names) == 1:
        task = "multi_label"
    return LabelSpace(
        task=task, names=names, values={} if task == "regression" else {n: i for i, n in enumerate(names)}
    )


@dataclass(frozen=True, kw_only=True)
class Form(ABC):
    """Form of the answers: their columns.

    top_k: labels of a row in the column `scores`, 0 for all; None: there is no such column.
    threshold: score from which a label is given; None: DEFAULT_THRESHOLD where `listed`, elsewhere any.
    logits: whether there is a column with the raw outputs.
    guess: what was taken for granted of the model, None for nothing.
    """

    top_k: int | None = None
    threshold: float | None = None
    logits: bool = False
    guess: str | None = None

    @property
    @abstractmethod
    def listed(self) -> bool:
        """True if a text may have several labels, or none: label and score are lists."""

    @property
    def numeric(self) -> bool:
        """True if the outputs are numbers, not scores of labels."""
        return False

    @property
    def least(self) -> float | None:
        """Score from which a label is given, None for any."""
        return DEFAULT_THRESHOLD if self.threshold is None and self.listed else self.threshold

    def columns(self, logits_PC: Singles, candidates: Candidates | None = None) -> dict[str, pa.Array]:
        """Columns of N rows; null in those without an answer.

        label, score: the likeliest and its score; below `threshold` the label is null. Where `listed`: lists of those
        from `least` on, the likeliest first. Of a regression no label: the number, or a list of them.
        scores: lists of {label, score}, the likeliest first; for regression always all, in the order of the outputs.
        logits: the raw outputs, a list for each sequence; zero-shot has a list of them, in the order of the candidates.
        """
        ranking = self._ranking(logits_PC, candidates)
        columns = self._answer_columns(ranking)
        if self.top_k is not None:
            shown = ranking.top(self.top_k) if self.top_k and not self.numeric else ranking
            columns["scores"] = shown.pairs()
        return columns | ({"logits": self._logit_lists(logits_PC, candidates)} if self.logits else {})

    def counts(self, logits_PC: Singles, candidates: Candidates | None = None) -> Counts:
        """Labels given and confidences. The other counts are the caller's to add: `counts + Counts(num_rows=...)`."""
        if self.numeric:
            return Counts()
        ranking = self._ranking(logits_PC, candidates)
        best_A = ranking.scores_P[ranking.offsets_N1[:-1][ranking.answered_N]]
        bins_A = np.minimum((best_A * CONFIDENCE_BINS).astype(np.int64), CONFIDENCE_BINS - 1)
        confidences = np.bincount(bins_A, minlength=CONFIDENCE_BINS)
        return Counts(labels=self._given(ranking).counts(), confidences=tuple(confidences.tolist()))

    @abstractmethod
    def score_blocks(self, logits_PC: Singles, candidates: Candidates | None = None) -> list[Singles]:
        """(G, M) scores of all rows with M labels, for each M, for regression the numbers; NaN without an answer."""

    @abstractmethod
    def _ranking(self, logits_PC: Singles, candidates: Candidates | None) -> Ranking:
        """Labels of each row with their scores: all, or as many as are asked for."""

    @abstractmethod
    def _logit_lists(self, logits_PC: Singles, candidates: Candidates | None) -> pa.Array: ...

    def _answer_columns(self, ranking: Ranking) -> dict[str, pa.Array]:
        given = self._given(ranking)
        if self.listed:
            return {"label": given.labels(), "score": given.scores()}
        return {"label": given.first_labels(), "score": ranking.first_scores()}

    def _given(self, ranking: Ranking) -> Ranking:
        """The labels that rows are given, of a ranking with all labels or at least each row's first."""
        ranking = ranking if self.listed else ranking.top(1)
        return ranking if self.least is None else ranking.at_least(self.least)


@dataclass(frozen=True, kw_only=True)
class AnswerForm(Form):
    """Answers of a text classifier.

    always_scored: a model of one output whose configuration states no task. Its one label is given whatever its score.
    """

    space: LabelSpace
    always_scored: bool = False

    @property
    def listed(self) -> bool:
        return self.space.task == "multi_label" and not self.always_scored

    @property
    def numeric(self) -> bool:
        return self.space.task == "regression"

    def score_blocks(self, logits_PC: Singles, candidates: Candidates | None = None) -> list[Singles]:
        scores_NC = _scores(self.space, logits_PC)
        return [np.where(finite_rows(logits_PC)[:, None], scores_NC, np.float32(np.nan))]

    def _ranking(self, logits_PC: Singles, candidates: Candidates | None) -> Ranking:
        most = None if self.listed or self.top_k == 0 else self.top_k or 1
        scores_NC = _scores(self.space, logits_PC)
        return ranked(scores_NC, finite_rows(logits_PC), _names(self.space), most=most, in_order=self.numeric)

    def _logit_lists(self, logits_PC: Singles, candidates: Candidates | None) -> pa.Array:
        answered_N = finite_rows(logits_PC)
        values = pa.array(logits_PC[answered_N].ravel())
        return as_lists(values, offsets_of(answered_N * logits_PC.shape[1]), answered_N)

    def _answer_columns(self, ranking: Ranking) -> dict[str, pa.Array]:
        if not self.numeric:
            return super()._answer_columns(ranking)
        return {"score": ranking.first_scores() if self.space.num_outputs == 1 else ranking.scores()}


def answer_form(
    config: Any, *, top_k: int | None = None, threshold: float | None = None, logits: bool = False
) -> AnswerForm:
    """The answers of a model with this configuration, as they are asked for.

    Raises: OptionError for a threshold where the outputs are numbers.
    """
    space = label_space(config)
    if space.task == "regression" and threshold is not None:
        raise OptionError(
            f"--threshold is {threshold}, and the model's outputs are numbers, not probabilities", hint="leave it out"
        )
    stated = getattr(config, "problem_type", None) == "multi_label_classification"
    return AnswerForm(
        space=space,
        always_scored=space.task == "multi_label" and not stated,
        top_k=top_k,
        threshold=threshold,
        logits=logits,
    )


def objects(
    space: LabelSpace,
    logits_NC: Singles,
    *,
    top_k: int | Literal[""] | None = "",
    function_to_apply: str | None = None,
    given: Literal["list", "text", "pair"] = "list",
) -> list[Any] | dict[str, Any]:
    """Return what transformers' pipeline("text-classification") returns for texts with these logits.

    top_k: a number, or None for all, makes a list per text, the likeliest first. "", the pipeline's own way to say that
    it was not given: one {"label", "score"} per text, of the likeliest.
    function_to_apply: sigmoid, softmax or none; None or "default": the one that belongs to the task.
    given: what the pipeline was called with. For one text alone it returns a list, unless top_k makes one; for one pair
    alone, {"text", "text_pair"}, the answer itself.

    A row without an answer has {"label": None, "score": None}, or no labels in its list.
    Raises: OptionError, as `check_objects` does.
    """
    check_objects(top_k=top_k, function_to_apply=function_to_apply)
    number = None if isinstance(top_k, str) else top_k
    scores_NC = _scores(space, logits_NC, _function_name(function_to_apply))
    ranking = ranked(scores_NC, finite_rows(logits_NC), _names(space), most=1 if isinstance(top_k, str) else number)
    if isinstance(top_k, str):
        firsts = ranking.firsts()
        return firsts[0] if given == "pair" else firsts
    rows = ranking.objects()
    answers = [[{"label": label, "score": score} for label, score in zip(*row, strict=True)] for row in rows]
    return answers if given == "list" else answers[0]


def check_objects(*, top_k: int | Literal[""] | None, function_to_apply: str | None) -> None:
    """Check that `objects` supports these arguments. Raises: OptionError for another top_k, or another function."""
    if top_k != "" and top_k is not None:
        wrong = "a whole number" if not isinstance(top_k, Integral) else "at least 0" if top_k < 0 else None
        if wrong is not None:
            raise OptionError(f"top_k is {printable(top_k)}: it must be {wrong}", hint="None is for all labels")
    if _function_name(function_to_apply) not in {*_FUNCTIONS, "default"}:
        raise OptionError(
            f"function_to_apply is '{printable(function_to_apply)}': there is no such function",
            hint="it is sigmoid, softmax, none or default",
        )


def sigmoid(logits: Singles) -> Singles:
    """1 / (1 + e^-x) of each number."""
    with np.errstate(over="ignore"):  # far below 0 it is 0
        return np.asarray(1 / (1 + np.exp(-logits)))


def softmax(logits: Singles) -> Singles:
    """Over the last axis. Not finite in, not a number out."""
    with np.errstate(over="ignore", invalid="ignore"):
        powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
        return np.asarray(powers / powers.sum(axis=-1, keepdims=True))


_FUNCTIONS: dict[str, Callable[[Singles], Singles]] = {
    "sigmoid": sigmoid,
    "softmax": softmax,
    "none": lambda logits: logits,
}


def _scores(space: LabelSpace, logits_NC: Singles, function: str = "default") -> Singles:
    """Scores of logits, by the function that belongs to the task or another one."""
    usual = {"single_label": "softmax", "multi_label": "sigmoid", "regression": "none"}[space.task]
    return _FUNCTIONS[usual if function == "default" else function](logits_NC)


def _function_name(asked: Any) -> str:
    """Name of a function that was asked for by name, or as transformers' ClassificationFunction."""
    return "default" if asked is None else str(getattr(asked, "value", asked)).lower()


def _names(space: LabelSpace) -> pa.Array:
    return pa.array(space.names, pa.large_string())

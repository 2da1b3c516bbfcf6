"""The scorer of a task."""

from __future__ import annotations

from brimful.core.records import LabelSpace
from brimful.tasks.label_rows import Targets
from brimful.tasks.scoring.labels import MultiLabelScorer, SingleLabelScorer
from brimful.tasks.scoring.regression import RegressionScorer
from brimful.tasks.scoring.scorers import RESAMPLES, Scorer


def make_scorer(
    space: LabelSpace,
    targets_N: Targets,
    *,
    seed: int,
    resamples: int = RESAMPLES,
    threshold: float | None = None,
) -> Scorer:
    """The scorer of a label space.

    threshold: least probability of a label that is given, where a row can have several.
    """
    if space.task == "regression":
        return RegressionScorer(space, targets_N, seed=seed, resamples=resamples)
    if space.task == "single_label":
        return SingleLabelScorer(space, targets_N, seed=seed, resamples=resamples)
    named = {} if threshold is None else {"threshold": threshold}
    return MultiLabelScorer(space, targets_N, seed=seed, resamples=resamples, **named)

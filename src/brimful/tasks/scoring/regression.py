"""Scores of numbers.

Legend: N rows, S rows of a window, C outputs, G groups, K sums of a group, R sets of rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from brimful.core.evaluation import LabelScore, ReliabilityBin
from brimful.tasks.scoring.labels import divided
from brimful.tasks.scoring.ranks import spearman
from brimful.tasks.scoring.resampling import Ends, Metrics
from brimful.tasks.scoring.scorers import Floats, Integers, Scored, Scorer, Singles, as_metric

#: Sums of each output: of both numbers without the targets' mean, their squares and product, and of the errors.
_SUMS = ("rows", "squared_error", "error", "target", "target2", "output", "output2", "product")
#: Bins with equally many rows.
_BINS = 10
_OF_ONE = ("r2", "pearson")
#: Share of squares below which a spread is rounding.
_ROUNDING = 1e-12


class RegressionScorer(Scorer):
    """Scores of C numbers a row. targets_N: (N, C) or (N,) float32."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._targets_NC = np.asarray(self._targets_N, np.float64).reshape(len(self._targets_N), -1)
        self._centre_C = self._targets_NC.mean(0) if len(self._targets_NC) else np.zeros(self.space.num_outputs)

    @property
    def _num_sums(self) -> int:
        return len(_SUMS) * self.space.num_outputs

    def add(self, rows_S: Integers, logits_SC: Singles) -> None:
        rows_S, logits_SC = self._answered(rows_S, logits_SC)
        target_SC = self._targets_NC[rows_S] - self._centre_C
        output_SC = logits_SC.astype(np.float64) - self._centre_C
        error_SC = output_SC - target_SC
        ones_SC = np.ones_like(error_SC)
        sums = (ones_SC, error_SC**2, np.abs(error_SC), target_SC, target_SC**2)
        sums_SK = np.concatenate([*sums, output_SC, output_SC**2, output_SC * target_SC], axis=1)
        np.add.at(self._sums_GK, self._group_N[rows_S], sums_SK)
        self._keep_scores(rows_S, logits_SC)

    def result(self) -> Scored:
        found, (rows, outputs_NC) = self._intervals(), self._all_kept()
        targets_NC, only = self._targets_NC[rows], self.space.num_outputs == 1
        metrics = {name: as_metric(found[name]) for name in ("mse", "rmse", "mae")}
        by_label = []
        for output, name in enumerate(self.space.names):
            own = {metric: as_metric(_part(found[f"{metric}_of"], output)) for metric in ("rmse", "mae", *_OF_ONE)}
            own["spearman"] = as_metric(spearman(targets_NC[:, output], outputs_NC[:, output].astype(np.float64)))
            by_label.append(LabelScore(name=name, support=self._num_rows, given=self._num_rows, metrics=own))
        if only:
            metrics |= {name: by_label[0].metrics[name] for name in (*_OF_ONE, "spearman")}
        reliability = _by_prediction(outputs_NC[:, 0], targets_NC[:, 0]) if only and len(rows) else ()
        labels = () if only else tuple(by_label)
        return self._scored(metrics, by_label=labels, reliability=reliability)

    def _metrics(self, sums_RK: Floats) -> Metrics:
        of = dict(zip(_SUMS, np.split(sums_RK, len(_SUMS), axis=-1), strict=True))
        rows = of["rows"]
        mse_RC = divided(of["squared_error"], rows)
        target_spread, output_spread = (_spread(of[name], of[f"{name}2"], rows) for name in ("target", "output"))
        together = of["product"] - np.nan_to_num(divided(of["target"] * of["output"], rows))
        r2_RC = 1 - divided(of["squared_error"], target_spread)
        pearson_RC = np.clip(divided(together, np.sqrt(target_spread * output_spread)), -1, 1)
        mae_RC = divided(of["error"], rows)
        overall = {"mse": mse_RC.mean(-1), "rmse": np.sqrt(mse_RC.mean(-1)), "mae": mae_RC.mean(-1)}
        if self.space.num_outputs == 1:
            overall |= {"r2": r2_RC[..., 0], "pearson": pearson_RC[..., 0]}
        return overall | {"rmse_of": np.sqrt(mse_RC), "mae_of": mae_RC, "r2_of": r2_RC, "pearson_of": pearson_RC}


def _spread(sum_RC: Floats, squares_RC: Floats, rows_RC: Floats) -> Floats:
    """Squared deviations from the mean; 0 where they are what rounding leaves of equal numbers."""
    found_RC = squares_RC - np.nan_to_num(divided(sum_RC**2, rows_RC))
    return np.where(found_RC > _ROUNDING * squares_RC, found_RC, 0.0)


def _part(ends: Ends, output: int) -> Ends:
    value, low, high = ends
    return value[output], low[output], high[output]


def _by_prediction(outputs_N: Singles, targets_N: Floats) -> tuple[ReliabilityBin, ...]:
    """Rows in tenths by what is predicted: its mean, and that of the targets."""
    order = np.argsort(outputs_N, kind="stable")
    parts = [part for part in np.array_split(order, min(_BINS, len(order))) if len(part)]
    return tuple(
        ReliabilityBin(
            low=float(outputs_N[part[0]]),
            high=float(outputs_N[part[-1]]),
            count=len(part),
            predicted=float(outputs_N[part].mean(dtype=np.float64)),
            observed=float(targets_N[part].mean()),
        )
        for part in parts
    )

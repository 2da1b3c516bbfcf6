"""An evaluation as text: warnings, metrics with their intervals beside the baselines, then by label.

`evaluation_page` shows the same record as a page.
"""

from __future__ import annotations

from collections.abc import Sequence

from brimful.core.errors import printable
from brimful.core.evaluation import CONSTANT, LINEAR, METRIC_NAMES, Baseline, Confused, Evaluation, Metric
from brimful.core.units import amount_text, count_text, number_text, seconds_text, share_text
from brimful.reports.text_columns import aligned, fitted, told_apart

#: Labels that are listed, the most frequent first, and pairs that are confused.
_MOST_LABELS, _MOST_PAIRS = 20, 5
_NAME = 40
#: Metrics in units of the targets, which may be of any size.
IN_UNITS = frozenset({"mse", "rmse", "mae"})


def evaluation_text(record: Evaluation) -> str:
    """The whole report, without a line break at its end."""
    warnings = [f"warning: {printable(said, 1000)}" for said in record.findings]
    parts = (_head(record), warnings, _metrics(record), by_label_lines(record), _confused(record), _notes(record))
    return "\n\n".join("\n".join(lines) for lines in parts if lines)


def short_text(record: Evaluation) -> str:
    """The part that ends a training: metrics beside the baselines, and the labels. Findings are for the caller."""
    parts = (_metrics(record), by_label_lines(record), _confused(record))
    return "\n\n".join("\n".join(lines) for lines in parts if lines)


def headline(record: Evaluation) -> str:
    """State the number of rows, the time and the device."""
    within = "" if record.wall_s is None else f" in {seconds_text(record.wall_s)}"
    device = "" if record.recipe is None else f" on {printable(record.recipe.device)}"
    return f"{record.num_rows:,} row{'' if record.num_rows == 1 else 's'}{within}{device}"


def _head(record: Evaluation) -> list[str]:
    lines = [f"Evaluated  {headline(record)}"]
    by = "answers in " + record.data if record.data == record.model else f"{record.data} by {record.model}"
    lines.append(f"  {printable(by, 300)}")
    lines += [f"  left out: {count_text(count)} rows {reason}" for reason, count in record.left_out.items()]
    return lines


def baseline_title(baseline: Baseline) -> str:
    """Name of a baseline, as a column's heading."""
    if baseline.name == CONSTANT:
        return f"always {fitted(baseline.answer or '', 20)}"
    return "TF-IDF, linear" if baseline.name == LINEAR else printable(baseline.name, 30)


def metric_text(name: str, value: float | None) -> str:
    """Value of a metric: a share, or an error in units of the targets."""
    return amount_text(value) if name in IN_UNITS else number_text(value)


def interval_text(metric: Metric, digits: int = 4, *, name: str = "") -> str:
    """`0.9634 to 0.9901`; nothing where it is not known. name: of a metric that may be in units of targets."""
    if metric.low is None or metric.high is None:
        return ""
    if name in IN_UNITS:
        return f"{amount_text(metric.low)} to {amount_text(metric.high)}"
    return f"{metric.low:z.{digits}f} to {metric.high:z.{digits}f}"


def metric_rows(record: Evaluation) -> list[tuple[str, ...]]:
    """Name, value, interval, and the values of the baselines."""
    return [
        (
            METRIC_NAMES.get(name, name),
            metric_text(name, metric.value),
            interval_text(metric, name=name),
            *("" if (v := each.metrics.get(name)) is None else metric_text(name, v) for each in record.baselines),
        )
        for name, metric in record.metrics.items()
        if metric.value is not None
    ]


def _metrics(record: Evaluation) -> list[str]:
    titles = [baseline_title(each) for each in record.baselines]
    interval = f"{share_text(record.intervals.level).replace('.0', '')} interval" if record.intervals.resamples else ""
    lines = aligned([("", "value", interval, *titles), *metric_rows(record)])
    return [f"Metrics\n  {lines[0]}".rstrip(), *(f"  {line}" for line in lines[1:])]


def label_rows(record: Evaluation) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Heading and rows of the table by label, the most frequent label first."""
    if not record.by_label:
        return (), []
    regression = record.labels.task == "regression"
    ordered = list(record.by_label) if regression else sorted(record.by_label, key=lambda each: -each.support)
    kinds = list(ordered[0].metrics)
    spread = ["f1"] if "f1" in kinds else []
    columns = [METRIC_NAMES.get(kind, kind) for kind in kinds]
    heading = ("output" if regression else "label", "rows", "predicted", *columns, *("F1 interval" for _ in spread))
    shown = told_apart([each.name for each in ordered], _NAME)
    return heading, [
        (
            name,
            f"{each.support:,}",
            f"{each.given:,}",
            *(_of_label(kind, each.metrics[kind].value) for kind in kinds),
            *(interval_text(each.metrics[kind], 3) for kind in spread),
        )
        for name, each in zip(shown, ordered, strict=True)
    ]


def _of_label(name: str, value: float | None) -> str:
    if value is None:
        return ""
    return amount_text(value) if name in IN_UNITS else f"{value:.3f}"


def by_label_lines(record: Evaluation) -> list[str]:
    """The table by label, as lines."""
    heading, rows = label_rows(record)
    if not rows:
        return []
    lines = aligned([heading, *rows[:_MOST_LABELS]])
    more = len(rows) - _MOST_LABELS
    return ["By label", *(f"  {line}" for line in lines)] + ([f"  and {more:,} more labels"] if more > 0 else [])


def most_confused(record: Evaluation, most: int = _MOST_PAIRS) -> Sequence[Confused]:
    """Pairs of a true label and another one that was predicted, the most frequent first."""
    wrong = [each for each in record.confusion if each.truth != each.label]
    return sorted(wrong, key=lambda each: -each.count)[:most]


def _confused(record: Evaluation) -> list[str]:
    pairs = most_confused(record)
    if not pairs:
        return []
    names = list(dict.fromkeys(name for pair in pairs for name in (pair.truth, pair.label)))
    shown = dict(zip(names, told_apart(names, _NAME), strict=True))
    lines = aligned([(shown[pair.truth], "predicted as", shown[pair.label], f"{pair.count:,}") for pair in pairs])
    return ["Most confused", *(f"  {line}" for line in lines)]


def _notes(record: Evaluation) -> list[str]:
    lines = []
    if record.intervals.resamples:
        intervals = record.intervals
        lines.append(f"Intervals: {intervals.method}; {intervals.resamples:,} resamples, seed {intervals.seed}.")
    if record.score_rows is not None:
        lines.append(f"Intervals of AUC and rank correlations are from a random {record.score_rows:,} of the rows.")
    for baseline in record.baselines:
        if baseline.note is not None:
            lines.append(f"The baseline {baseline_title(baseline)} {baseline.note}.")
    if record.predictions is not None:
        lines.append(f"Answers of all rows: {printable(record.predictions, 300)}")
    return lines

"""An evaluation as a page: findings first, then metrics beside the baselines, labels, mistakes and calibration.

This module makes the figures and charts; the words between them are in `templates/evaluation.html.j2`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from brimful.core.errors import printable
from brimful.core.evaluation import MAIN_METRIC, METRIC_NAMES, Evaluation, Metric, Mistake
from brimful.core.options.checks import flag
from brimful.core.records import TaskName
from brimful.core.units import amount_text, number_text, part_text, share_text
from brimful.reports.bars import Bar, bar_chart
from brimful.reports.charts import agreement
from brimful.reports.classification_page import Chart
from brimful.reports.evaluation_text import (
    baseline_title,
    headline,
    interval_text,
    label_rows,
    metric_rows,
    metric_text,
    most_confused,
)
from brimful.reports.page import render
from brimful.reports.page_bounds import fitting_rows, short_name

#: Labels with a bar of their own, labels of a whole confusion matrix, and pairs and labels that are listed.
_MOST_BARS, _MOST_IN_MATRIX, _MOST_PAIRS, _MOST_ROWS = 30, 12, 30, 1000
#: Bytes of the table by label.
_MOST_TABLE = 350_000
#: Mistakes and labels with the lowest F1 that are listed.
_MOST_MISTAKES, _MOST_WORST = 15, 20
#: Metrics shown large, of each task.
_TILES = {
    "single_label": ("accuracy", "f1_macro", "auc_macro"),
    "multi_label": ("f1_micro", "f1_macro", "auc_macro"),
    "regression": ("r2", "rmse", "spearman"),
}


def evaluation_page(record: Evaluation) -> str:
    """One HTML document that needs no network; the same record gives the same bytes.

    Raises: InputError if matplotlib is not installed.
    """
    levers = () if record.recipe is None else record.recipe.levers
    return render(
        "evaluation.html.j2",
        record,
        whole="evaluation.json, or what evaluate --json prints",
        source=printable(PurePath(record.data).name or record.data, 48),
        headline=headline(record),
        warnings=[f"{said[:1].upper()}{said[1:]}." for said in record.findings],
        left_out=[f"{count:,} row{'s' if count > 1 else ''} {reason}" for reason, count in record.left_out.items()],
        tiles=evaluation_tiles(record),
        levers=[(each.name, f"{each.value} · {each.arithmetic}", each.reason) for each in levers],
        options=[(flag(name), str(value)) for name, value in record.options.items() if value is not None],
        **evaluation_values(record),
    )


def evaluation_values(record: Evaluation) -> dict[str, Any]:
    """Values of the template of an evaluation's parts, on its own page and on that of a run."""
    heading, rows = label_rows(record)
    listed = fitting_rows(rows[:_MOST_ROWS], _MOST_TABLE)
    resampled, intervals = record.intervals.resamples, record.intervals
    columns = ("Metric", "Value", f"{share_text(intervals.level).replace('.0', '')} interval")
    return {
        "evaluated": record,
        "metric_columns": (*columns, *map(baseline_title, record.baselines)),
        "metric_rows": [(row[0][:1].upper() + row[0][1:], *row[1:]) for row in metric_rows(record)],
        "method": f"{intervals.method}; {resampled:,} resamples, seed {intervals.seed}" if resampled else None,
        "baseline_notes": [f"{baseline_title(b)}: {b.note}" for b in record.baselines if b.note is not None],
        "label_columns": tuple(name[:1].upper() + name[1:] for name in heading),
        "label_rows": listed,
        "labels_shown": _shown(len(listed), len(rows)),
        "worst_rows": _worst(record, rows),
        "bars": _bars(record),
        "matrix": _matrix(record),
        "pairs": [
            (short_name(pair.truth), short_name(pair.label), f"{pair.count:,}")
            for pair in most_confused(record, _MOST_PAIRS)
        ],
        "reliability": _reliability(record),
        "mistake_columns": _mistake_columns(record),
        "mislabelled": [_mistake_row(record, each) for each in record.mistakes if each.mislabelled][:_MOST_MISTAKES],
        "mistakes": [_mistake_row(record, each) for each in record.mistakes if not each.mislabelled][:_MOST_MISTAKES],
    }


def _shown(listed: int, number: int) -> str:
    """Heading of the table of many labels."""
    if listed == number:
        return f"All {number:,} labels"
    return f"The {listed:,} most frequent of {number:,} labels; evaluation.json has all"


def _mistake_columns(record: Evaluation) -> tuple[str, ...]:
    sure = () if record.labels.task == "regression" else ("Sure of it", "Sure of the label")
    return ("Row", "Its label", "Given", *sure, "Text")


def _mistake_row(record: Evaluation, mistake: Mistake) -> tuple[str, ...]:
    row = f"{mistake.row:,}" if mistake.file is None else f"{mistake.file}, {mistake.row:,}"
    scores = (share_text(score) for score in (mistake.score, mistake.truth_score))
    sure = () if record.labels.task == "regression" else tuple(scores)
    return (row, short_name(mistake.truth), short_name(mistake.label), *sure, " ".join((mistake.text or "").split()))


def _worst(record: Evaluation, rows: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Of many labels the rows of those with the lowest F1. rows: of all, the most frequent first."""
    ordered = sorted(record.by_label, key=lambda each: -each.support)
    known = [
        (value, place)
        for place, each in enumerate(ordered[: len(rows)])
        if each.support and (metric := each.metrics.get("f1")) and (value := metric.value) is not None
    ]
    return [rows[place] for _, place in sorted(known)[:_MOST_WORST]]


def evaluation_tiles(record: Evaluation) -> list[tuple[str, str | None, str | None]]:
    names = [name for name in _TILES[record.labels.task] if name in record.metrics]
    tiles: list[tuple[str, str | None, str | None]] = [("Rows", f"{record.num_rows:,}", None)]
    for name in names:
        metric, title = record.metrics[name], METRIC_NAMES[name]
        if metric.value is not None:
            interval = interval_text(metric, name=name) or None
            tiles.append((title[:1].upper() + title[1:], metric_text(name, metric.value), interval))
    main = MAIN_METRIC[record.labels.task]
    for baseline in record.baselines:
        if (value := baseline.metrics.get(main)) is not None:
            title = baseline_title(baseline)
            tiles.append((title[:1].upper() + title[1:], number_text(value), f"{METRIC_NAMES[main]} of this baseline"))
    return tiles


def metric_tiles(
    task: TaskName, metrics: Mapping[str, float], note: str | None
) -> list[tuple[str, str | None, str | None]]:
    """Key figures of metrics without intervals. note: to each."""
    names = [name for name in _TILES[task] if name in metrics]
    titles = (METRIC_NAMES[name] for name in names)
    return [
        (title[:1].upper() + title[1:], metric_text(name, metrics[name]), note)
        for name, title in zip(names, titles, strict=True)
    ]


def _bars(record: Evaluation) -> Chart | None:
    """F1 of each label."""
    ordered = sorted(record.by_label, key=lambda each: -each.support)
    known = [(each, each.metrics["f1"].value) for each in ordered if "f1" in each.metrics]
    bars = [
        Bar(each.name, value, _short(each.metrics["f1"]), strong=True) for each, value in known if value is not None
    ][:_MOST_BARS]
    if not bars:
        return None
    alt = "Bar chart: F1 of each label. " + "; ".join(f"{short_name(bar.name)} {bar.said}" for bar in bars[:10])
    more = f" The {_MOST_BARS} most frequent labels." if len(known) > _MOST_BARS else ""
    return Chart(
        drawing=bar_chart("labels", bars, alt=alt, whole=1.0), caption=f"F1 of each label, with its interval.{more}"
    )


def _short(metric: Metric) -> str:
    interval = interval_text(metric, 2)
    return f"{metric.value:.2f}" + (f" ({interval})" if interval else "")


def _matrix(record: Evaluation) -> tuple[tuple[str, ...], list[tuple[str, ...]]] | None:
    """Heading and rows of the confusion matrix, None where there are too many labels."""
    names = [each.name for each in record.by_label]
    if not record.confusion or len(names) > _MOST_IN_MATRIX:
        return None
    shown = [short_name(name) for name in names]
    counts = {(each.truth, each.label): each.count for each in record.confusion}
    numbers = ([f"{counts.get((truth, label), 0) or '·'}" for label in names] for truth in names)
    rows = [(truth, *cells) for truth, cells in zip(shown, numbers, strict=True)]
    return ("True \N{RIGHTWARDS ARROW} predicted", *shown), rows


def _reliability(record: Evaluation) -> Chart | None:
    bins = [each for each in record.reliability if each.count]
    if not bins:
        return None
    regression, points = record.labels.task == "regression", [(b.predicted, b.observed, b.count) for b in bins]
    ends = (0.0, 1.0)
    if regression:
        numbers = [number for x, y, _ in points for number in (x, y)]
        margin = 0.05 * (max(numbers) - min(numbers)) or 1.0
        ends = (min(numbers) - margin, max(numbers) + margin)
        names, caption = ("mean prediction", "mean target"), "Rows in tenths by what is predicted, and their targets."
    else:
        what = "right" if record.labels.task == "single_label" else "true"
        names = ("confidence", f"share that is {what}")
        caption = f"Answers by their confidence, and the share of them that is {what}; larger dots are more answers."
        if (error := record.metrics.get("ece")) is not None and error.value is not None:
            caption += f" On average they are {share_text(error.value)} apart (the calibration error)."
    total, said = sum(b.count for b in bins), amount_text if regression else number_text
    return Chart(
        drawing=agreement("reliability", points, ends=ends, axes_names=names, alt=f"Dots beside a diagonal. {caption}"),
        caption=f"{caption} On the dashed line both are equal.",
        title="Calibration",
        columns=(f"{names[0][:1].upper()}{names[0][1:]}", f"{names[1][:1].upper()}{names[1][1:]}", "Count"),
        rows=[(said(each.predicted), said(each.observed), part_text(each.count, total)) for each in bins],
    )

"""A comparison as a page: what is sure about the metrics, curves over one another, speed, memory, settings that differ.

This module makes the figures and charts; the words between them are in `templates/comparison.html.j2`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from brimful.core.comparison import Compared, Comparison
from brimful.core.evaluation import METRIC_NAMES
from brimful.core.units import bytes_text, number_text
from brimful.reports.bars import Bar, bar_chart
from brimful.reports.bench_text import rate_text
from brimful.reports.charts import overlaid_curves
from brimful.reports.classification_page import Chart
from brimful.reports.comparison_text import (
    PARTS,
    bench_memory_rows,
    bench_rows,
    cost_rows,
    difference_rows,
    mcnemar_text,
    metric_rows,
    overview_rows,
    paired_rows,
    paired_title,
    ratio_text,
)
from brimful.reports.page import environment, render

#: Rows of benches with a bar of their own.
_MOST_BARS = 40


def comparison_page(record: Comparison) -> str:
    """One HTML document that needs no network; the same record gives the same bytes.

    Raises: InputError if matplotlib is not installed.
    """
    figure = environment().get_template("parts.html.j2").module.figure  # type: ignore[attr-defined]
    *names, last = [each.name for each in record.compared]
    columns = ("", *names, last)
    charts = [*_curves(record), _bars(record, "speed"), _bars(record, "memory"), _bench_bars(record)]
    return render(
        "comparison.html.j2",
        record,
        whole="what compare --json prints",
        title=f"{', '.join(names)} and {last}",
        notes=[f"{note[:1].upper()}{note[1:]}." for note in (*record.warnings, *record.notes)],
        columns=columns,
        kinds={"run": "runs", "evaluation": "evaluations", "bench": "benches"}[record.compared[0].kind],
        overview=[*overview_rows(record), ("folder", *(each.folder for each in record.compared))],
        metrics=_capital(metric_rows(record)),
        paired=[
            (paired_title(record, pair), _capital(paired_rows(pair)), mcnemar_text(record, pair))
            for pair in record.paired
        ],
        costs=_capital(cost_rows(record)),
        bench=bench_rows(record),
        bench_memory=bench_memory_rows(record),
        charts=[figure(chart) for chart in charts if chart is not None],
        differences=[(title, difference_rows(record.differences, part)) for part, title in PARTS.items()],
    )


def _capital(rows: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    return [(row[0][:1].upper() + row[0][1:], *row[1:]) for row in rows]


def _curves(record: Comparison) -> list[Chart | None]:
    charts = [_curve(record, "loss", "Loss of training", lambda each: each.losses)]
    if (main := record.main_metric) is not None:
        name = METRIC_NAMES[main][:1].upper() + METRIC_NAMES[main][1:]
        charts.append(_curve(record, "metric", f"{name} of the evaluation rows", lambda each: each.evaluated))
    return charts


def _curve(
    record: Comparison, key: str, title: str, points: Callable[[Compared], Sequence[tuple[int, float]]]
) -> Chart | None:
    lines = {each.name: points(each) for each in record.compared if points(each)}
    if not lines:
        return None
    ends = "; ".join(f"{name} ends at {values[-1][1]:.4g}" for name, values in lines.items())
    drawing = overlaid_curves(key, lines, axis="step", alt=f"Curves: {title}. {ends}.", said="{:.3g}".format)
    rows = [(name, f"{values[-1][0]:,}", number_text(values[-1][1])) for name, values in lines.items()]
    return Chart(drawing=drawing, caption=f"{title}.", title=title, columns=("Run", "Last step", "Value"), rows=rows)


def _bars(record: Comparison, what: str) -> Chart | None:
    """Speed or memory of runs."""
    values = [each.samples_per_s if what == "speed" else each.peak_bytes for each in record.compared]
    if sum(value is not None for value in values) < 2:
        return None
    said = rate_text if what == "speed" else bytes_text
    named = zip(record.compared, values, strict=True)
    bars = [Bar(each.name, value, said(value), strong=True) for each, value in named if value is not None]
    caption = "Rows per second" if what == "speed" else "Peak memory"
    alt = f"Bar chart: {caption}. " + "; ".join(f"{bar.name} {bar.said}" for bar in bars)
    return Chart(drawing=bar_chart(what, bars, alt=alt), caption=f"{caption}.")


def _bench_bars(record: Comparison) -> Chart | None:
    """Speed of the last bench over that of the first one, for the rows that both have."""
    last = len(record.compared) - 1
    bars = []
    for row in record.rows:
        first, other = row.figures[0], row.figures[last]
        if first is not None and other is not None and first.samples_per_s and other.samples_per_s:
            ratio = other.samples_per_s / first.samples_per_s
            mark = "*" if first.disturbed or other.disturbed else ""
            bars.append(Bar(row.name, ratio, f"{ratio_text(ratio)}{mark}", strong=ratio >= 1))
    if not bars:
        return None
    names = record.compared[last].name, record.compared[0].name
    caption = f"Samples per second of {names[0]} over those of {names[1]}, by row; slower rows are paler"
    alt = f"Bar chart: {caption}. " + "; ".join(f"{bar.name} {bar.said}" for bar in bars[:20])
    more = f" The first {_MOST_BARS} of {len(bars):,} rows." if len(bars) > _MOST_BARS else ""
    rows = [(bar.name, bar.said) for bar in bars]
    drawing = bar_chart("rows", bars[:_MOST_BARS], alt=alt)
    return Chart(drawing=drawing, caption=f"{caption}.{more}", title="Rows", columns=("Row", "Ratio"), rows=rows)

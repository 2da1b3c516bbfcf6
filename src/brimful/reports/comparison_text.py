"""A comparison as text: metrics, what is sure about them, speed and memory, and the settings that differ.

`comparison_page` shows the same record as a page, from the same rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from brimful.core.comparison import Compared, Comparison, Difference, Paired, PairedMetric, RowFigures
from brimful.core.errors import printable
from brimful.core.evaluation import LOWER_IS_BETTER, METRIC_NAMES, Metric
from brimful.core.units import bytes_text, count_text, seconds_text
from brimful.reports.bench_text import rate_text
from brimful.reports.evaluation_text import interval_text, metric_text
from brimful.reports.text_columns import aligned, fitted, told_apart

_NAME, _VALUE = 36, 34
#: Parts of the settings, by their headings.
PARTS = {
    "learned": "What was learned",
    "evaluated": "What was evaluated",
    "run": "How it ran",
    "machine": "Where it ran",
}
UNKNOWN = "–"


def comparison_text(record: Comparison) -> str:
    """The whole comparison, without a line break at its end."""
    heading = ["", *told_apart([each.name for each in record.compared], _VALUE)]
    parts = [[f"warning: {printable(each, 500)}" for each in record.warnings]]
    parts += [_block("Compared", heading, overview_rows(record)), _block("Metrics", heading, metric_rows(record))]
    parts += [_paired(record, each) for each in record.paired]
    parts.append(_block("Speed and memory", heading, cost_rows(record)))
    parts.append(_block("Samples per second", heading, bench_rows(record)))
    parts.append(_block("Peak memory", heading, bench_memory_rows(record)))
    for part, title in PARTS.items():
        rows = [(each.name, *map(_value, each.values)) for each in record.differences if each.part == part]
        parts.append(_block(f"{title}: what differs", heading, rows))
    if not record.differences and any(each.kind != "bench" for each in record.compared):
        parts.append(["No setting differs."])
    parts.append([f"x: times the figure of {printable(record.compared[0].name, 60)}"] if _has_ratios(record) else [])
    parts.append([f"note: {printable(each, 500)}" for each in record.notes])
    return "\n\n".join("\n".join(lines) for lines in parts if lines)


def _has_ratios(record: Comparison) -> bool:
    rows = [*cost_rows(record), *bench_rows(record), *bench_memory_rows(record)]
    return any(", x " in cell for row in rows for cell in row[1:])


def overview_rows(record: Comparison) -> list[tuple[str, ...]]:
    """State, device, steps, rows and what a bench recommends, as far as any folder has them."""
    return _rows(
        record,
        {
            "state": lambda each: each.status,
            "device": lambda each: each.device,
            "steps": lambda each: None if each.steps is None else f"{each.steps:,}",
            "rows evaluated": lambda each: None if each.num_rows is None else f"{each.num_rows:,}",
            "recommended": lambda each: each.recommended,
        },
    )


def metric_rows(record: Comparison) -> list[tuple[str, ...]]:
    """Metrics with their intervals."""
    names = dict.fromkeys(name for each in record.compared for name in each.metrics)
    ordered = [*(name for name in METRIC_NAMES if name in names), *(name for name in names if name not in METRIC_NAMES)]
    found = [
        (
            METRIC_NAMES.get(name, printable(name, 40)),
            *(_metric(name, each.metrics.get(name)) for each in record.compared),
        )
        for name in ordered
    ]
    return [row for row in found if set(row[1:]) != {UNKNOWN}]


def cost_rows(record: Comparison) -> list[tuple[str, ...]]:
    """Time, rates and memory, with ratios to the first folder."""
    rows = _rows(
        record,
        {
            "time in the training loop": lambda each: None if each.train_s is None else seconds_text(each.train_s),
            "time of the whole run": lambda each: None if each.wall_s is None else seconds_text(each.wall_s),
        },
    )
    rows += _ratios(record, "rows/s", lambda each: each.samples_per_s, rate_text)
    rows += _ratios(record, "tokens/s", lambda each: each.tokens_per_s, count_text)
    rows += _ratios(record, "peak memory", lambda each: each.peak_bytes, bytes_text)
    return rows


def bench_rows(record: Comparison) -> list[tuple[str, ...]]:
    """Rates of the rows of benches, with ratios to the first bench, where it has the row."""
    return [(row.name, *_cells(row.figures, figures_text, lambda each: each.samples_per_s)) for row in record.rows]


def bench_memory_rows(record: Comparison) -> list[tuple[str, ...]]:
    """Peak memory of the rows of benches."""
    rows = [row for row in record.rows if any(each is not None and each.peak_bytes for each in row.figures)]
    return [
        (row.name, *_cells(row.figures, lambda each: _value(_held(each)), lambda each: each.peak_bytes)) for row in rows
    ]


def _held(figures: RowFigures) -> str | None:
    return None if figures.peak_bytes is None else bytes_text(figures.peak_bytes)


def figures_text(figures: RowFigures) -> str:
    """Rate of a row with its slowest and fastest repeat, marked where others were busy or a budget cut it short; or why
    there is none."""
    if figures.samples_per_s is None:
        return figures.reason or UNKNOWN
    spread = figures.low is not None and figures.high is not None and figures.low < figures.high
    told = [f"{rate_text(figures.low or 0)} to {rate_text(figures.high or 0)}"] if spread else []
    told += ["cut short"] if figures.cut_short else []
    within = f" ({', '.join(told)})" if told else ""
    return f"{rate_text(figures.samples_per_s)}{'*' if figures.disturbed else ''}{within}"


def paired_title(record: Comparison, pair: Paired) -> str:
    """Title of a pair: the two folders, and the number of rows."""
    first, other = record.compared[pair.first].name, record.compared[pair.other].name
    return f"{printable(other, 60)} less {printable(first, 60)}, on the same {pair.num_rows:,} rows"


def paired_rows(pair: Paired) -> list[tuple[str, str, str, str]]:
    """Differences, their intervals, and what they say."""
    return [
        (
            METRIC_NAMES.get(each.name, each.name),
            _signed(each.name, each.difference),
            UNKNOWN
            if each.low is None or each.high is None
            else f"{_signed(each.name, each.low)} to {_signed(each.name, each.high)}",
            verdict(each),
        )
        for each in pair.metrics
    ]


def _signed(name: str, difference: float) -> str:
    return f"{'-' if difference < 0 else '+'}{metric_text(name, abs(difference))}"


def verdict(metric: PairedMetric) -> str:
    """Return `better` or `worse` where the difference is clear, and `equal` where there is none in any sample."""
    if metric.difference == metric.low == metric.high == 0:
        return "equal"
    if not metric.is_clear:
        return "not clear"
    return "better" if (metric.difference > 0) != (metric.name in LOWER_IS_BETTER) else "worse"


def mcnemar_text(record: Comparison, pair: Paired) -> str | None:
    """McNemar's test in a sentence; None for numbers."""
    if pair.p_value is None or pair.only_first is None or pair.only_other is None:
        return None
    first, other = (printable(record.compared[place].name, 60) for place in (pair.first, pair.other))
    p_value = "< 0.0001" if pair.p_value < 1e-4 else f"= {pair.p_value:.4f}"
    found = f"Right in one alone: {first} {pair.only_first:,}, {other} {pair.only_other:,} rows"
    return f"{found}; McNemar's exact test: p {p_value}."


def _paired(record: Comparison, pair: Paired) -> list[str]:
    rows = [("", "difference", "95 % interval", ""), *paired_rows(pair)]
    said = mcnemar_text(record, pair)
    lines = [paired_title(record, pair), *(f"  {line}" for line in aligned(rows))]
    return lines if said is None else [*lines, f"  {said}"]


def difference_rows(differences: Sequence[Difference], part: str) -> list[tuple[str, ...]]:
    """Settings of a part that differ."""
    return [
        (each.name, *(UNKNOWN if v is None else v for v in each.values)) for each in differences if each.part == part
    ]


def _block(title: str, heading: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    if not rows:
        return []
    names = told_apart([row[0] for row in rows], _NAME)
    cut = [(name, *(fitted(cell, _VALUE) for cell in row[1:])) for name, row in zip(names, rows, strict=True)]
    return [title, *(f"  {line}" for line in aligned([heading, *cut]))]


def _rows(record: Comparison, values: dict[str, Callable[[Compared], str | None]]) -> list[tuple[str, ...]]:
    found = [(name, *map(value, record.compared)) for name, value in values.items()]
    return [(row[0], *map(_value, row[1:])) for row in found if any(row[1:])]  # type: ignore[arg-type]


def _ratios(
    record: Comparison, name: str, value: Callable[[Compared], float | None], said: Callable[[float], str]
) -> list[tuple[str, ...]]:
    found = [value(each) for each in record.compared]
    if not any(found):
        return []
    texts = [UNKNOWN if each is None else said(each) for each in found]
    return [(name, *(_with_ratio(each, found[0], texts[place], place) for place, each in enumerate(found)))]


def _cells(
    figures: Sequence[RowFigures | None],
    said: Callable[[RowFigures], str],
    value: Callable[[RowFigures], float | None],
) -> list[str]:
    values = [None if each is None else value(each) for each in figures]
    return [
        UNKNOWN if each is None else _with_ratio(values[place], values[0], said(each), place)
        for place, each in enumerate(figures)
    ]


def _with_ratio(value: float | None, first: float | None, said: str, place: int) -> str:
    """Text of a value with its ratio to the first: not of the first itself."""
    return f"{said}, {ratio_text(value / first)}" if first and place and value is not None else said


def ratio_text(ratio: float) -> str:
    """`x 1.50`; of a small one two digits that are not 0."""
    return f"x {ratio:.2f}" if ratio >= 0.1 or not ratio else f"x {ratio:.2g}"


def _metric(name: str, metric: Metric | None) -> str:
    if metric is None or metric.value is None:
        return UNKNOWN
    within = interval_text(metric, name=name)
    return metric_text(name, metric.value) + (f" ({within})" if within else "")


def _value(value: str | None) -> str:
    return UNKNOWN if value is None else value

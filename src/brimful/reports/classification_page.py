"""A classification as a page: warnings first, then key figures, what was found, and how it ran.

This module makes the figures and charts; the words between them are in `templates/classification.html.j2`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath

from markupsafe import Markup

from brimful.core.classification import CONFIDENCE_BINS, LENGTH_ENDS, Classification
from brimful.core.errors import printable
from brimful.core.options.checks import flag
from brimful.core.units import bytes_text, part_text, seconds_text, share_text
from brimful.reports.arithmetic import arithmetic_legend
from brimful.reports.bars import Bar, bar_chart
from brimful.reports.charts import histogram
from brimful.reports.classification_text import (
    STAGES,
    absent_text,
    compared,
    concerns,
    confidence_text,
    flips_text,
    headline,
    lengths_text,
    limit_text,
    ranked_labels,
    rest_text,
    same_label,
    unchecked_text,
)
from brimful.reports.memory_text import memory_text
from brimful.reports.page import render
from brimful.reports.page_bounds import fitting_rows, short_name

#: Labels that have a bar of their own.
_MOST_LABELS = 30
#: Labels whose numbers are listed, and bytes of that table; the manifest has them all.
_MOST_ROWS, _MOST_TABLE = 1000, 250_000
#: Classes of lengths up to which each edge is labelled; above, powers of two.
_MOST_EDGES = 9


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A drawing, its meaning in words, and the table of its numbers: no rows, no table."""

    drawing: Markup
    caption: str
    title: str = ""
    columns: tuple[str, ...] = ()
    rows: Sequence[tuple[str, ...]] = ()


def classification_page(record: Classification) -> str:
    """One HTML document that needs no network; the same record gives the same bytes.

    Raises: InputError if matplotlib is not installed.
    """
    regression = record.labels.task == "regression"
    found = compared(record)
    num_same = None if found is None or regression else found.num_rows - found.num_flips
    gpus = record.machine.gpus
    return render(
        "classification.html.j2",
        record,
        whole="the manifest beside the results",
        source="standard input" if record.data == "-" else printable(PurePath(record.data).name or record.data, 48),
        headline=headline(record),
        warnings=[_capital(said) + "." for said in concerns(record)],
        regression=regression,
        labels=None if regression else _label_chart(record),
        confidence=None if regression else _confidence_chart(record),
        stages=_stage_chart(record),
        advice=limit_text(record) if record.stages else None,
        peak_memory=memory_text(record.peak_bytes),
        start=None if record.start_s is None else seconds_text(record.start_s),
        lengths=_length_chart(record),
        unchecked=unchecked_text(record) if found is None else None,
        same_label=_capital(same_label(record)),
        num_same=num_same,
        same_share=None if found is None or num_same is None else part_text(num_same, found.num_rows),
        flips=flips_text(found) if found is not None and found.num_flips else None,
        levers=[(each.name, f"{each.value} · {each.arithmetic}", each.reason) for each in record.recipe.levers],
        legend=_capital("; ".join(arithmetic_legend(record.recipe))),
        gpus=[
            (
                f"GPU {i}" if len(gpus) > 1 else "GPU",
                gpu.name,
                None if gpu.total_bytes is None else bytes_text(gpu.total_bytes),
            )
            for i, gpu in enumerate(gpus)
        ],
        versions=", ".join(f"{name} {version}" for name, version in record.machine.versions.items()) or None,
        options=[(flag(name), str(value)) for name, value in record.options.items() if value is not None],
    )


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _label_chart(record: Classification) -> Chart | None:
    listed, rest = ranked_labels(record, _MOST_LABELS)
    whole = record.counts.num_rows
    if not listed:
        return None
    bars = [Bar(name, count, part_text(count, whole), strong=True) for name, count in listed]
    most = f"{short_name(listed[0][0])}, {part_text(listed[0][1], whole)}"
    alt = f"Bar chart: how often each label was predicted; most often {most}"
    several = "; a text can have several" if record.labels.task == "multi_label" else ""
    said = [f"How often each label was predicted, and in how many of all {whole:,} rows{several}."]
    said += [f"{rest_text(rest)}."] if rest else []
    ranked = listed + rest
    rows = fitting_rows([_row(name or "(empty)", n, whole) for name, n in ranked[:_MOST_ROWS]], _MOST_TABLE)
    said += [f"Numbers are of {len(rows):,}; those of all are in the manifest."] if len(rows) < len(ranked) else []
    said += [absent] if (absent := absent_text(record)) is not None else []
    return Chart(
        drawing=bar_chart("labels", bars, alt=alt),
        caption=" ".join(said),
        title="Labels",
        columns=("Label", "Rows", "Share"),
        rows=rows,
    )


def _row(name: str, count: int, whole: int) -> tuple[str, str, str]:
    share = part_text(count, whole).partition(" (")[2].removesuffix(")")
    return name, f"{count:,}", share


def _confidence_chart(record: Classification) -> Chart | None:
    counts = record.counts.confidences
    said = confidence_text(counts)
    if said is None:
        return None
    caption = f"The likeliest label has a probability of {said}."
    axis, edges = "probability of the likeliest label", {i * CONFIDENCE_BINS // 4: f"{i / 4:g}" for i in range(5)}
    return Chart(
        drawing=histogram("confidences", counts, edges=edges, axis=axis, alt=f"Histogram. {caption}"),
        caption=caption,
        title="Confidences",
        columns=("Probability", "Texts", "Share"),
        rows=[
            _row(f"{i / CONFIDENCE_BINS:.2f} to {(i + 1) / CONFIDENCE_BINS:.2f}", count, sum(counts))
            for i, count in enumerate(counts)
            if count
        ],
    )


def _stage_chart(record: Classification) -> Chart | None:
    if not record.stages:
        return None
    wall_s = record.wall_s
    bars = [
        Bar(
            _capital(STAGES[stage.name]),
            stage.busy_s,
            seconds_text(stage.busy_s) + (f" ({share_text(stage.busy_s / wall_s)})" if wall_s else ""),
            strong=stage.name == record.limit,
        )
        for stage in record.stages
    ]
    alt = "Bar chart: seconds that each stage was busy. " + "; ".join(f"{bar.name} {bar.said}" for bar in bars)
    caption = "How long each stage was busy, without waiting for the others; they work at the same time."
    return Chart(drawing=bar_chart("stages", bars, alt=alt, whole=wall_s), caption=caption)


def _length_chart(record: Classification) -> Chart | None:
    counts = record.counts
    said = lengths_text(counts.num_tokens, counts.lengths)
    if said is None:
        return None
    filled = [i for i, count in enumerate(counts.lengths) if count]
    by_length = counts.lengths[: filled[-1] + 1]
    cut = part_text(counts.num_truncated, counts.num_rows) if counts.num_truncated else "None"
    caption = f"Tokens in a text: {said}. {cut} of them had to be cut to the longest sequence."
    spans = (f"{end + 1:,} to {following:,}" for end, following in itertools.pairwise(LENGTH_ENDS))
    names = (f"up to {LENGTH_ENDS[0]}", *spans, f"{LENGTH_ENDS[-1] + 1:,} on")
    axis, edges = "tokens in a text", _edges(len(by_length))
    return Chart(
        drawing=histogram("lengths", by_length, edges=edges, axis=axis, alt=f"Histogram. {caption}"),
        caption=caption,
        title="Lengths",
        columns=("Tokens", "Texts", "Share"),
        rows=[_row(name, count, sum(by_length)) for name, count in zip(names, by_length, strict=False)],
    )


def _edges(num_classes: int) -> dict[int, str]:
    """Labels at the ends of the classes: thinned out to powers of two where they would touch."""
    ends = dict(enumerate((0, *LENGTH_ENDS)))
    thin = num_classes > _MOST_EDGES
    named = {i: _short(end) for i, end in ends.items() if i <= num_classes and not (thin and end.bit_count() > 1)}
    return named if num_classes < len(ends) else named | {num_classes: "∞"}


def _short(tokens: int) -> str:
    """`512`, `1k`."""
    return f"{tokens // 1024}k" if tokens and tokens % 1024 == 0 else str(tokens)

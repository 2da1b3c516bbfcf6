"""A classification as a page: what should be known first, key figures, what was found, and how it ran."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import PurePath

from brimful.core.classification import CONFIDENCE_BINS, LENGTH_ENDS, Classification, Parity
from brimful.core.errors import printable
from brimful.core.options import flag
from brimful.core.records import Arithmetic
from brimful.core.units import bytes_text, count_text, part_text, seconds_text, share_text
from brimful.reports.charts import Bar, bar_chart, histogram
from brimful.reports.classification_text import (
    STAGES,
    absent_text,
    concerns,
    confidence_text,
    flips_text,
    headline,
    is_unchecked,
    lengths_text,
    limit_text,
    memory_text,
    ranked_labels,
    rest_text,
    same_label,
    unchecked_text,
)
from brimful.reports.page import (
    Content,
    Fact,
    Markup,
    Section,
    Tile,
    code,
    facts,
    figure,
    folded,
    isolated,
    note,
    page,
    paragraph,
    prose,
    sentence,
    side_by_side,
    table,
    tiles,
    warning,
)

#: Labels that have a bar of their own.
_MOST_LABELS = 30
#: Labels whose numbers are listed; the record in the page has them all.
_MOST_ROWS = 1000
#: Classes of lengths up to which each edge is labelled; above, powers of two.
_MOST_EDGES = 9
_ARITHMETIC: dict[Arithmetic, str] = {
    "exact": "the plain model's numbers, up to the order of sums",
    "rounding": "the same computation in numbers of fewer digits",
    "training": "another computation, which was asked for",
}


def classification_page(record: Classification) -> str:
    """One HTML document that needs no network; the same record gives the same bytes.

    Raises: InputError if matplotlib is not installed.
    """
    sections = (
        Section(title="What was found", parts=_found(record)),
        Section(title="Where the time went", parts=_time(record)),
        Section(title="How long the texts are", parts=_lengths(record)),
        Section(title="Can it be trusted?", parts=_trust(record)),
        Section(title="How it ran", parts=_ways(record)),
        Section(title="Machine and versions", parts=_machine(record)),
        Section(title="To repeat it", parts=_again(record)),
    )
    return page(
        kind="brimful classify",
        title=f"Classification of {_source(record)}",
        summary=sentence(headline(record), ", by ", isolated(record.model), "."),
        opening=(*(warning(prose(_capital(said) + ".")) for said in concerns(record)), _key_figures(record)),
        sections=sections,
        record=record,
    )


def _source(record: Classification) -> str:
    return "standard input" if record.data == "-" else printable(PurePath(record.data).name or record.data, 48)


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _key_figures(record: Classification) -> Markup:
    parity, counts = record.parity, record.counts
    same = None
    if parity is not None and not is_unchecked(record) and record.labels.task != "regression":
        same = f"{parity.num_rows - parity.num_flips:,} / {parity.num_rows:,}"
    return tiles([
        Tile("Texts", f"{counts.num_rows:,}", _after(record)),
        Tile("Texts per second", _known(record.texts_per_s)),
        Tile("Tokens per second", _known(record.tokens_per_s)),
        Tile("MFU", None if record.mfu is None else share_text(record.mfu), "of the datasheet's peak"),
        Tile("Time", None if record.wall_s is None else seconds_text(record.wall_s), _before(record)),
        Tile(_capital(same_label(record)), same, "rows, compared with the plain fp32 model"),
    ])  # fmt: skip


def _known(rate: float | None) -> str | None:
    return None if rate is None else count_text(rate)


def _after(record: Classification) -> str:
    return f"went on after {record.resumed_rows:,} of an interrupted run" if record.resumed_rows else ""


def _before(record: Classification) -> str:
    return "" if record.start_s is None else f"and {seconds_text(record.start_s)} before it, to load and to check"


def _found(record: Classification) -> tuple[Markup, ...]:
    if not record.counts.num_rows:
        return (paragraph("The input had no rows."),)
    if record.labels.task == "regression":
        names = sentence(*_joined([isolated(name) for name in record.labels.names]))
        return (paragraph(sentence("The model answers each text with a number: ", names, ".")),)
    return (side_by_side(_label_chart(record), _confidence_chart(record)),)


def _joined(pieces: Sequence[Content]) -> list[Content]:
    """The pieces with commas between them."""
    return [part for piece in pieces for part in (", ", piece)][1:]


def _label_chart(record: Classification) -> Markup:
    listed, rest = ranked_labels(record, _MOST_LABELS)
    whole = record.counts.num_rows
    if not listed:
        return paragraph("No text was given a label.")
    bars = [Bar(name, count, part_text(count, whole), strong=True) for name, count in listed]
    alt = f"Bar chart: how often each label was given; most often {listed[0][0]}, {part_text(listed[0][1], whole)}"
    rows = [
        (isolated(name or "(empty)"), f"{count:,}", _share(count, whole))
        for name, count in (listed + rest)[:_MOST_ROWS]
    ]
    several = "; a text can have several" if record.labels.task == "multi_label" else ""
    said = [f"How often each label was given, and in how many of all {whole:,} rows{several}."]
    said += [f"{rest_text(rest)}."] if rest else []
    said += [absent] if (absent := absent_text(record)) is not None else []
    numbers = folded("Numbers", table("Labels", ("Label", "Rows", "Share"), rows, numeric={1, 2}))
    return figure(bar_chart("labels", bars, alt=alt), " ".join(said), numbers)


def _share(count: int, whole: int) -> str:
    return part_text(count, whole).partition(" (")[2].removesuffix(")")


def _confidence_chart(record: Classification) -> Markup:
    counts = record.counts.confidences
    said = confidence_text(counts)
    if said is None:
        return Markup("")
    quarter = CONFIDENCE_BINS // 4
    edges = {i * quarter: f"{i / 4:g}" for i in range(5)}
    said = f"The likeliest label has a probability of {said}."
    chart = histogram(
        "confidences", counts, edges=edges, axis="probability of the likeliest label", alt=f"Histogram. {said}"
    )
    rows = [
        (f"{i / CONFIDENCE_BINS:.2f} to {(i + 1) / CONFIDENCE_BINS:.2f}", f"{count:,}", _share(count, sum(counts)))
        for i, count in enumerate(counts)
        if count
    ]
    numbers = table("Confidences", ("Probability", "Texts", "Share"), rows, numeric={1, 2})
    return figure(chart, said, folded("Numbers", numbers))


def _time(record: Classification) -> tuple[Markup, ...]:
    known = facts([
        Fact("Peak memory", memory_text(record)),
        Fact("Before the first row", None if record.start_s is None else seconds_text(record.start_s)),
    ])  # fmt: skip
    if not record.stages:
        return (known,)
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
    advice = limit_text(record)
    chart = figure(bar_chart("stages", bars, alt=alt, whole=wall_s), caption)
    return (note(prose(advice)) if advice else Markup(""), side_by_side(chart, known))


def _lengths(record: Classification) -> tuple[Markup, ...]:
    counts = record.counts
    said = lengths_text(counts.num_tokens, counts.lengths)
    if said is None:
        return ()
    filled = [i for i, count in enumerate(counts.lengths) if count]
    by_length = counts.lengths[: filled[-1] + 1]
    cut = f"{part_text(counts.num_truncated, counts.num_rows) if counts.num_truncated else 'None'} of them"
    caption = f"Tokens in a text: {said}. {cut} had to be cut to the longest sequence."
    chart = histogram(
        "lengths", by_length, edges=_edges(len(by_length)), axis="tokens in a text", alt=f"Histogram. {caption}"
    )
    spans = (f"{end + 1:,} to {following:,}" for end, following in itertools.pairwise(LENGTH_ENDS))
    names = (f"up to {LENGTH_ENDS[0]}", *spans, f"{LENGTH_ENDS[-1] + 1:,} on")
    rows = [(n, f"{c:,}", _share(c, sum(by_length))) for n, c in zip(names, by_length, strict=False)]
    numbers = table("Lengths", ("Tokens", "Texts", "Share"), rows, numeric={1, 2})
    return (figure(chart, caption, folded("Numbers", numbers)),)


def _edges(num_classes: int) -> dict[int, str]:
    """What to write at the ends of the classes: thinned out to powers of two where they would touch."""
    ends = dict(enumerate((0, *LENGTH_ENDS)))
    thin = num_classes > _MOST_EDGES
    named = {i: _short(end) for i, end in ends.items() if i <= num_classes and not (thin and end.bit_count() > 1)}
    return named if num_classes < len(ends) else named | {num_classes: "∞"}


def _short(tokens: int) -> str:
    """`512`, `1k`."""
    return f"{tokens // 1024}k" if tokens and tokens % 1024 == 0 else str(tokens)


def _trust(record: Classification) -> tuple[Markup, ...]:
    parity = record.parity
    if parity is None or is_unchecked(record):
        return (note(prose(f"Nothing was compared with the plain model ({unchecked_text(record)}).")),)
    regression = record.labels.task == "regression"
    meaning = (
        f"{parity.num_rows:,} of your own rows were also given to the plain Hugging Face model in fp32, one path beside"
        f" the other. The fast path computes in {parity.precision}."
    )
    same = None if regression else part_text(parity.num_rows - parity.num_flips, parity.num_rows)
    largest = f"{parity.largest_difference:.2g}"
    verdict = "Passed" if parity.passed else "Not passed"
    return (
        paragraph(meaning),
        facts([
            Fact("Verdict", Markup(f"<strong>{verdict}</strong>"), _rule(regression)),
            Fact(_capital(same_label(record)), same, flips_text(parity) if parity.num_flips else None),
            Fact(_largest(regression), largest, f"up to {parity.tolerance:g} is allowed"),
            Fact("Near-ties", None if regression else f"{parity.num_near_ties:,}", _ties(parity)),
        ]),
    )  # fmt: skip


def _largest(regression: bool) -> str:
    return "Largest relative difference" if regression else "Largest difference of a probability"


def _rule(regression: bool) -> str:
    if regression:
        return "it passes if no number differs, relatively, by more than the tolerance"
    return "it passes if no probability differs by more than the tolerance, and labels differ only in near-ties"


def _ties(parity: Parity) -> str:
    return f"rows whose two best labels are closer than {parity.tolerance:g} in fp32: rounding may turn them over"


def _ways(record: Classification) -> tuple[Markup, ...]:
    levers = record.recipe.levers
    kinds = [kind for kind in _ARITHMETIC if any(lever.arithmetic == kind for lever in levers)]
    rows = [Fact(lever.name, sentence(lever.value, " · ", lever.arithmetic), lever.reason) for lever in levers]
    legend = paragraph(_capital("; ".join(f"{kind}: {_ARITHMETIC[kind]}" for kind in kinds)) + ".")
    return (
        facts([Fact("device", record.recipe.device), *rows]),
        legend if kinds else Markup(""),
    )


def _machine(record: Classification) -> tuple[Markup, ...]:
    machine = record.machine
    gpus = [
        Fact(f"GPU {i}" if len(machine.gpus) > 1 else "GPU", gpu.name, _memory(gpu.total_bytes))
        for i, gpu in enumerate(machine.gpus)
    ]
    cores = None if machine.num_cores is None else f"{machine.num_cores:,}"
    return (
        facts([
            *gpus,
            Fact("CPU", machine.cpu),
            Fact("Cores", cores),
            Fact("Memory", _memory(machine.memory_bytes)),
            Fact("Versions", ", ".join(f"{name} {version}" for name, version in machine.versions.items()) or None),
        ]),
    )  # fmt: skip


def _memory(num_bytes: int | None) -> str | None:
    return None if num_bytes is None else bytes_text(num_bytes)


def _again(record: Classification) -> tuple[Markup, ...]:
    asked = [(flag(name), str(value)) for name, value in record.options.items() if value is not None]
    options = table("Options of this pass", ("Option", "Value"), asked)
    paths = facts([
        Fact("Model", isolated(record.model)),
        Fact("Input", "standard input" if record.data == "-" else isolated(record.data)),
        Fact("Output", "standard output" if record.output is None else isolated(record.output)),
    ])  # fmt: skip
    return (code(record.command), paths, folded("All options", options))

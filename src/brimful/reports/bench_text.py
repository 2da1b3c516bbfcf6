"""Results of a bench as text: a table on the terminal, in Markdown, and as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from contextlib import suppress

from brimful.core.bench import RECOMMENDED, Bench, BenchRow, Measured
from brimful.core.command_line import command_of
from brimful.core.errors import InputError, printable
from brimful.core.options.bench import OF_TRAIN
from brimful.core.options.train import TrainOptions
from brimful.core.units import bytes_text, count_text, parse_bytes, share_text
from brimful.reports.memory_text import memory_names
from brimful.reports.text_columns import aligned, fitted

#: Status of a row without figures, in words.
STATUS = {
    "out_of_memory": "out of memory", "failed": "failed", "unsupported": "not here", "left": "no time", "measured": "",
    "not_reached": "not reached",
}  # fmt: skip
_NAME = 39
COLUMNS = ("#", "row", "samples/s", "spread", "ratio", "tokens/s", "MFU", "memory", "loss", "arithmetic")


def rate_text(rate: float) -> str:
    """Samples a second, to three digits, whole ones from 100 on."""
    return count_text(rate) if rate >= 100 else f"{rate:.3g}"


def busy_mark(bench: Bench, figures: Measured) -> str:
    """`*` beside a speed that others disturbed."""
    return "*" if bench.workload.disturbed(figures) else ""


def cells(bench: Bench, number: int) -> tuple[str, ...]:
    """One row of the table, in the order of COLUMNS; empty where nothing is known."""
    each = bench.rows[number]
    figures, name = each.measured, each.row.key
    if figures is None:
        return (str(number + 1), name, STATUS[each.status], *[""] * 7)
    ratio, memory = bench.ratio(figures), figures.memory_bytes
    return (
        str(number + 1),
        name,
        rate_text(figures.samples_per_s) + busy_mark(bench, figures),
        _spread_text(bench.rows[number], figures),
        "" if ratio is None else f"{ratio:.2f}",
        count_text(figures.tokens_per_s),
        ""
        if figures.mfu is None
        else share_text(figures.mfu) + ("*" if bench.workload.rate_disturbed(figures) else ""),
        "" if memory is None else bytes_text(memory),
        "" if figures.loss is None else f"{figures.loss:.3f}",
        figures.arithmetic,
    )


def _spread_text(each: BenchRow, figures: Measured) -> str:
    """Spread and number of blocks, and whether they are fewer than those of other rows."""
    if figures.spread is None:
        return ""
    return f"{share_text(figures.spread)} of {len(figures.block_rates)}" + (", cut short" if each.cut_short else "")


def bench_text(bench: Bench) -> str:
    """The table for a terminal, then what was not measured, and what is recommended."""
    rows = [tuple(cells(bench, number)) for number in range(len(bench.rows))]
    shown = [(row[0], fitted(row[1], _NAME), *row[2:]) for row in rows]
    lines = aligned([COLUMNS, *shown])
    lines += ["", _BUSY] if _has_busy(bench) else []
    for heading, wanted in _HEADINGS.items():
        found = [f"  {line}" for line in _reasons(bench, wanted)]
        lines += ["", heading, *found] if found else []
    said, command = recommended_text(bench), recommended_command(bench)
    lines += ["", said] if said else []
    lines += [f"  {printable(command, 1000)}"] if command else []
    if (said := unfinished_text(bench)) is not None:
        lines += ["", said]
    if (said := budget_text(bench)) is not None:
        lines += ["", f"No row more fits in the budget: {said}"]
    elif any(each.status in ("left", "not_reached") or each.cut_short for each in bench.rows):
        lines += ["", f"The same command goes on with the rest: {printable(bench.command, 1000)}"]
    return "\n".join(lines)


def budget_text(bench: Bench) -> str | None:
    """Hint of a budget that was enough for none of the rows that are left; None where it was."""
    needs = bench.needs_budget_s
    return None if needs is None else f"raise --budget-s to some {needs:.0f}, or give 0 for no limit"


def unfinished_text(bench: Bench) -> str | None:
    """Sentence on rows that a bench which was ended early did not come to; None without any."""
    missing = [each for each in bench.rows if each.status == "not_reached"]
    if not missing:
        return None
    return f"Not finished: {len(missing)} of {len(bench.rows)} rows were not reached ({missing[0].reason})"


_BUSY = "* other programs were busy on this machine meanwhile: this figure says little"


def _has_busy(bench: Bench) -> bool:
    work = bench.workload
    return any(work.disturbed(each) or (each.mfu and work.rate_disturbed(each)) for _, each in bench.measured())


def _reasons(bench: Bench, wanted: Sequence[str]) -> list[str]:
    """Rows of these states with their reasons, each reason once."""
    found = dict[str, list[str]]()
    for each in bench.rows:
        if each.status in wanted and each.reason is not None:
            found.setdefault(printable(each.reason, 300), []).append(each.row.key)
    return [f"{'; '.join(keys)}: {reason}" for reason, keys in found.items()]


#: Share by which two measurements of the same settings may differ, and be one figure.
_AGREES = 0.1
#: Spread from which on it is told beside a gain.
_WIDE = 0.5
_HEADINGS = {
    "Did not end:": ("out_of_memory", "failed"),
    "Not here:": ("unsupported",),
    "Not measured:": ("left", "not_reached"),
    "Cut short, and measured again by a call with more time:": ("measured",),
}


def recommended_row(bench: Bench) -> BenchRow | None:
    """The row that the recommended settings were measured by once more; None if it is not there."""
    return next((each for each in bench.rows if each.row.name == RECOMMENDED), None)


def recommended_figures(bench: Bench) -> Measured | None:
    """Figures of the recommended settings: of the last row, unless others were busy then and not before."""
    again = recommended_row(bench)
    if again is not None and again.measured is not None and not bench.workload.disturbed(again.measured):
        return again.measured
    return next((each.measured for each in bench.rows if each.row.key == bench.recommended), None)


def recommended_text(bench: Bench) -> str | None:
    """A sentence on the recommended row; None without one."""
    if bench.recommended is None:
        return None
    measured = recommended_figures(bench)
    gained = None if measured is None else gained_text(bench, measured)
    busy = measured is not None and bench.workload.disturbed(measured)
    unsure = " (others were busy on this machine: measure it again)" if busy else ""
    said = bench.recommended if gained is None else f"{bench.recommended}, {gained}"
    first = f"Recommended: {said}, brimful's fastest that fits and changes no arithmetic{unsure}"
    again = recommended_row(bench)
    once = "Not measured once more" if again is None or again.status in ("left", "not_reached") else None
    short = any(each.row.key == bench.recommended and each.cut_short for each in bench.rows)
    cut = "Its row was cut short by the budget" if short else None
    return ". ".join(filter(None, (first, _slower(bench, measured), _passed_over(bench), _few(bench), cut, once)))


def _slower(bench: Bench, measured: Measured | None) -> str | None:
    """Sentence that the recommended settings are slower than the first row; None where they are not."""
    ratio = None if measured is None else bench.ratio(measured)
    return f"It is slower than {bench.rows[0].row.key} in this bench" if ratio is not None and ratio < 1 else None


def _passed_over(bench: Bench) -> str | None:
    """Brimful's fastest row, where another one is recommended, and why it is not; None where they are the same."""
    ours = {row.key: each for row, each in bench.measured() if row.side == "brimful" and row.name != RECOMMENDED}
    if (best := ours.get(bench.recommended or "")) is None:
        return None
    key = max(ours, key=lambda each: ours[each].samples_per_s)
    figures, limit = ours[key], bench.options.get("memory_limit")
    if figures.samples_per_s <= best.samples_per_s:
        return None
    if limit is not None and figures.memory_bytes is not None and figures.memory_bytes > parse_bytes(limit):
        why = f"needs more than --memory-limit {limit}"
    else:
        why = (
            "changes what is learned" if figures.arithmetic == "exact" else f"changes arithmetic ({figures.arithmetic})"
        )
    return f"{key}, {figures.samples_per_s / best.samples_per_s:.2f} times as fast, is not taken: it {why}"


def _few(bench: Bench) -> str | None:
    """Number of brimful's rows that the recommended one was chosen among; None where all were begun."""
    ours = [each for each in bench.rows if each.row.side == "brimful" and each.row.name != RECOMMENDED]
    left, missing = (sum(each.status == status for each in ours) for status in ("left", "not_reached"))
    why = [f"for {left} there was no time"] if left else []
    why += [f"{missing} {'was' if missing == 1 else 'were'} not reached"] if missing else []
    measured = sum(each.measured is not None for each in ours)
    return f"Chosen among {measured} of brimful's {len(ours)} rows: {', and '.join(why)}" if why else None


def gained_text(bench: Bench, measured: Measured) -> str | None:
    """The recommended row's gain over the first; of two measurements that do not agree, both. None without a first."""
    first = next((each.measured for each in bench.rows if each.row.key == bench.recommended), None)
    now, before = bench.ratio(measured), None if first is None else bench.ratio(first)
    if now is None:
        return None
    than = bench.rows[0].row.key
    if before is None or abs(before - now) <= _AGREES * now:
        plain = bench.rows[0].measured
        assert plain is not None
        if measured.spread is None or plain.spread is None:
            return f"{now:.2f} times {than}, by one block, whose spread is unknown"
        spread = max(measured.spread, plain.spread)
        if abs(now - 1) <= spread or _overlap(measured.block_rates, plain.block_rates):
            return f"no clear gain over {than}: {now:.2f} times it, within the spread of {share_text(spread)}"
        return f"{now:.2f} times {than}" + (f" (spread {share_text(spread)})" if spread > _WIDE else "")
    if min(before, now) < 1 < max(before, now):
        return f"no clear gain over {than}: {before:.2f} times it in the table, {now:.2f} when measured again"
    return f"{now:.2f} times {than} ({before:.2f} when first measured)"


def _overlap(one: Sequence[float], other: Sequence[float]) -> bool:
    """True where a block of the slower row was as fast as one of the faster."""
    return min(one) <= max(other) and min(other) <= max(one)


def recommended_command(bench: Bench) -> str | None:
    """Command that trains with the recommended settings; None without any."""
    row = next((each.row for each in bench.rows if each.row.key == bench.recommended), None)
    if row is None:
        return None
    shared = {name: bench.options[name] for name in OF_TRAIN if name in bench.options and name not in _BENCH_ONLY}
    given = {"data": bench.data or "DATA", "model": bench.model, "output": "run"}
    with suppress(InputError):  # options of another version
        return command_of("train", TrainOptions(**{**shared, **given, **row.settings}))
    return None


#: Options that a bench shares with train and chooses for itself.
_BENCH_ONLY = frozenset({"limit", "learning_rate"})


def bench_markdown(bench: Bench) -> str:
    """The table in Markdown, with the work above it and the command below."""
    work, data = bench.workload, "random tokens" if bench.data is None else bench.data
    lines = [
        f"{printable(bench.model, 300)} ({count_text(work.parameters)} parameters), {printable(data, 300)}:"
        f" {work.rows_text}, {work.median_tokens:,} tokens in the median, batch {work.batch_size}, on"
        f" {_machine_text(bench)}.",
        "",
        _markdown(COLUMNS),
        "|" + "---|" * len(COLUMNS),
        *(_markdown(cells(bench, number)) for number in range(len(bench.rows))),
        "",
    ]
    lines += [printable(_BUSY).replace("*", "\\*"), ""] if _has_busy(bench) else []
    reasons = [f"- {each.row.key}: {printable(each.reason, 300)}" for each in bench.rows if each.reason is not None]
    lines += [*reasons, ""] if reasons else []
    lines += _components(bench)
    lines += [unfinished + ".", ""] if (unfinished := unfinished_text(bench)) is not None else []
    if (said := recommended_text(bench)) is not None:
        lines += [said + ".", ""]
    if (command := recommended_command(bench)) is not None:
        lines += ["```", printable(command, 100_000), "```", ""]
    return "\n".join([*lines, "Measured by", "", "```", printable(bench.command, 100_000), "```", ""])


def _components(bench: Bench) -> list[str]:
    """Peak memory by component in Markdown, of rows and components of which it is known."""
    found = [
        (number, each.row.key, each.measured.peak_bytes.components)
        for number, each in enumerate(bench.rows, 1)
        if each.measured is not None and each.measured.peak_bytes.components
    ]
    parts = [name for name in _PARTS if any(name in held for *_, held in found)]
    if not parts:
        return []
    rows = [(str(n), key, *(bytes_text(held[p]) if p in held else "" for p in parts)) for n, key, held in found]
    heading = ("#", "peak memory of", *map(memory_names, parts))
    return [_markdown(heading), "|" + "---|" * len(heading), *map(_markdown, rows), ""]


def _markdown(cells: Sequence[str]) -> str:
    return "| " + " | ".join(printable(cell, 200).replace("|", "\\|") for cell in cells) + " |"


def _machine_text(bench: Bench) -> str:
    machine = bench.workload.machine
    of_cpu = ", ".join(filter(None, (machine.cpu or "CPU", bench.workload.cores_text)))
    name = bench.workload.device if bench.workload.on_gpu else of_cpu
    versions = ", ".join(f"{each} {machine.versions[each]}" for each in _SHOWN if each in machine.versions)
    return printable(f"{name} ({versions})", 300)


_SHOWN = ("torch", "transformers", "brimful")
_CSV = (
    *("number", "side", "row", "settings", "status", "reason", "samples_per_s", "ratio", "spread", "repeats"),
    *("step_s", "tokens_per_s", "mfu", "datasheet_mfu", "precision", "arithmetic", "loss", "nvml_bytes"),
    *("resident_bytes", "allocated_bytes", "reserved_bytes", "first_step_s", "cores", "waiting", "disturbed"),
    "cut_short",
)
_PARTS = (
    *("weights", "gradients", "optimizer_states", "activations", "temporaries", "workspaces", "unused"),
    *("outside_torch", "all_else"),
)


def bench_csv(bench: Bench) -> str:
    """All figures, unrounded: a line for each row, memory by component in columns of its own."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*_CSV, *(f"{name}_bytes" for name in _PARTS)])
    for number, each in enumerate(bench.rows):
        settings = " ".join(f"{name}={value}" for name, value in each.row.settings.items())
        values: list[object] = [number + 1, each.row.side, each.row.name, settings, each.status, each.reason]
        figures, columns = each.measured, len(_CSV) + len(_PARTS)
        if figures is not None:
            peak = figures.peak_bytes
            values += [
                figures.samples_per_s, bench.ratio(figures), figures.spread, len(figures.block_rates), figures.step_s,
                figures.tokens_per_s, figures.mfu, figures.datasheet_mfu, figures.precision, figures.arithmetic,
                figures.loss, figures.nvml_bytes, peak.resident, peak.allocated, peak.reserved, figures.first_step_s,
                figures.cores, figures.waiting, "yes" if bench.workload.disturbed(figures) else "no",
                "yes" if each.cut_short else "no",
                *(peak.components.get(name) for name in _PARTS),
            ]  # fmt: skip
        values += [None] * (columns - len(values))
        writer.writerow(["" if value is None else value for value in values])
    return text.getvalue()


def component_names() -> dict[str, str]:
    """Components of peak memory in the order in which they are stacked, with their names."""
    return {name: memory_names(name) for name in _PARTS}

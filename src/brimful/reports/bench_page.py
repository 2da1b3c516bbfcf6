"""A bench as a page: speed against memory, every row as bars, memory by component, and what each lever gained and cost.

This module makes the figures and charts; the words between them are in `templates/bench.html.j2`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import PurePath

from markupsafe import Markup

from brimful.core.bench import RECOMMENDED, Bench, BenchRow, Measured, frontier
from brimful.core.errors import listed, printable
from brimful.core.records import PeakMemory
from brimful.core.units import bytes_text, count_text
from brimful.reports.bars import Bar, Stack, bar_chart, stacked_bars
from brimful.reports.bench_text import (
    COLUMNS,
    STATUS,
    busy_mark,
    cells,
    gained_text,
    rate_text,
    recommended_command,
    recommended_figures,
    recommended_row,
    recommended_text,
    unfinished_text,
)
from brimful.reports.charts import Point, scatter
from brimful.reports.classification_page import Chart
from brimful.reports.guide_claims import MACHINE, claim_of
from brimful.reports.page import render
from brimful.reports.text_columns import fitted

#: Parts of stacked bars, and the components that each is made of.
_STACKED = {
    "weights": ("weights",),
    "gradients": ("gradients",),
    "optimizer states": ("optimizer_states",),
    "activations": ("activations",),
    "other of torch": ("temporaries", "workspaces", "unused"),
    "all else": ("outside_torch", "all_else"),
}


#: Legend of bars: whose rows stand out.
_SIDES = {"brimful": True, "Trainer": False}
#: Columns of a name beside a point.
_POINT_NAME = 30


def bench_page(bench: Bench) -> str:
    """One HTML document that needs no network; the same record gives the same bytes.

    Raises: InputError if matplotlib is not installed.
    """
    work, recommended = bench.workload, recommended_text(bench)
    return render(
        "bench.html.j2",
        bench,
        whole="results.json, in the folder of the bench",
        source=printable(_model_name(bench.model), 48),
        headline=_headline(bench),
        notices=[f"{recommended}."] if recommended else [],
        warnings=_warnings(bench),
        missing=_missing(bench),
        tiles=_tiles(bench),
        plot=_plot(bench),
        bars=[_speeds(bench), _memories(bench)],
        stacked=_stacked(bench),
        levers=_levers(bench),
        guide=f"The guide's figures are of {MACHINE}.",
        table_columns=("Row", *COLUMNS[2:]),
        table_rows=[
            (_key(number, each), *cells(bench, number - 1)[2:])
            for number, each in enumerate(bench.rows, 1)
            if each.measured is not None
        ],
        work_facts=_work_facts(bench),
        recipe=_recipe(bench),
        train_command=recommended_command(bench),
        machine=_machine(bench),
        settings=[(each.row.key, _settings(each)) for each in bench.rows],
        memory_word=_memory_word(work.on_gpu),
    )


def _model_name(model: str) -> str:
    """The last part of a model's name, and the one before it where that is `model`, as in the folder of a run."""
    path = PurePath(model)
    before = path.parent.name if path.name == "model" else ""
    return "/".join(filter(None, (before, path.name))) or model


def _missing(bench: Bench) -> list[tuple[str, str, str]]:
    """Rows without figures, their states and reasons; those of one reason together."""
    found = dict[tuple[str, str], list[str]]()
    for number, each in enumerate(bench.rows, 1):
        if each.measured is None:
            found.setdefault((STATUS[each.status], each.reason or ""), []).append(_key(number, each))
    return [(", ".join(names), *why) for why, names in found.items()]


def _warnings(bench: Bench) -> list[str]:
    """Rows that others disturbed, in one line, and what the rows' processes warned of, each once."""
    work, said = bench.workload, dict[str, list[int]]()
    measured = [(number, each.measured) for number, each in enumerate(bench.rows, 1) if each.measured is not None]
    disturbed = [number for number, figures in measured if work.disturbed(figures)]
    for number, each in enumerate(bench.rows, 1):
        for text in each.notes:
            said.setdefault(text, []).append(number)
    lines = [f"{_numbered(numbers)}: {text}." for text, numbers in said.items()]
    if disturbed:
        busy = "other programs were busy on this machine meanwhile, so the speed says little (marked *)"
        lines.insert(0, f"{_numbered(disturbed)}: {busy}.")
    if any(figures.mfu is not None and work.rate_disturbed(figures) for _, figures in measured):
        lines.insert(0, "Other programs were busy while matrix products were measured, so MFU says little (marked *).")
    cut = dict[str, list[int]]()
    for number, each in enumerate(bench.rows, 1):
        if each.cut_short:
            cut.setdefault(each.reason or "", []).append(number)
    again = "a call with more time measures it again (cut short)"
    lines = [*(f"{_numbered(numbers)}: {text}; {again}." for text, numbers in cut.items()), *lines]
    if (unfinished := unfinished_text(bench)) is not None:
        lines.insert(0, f"{unfinished}. The same command goes on.")
    return lines


def _numbered(numbers: list[int]) -> str:
    """Rows by their numbers, in words."""
    return f"Row{'' if len(numbers) == 1 else 's'} {listed([str(number) for number in numbers])}"


def _key(number: int, each: BenchRow) -> str:
    return f"{number}. {each.row.key}"


def _memory_word(on_gpu: bool) -> str:
    return "the driver's highest reading (NVML)" if on_gpu else "the process's highest resident memory"


def _headline(bench: Bench) -> str:
    work, rows = bench.workload, sum(row.name != RECOMMENDED for row, _ in bench.measured())
    device = work.device if work.on_gpu else f"{work.cores_text or 'some cores'} of {work.machine.cpu or 'a CPU'}"
    asked = sum(each.row.name != RECOMMENDED for each in bench.rows)
    of = f" of {asked}" if unfinished_text(bench) is not None else ""
    return f"{rows}{of} way{'' if rows == 1 and not of else 's'} to train, measured on {printable(device)}"


def _tiles(bench: Bench) -> list[tuple[str, str | None, str | None]]:
    """Trainer's plain row, the recommended one, and the least memory."""
    measured = bench.measured()
    if not measured:
        return []
    row, first = measured[0]
    tiles: list[tuple[str, str | None, str | None]] = [
        (f"{row.key}, samples/s", rate_text(first.samples_per_s), _bytes(first.memory_bytes))
    ]
    if (best := recommended_figures(bench)) is not None:
        said = filter(None, (gained_text(bench, best), _bytes(best.memory_bytes)))
        tiles.append(("Recommended, samples/s", rate_text(best.samples_per_s), ", ".join(said)))
    all_held = [(each.memory_bytes, row.key) for row, each in measured if each.memory_bytes is not None]
    if all_held:
        least, key = min(all_held)
        tiles.append(("Least memory", bytes_text(least), key))
    return tiles


def _bytes(value: float | None) -> str | None:
    return None if value is None else bytes_text(value)


def _plot(bench: Bench) -> Chart | None:
    """Speed against memory: every measured row a point, those of the front with their names."""
    found = [
        (number, each, figures, figures.memory_bytes)
        for number, each in enumerate(bench.rows, 1)
        if (figures := each.measured) is not None and figures.memory_bytes is not None
    ]
    if not found:
        return None
    points = [
        Point(str(number), memory / (1 << 30), figures.samples_per_s, strong=each.row.side == "brimful")
        for number, each, figures, memory in found
    ]
    front = frontier([(point.x, point.y) for point in points])
    best = ", ".join(f"{found[i][0]} ({found[i][1].row.key})" for i in front)
    for i in front:
        points[i] = replace(points[i], label=fitted(f"{found[i][0]} {found[i][1].row.name}", _POINT_NAME))
    drawing = scatter(
        "plot",
        points,
        front=front,
        axes_names=("memory, GiB", "samples/s"),
        said=("{:g}".format, "{:,g}".format),
        alt=f"Samples a second against peak memory of {len(points)} rows. None is faster with less memory than {best}.",
    )
    rows = [
        (f"{number}. {each.row.key}", rate_text(figures.samples_per_s), bytes_text(memory))
        for number, each, figures, memory in found
    ]
    return Chart(
        drawing=drawing,
        caption=f"Round: brimful; square: Trainer. Up and left is better. No row is faster with less memory than those"
        f" on the dashed line (the Pareto front): {best}.",
        title="Speed and memory of each row",
        columns=("Row", "samples/s", "Memory"),
        rows=rows,
    )


def _speeds(bench: Bench) -> Chart | None:
    bars = [
        Bar(_name(number, each), figures.samples_per_s, _beside_first(bench, figures), each.row.side == "brimful")
        for number, each in enumerate(bench.rows, 1)
        if (figures := each.measured) is not None
    ]
    return _bars("speed", "Samples a second, and their ratio to the first row (×)", bars)


def _memories(bench: Bench) -> Chart | None:
    bars = [
        Bar(_name(number, each), float(memory), bytes_text(memory), each.row.side == "brimful")
        for number, each in enumerate(bench.rows, 1)
        if each.measured is not None and (memory := each.measured.memory_bytes) is not None
    ]
    return _bars("held", "Peak memory", bars)


def _bars(key: str, caption: str, bars: list[Bar]) -> Chart | None:
    if not bars:
        return None
    alt = f"Bar chart: {caption}. " + "; ".join(f"{bar.name} {bar.said}" for bar in bars)
    return Chart(drawing=bar_chart(key, bars, alt=alt, legend=_SIDES), caption=f"{caption}.")


def _name(number: int, each: BenchRow) -> str:
    return f"{number} {each.row.name}"


def _beside_first(bench: Bench, figures: Measured) -> str:
    ratio = bench.ratio(figures)
    return rate_text(figures.samples_per_s) + busy_mark(bench, figures) + ("" if ratio is None else f" · {ratio:.2f}×")


def _stacked(bench: Bench) -> Chart | None:
    """Memory of each row by component."""
    found = [
        (number, each, each.measured.peak_bytes)
        for number, each in enumerate(bench.rows, 1)
        if each.measured is not None and each.measured.peak_bytes.total is not None
    ]
    if not found:
        return None
    parts = [name for name in _STACKED if any(_part(peak, name) is not None for *_, peak in found)]
    stacks, rows = [], []
    for number, each, peak in found:
        sizes = [_part(peak, name) for name in parts]
        stacks.append(Stack(_name(number, each), [float(size or 0) for size in sizes], bytes_text(peak.total)))
        rows.append((_key(number, each), *("–" if size is None else bytes_text(size) for size in sizes)))
    alt = "Stacked bars: peak memory by component. " + "; ".join(f"{each.name} {each.said}" for each in stacks)
    return Chart(
        drawing=stacked_bars("parts", stacks, parts=parts, alt=alt),
        caption="Peak memory by component, as torch's allocator and the driver count it."
        if bench.workload.on_gpu
        else "Resident memory by component: weights, states, and gradients when it was highest; the rest is all else.",
        title="Memory by component",
        columns=("Row", *parts),
        rows=rows,
    )


def _part(peak: PeakMemory, name: str) -> int | None:
    """Bytes of a part of the bars; None where none of its components is known."""
    known = [peak.components[each] for each in _STACKED[name] if each in peak.components]
    return sum(known) if known else None


def _levers(bench: Bench) -> list[tuple[str, ...]]:
    """Speed and memory of each row over those of the row it was made from, and what the guide says of the same."""
    found = {each.row.key: each for each in bench.rows}
    rows = []
    for each in bench.rows:
        base = None if each.row.base is None else found.get(each.row.base)
        if base is None or each.measured is None or base.measured is None or each.row.name == RECOMMENDED:
            continue
        one, other = each.measured, base.measured
        speed, memory = one.samples_per_s / other.samples_per_s, _ratio(one.memory_bytes, other.memory_bytes)
        claim = claim_of(each.row, base.row)
        said = ("–", "–") if claim is None else tuple(_times(value) for value in claim)
        busy = busy_mark(bench, one) or busy_mark(bench, other)
        held = "–" if memory is None else _times(memory)
        rows.append((each.row.key, base.row.key, _times(speed) + busy, held, *said))
    return rows


def _ratio(one: int | None, other: int | None) -> float | None:
    return None if one is None or not other else one / other


def _times(ratio: float) -> str:
    return f"{ratio:.2f}×"


def _settings(each: BenchRow) -> str:
    return ", ".join(f"{name}={value}" for name, value in each.row.settings.items()) or "defaults"


def _recipe(bench: Bench) -> list[tuple[str, str, str]]:
    """Levers of the recommended row, with their reasons."""
    again = recommended_row(bench)
    if again is None or again.measured is None or again.measured.recipe is None:
        return []
    levers = again.measured.recipe.levers
    return [(each.name, f"{each.value} · {each.arithmetic}", each.reason) for each in levers]


def _work_facts(bench: Bench) -> list[tuple[str, str | None, str | None]]:
    work, steps = bench.workload, bench.steps
    data = "random tokens" if bench.data is None else PurePath(bench.data).name
    return [
        ("Model", Markup("<bdi>{}</bdi>").format(printable(bench.model, 300)),
         f"{work.model_type}, {count_text(work.parameters)} parameters"),
        ("Data", Markup("<bdi>{}</bdi>").format(printable(data, 300)),
         f"{work.rows_text}, SHA-256 {work.data_fingerprint[:16]}…"),
        ("Tokens of a sample", f"median {work.median_tokens:,}, at most {work.longest_tokens:,}", None),
        ("Task", f"{work.task}, {work.labels:,} outputs", None),
        ("Batch", f"{work.batch_size:,} samples per optimizer step", None),
        ("Optimizer steps", f"{steps.warm_up} to warm up, then {steps.repeats} timed blocks of {steps.block}",
         "speeds are medians over the blocks; the spread is slowest to fastest block over the median; the loss is the"
         f" mean of the last block, after {steps.total} steps"),
    ]  # fmt: skip


def _machine(bench: Bench) -> list[tuple[str, str | None, str | None]]:
    work, machine = bench.workload, bench.workload.machine
    gpus = ", ".join(gpu.name for gpu in machine.gpus) or None
    rates = ", ".join(f"{name} {rate / 1e12:.3g}" for name, rate in work.rates.items())
    versions = ", ".join(f"{name} {version}" for name, version in machine.versions.items()) or None
    return [
        ("GPU", gpus, None),
        ("CPU", machine.cpu, work.cores_text),
        ("Memory", None if machine.memory_bytes is None else bytes_text(machine.memory_bytes), None),
        ("Matrix products", f"{rates} TFLOP/s" if rates else None, "measured; MFU is over these"),
        ("Versions", versions, None),
    ]

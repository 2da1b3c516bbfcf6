"""A training run as a page: how it learned, how good it is, where time and memory went, and how to repeat it.

This module makes the figures and charts; the words between them are in `templates/run.html.j2`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import PurePath
from typing import Any

from markupsafe import Markup

from brimful.core.errors import printable
from brimful.core.evaluation import MAIN_METRIC, METRIC_NAMES
from brimful.core.options.checks import flag
from brimful.core.records import Processes
from brimful.core.units import bytes_text, count_text, number_text, parse_bytes, part_text, seconds_text, share_text
from brimful.reports.arithmetic import arithmetic_legend
from brimful.reports.bars import Bar, bar_chart
from brimful.reports.bench_text import rate_text
from brimful.reports.charts import curves
from brimful.reports.classification_page import Chart
from brimful.reports.evaluation_page import evaluation_tiles, evaluation_values, metric_tiles
from brimful.reports.memory_text import memory_names
from brimful.reports.page import environment, render
from brimful.reports.page_bounds import fitting_rows, short_name
from brimful.reports.processes_text import COLUMNS, nearest_limit, processes_rows
from brimful.reports.run_record import RunReport

#: Rows of numbers under a curve, and labels with a bar of their own.
_MOST_NUMBERS, _MOST_BARS = 60, 30
#: Labels whose numbers are listed, and bytes of that table.
_MOST_LABELS, _MOST_TABLE = 1000, 250_000
#: Pairs of labels in the record that the page embeds.
_MOST_CONFUSED = 500
#: Events that a run should not have, in words: one of them, and several.
_INCIDENTS = {
    "skipped": ("batch was skipped, as its loss or gradient was", "batches were skipped, as loss or gradient were"),
    "overflow": ("batch was skipped for a loss scale that", "batches were skipped for loss scales that"),
    "out_of_memory": ("time memory ran out, and", "times memory ran out, and"),
    "checkpoint_failed": ("checkpoint could not be saved", "checkpoints could not be saved"),
    "best_lost": ("time the best model could not be read again", "times the best model could not be read again"),
    "events_lost": ("log line could not be written", "log lines could not be written"),
    "tracker_failed": ("time a tracker did not get all of the log", "times a tracker did not get all of the log"),
    "process_lost": ("time another process of the training was gone", "times another process of the training was gone"),
    "resumed": ("time it was resumed", "times it was resumed"),
    "stopped": ("time it was stopped", "times it was stopped"),
}
_ENDS = {
    "skipped": " not finite", "overflow": " overflowed (fp16)",
    "out_of_memory": " the run went on with smaller micro-batches",
}  # fmt: skip


def run_page(report: RunReport) -> str:
    """One HTML document that needs no network; the same record gives the same bytes.

    Raises: InputError if matplotlib is not installed.
    """
    run = report.run
    figure = environment().get_template("parts.html.j2").module.figure  # type: ignore[attr-defined]
    evaluated = {} if report.evaluation is None else evaluation_values(report.evaluation)
    data = str(run.options.get("data") or "")
    return render(
        "run.html.j2",
        _embedded(report),
        whole="run.json and evaluation.json, in the folder of the run",
        source=printable(PurePath(data).name or data, 48),
        headline=_headline(report),
        warnings=[f"{said[:1].upper()}{said[1:]}." for said in run.findings],
        notices=_notices(report),
        tiles=_tiles(report),
        learning=_learning(report),
        curves=[figure(chart) for chart in _curves(report)],
        time=_time(report),
        memory=_memory(report),
        planned=_planned(report),
        processes=None if (found := report.processes) is None else (COLUMNS, processes_rows(found), _shares(found)),
        data_facts=_data_facts(report),
        data_notes=list(run.data.get("notes") or ()),
        label_counts=_label_counts(report),
        levers=[(each.name, f"{each.value} · {each.arithmetic}", each.reason) for each in run.recipe.levers],
        checks=_checks(report),
        legend=arithmetic_legend(run.recipe),
        machine=_machine(report),
        options=[(flag(name), str(value)) for name, value in run.options.items() if value is not None],
        **{"evaluated": None, **evaluated},
    )


def _embedded(report: RunReport) -> RunReport:
    """The report with the most frequent mistakes alone: of many labels there can be as many as rows."""
    if report.evaluation is None or len(report.evaluation.confusion) <= _MOST_CONFUSED:
        return report
    ordered = sorted(report.evaluation.confusion, key=lambda each: -each.count)
    return replace(report, evaluation=replace(report.evaluation, confusion=tuple(ordered[:_MOST_CONFUSED])))


def _headline(report: RunReport) -> str:
    run, device = report.run, printable(report.run.recipe.device)
    if run.status == "finished":
        took = "" if run.train_s is None else f" in {seconds_text(run.train_s)}"
        return f"{run.steps:,} steps{took} on {device}"
    of = "" if report.num_steps is None else f" of {report.num_steps:,}"
    return f"Step {report.last_step:,}{of} on {device}"


def _notices(report: RunReport) -> list[str]:
    """The state of a run that has not finished, and events that it should not have."""
    said = []
    if report.run.status != "finished" and report.stopped is not None:
        said.append(f"This run was stopped after step {report.last_step:,}: {report.stopped}.")
    elif report.run.status != "finished" and not report.is_live:
        last = f"its last line is of step {report.last_step:,}"
        said.append(f"This run has not finished, and no process is at work on it: {last}. `--resume` goes on.")
    elif report.run.status != "finished":
        left = "" if report.left_s is None else f", about {seconds_text(report.left_s)} left by then"
        said.append(f"This run has not finished: its last line is of step {report.last_step:,}{left}.")
    elif report.evaluation is None and report.run.metrics:
        has = "metrics are those of run.json, without intervals, labels and rows to look at"
        said.append(f"The run has no evaluation.json any more: {has}.")
    if report.evaluation is not None:
        said += [f"{note[:1].upper()}{note[1:]}." for note in report.evaluation.notes]
    found = [
        f"{count:,} {_INCIDENTS[kind][count != 1]}{_ENDS.get(kind, '')}" for kind, count in report.incidents.items()
    ]
    return [*said, f"In its log: {'; '.join(found)}."] if found else said


def _tiles(report: RunReport) -> list[tuple[str, str | None, str | None]]:
    run = report.run
    tiles = evaluation_tiles(report.evaluation) if report.evaluation is not None else []
    tiles[:1] = [("Rows evaluated", value, note) for _, value, note in tiles[:1]]
    if report.evaluation is None:
        when = None if run.status == "finished" or not report.evaluations else report.evaluations[-1].step
        tiles = metric_tiles(run.labels.task, report.metrics, None if when is None else f"after step {when:,}")
    rate = report.samples_per_s
    tokens = None if run.tokens_per_s is None else f"{count_text(run.tokens_per_s)} tokens/s"
    tiles.append(("Rows per second", None if rate is None else rate_text(rate), tokens))
    peak = run.peak_bytes
    tiles.append(("Peak memory", None if peak.total is None else bytes_text(peak.total), peak.moment))
    return tiles


def _learning(report: RunReport) -> list[tuple[str, str, str | None]]:
    """Peak of the learning rate and warm-up, with the reasons of what was chosen."""
    if (learning := report.run.learning) is None:
        return []
    warmup = f"warm-up of {learning.num_warmup_steps:,} step{'' if learning.num_warmup_steps == 1 else 's'}"
    chosen = f"; chosen: {learning.reason}" if learning.reason else ""
    return [("Peak learning rate", f"{learning.learning_rate:g}", warmup + chosen)]


def _curves(report: RunReport) -> list[Chart]:
    """Charts of what changed from step to step, as far as it was logged."""
    losses = [(each.step, each.metrics["loss"]) for each in report.evaluations if "loss" in each.metrics]
    charts = [
        _curve(report, "loss", "Loss of training", others=losses, note=_loss_note(report, bool(losses))),
        _metric(report),
        _curve(report, "learning_rate", "Learning rate", said="{:.2g}".format, from_zero=True),
        _curve(report, "grad_norm", "Norm of the gradient, before clipping", said="{:.3g}".format, from_zero=True),
        _curve(report, "samples_per_s", "Rows per second", said=rate_text, from_zero=True),
        _held(report),
    ]
    return [chart for chart in charts if chart is not None]


def _loss_note(report: RunReport, has_dots: bool) -> str:
    dots = " Dots: of the evaluation rows." if has_dots else ""
    return (
        dots
        if report.run.target_scale is None
        else f"{dots} Targets are scaled to a mean of 0 and a spread of 1, one for all."
    )


def _curve(
    report: RunReport, name: str, title: str, *, others: Sequence[tuple[float, float]] = (), note: str = "",
    said: Callable[[float], str] = "{:.4g}".format, from_zero: bool = False,
) -> Chart | None:  # fmt: skip
    points = [(each.step, value) for each in report.steps if (value := getattr(each, name)) is not None]
    if not points and not others:
        return None
    lines, caption = ([points, others] if others else [points]), f"{title}.{note}"
    alt = f"Curve: {caption}{_ends(points, said)}"
    drawing = curves(name, lines, axis="step", alt=alt, said=said, from_zero=from_zero)
    every = -(-len(points) // _MOST_NUMBERS)
    rows = [(f"{step:,}", said(value)) for step, value in points[::every]] if points else []
    return Chart(drawing=drawing, caption=caption, title=title, columns=("Step", title), rows=rows)


def _held(report: RunReport) -> Chart | None:
    """Memory, in a unit that gives round numbers."""
    most = max((each.memory_bytes or 0.0 for each in report.steps), default=0.0)
    unit, size = ("GiB", 1 << 30) if most >= 2 << 30 else ("MiB", 1 << 20)
    scaled = [
        replace(each, memory_bytes=None if each.memory_bytes is None else each.memory_bytes / size)
        for each in report.steps
    ]
    where = "by torch" if report.run.machine.gpus and report.run.peak_bytes.resident is None else "by the process"

    def said(value: float) -> str:
        return f"{value:,.{0 if unit == 'MiB' else 1}f} {unit}"

    return _curve(
        replace(report, steps=tuple(scaled)), "memory_bytes", f"Memory held {where}", said=said, from_zero=True
    )


def _ends(points: Sequence[tuple[float, float]], said: Callable[[float], str]) -> str:
    return f" From {said(points[0][1])} to {said(points[-1][1])}." if points else ""


def _metric(report: RunReport) -> Chart | None:
    """The metric of the task after each evaluation; nothing where there was one."""
    main = MAIN_METRIC[report.run.labels.task]
    points = [(each.step, each.metrics[main]) for each in report.evaluations if main in each.metrics]
    if len(points) < 2:
        return None
    title = METRIC_NAMES[main][:1].upper() + METRIC_NAMES[main][1:]
    drawing = curves(
        "metric", [[], points], axis="step", alt=f"Curve: {title} of the evaluation rows.", said="{:.3g}".format
    )
    rows = [(f"{step:,}", number_text(value)) for step, value in points]
    return Chart(
        drawing=drawing, caption=f"{title} of the evaluation rows.", title=title, columns=("Step", title), rows=rows
    )


def _time(report: RunReport) -> Chart | None:
    phases = {name: seconds for name, seconds in report.phases_s.items() if seconds >= 0.05}
    total = sum(phases.values())
    what = "the run, since it was last resumed" if "resumed" in report.incidents else "the run"
    title = f"Seconds by part of {what}" + ("" if report.run.status == "finished" else ", so far")
    return _parts("time", title, phases, lambda s: f"{seconds_text(s)} · {share_text(s / total)}")


def _memory(report: RunReport) -> Chart | None:
    peak = report.run.peak_bytes
    parts = {memory_names(name): count for name, count in peak.components.items() if count >= 1 << 16}
    moment = "" if peak.moment is None else f", when it was highest ({peak.moment})"
    return _parts("memory", f"Memory by component{moment}", parts, bytes_text)


def _shares(found: Processes) -> str:
    return (
        f"In each step the process with the most tokens has {found.imbalance:.3f} of the mean. Waiting is for other"
        " processes, as the host sees it; communication is the time in which gradients are on their way, those that"
        " come late waited for. Memory is the peak by the driver, else by torch, on a CPU what was resident."
        + ("" if (rank := nearest_limit(found)) is None else f" Process {rank} had the most of its limit.")
    )


def _planned(report: RunReport) -> list[tuple[str, str, str]]:
    """Plans and limits beside what was measured: lines of which both are known."""
    run, peak, options = report.run, report.run.peak_bytes, report.run.options
    taken = run.steps if run.status == "finished" else report.last_step
    lines: list[tuple[str, Any, Any]] = [
        ("Steps", None if report.num_steps is None else f"{report.num_steps:,}", f"{taken:,}"),
        ("Epochs", _epochs(report.num_epochs), _epochs(report.last_epoch)),
        ("Memory (--memory-limit)", _limit(options.get("memory_limit")), _bytes(peak.reserved or peak.total)),
        (
            "Activations (--activation-memory)",
            _limit(options.get("activation_memory")),
            _bytes(peak.components.get("activations")),
        ),
    ]
    return [(name, plan, found) for name, plan, found in lines if plan is not None and found is not None]


def _epochs(count: float | None) -> str | None:
    return None if count is None else f"{count:.4g}"


def _bytes(count: int | None) -> str | None:
    return None if count is None else bytes_text(count)


def _limit(given: Any) -> str | None:
    try:
        return None if given is None else f"at most {bytes_text(parse_bytes(str(given)))}"
    except ValueError:
        return f"at most {given}"


def _parts(key: str, caption: str, parts: dict[str, Any], said: Callable[[float], str]) -> Chart | None:
    """Bars of the parts of a whole."""
    if not parts:
        return None
    bars = [Bar(name, value, said(value), strong=True) for name, value in parts.items()]
    alt = f"Bar chart: {caption}. " + "; ".join(f"{bar.name} {bar.said}" for bar in bars)
    return Chart(drawing=bar_chart(key, bars, alt=alt, whole=float(sum(parts.values()))), caption=f"{caption}.")


def _data_facts(report: RunReport) -> list[tuple[str, Any, str | None]]:
    data = report.run.data
    lengths, weights = data.get("token_lengths") or {}, data.get("weights")
    cut, share = data.get("truncated_rows"), data.get("truncated_share")
    median = None if "p50" not in lengths else f"median {lengths['p50']:,}, at most {lengths['p100']:,}"
    return [
        ("Rows to train on", _count(data.get("rows")), None),
        ("Rows to evaluate on", _count(data.get("eval_rows")), None),
        ("Tokens of a row", median, f"cut at {data['max_length']:,}" if cut and "max_length" in data else None),
        ("Rows that were cut", _count(cut or None), share_text(share) if share else None),
        ("Weights of rows", None if weights is None else f"{weights['min']:g} to {weights['max']:g}", None),
        ("Without text", _count(data.get("empty_rows") or None), "left out"),
        ("Without a label", _count(data.get("unlabelled_rows") or None), "left out"),
        ("Repeated texts", _count(data.get("duplicate_texts") or None), "of the training rows"),
        ("Texts in both parts", _count(data.get("eval_texts_in_train") or None), "trained on and evaluated on"),
    ]


def _count(number: Any) -> str | None:
    return None if number is None else count_text(number)


def _label_counts(report: RunReport) -> Chart | None:
    labels = report.run.data.get("labels") or {}
    held_out = report.run.data.get("eval_labels") or {}
    ordered = sorted(labels.items(), key=lambda each: -each[1])
    whole = report.run.data.get("rows") or 0
    bars = [Bar(name, count, part_text(count, whole)) for name, count in ordered[:_MOST_BARS]]
    if not bars:
        return None
    more = f" The {_MOST_BARS} most frequent of {len(ordered):,}." if len(ordered) > _MOST_BARS else ""
    alt = "Bar chart: training rows by label. " + "; ".join(f"{short_name(bar.name)} {bar.said}" for bar in bars[:10])
    rows = [(name, f"{count:,}", f"{held_out.get(name, 0):,}") for name, count in ordered[:_MOST_LABELS]]
    if len(listed := fitting_rows(rows, _MOST_TABLE)) < len(ordered):
        more += f" Numbers are of {len(listed):,}; those of all are in run.json."
    return Chart(
        drawing=bar_chart("data", bars, alt=alt),
        caption=f"Training rows by label.{more}",
        title="Rows by label",
        columns=("Label", "To train on", "To evaluate on"),
        rows=listed,
    )


def _checks(report: RunReport) -> list[tuple[str, str, str | None]]:
    """Lines on the check before the first step, and on compilations."""
    run, rows = report.run, list[tuple[str, str, str | None]]()
    if (found := run.first_batch) is not None:
        said = {True: "as the plain model", False: "not as the plain model", None: "not compared"}[found.passed]
        error = None if found.gradient_error is None else f"gradient off by {found.gradient_error:.1e}"
        rows.append(("first batch", said, found.reason or error))
    if run.compilations.captured or run.compilations.traced:
        said = f"{run.compilations.captured:,} graphs captured, {run.compilations.traced:,} traced"
        rows.append(("compilations", said, None))
    return rows


def _machine(report: RunReport) -> list[tuple[str, Any, str | None]]:
    machine, run = report.run.machine, report.run
    gpus = ", ".join(gpu.name for gpu in machine.gpus) or None
    memory = None if machine.memory_bytes is None else bytes_text(machine.memory_bytes)
    versions = ", ".join(f"{name} {version}" for name, version in machine.versions.items()) or None
    return [
        ("Model", Markup("<bdi>{}</bdi>").format(printable(run.model, 300)), None),
        ("Data", f"SHA-256 {run.data_fingerprint[:16]}…", None),
        ("GPU", gpus, None),
        ("CPU", machine.cpu, None if machine.num_cores is None else f"{machine.num_cores:,} cores"),
        ("Memory", memory, None),
        ("Versions", versions, None),
    ]

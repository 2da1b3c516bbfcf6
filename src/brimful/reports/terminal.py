"""A run on the terminal: inferred columns, the recipe with reasons, live progress, and the result.

Everything goes to stderr; stdout is for data. Where stderr is not a terminal there is no colour and no bar: progress is
a plain line every ten seconds, and long lines are left whole, so that they can be searched. rich's tables would fold
them at 80 columns, so rows are aligned here.
"""

from __future__ import annotations

import os
import shlex
import sys
import textwrap
import time
from collections.abc import Mapping
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Column

from brimful.core.callbacks import Callbacks, StepsDone
from brimful.core.callbacks import Progress as TrainingProgress
from brimful.core.errors import listed, printable
from brimful.core.evaluation import Evaluation
from brimful.core.records import Recipe, Run
from brimful.core.units import count_text, number_text, seconds_text, share_text, target_text
from brimful.reports.arithmetic import arithmetic_legend
from brimful.reports.eta import Pace
from brimful.reports.evaluation_text import metric_text, short_text
from brimful.reports.memory_text import memory_text
from brimful.reports.processes_text import processes_text
from brimful.reports.text_columns import aligned

#: Seconds between plain progress lines where there is no terminal to draw a bar on.
_PLAIN_EVERY_S = 10.0
#: And in a notebook, where one line is written over.
_NOTEBOOK_EVERY_S = 0.5
#: Labels that are listed with their counts.
_MOST_LABELS = 20
#: Widest text, on however wide a terminal.
_WIDEST = 120


class _Console(Console):
    """A console on stderr whose reader may leave: the work goes on without a word."""

    def on_broken_pipe(self) -> None:
        """Write nothing from now on. rich would end the process."""
        self.quiet = True
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stderr.fileno())
        os.close(nowhere)


class Terminal(Callbacks):
    """Callbacks that print a run for a person."""

    def __init__(self, *, in_notebook: bool = False) -> None:
        """in_notebook: the cell shows text, and one line of progress that is written over."""
        self._console = _Console(
            stderr=True,
            highlight=False,
            soft_wrap=True,
            emoji=False,
            force_jupyter=False,
            force_terminal=False if in_notebook else None,
        )
        self._line_width: int | None = 0 if in_notebook else None
        self._evaluation: Evaluation | None = None
        self._data: Mapping[str, Any] = {}
        self._bar: Progress | None = None
        self._task: Any = None
        self._said_at = time.monotonic()
        self._pace = Pace()
        #: Notes and warnings so far.
        self.told: set[str] = set()

    def stage(self, text: str) -> None:
        self.close()
        self._said_at = time.monotonic()
        self._pace = Pace()
        self._console.print(f"[dim]{_safe(text)}[/dim]")

    def note(self, text: str) -> None:
        self.told.add(text)
        self._say(text, indent=2)

    def warning(self, text: str) -> None:
        self.told.add(text)
        self._say(f"warning: {printable(text, 1000)}", style="yellow")

    def data(self, report: Mapping[str, Any]) -> None:
        self._data = report
        held_out = report.get("eval_rows")
        counts = f"{count_text(report.get('rows'))} rows to train on"
        self._head(
            "Data", counts + (f", {count_text(held_out)} to evaluate on" if held_out else ", none to evaluate on")
        )
        labels = list((report.get("labels") or {}).items())
        for line in aligned([(printable(name, 40), f"{count_text(n):>9}") for name, n in labels[:_MOST_LABELS]]):
            self._say(line, indent=2)
        if len(labels) > _MOST_LABELS:
            self._say(f"and {len(labels) - _MOST_LABELS:,} more labels", indent=2)
        for name, spread in (report.get("target") or {}).items():
            low, mean, high = (target_text(spread[key]) for key in ("min", "mean", "max"))
            self._say(f"{printable(name, 40)}: from {low} to {high}, mean {mean}", indent=2)
        lengths = report["token_lengths"]
        cut = f", cut at {report['max_length']}" if report.get("truncated_rows") else ""
        self._say(
            f"tokens in a row{cut}: median {lengths['p50']}, 95 % of rows have at most {lengths['p95']},"
            f" the longest {lengths['p100']}",
            indent=2,
        )
        self._left_out(report)

    def _left_out(self, report: Mapping[str, Any]) -> None:
        """Rows that are cut, left out or repeated."""
        if report.get("truncated_rows"):
            share = share_text(report["truncated_share"])
            cut = f"{count_text(report['truncated_rows'])} rows ({share}) are longer than {report['max_length']} tokens"
            self._say(f"{cut}, and cut there (--max-length)", indent=2, style="yellow")
        for name, one, several in (
            ("empty_rows", "row without text was left out", "rows without text were left out"),
            ("unlabelled_rows", "row without a label was left out", "rows without a label were left out"),
            ("duplicate_texts", "training row repeats another's text", "training rows repeat another's text"),
            ("eval_texts_in_train", "evaluation row is also trained on", "evaluation rows are also trained on"),
        ):
            if count := report.get(name):
                self._say(f"{count_text(count)} {one if count == 1 else several}", indent=2, style="yellow")

    def recipe(self, recipe: Recipe) -> None:
        self._head("How it runs", f"on {printable(recipe.device)}")
        levers = [(printable(each.name), _short_list(printable(each.value)), each.arithmetic) for each in recipe.levers]
        reasons = [printable(each.reason, 300) for each in recipe.levers]
        if self._console.is_terminal:
            margin = max((cell_len(name) for name, *_ in levers), default=0) + 4
            for line, reason in zip(aligned(levers), reasons, strict=True):
                self._say(line, indent=2)
                self._say(reason, indent=margin, style="dim")
        else:
            for line in aligned([(*lever, reason) for lever, reason in zip(levers, reasons, strict=True)]):
                self._say(line, indent=2)
        for line in arithmetic_legend(recipe):
            self._say(line, indent=2, style="dim")
        if (inputs := self._data.get("inputs")) is not None:
            self._head("Learns", _task_text(inputs, list(self._data.get("labels") or ())))
        self._console.print()
        if self._console.is_terminal:
            self._draw("the first steps", 0, None)

    def progress(self, progress: TrainingProgress) -> None:
        text = (
            f"step {progress.step:,} of {progress.num_steps:,}  loss {progress.loss:.4f}"
            f"  lr {progress.learning_rate:.1e}  {count_text(progress.tokens_per_s)} tokens/s"
            f"  {seconds_text(progress.left_s)} left"
        )
        self._draw(text, progress.step, progress.num_steps, due=progress.step >= progress.num_steps)

    def stepped(self, steps: StepsDone) -> None:
        loss = "" if steps.loss is None else f"  loss {steps.loss:.4f}"
        rate = f"{steps.steps_per_s:.3g} steps/s" if steps.steps_per_s >= 1 else f"{1 / steps.steps_per_s:.3g} s a step"
        text = f"step {steps.done:,} of {steps.num_steps:,}{loss}  {rate}  {seconds_text(steps.left_s)} left"
        self._draw(text, steps.done, steps.num_steps)

    def count(self, done: int, total: int | None, share: float | None = None) -> None:
        if total is not None and done >= total:
            self.close()
            return
        share = done / total if total else share
        self._pace.mark(time.monotonic(), done, share)
        self._draw(_counted(done, total, share, self._pace), share or 0.0, None if share is None else 1.0)

    def working(self, text: str, share: float) -> None:
        self._draw(printable(text, 300), share, 1.0)

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        shown = ", ".join(f"{name} {metric_text(name, value)}" for name, value in metrics.items())
        self._say(f"evaluation after step {step:,}: {shown}")

    def evaluation(self, evaluation: Evaluation) -> None:
        self._evaluation = evaluation

    def finished(self, run: Run, folder: str) -> None:
        self.close()
        done = f"{count_text(run.steps)} step{'' if run.steps == 1 else 's'} in {seconds_text(run.train_s)}"
        speed = f"{count_text(run.samples_per_s)} rows/s, {count_text(run.tokens_per_s)} tokens/s"
        self._head("Done", f"{done} ({speed})")
        if run.skipped_steps:
            self._say(
                f"{count_text(run.skipped_steps)} steps were skipped: loss or gradient not finite",
                indent=2,
                style="yellow",
            )
        rows = [(name, number_text(value)) for name, value in run.metrics.items() if self._evaluation is None]
        if (memory := memory_text(run.peak_bytes)) is not None:
            rows.append(("peak memory", memory))
        if run.phases_s:
            rows.append(("time", phases_text(run.phases_s)))
        in_steps = sum(run.phases_s.get(name, 0.0) for name in ("capture", "steps"))
        if run.input_wait_s is not None and in_steps:
            share = share_text(min(1.0, run.input_wait_s / in_steps))
            rows.append(("input", f"steps waited {seconds_text(run.input_wait_s)} for batches, {share} of their time"))
        if run.processes is not None:
            rows.append(("processes", processes_text(run.processes)))
        merged = " (the adapter is merged: a plain model)" if run.options.get("merge") else ""
        rows += [
            ("model", printable(f"{folder}/model", 1000) + merged),
            ("record", printable(f"{folder}/run.json", 1000)),
        ]
        for line in aligned([(printable(name), value) for name, value in rows]):
            self._say(line, indent=2)
        if self._evaluation is not None:
            self._console.print()
            for line in short_text(self._evaluation).splitlines():
                self._say(line)
            if self._evaluation.findings:
                self._console.print()
            self._findings()
        self._console.print()
        self._console.print(f"Use it:  brimful classify {_safe(shlex.quote(f'{folder}/model'), 1000)} FILE")

    def _findings(self) -> None:
        for finding in () if self._evaluation is None else self._evaluation.findings:
            self.warning(finding)

    def text(self, text: str) -> None:
        """Print a text that is laid out already."""
        self.close()
        self._console.print()
        for line in text.splitlines():
            self._say(line)

    def close(self) -> None:
        """End the live display."""
        if self._line_width:
            self._overwrite("")
            self._line_width = 0
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _head(self, word: str, rest: str) -> None:
        self._console.print(f"\n[bold]{word}[/bold]  {escape(rest)}")

    def _say(self, text: str, *, indent: int = 0, style: str | None = None) -> None:
        """Print text at an indent that its wrapped lines keep, on a terminal too narrow for one line."""
        text = printable(text, 2000)
        if self._line_width:
            self._overwrite("")
        margin = " " * indent
        lines = [margin + text]
        if self._console.is_terminal:
            width = max(40, min(self._console.width, _WIDEST))
            deeper = margin if indent > 2 else margin + "    "
            kept = textwrap.TextWrapper(width, margin, deeper, break_on_hyphens=False, break_long_words=False)
            lines = kept.wrap(text) or [margin]
        for line in lines:
            self._console.print(escape(line), style=style)

    def _overwrite(self, text: str) -> None:
        """Write over the line of progress in a notebook."""
        file = self._console.file
        file.write("\r" + text.ljust(self._line_width or 0) + ("" if text else "\r"))
        file.flush()
        self._line_width = len(text)

    def _draw(self, text: str, done: float, total: float | None, *, due: bool = False) -> None:
        """Draw the bar, or print a plain line where one is due. total: None while unknown. due: a plain line is due,
        however short ago the one before it was."""
        if self._line_width is not None:
            if time.monotonic() - self._said_at >= _NOTEBOOK_EVERY_S:
                self._said_at = time.monotonic()
                self._overwrite(text)
            return
        if not self._console.is_terminal:
            if due or time.monotonic() - self._said_at >= _PLAIN_EVERY_S:
                self._said_at = time.monotonic()
                self._console.print(escape(text))
            return
        if self._bar is None:
            words = TextColumn("{task.description}", table_column=Column(no_wrap=True, overflow="ellipsis"))
            bar = BarColumn(bar_width=None, table_column=Column(min_width=4, max_width=24, ratio=1))
            self._bar = Progress(bar, words, console=self._console, transient=True, expand=False)
            self._task = self._bar.add_task(escape(text), total=total)
            self._bar.start()
        self._bar.update(self._task, completed=done, total=total, description=escape(text))


class Quiet(Terminal):
    """A terminal for warnings alone: what was lost, cut or fallen back on, and what stands out at the end."""

    def stage(self, text: str) -> None:
        pass

    def note(self, text: str) -> None:
        pass

    def data(self, report: Mapping[str, Any]) -> None:
        self._left_out(report)

    def recipe(self, recipe: Recipe) -> None:
        pass

    def progress(self, progress: TrainingProgress) -> None:
        pass

    def stepped(self, steps: StepsDone) -> None:
        pass

    def count(self, done: int, total: int | None, share: float | None = None) -> None:
        pass

    def working(self, text: str, share: float) -> None:
        pass

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        pass

    def finished(self, run: Run, folder: str) -> None:
        self._findings()

    def text(self, text: str) -> None:
        pass


def phases_text(phases_s: Mapping[str, float]) -> str:
    """All seconds and where they went, as far as it can be seen: `12.3 s: start 4.1, steps 8.0`."""
    shown = [f"{name} {seconds:.1f}" for name, seconds in phases_s.items() if seconds >= 0.05]
    return f"{seconds_text(sum(phases_s.values()))}: {', '.join(shown)}"


def _counted(done: int, total: int | None, share: float | None, pace: Pace) -> str:
    """Rows done, rate and time left, as far as they are known."""
    rows = f"{done:,} rows" if total is None else f"{done:,} of {total:,} rows"
    of_all = share_text(share) if total is None and share is not None else None
    rate = None if pace.rows_per_s is None else f"{count_text(pace.rows_per_s)} rows/s"
    left = None if pace.left_s is None else f"{seconds_text(pace.left_s)} left"
    return "  ".join(said for said in (rows, of_all, rate, left) if said is not None)


def _short_list(value: str) -> str:
    """`112, 704, ..., 1024` as `112 to 1024, 12 sizes`."""
    parts = value.split(", ")
    is_long = len(parts) > 3 and all(map(str.isdecimal, parts))
    return f"{parts[0]} to {parts[-1]}, {len(parts)} sizes" if is_long else value


def _safe(text: object, limit: int = 400) -> str:
    return escape(printable(text, limit))


def _task_text(inputs: Mapping[str, Any], labels: list[str]) -> str:
    """Say what is learned from which columns. inputs: as in TrainedInputs. labels: none of numbers."""
    texts = [name for name in (inputs["text_column"], inputs["pair_column"]) if name is not None]
    names = [f"'{printable(name, 60)}'" for name in (*texts, *inputs["label_columns"])]
    read, asked = names[: len(texts)], names[len(texts) :]
    said = f"{listed(asked, 5)} from {' with '.join(read)}"
    return said + (f": {listed([printable(label, 30) for label in labels], 5)}" if labels else "")

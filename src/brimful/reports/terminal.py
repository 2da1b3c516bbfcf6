"""A run on the terminal: what was inferred, how it will run and why, live progress, and what came of it.

Everything goes to stderr; stdout is for data. Without a terminal, progress is a plain line now and then.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

from brimful.core.errors import printable
from brimful.core.listener import Listener
from brimful.core.listener import Progress as TrainingProgress
from brimful.core.records import Recipe, Run
from brimful.core.units import bytes_text, count_text, number_text, seconds_text, share_text

#: Seconds between plain progress lines where there is no terminal to draw a bar on.
_PLAIN_EVERY_S = 10.0


class Terminal(Listener):
    """Tells a person about a run."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False, soft_wrap=True)
        self._bar: Progress | None = None
        self._task: Any = None
        self._said_at = 0.0

    def stage(self, text: str) -> None:
        self._console.print(f"[dim]{_safe(text)}[/dim]")

    def note(self, text: str) -> None:
        self._console.print(f"  {_safe(text)}")

    def warning(self, text: str) -> None:
        self._console.print(f"[yellow]warning:[/yellow] {_safe(text, 400)}")

    def data(self, report: Mapping[str, Any]) -> None:
        lengths = report["token_lengths"]
        held_out = f", {count_text(report.get('eval_rows'))} held out" if report.get("eval_rows") else ""
        self._console.print(f"\n[bold]Data[/bold]  {count_text(report.get('rows'))} rows to train on{held_out}")
        for name, count in list((report.get("labels") or {}).items())[:20]:
            self._console.print(f"  {_safe(name, 40):<24} {count_text(count):>10}")
        self._console.print(
            "  tokens a row: "
            + ", ".join(f"{name} {lengths[name]}" for name in ("mean", "p5", "p50", "p95", "p100"))
            + f"; {share_text(report['truncated_share'])} cut at {report['max_length']}"
        )
        for name, text in (
            ("empty_rows", "rows without text were left out"),
            ("duplicate_texts", "training rows repeat another one's text"),
            ("eval_texts_in_train", "held-out texts also stand in the training rows"),
        ):
            if report.get(name):
                self._console.print(f"  [yellow]{count_text(report[name])}[/yellow] {text}")

    def recipe(self, recipe: Recipe) -> None:
        table = Table(title=f"How it runs on {_safe(recipe.device)}", title_justify="left", box=None, padding=(0, 2))
        for header in ("lever", "value", "arithmetic", "why"):
            table.add_column(header, style="dim" if header == "why" else None, overflow="fold")
        for lever in recipe.levers:
            table.add_row(lever.name, _safe(lever.value), lever.arithmetic, _safe(lever.reason, 300))
        self._console.print()
        self._console.print(table)
        self._console.print()

    def progress(self, progress: TrainingProgress) -> None:
        text = (
            f"step {progress.step}/{progress.num_steps}  loss {progress.loss:.4f}  lr {progress.learning_rate:.2e}  "
            f"{count_text(progress.tokens_per_s)} tokens/s  {seconds_text(progress.left_s)} left"
        )
        if not self._console.is_terminal:
            if time.monotonic() - self._said_at >= _PLAIN_EVERY_S:
                self._said_at = time.monotonic()
                self._console.print(text)
            return
        if self._bar is None:
            self._bar = Progress(BarColumn(30), TextColumn("{task.description}"), console=self._console)
            self._task = self._bar.add_task("", total=progress.num_steps)
            self._bar.start()
        self._bar.update(self._task, completed=progress.step, description=text)

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        shown = "  ".join(f"{name} {value:.4f}" for name, value in metrics.items())
        self._console.print(f"[bold]evaluation[/bold] after step {step}: {shown}")

    def finished(self, run: Run, folder: str) -> None:
        self.close()
        speed = f"{count_text(run.samples_per_s)} samples/s, {count_text(run.tokens_per_s)} tokens/s"
        self._console.print(
            f"\n[bold]Done[/bold]  {count_text(run.steps)} steps in {seconds_text(run.train_s)}  ({speed})"
        )
        if run.skipped_steps:
            self._console.print(f"  [yellow]{run.skipped_steps} batches were skipped, not finite[/yellow]")
        for name, value in run.metrics.items():
            self._console.print(f"  {name:<22} {number_text(value)}")
        if run.peak_bytes.allocated is not None:
            peak = run.peak_bytes
            self._console.print(
                f"  peak memory            {bytes_text(peak.allocated)} allocated, {bytes_text(peak.reserved)}"
                f" reserved, {bytes_text(peak.nvml)} by NVML"
            )
        self._console.print(f"\nUse the model:  brimful classify {shlex.quote(folder + '/model')} FILE")

    def close(self) -> None:
        """Ends the live display."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def _safe(text: object, limit: int = 120) -> str:
    return escape(printable(text, limit))

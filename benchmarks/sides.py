"""Shared by benchmarks whose rows are settings of one work, ours and Trainer's: a process each, blocks of equal steps.

A row's result has its rates by block, the last loss, and the peaks of torch's allocator and of the driver. A script has
`measure(plan, ...)`, which prints its row, and calls `run_rows`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from resumable import Session, say, versions_here, write_texts


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row: whose it is, its name, and its settings."""

    side: str
    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """The row as `--rows` has it."""
        return f"{self.side}: {self.name}"


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """Steps that are timed: `count` blocks of `steps`, after `warm_up` steps. rows: of a step."""

    warm_up: int
    count: int
    steps: int
    rows: int

    @property
    def num_steps(self) -> int:
        """All steps."""
        return self.warm_up + self.count * self.steps

    def rates(self, seconds: Sequence[float]) -> list[float]:
        """Samples a second of each block, in ascending order."""
        return sorted(self.steps * self.rows / each for each in seconds)


def wait(smoke: bool) -> None:
    """Wait for the GPU."""
    if not smoke:
        import torch

        torch.cuda.synchronize()


def our_steps(
    model: Any, rows: Sequence[dict[str, Any]], blocks: Blocks, smoke: bool, **options: Any
) -> dict[str, Any]:
    """Time `brimful.Step` on batches that are made beforehand."""
    import brimful

    lengths = [len(row["input_ids"]) for row in rows]
    step = brimful.Step(model, num_steps=1000, batch_size=blocks.rows, lengths=lengths, **options)
    size, count = blocks.rows, len(rows)
    batches = [
        step.batch([rows[(number * size + i) % count] for i in range(size)]) for number in range(blocks.num_steps)
    ]
    for batch in batches[: blocks.warm_up]:
        step.run(batch).read()
    seconds, loss = [], 0.0
    for start in range(blocks.warm_up, len(batches), blocks.steps):
        wait(smoke)
        began = time.perf_counter()
        for batch in batches[start : start + blocks.steps]:
            pending = step.run(batch)
        loss = pending.read().loss
        wait(smoke)
        seconds.append(time.perf_counter() - began)
    levers = {lever.name: f"{lever.value} ({lever.arithmetic}): {lever.reason}" for lever in step.recipe.levers}
    classes = {lever.arithmetic for lever in step.recipe.levers}
    worst = next((each for each in ("training", "rounding") if each in classes), "exact")
    return {"rates": blocks.rates(seconds), "loss": loss, "arithmetic": worst, "recipe": levers}


def command_steps(folder: Path, blocks: Blocks, smoke: bool, *, gpus: int = 1, **asked: Any) -> dict[str, Any]:
    """Time `brimful train` as a user calls it on `rows.jsonl` and `base` of a folder, ended after the steps that are
    timed: no checkpoint is written. asked: options by name; True for a flag without a value."""
    asked |= {
        "max-steps": 10 * blocks.num_steps, "save-steps": 10 * blocks.num_steps, "logging-steps": blocks.steps,
        "batch-size": blocks.rows * gpus, "eval-split": 0, "precision": "fp32" if smoke else "bf16",
        "device": "cpu" if smoke else "cuda",
    }  # fmt: skip
    start = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={gpus}", "-m"]
    start = start if smoke and gpus > 1 else [sys.executable, "-m"]
    more = [] if smoke else ["--gpus", str(gpus)]
    with tempfile.TemporaryDirectory() as kept:
        output = Path(kept) / "run"
        words = ["brimful", "train", str(folder / "rows.jsonl"), "--model", str(folder / "base"), "--output", output]
        flags = [word for name, value in asked.items() for word in (f"--{name}", *_value(value))]
        command = [*start, *map(str, words), *flags, *more]
        process = subprocess.Popen(command, stdout=sys.stderr, start_new_session=True)
        try:
            steps = _steps(process, output / "events.jsonl", blocks.num_steps)
        finally:
            for each in (*_descendants(process.pid), process.pid):  # or the next row finds less memory
                with suppress(ProcessLookupError):
                    os.kill(each, signal.SIGKILL)
            process.wait()
        if len(steps) < blocks.num_steps // blocks.steps:
            raise RuntimeError(f"it ended after {len(steps)} of {blocks.num_steps // blocks.steps} blocks")
    timed = [step for step in steps if step["step"] > blocks.warm_up][: blocks.count]
    rates = [step["samples_per_s"] for step in steps]
    return {"rates": sorted(step["samples_per_s"] for step in timed), "all_rates": rates, "loss": timed[-1]["loss"]}


def _value(value: Any) -> tuple[str, ...]:
    """What follows a flag."""
    return () if value is True else (str(value),)


def _descendants(parent: int) -> list[int]:
    """Numbers of the processes that a process has started, and of those that they have."""
    found = []
    for each in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            number, parent_of_it = int(each.parent.name), int(each.read_text().rpartition(")")[2].split()[1])
            if parent_of_it == parent:
                found += [number, *_descendants(number)]
    return found


def _steps(process: subprocess.Popen[str], events: Path, number: int) -> list[dict[str, Any]]:
    """Events of steps, once so many are done, or the run has ended."""
    while True:
        ended = process.poll() is not None
        lines = events.read_text().splitlines(keepends=True) if events.exists() else []
        found = [json.loads(line) for line in lines if line.endswith("\n")]
        steps = [event for event in found if event["kind"] == "step"]
        if ended or (steps and steps[-1]["step"] >= number):
            return steps
        time.sleep(0.2)


def trainer_steps(
    model: Any, data: Any, blocks: Blocks, smoke: bool, *, collator: Any = None, **arguments: Any
) -> dict[str, Any]:
    """Time transformers' Trainer. arguments: of TrainingArguments, beside what any row has."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    marks: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, arguments: Any, state: Any, control: Any, **others: Any) -> None:
            if state.global_step >= blocks.warm_up and (state.global_step - blocks.warm_up) % blocks.steps == 0:
                wait(smoke)
                marks.append(time.perf_counter())

    fixed = {
        "max_steps": blocks.num_steps, "use_cpu": smoke, "logging_steps": blocks.steps, "logging_nan_inf_filter": False,
        "disable_tqdm": True, "report_to": "none", "save_strategy": "no", "dataloader_pin_memory": not smoke,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        asked = TrainingArguments(output_dir=folder, **{**fixed, **arguments})
        trainer = Trainer(model=model, args=asked, train_dataset=data, data_collator=collator, callbacks=[Clock()])
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return {"rates": blocks.rates([b - a for a, b in pairwise(marks)]), "loss": losses[-1]}


def with_peaks(found: dict[str, Any], smoke: bool) -> dict[str, Any]:
    """Add the median rate, peaks of torch's allocator, and versions."""
    import torch

    found |= {"samples_per_s": median(found["rates"]), "versions": versions_here("accelerate", "peft", "bitsandbytes")}
    peaks = {"peak_allocated_bytes": None, "peak_reserved_bytes": None}
    if not smoke:
        peaks["peak_allocated_bytes"] = torch.cuda.max_memory_allocated()
        peaks["peak_reserved_bytes"] = torch.cuda.max_memory_reserved()
    return found | peaks


def run_rows(
    arguments: Namespace, script: str, rows: Sequence[Row], expected_s: Callable[[Row], float]
) -> list[dict[str, Any]]:
    """Measure the rows that the raw log lacks and that there is time for; write results.json. Return all results."""
    session = Session(arguments, script, gpu=not arguments.smoke)
    for row in (row for row in rows if row.key in arguments.rows):
        if session.known("row", side=row.side, row=row.name, ok=True):
            continue
        expected = session.last_wall_s("row", side=row.side, row=row.name) or expected_s(row)
        if arguments.dry_run or not session.fits(expected):
            say(f"{row.key}: about {expected:.0f} s{'' if arguments.dry_run else ', no time left'}")
            continue
        plan = {"side": row.side, "row": row.name, "settings": dict(row.settings), "smoke": arguments.smoke}
        found = session.child(plan, arguments.timeout_s)
        measured = found.pop("found")
        result = {"settings": dict(row.settings)} | (measured[0] if measured else {}) | found
        record = session.add(kind="row", side=row.side, row=row.name, **result)
        rate = f"{record['samples_per_s']:.1f} samples/s" if record["ok"] else str(record["error"])[-300:]
        say(f"{row.key}: {rate}, {record['nvml_bytes']} bytes by NVML, {record['wall_s']} s")
    results = [found for row in rows if (found := session.known("row", side=row.side, row=row.name))]
    newest = [max(found, key=lambda record: (record["ok"], session.records.index(record))) for found in results]
    newest = [{name: each["settings"].get(name) for name in ("work", "gpus")} | each for each in newest]
    write_texts(arguments.output, {"results.json": json.dumps(newest, indent=1)})
    return newest

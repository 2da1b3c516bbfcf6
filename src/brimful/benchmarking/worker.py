"""The process of one row: `python -m brimful.benchmarking.worker PLAN.json RESULT.json`.

The plan has options of the bench, and a row with its steps and the time by which it is to end, of `time.monotonic()`,
which processes share; or no row, for a look at the work and the machine. The result has what was found, and whether it
is of fewer blocks than were asked for, or the reason that there is nothing. Lines `STEP n` on stdout say how far it is.
The process ends when its stdin does: it does not outlive whoever started it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

from brimful.benchmarking.needed import check_trainer
from brimful.core import atomic_files
from brimful.core.bench import Row, Steps
from brimful.core.callbacks import Callbacks
from brimful.core.errors import BrimfulError, InputError, MemoryFullError, printable
from brimful.core.options.bench import BenchOptions
from brimful.core.records import json_text


class _Notes(Callbacks):
    """Keeps warnings: a fallback of a row must not go unseen."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def warning(self, text: str) -> None:
        if text not in self.lines:
            self.lines.append(text)


def measure(plan: dict[str, Any], folder: Path | None = None) -> dict[str, Any]:
    """Do what a plan says. folder: for files on the way. Raises: whatever the work raises."""
    if plan["row"] is None:
        check_trainer()  # before imports of ours that a broken package ends, too
    from brimful.benchmarking.our_side import measure_ours
    from brimful.benchmarking.workload import describe, make_work

    options, notes = BenchOptions(**plan["options"]), _Notes()
    if plan["row"] is None:
        workload = describe(make_work(options, notes))
        return {"workload": dataclasses.asdict(workload), "notes": notes.lines}
    row, steps, until = Row(**plan["row"]), Steps(**plan["steps"]), plan.get("until")
    if row.side == "brimful":
        found = measure_ours(make_work(options, notes, steps, **row.settings), steps, notes, _told, until)
    else:
        from brimful.benchmarking.trainer_side import measure_trainers

        work = make_work(options, Callbacks(), steps)
        found = measure_trainers(work, row.settings, steps, notes, _told, folder, until)
    cut_short = len(found.block_rates) < steps.repeats
    return {"measured": dataclasses.asdict(found), "notes": notes.lines, "cut_short": cut_short}


def main(plan: Path, result: Path) -> None:
    """Write the result of a plan, an error as well, and end."""
    threading.Thread(target=_end_with_stdin, name="lifeline", daemon=True).start()
    try:
        found = measure(json.loads(plan.read_text("utf-8")), plan.parent)
    except Exception as error:
        found = failure(error)
    atomic_files.write_bytes(result, json_text(found).encode())
    sys.stdout.flush()
    os._exit(0)  # taking a million objects apart first takes a second


def _told(steps: int) -> None:
    print(f"STEP {steps}", flush=True)


def failure(error: Exception) -> dict[str, Any]:
    """The result of a plan that failed: its reason on one line, and whether memory ran out or the input is wrong."""
    from brimful.hardware.memory import is_out_of_memory

    said = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    if not isinstance(error, BrimfulError):
        said = f"{type(error).__name__}: {said}" if said else type(error).__name__
    return {
        "error": printable(said, 500),
        "hint": getattr(error, "hint", None),
        "out_of_memory": isinstance(error, MemoryFullError) or is_out_of_memory(error),
        "is_input": isinstance(error, InputError),
    }


def _end_with_stdin() -> None:
    """End the process once nobody holds the other end of its stdin."""
    try:
        while os.read(0, 4096):
            pass
    finally:
        os._exit(1)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))

"""Words of a bench while it measures, and about why it has no figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from brimful.core.bench import Bench, BenchRow, Steps, Workload
from brimful.core.callbacks import Callbacks
from brimful.core.errors import InputError, printable
from brimful.core.units import bytes_text, share_text
from brimful.reports.bench_text import STATUS, budget_text, rate_text

#: Seconds of a row's timed steps and warm-up, where there is time; and of all else in its process, to begin with.
STEPS_S, START_S = 30.0, 14.0


def tell(callbacks: Callbacks, work: Workload, found: BenchRow, *, again: bool = False) -> None:
    """Tell a row's figures, or why it has none. again: whether it was measured before in this call."""
    key, figures = found.row.key, found.measured
    if figures is None:
        callbacks.note(f"{key}: {_why(found)}")
        return
    memory = "" if figures.memory_bytes is None else f", {bytes_text(figures.memory_bytes)}"
    cut = f"; {found.reason}" if found.cut_short else ""
    callbacks.note(f"{key}: {rate_text(figures.samples_per_s)} samples/s{memory}{cut}")
    if work.disturbed(figures):
        said = f"it had {figures.cores or 0.0:.1f} of {work.num_threads} cores"
        if figures.waiting is not None:
            said = f"its threads waited for a core in {share_text(figures.waiting)} of their time"
        then = "again; the next call measures it once more" if again else "it is measured again where there is time"
        callbacks.warning(f"{key}: {said}, others were busy{' ' if again else ': '}{then}")
    for text in found.notes:
        callbacks.warning(f"{key}: {text}")


def _why(found: BenchRow) -> str:
    """Why a row has no figures; what there was no time for says so itself."""
    return str(found.reason) if found.status == "left" else f"{STATUS[found.status]}: {found.reason}"


def missing_text(rows: Sequence[BenchRow]) -> str:
    """Say how many of these rows have no figures, and why; empty where all have."""
    reasons = {
        "unsupported": "cannot run here",
        "left": "had no time",
        "failed": "failed",
        "out_of_memory": "ran out of memory",
    }
    counts = {said: sum(each.status == status for each in rows) for status, said in reasons.items()}
    found = [f"{count} {said}" for said, count in counts.items() if count]
    return f"; of the others {', '.join(found)}" if found else ""


def more_time() -> str:
    """Hint for a budget that ended before anything was measured."""
    most = START_S + STEPS_S
    return (
        f"raise --budget-s by some {most:.0f} s for each row, or give 0 for no limit: a row takes about"
        f" {START_S:.0f} s to start, and up to {STEPS_S:.0f} s of steps"
    )


def check_measured(bench: Bench) -> None:
    """Check that a bench has figures. Raises: InputError, with the reason of the first row, where none was measured."""
    if bench.measured():
        return
    first = next((each for each in bench.rows if each.status in ("failed", "out_of_memory")), bench.rows[0])
    why = f"{first.row.key}: {printable(_why(first), 300)}"
    hint = "mend that, and start it again: rows that failed are tried again"
    if first.status == "left":
        hint = budget_text(bench) or more_time()
    elif first.status == "out_of_memory":
        hint = "lower --batch-size, or --max-length, with another --output"
    raise InputError(f"no row of the bench was measured: {why}", hint=hint)


def work_text(work: Workload, steps: Steps) -> str:
    """Say what all rows do, and on what."""
    machine: Mapping[str, str] = work.machine.versions
    device = work.device if work.on_gpu else ", ".join(filter(None, (work.device, work.cores_text)))
    return (
        f"{work.rows_text} of {work.median_tokens:,} tokens in the median, {work.longest_tokens:,} at most, on"
        f" {device} (torch {machine.get('torch', '?')}); each row of the bench: {steps.warm_up} steps of"
        f" {work.batch_size} rows to warm up, then {steps.repeats} blocks of {steps.block}"
    )

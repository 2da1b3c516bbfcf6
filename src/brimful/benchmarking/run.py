"""A bench from its options to its folder: what the machine is, each row in a process of its own, and the best again.

Loads no torch: the processes of rows do.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from brimful.benchmarking.figures import together
from brimful.benchmarking.folder import BenchFolder
from brimful.benchmarking.needed import check_accelerate
from brimful.benchmarking.process import KILLED, Ended, Watch, run_plan
from brimful.benchmarking.rows import LEARNED, check_rows, in_turns, recommended_of, rows_of, same_rows, words_of
from brimful.core.bench import RECOMMENDED, RESULTS, Bench, BenchRow, Measured, Row, Steps, Workload
from brimful.core.callbacks import Callbacks
from brimful.core.command_line import command_of
from brimful.core.errors import InputError, Interrupted, printable
from brimful.core.options.bench import BenchOptions
from brimful.core.records import from_json, json_text, to_json
from brimful.core.units import bytes_text, parse_bytes, seconds_text, share_text
from brimful.reports.bench_page import bench_page
from brimful.reports.bench_text import bench_csv, bench_markdown, rate_text
from brimful.reports.svg import check_charts

#: Seconds of a row's timed steps and warm-up, where there is time; and of all else in its process, to begin with.
_STEPS_S, _START_S = 30.0, 14.0
_MOST_BLOCK, _MOST_WARM_UP, _REPEATS = 20, 24, 5
#: Seconds below which no row is begun.
_LEAST_S = 2.0
#: Most seconds of a row without a budget: it hangs by then.
_MOST_ROW_S = 3600.0
#: How much longer than expected a row may take before it is ended, where the budget is not over sooner.
_PATIENCE = 6.0
#: Spread of a row's blocks above which another process measures it, too.
_UNEVEN = 0.1


class BenchRun:
    """One call of a bench."""

    def __init__(self, options: BenchOptions, command: str, callbacks: Callbacks, table: Any = None) -> None:
        self._options, self._command, self._callbacks = options, command, callbacks
        self._table = table
        self._folder = BenchFolder(Path(options.output))
        self._deadline = time.monotonic() + options.budget_s if options.budget_s else None
        self._walls: list[float] = []
        self._found: list[BenchRow] = []  # as they were measured
        self._places: dict[str, int] = {}  # of rows in tables, by their keys
        self._asked: list[Row] = []
        self._begun = self._has_work = False

    def run(self) -> Bench:
        """Measure what is not there yet. Raises: InputError for what cannot be done as asked; Interrupted by Ctrl-C."""
        check_rows(self._options)
        check_accelerate()
        self._draws = _draws(self._callbacks)
        with self._folder.locked():
            if self._table is not None:
                self._folder.save_rows(self._table)
            try:
                return self._run()
            except KeyboardInterrupt:
                done = sum(each.measured is not None for each in self._all()) if self._has_work else 0
                if done:
                    self._write()
                said = f"interrupted: {done} row{'' if done == 1 else 's'} measured so far, in {self._options.output}"
                raise Interrupted(said, hint="the same command goes on") from None

    def _run(self) -> Bench:
        self._callbacks.stage("reading the rows, and measuring what the machine can do")
        workload = self._workload()
        rows = rows_of(self._options, longest=workload.longest_tokens, on_gpu=workload.on_gpu)
        steps = self._steps(workload, len(rows) + 1)
        self._steps_now, self._work = self._folder.agree(self._options, workload, steps)
        self._has_work = True
        self._callbacks.note(_work_text(self._work, self._steps_now))
        for other, key in same_rows(self._options, longest=workload.longest_tokens, on_gpu=workload.on_gpu).items():
            self._callbacks.note(f"{other}: the same settings as {key}, measured once, under that name")
        for name in self._folder.broken():
            self._callbacks.note(f"{name} cannot be read: its row counts as not measured")
        self._places, self._asked = {row.key: place for place, row in enumerate(rows)}, rows
        for number, row in enumerate(in_turns(rows)):
            self._found.append(self._row(row, f"row {number + 1} of {len(rows) + 1}", len(rows) - number))
            self._tell(self._found[-1])
            self._folder.write(RESULTS, to_json(self._bench()))  # a killed bench leaves what it found
        self._measure_again(range(len(rows)), after=1)  # before one of them is said to be the fastest
        self._add_blocks(range(len(rows)))
        self._recommend()
        self._measure_again(range(len(rows), len(self._found)), after=0)
        return self._write()

    def _measure_again(self, rows: Sequence[int], *, after: int) -> None:
        """Measure those of these rows once more that others disturbed. after: how many rows come then."""
        disturbed = [number for number in rows if self._disturbed(self._found[number])]
        for place, number in enumerate(disturbed, 1):
            later = len(disturbed) - place + after
            found = self._row(self._found[number].row, "again, undisturbed", later, again=True)
            if found != self._found[number]:  # there was time
                self._found[number] = found
                self._tell(found)

    def _add_blocks(self, rows: Sequence[int]) -> None:
        """Measure those of these rows on a GPU that are uneven in another process, too: it may have another core of a
        host that others share, for which such a row waits. Both count."""
        uneven = [number for number in rows if self._uneven(self._found[number])]
        for place, number in enumerate(uneven, 1):
            first = self._found[number]
            other = self._row(first.row, "again, uneven", len(uneven) - place + 1, again=True)
            if first.measured is None or other.measured is None or other == first:  # there was no time
                continue
            both = dataclasses.replace(first, measured=together(first.measured, other.measured))
            self._found[number] = both
            self._folder.keep(both)
            self._tell(both)

    def _uneven(self, row: BenchRow) -> bool:
        """Return whether blocks of one process are far apart, which had all that the GPU has."""
        found, repeats = row.measured, self._steps_now.repeats
        if found is None or not self._work.on_gpu or len(found.block_rates) > repeats:
            return False
        return (found.spread or 0.0) > _UNEVEN

    def _disturbed(self, row: BenchRow) -> bool:
        return row.measured is not None and self._work.disturbed(row.measured)

    def _workload(self) -> Workload:
        """The work and the machine, from a process like those of the rows. Raises: InputError that was raised there."""
        ended = self._measure(None, Watch(), self._left_s())
        found = ended.found or {}
        if ended.timed_out and self._options.budget_s:
            self._folder.begun = True
            said = f"--budget-s {self._options.budget_s:g} was over before the machine was measured"
            num = self._folder.num_measured()
            kept = f"; rows that were measured before, in {printable(self._options.output)}: {num}" if num else ""
            more = " more" if num else ""
            raise InputError(f"nothing{more} could be measured: {said}{kept}", hint=_more_time())
        if "workload" not in found:
            said = str(found.get("error") or ended.reason)
            raise InputError(f"nothing could be measured: {said}" if not found.get("is_input") else said,
                             hint=found.get("hint") or "see brimful bench --help")  # fmt: skip
        for text in found.get("notes", ()):
            self._callbacks.warning(text)
        return from_json(Workload, json_text(found["workload"]))

    def _measure(self, row: Row | None, watch: Watch, limit_s: float | None) -> Ended:
        return run_plan(self._plan(row), watch, limit_s=limit_s, folder=self._folder.processes)

    def _plan(self, row: Row | None) -> dict[str, Any]:
        steps = None if row is None else dataclasses.asdict(self._steps_now)
        plain = None if row is None else {**dataclasses.asdict(row), "settings": dict(row.settings)}
        return {"options": dataclasses.asdict(self._options), "row": plain, "steps": steps}

    def _steps(self, workload: Workload, num_rows: int) -> Steps:
        """As many steps as there is time for, at the speed of a plain step."""
        asked, repeats = self._options, self._options.repeats or _REPEATS
        seconds = _STEPS_S
        if self._deadline is not None:
            seconds = min(seconds, (self._deadline - time.monotonic()) / num_rows - _START_S)
        num = max(seconds, 0.0) / max(workload.step_s or 1.0, 1e-4)
        block = asked.steps or max(1, min(_MOST_BLOCK, int(0.8 * num / repeats)))
        if asked.repeats is None and asked.steps is None and num < repeats + 2:
            repeats = 3
        warm_up = asked.warmup_steps or max(2, min(_MOST_WARM_UP, int(0.2 * num)))
        return Steps(warm_up=warm_up, repeats=repeats, block=block)

    def _left_s(self) -> float | None:
        return None if self._deadline is None else max(1.0, self._deadline - time.monotonic())

    def _expected_s(self) -> float:
        """Seconds of a row: the median of those before it, or a guess."""
        guess = _START_S + self._steps_now.total * (self._work.step_s or 1.0)
        return statistics.median(self._walls) if self._walls else guess

    def _fits(self, expected: float, left: float, *, recommends: bool) -> bool:
        """True where there is time for a row, and for the recommended one if there will be one. As long as no row was
        measured, a call begins one whatever is expected: a guess must not keep every call from going on."""
        if not self._begun and not self._walls and left > _LEAST_S:
            return True
        ours = any(each.measured is not None and each.row.side == "brimful" for each in self._found)
        return expected * (2 if recommends and ours else 1) <= left

    def _row(self, row: Row, place: str, after: int, *, again: bool = False) -> BenchRow:
        """One row, measured or as it was. after: how many come after it, the recommended one among them. again: whether
        to measure it though it was."""
        if row.needs_gpu is not None and not self._work.on_gpu:
            return BenchRow(row=row, status="unsupported", reason=f"needs a GPU: {row.needs_gpu}")
        known = self._folder.row(row)
        if known is not None and not again and is_final(known):  # a package may be missing: what failed is tried again
            self._walls += [known.wall_s] if known.measured is not None and known.wall_s else []
            return known
        expected, left = self._expected_s(), self._left_s()
        if left is not None and not self._fits(expected, left, recommends=after > 0):
            if known is not None:
                return known
            return BenchRow(row=row, status="left", reason="no time left")
        limit = min(_MOST_ROW_S if left is None else left, max(120.0, _PATIENCE * expected))
        total = self._steps_now.total

        def told(done: int) -> None:
            spent = time.monotonic() - began
            here = max(expected - spent, spent * (total - done) / done if done > 1 else 0.0)
            later = max(0.0, here) + after * expected
            later = later if left is None else min(later, max(0.0, left - spent))
            self._callbacks.working(f"{place}: {row.key}, step {done} of {total}, {seconds_text(later)} left",
                                    (len(self._found) + done / total) / (len(self._found) + after + 1))  # fmt: skip

        began, self._begun = time.monotonic(), True
        told(0)
        found = self._result(row, self._measure(row, Watch(told=told), limit))
        if found.measured is not None and found.wall_s is not None:
            self._walls.append(found.wall_s)
        if known is not None and known.measured is not None and found.measured is None:
            return known
        if found.status != "left":
            self._folder.keep(found)
        return found

    def _result(self, row: Row, ended: Ended) -> BenchRow:
        found, wall_s = ended.found or {}, round(ended.wall_s, 1)
        notes = tuple(found.get("notes") or ())
        if "measured" in found:
            figures = from_json(Measured, json_text(found["measured"]))
            precision = figures.precision.replace("fp8", "bf16")
            figures = dataclasses.replace(
                figures,
                nvml_bytes=ended.nvml_bytes if self._work.on_gpu else None,
                mfu=_over(figures.flops_per_s, self._work.rates.get(precision)),
                datasheet_mfu=_over(figures.flops_per_s, self._work.datasheet.get(precision)),
            )
            return BenchRow(row=row, status="measured", measured=figures, notes=notes, wall_s=wall_s)
        reason = str(found.get("error") or ended.reason)
        if ended.timed_out and self._deadline is not None and time.monotonic() >= self._deadline - 1:
            return BenchRow(row=row, status="left", reason=f"the budget was over: {reason}", wall_s=wall_s)
        ran_out = bool(found.get("out_of_memory")) or ended.killed
        return BenchRow(row=row, status="out_of_memory" if ran_out else "failed", reason=reason, wall_s=wall_s)

    def _recommend(self) -> None:
        """Measure the recommended settings once more as the last row."""
        found = self._all()
        best = self._best(found)
        cut = next((each.wall_s for each in found if each.status == "left" and each.wall_s), None)
        if cut is not None and not any(each.measured is not None for each in found):
            said = f"no row was measured: --budget-s {self._options.budget_s:g} left {cut:.0f} s to the first"
            self._callbacks.warning(f"{said}; {_more_time()}")
            return
        if best is None:
            self._callbacks.warning("no row of brimful's was measured that changes no arithmetic: none is recommended")
            return
        again = self._row(recommended_of(best), "the last row", 0)
        self._found.append(again)
        self._tell(again)

    def _best(self, found: Sequence[BenchRow]) -> Row | None:
        return recommended(found, self._options.memory_limit, on_gpu=self._work.on_gpu)

    def _all(self) -> list[BenchRow]:
        """Rows of this call, and after them those that others have measured; what is recommended comes last."""
        found = [each for each in self._found if each.row.name != RECOMMENDED]
        found.sort(key=lambda each: self._places[each.row.key])
        last = [each for each in self._found if each.row.name == RECOMMENDED]
        return [*found, *self._folder.others([each.row for each in found]), *last]

    def _write(self) -> Bench:
        """Write all files."""
        bench = self._bench()
        self._folder.write(RESULTS, to_json(bench))
        self._folder.write("results.csv", bench_csv(bench))
        self._folder.write("results.md", bench_markdown(bench))
        if self._draws:
            page = self._folder.write("bench.html", bench_page(bench))
            self._callbacks.note(f"page: {page}")
        return bench

    def _bench(self) -> Bench:
        found = self._all()
        best = self._best(found)
        return Bench(
            model=self._options.model,
            data=self._options.data,
            options=dataclasses.asdict(self._options),
            command=self._repeats(found),
            workload=self._work,
            steps=self._steps_now,
            rows=tuple(_plausible(found)),
            recommended=None if best is None else best.key,
        )

    def _repeats(self, found: Sequence[BenchRow]) -> str:
        """The command that measures all rows of the table: those of earlier calls, too."""
        asked = words_of(self._options.rows)
        words, identities = [*asked], {row.identity for row in self._asked}
        others = {each.row.identity: each.row.name for each in found if each.row.name != RECOMMENDED}
        others = {identity: name for identity, name in others.items() if identity not in identities}
        for word in self._folder.words:
            options = dataclasses.replace(self._options, rows=word)
            rows = rows_of(options, longest=self._work.longest_tokens, on_gpu=self._work.on_gpu)
            if word not in words and [row for row in rows if others.pop(row.identity, None) is not None]:
                words.append(word)
        words += list(dict.fromkeys(name for name in others.values() if "=" in name and name not in words))
        if words == asked:
            return self._command
        return command_of("bench", dataclasses.replace(self._options, rows=",".join(words)))

    def _tell(self, found: BenchRow) -> None:
        if found.measured is None:
            self._callbacks.note(f"{found.row.key}: {found.status.replace('_', ' ')}: {found.reason}")
            return
        figures = found.measured
        memory = "" if figures.memory_bytes is None else f", {bytes_text(figures.memory_bytes)}"
        self._callbacks.note(f"{found.row.key}: {rate_text(figures.samples_per_s)} samples/s{memory}")
        if self._work.disturbed(figures):
            said = f"it had {figures.cores or 0.0:.1f} of {self._work.num_threads} cores"
            if figures.waiting is not None:
                said = f"its threads waited for a core in {share_text(figures.waiting)} of their time"
            said = f"{found.row.key}: {said}, others were busy"
            self._callbacks.warning(f"{said}: it is measured again where there is time")
        for text in found.notes:
            self._callbacks.warning(f"{found.row.key}: {text}")


def _draws(callbacks: Callbacks) -> bool:
    """True where charts can be drawn; what is missing is said."""
    try:
        check_charts()
    except InputError as error:
        callbacks.warning(f"{error}: no page is written, brimful report makes it later ({error.hint})")
        return False
    return True


def _more_time() -> str:
    """Hint for a budget that no row fits."""
    most = _START_S + _STEPS_S
    return (
        f"raise --budget-s by some {most:.0f} s for each row, or give 0 for no limit: a row takes about"
        f" {_START_S:.0f} s to start, and up to {_STEPS_S:.0f} s of steps"
    )


def run_bench(options: BenchOptions, callbacks: Callbacks, *, command: str, table: Any = None) -> Bench:
    """Measure the rows that `options` ask for and that the output folder lacks, and write its files.

    command: to repeat it. table: of Arrow, data in memory, to be saved where `options` say that they are.
    Raises: InputError for what cannot be done as asked; Interrupted.
    """
    return BenchRun(options, command, callbacks, table).run()


def check_measured(bench: Bench) -> None:
    """Check that a bench has figures. Raises: InputError, with the reason of the first row, where none was measured."""
    if bench.measured():
        return
    first = next((each for each in bench.rows if each.status in ("failed", "out_of_memory")), bench.rows[0])
    why = f"{first.row.key}: {first.status.replace('_', ' ')}: {printable(first.reason, 300)}"
    hint = "mend that, and start it again: rows that failed are tried again"
    if first.status == "left":
        hint = _more_time()
    elif first.status == "out_of_memory":
        hint = "lower --batch-size, or --max-length, with another --output"
    raise InputError(f"no row of the bench was measured: {why}", hint=hint)


def recommended(found: Sequence[BenchRow], memory_limit: str | None, *, on_gpu: bool) -> Row | None:
    """Row of the fastest recipe of ours that fits, has the same optimizer and clipping, and changes no arithmetic. None
    if there is none. Products in the precision that train chooses by itself are allowed: on a GPU bf16, and tf32."""
    limit = None if memory_limit is None else parse_bytes(memory_limit)
    rounding = ("bf16", "tf32") if on_gpu else ()

    def fits(figures: Measured) -> bool:
        return limit is None or figures.memory_bytes is None or figures.memory_bytes <= limit

    def keeps_arithmetic(figures: Measured) -> bool:
        levers = () if figures.recipe is None else figures.recipe.levers
        return figures.recipe is not None and all(
            lever.arithmetic == "exact" or (lever.name == "precision" and lever.value in rounding) for lever in levers
        )

    def as_asked(row: Row, figures: Measured) -> bool:
        return row.settings.get("precision", "auto") in ("auto", figures.precision)  # fp8 may have run in bf16

    ours = [
        (each.measured.samples_per_s, each.row)
        for each in found
        if each.measured is not None and each.row.side == "brimful" and each.row.name != RECOMMENDED
        and not LEARNED & each.row.settings.keys() and keeps_arithmetic(each.measured) and fits(each.measured)
        and as_asked(each.row, each.measured)
    ]  # fmt: skip
    return max(ours, key=lambda each: each[0])[1] if ours else None


def is_final(row: BenchRow) -> bool:
    """False for a row that failed or that somebody killed: the next call tries it again."""
    return row.status == "measured" or (row.status == "out_of_memory" and not (row.reason or "").startswith(KILLED))


def _plausible(found: Sequence[BenchRow]) -> list[BenchRow]:
    """The rows, without MFU where one of the same precision is above 1: the machine was busy when it was measured."""
    wrong = {e.measured.precision for e in found if e.measured is not None and (e.measured.mfu or 0.0) > 1.0}
    return [
        each
        if each.measured is None or each.measured.precision not in wrong
        else dataclasses.replace(each, measured=dataclasses.replace(each.measured, mfu=None))
        for each in found
    ]


def _over(rate: float | None, peak: float | None) -> float | None:
    return None if rate is None or not peak else rate / peak


def _work_text(work: Workload, steps: Steps) -> str:
    machine: Mapping[str, str] = work.machine.versions
    device = work.device if work.on_gpu else ", ".join(filter(None, (work.device, work.cores_text)))
    return (
        f"{work.rows_text} of {work.median_tokens:,} tokens in the median, {work.longest_tokens:,} at most, on"
        f" {device} (torch {machine.get('torch', '?')}); each row of the bench: {steps.warm_up} steps of"
        f" {work.batch_size} rows to warm up, then {steps.repeats} blocks of {steps.block}"
    )

"""A bench from its options to its folder: what the machine is, each row in a process of its own, and the best again.

Loads no torch: the processes of rows do.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from brimful.benchmarking.choosing import is_final, over, recommended, waited_less, with_mfu
from brimful.benchmarking.figures import together
from brimful.benchmarking.folder import BenchFolder
from brimful.benchmarking.needed import check_accelerate
from brimful.benchmarking.process import Ended, Watch, run_plan
from brimful.benchmarking.rows import check_rows, in_turns, recommended_of, rows_of, same_rows, words_of
from brimful.benchmarking.stopping import GOES_ON, name_of, stopped_by_sigterm
from brimful.benchmarking.told import START_S, STEPS_S, missing_text, more_time, tell, work_text
from brimful.core.bench import LEAST_BLOCKS, RECOMMENDED, RESULTS, Bench, BenchRow, Measured, Row, Steps, Workload
from brimful.core.callbacks import Callbacks
from brimful.core.command_line import command_of
from brimful.core.errors import InputError, Interrupted, printable
from brimful.core.options.bench import BenchOptions
from brimful.core.records import from_json, json_text, to_json
from brimful.core.units import seconds_text
from brimful.reports.bench_page import bench_page
from brimful.reports.bench_text import bench_csv, bench_markdown, budget_text
from brimful.reports.svg import check_charts

_MOST_BLOCK, _MOST_WARM_UP, _REPEATS = 20, 24, 5
#: Seconds of the budget that a row has after its last block, to count and to end.
_COUNT_S = 3.0
#: Seconds below which no row is begun.
_LEAST_S = 2.0
#: Most seconds of a row without a budget: it hangs by then.
_MOST_ROW_S = 3600.0
#: How much longer than expected a row may take before it is ended, where the budget is not over sooner.
_PATIENCE = 6.0
#: Seconds more that a row of Trainer may take which is compiled.
_COMPILING_S = 400.0
#: Spread of a row's blocks above which another process measures it, too.
_UNEVEN = 0.1


class BenchRun:
    """One call of a bench. stopped: its record so far, where a signal ended it after a row was measured."""

    def __init__(self, options: BenchOptions, command: str, callbacks: Callbacks, table: Any = None) -> None:
        self._options, self._command, self._callbacks = options, command, callbacks
        self._table = table
        self._folder = BenchFolder(Path(options.output))
        self._called = time.monotonic()
        self._deadline = self._called + options.budget_s if options.budget_s else None
        self._walls: list[float] = []
        self._rows: list[Row] = []  # as they are asked for
        self._found: list[BenchRow] = []  # as they were measured
        self._begun = self._has_work = False
        #: Rows measured by this call; seconds until the first one began, and that one which the budget cut would take.
        self._num_now, self._before_s, self._cut_s = 0, 0.0, 0.0
        self._not_reached = "the bench was ended before"
        self.stopped: Bench | None = None

    def run(self) -> Bench:
        """Measure what is not there yet. Raises: InputError for what cannot be done as asked; Interrupted by Ctrl-C or
        SIGTERM."""
        check_rows(self._options)
        check_accelerate()
        self._draws = _draws(self._callbacks)
        with stopped_by_sigterm(), self._folder.locked():
            if self._table is not None:
                self._folder.save_rows(self._table)
            try:
                return self._run()
            except KeyboardInterrupt as stop:
                number, by = name_of(stop)
                self._not_reached = f"the bench was stopped by {by}"
                done = self._folder.num_measured()
                if done and self._has_work:
                    self.stopped = self._write()
                said = f"{done} row{'' if done == 1 else 's'} measured so far, in {printable(self._options.output)}"
                how = "interrupted" if by == "Ctrl-C" else f"stopped by {by}"
                raise Interrupted(f"{how}: {said}", signal_number=number, hint=GOES_ON) from None

    def _run(self) -> Bench:
        self._callbacks.stage("reading the rows, and measuring what the machine can do")
        workload = self._workload()
        rows = rows_of(self._options, longest=workload.longest_tokens, on_gpu=workload.on_gpu)
        steps = self._steps(workload, len(rows) + 1)
        self._steps_now, self._work = self._folder.agree(self._options, workload, steps)
        self._rows, self._has_work, self._before_s = rows, True, time.monotonic() - self._called
        self._callbacks.note(work_text(self._work, self._steps_now))
        for other, key in same_rows(self._options, longest=workload.longest_tokens, on_gpu=workload.on_gpu).items():
            self._callbacks.note(f"{other}: the same settings as {key}, measured once, under that name")
        if workload.on_gpu and not any(row.settings.get("torch_compile") for row in rows):
            self._callbacks.note(
                "no row of Trainer is compiled: --rows best has such rows, which take minutes to compile"
            )
        if not workload.on_gpu and (num := sum(row.needs_gpu is not None for row in rows)):
            self._callbacks.note(f"{num} of {len(rows)} rows need a GPU, and are not measured here")
        for name in self._folder.broken():
            self._callbacks.note(f"{name} cannot be read: its row counts as not measured")
        for number, row in enumerate(in_turns(rows)):
            later = len(rows) - number + self._num_again()
            self._found.append(self._row(row, f"row {number + 1} of {len(rows) + 1}", later))
            self._tell(self._found[-1])
            self._save()  # a killed bench leaves what it found
        self._finish(range(len(rows)), after=1)
        self._measure_again(range(len(rows)), after=1)  # before one of them is said to be the fastest
        self._add_blocks(range(len(rows)))
        self._recommend()
        self._finish(range(len(rows), len(self._found)), after=0)
        self._measure_again(range(len(rows), len(self._found)), after=0)
        return self._write()

    def _num_again(self) -> int:
        """Rows known by now that are to be measured once more."""
        return sum(each.cut_short or self._disturbed(each) or self._uneven(each) for each in self._found)

    def _finish(self, rows: Sequence[int], *, after: int) -> None:
        """Measure those of these rows again that the budget cut short, where there is time for all their blocks. The
        measurement of more blocks counts. after: how many rows come then."""
        cut = [number for number in rows if self._found[number].cut_short]
        for place, number in enumerate(cut, 1):
            first, left = self._found[number], self._left_s()
            if left is not None and self._whole_s(first) > left:
                self._cut_s = self._cut_s or self._whole_s(first)
                continue
            other = self._begin(first.row, "again, as it was cut short", len(cut) - place + after)
            if first.measured is None or other is None or other.measured is None:  # there was no time
                continue
            self._tell(other, again=True)
            if not other.cut_short or len(other.measured.block_rates) > len(first.measured.block_rates):
                self._put(number, other)

    def _measure_again(self, rows: Sequence[int], *, after: int) -> None:
        """Measure those of these rows once more that others disturbed; the measurement counts that waited less.

        after: how many rows come then.
        """
        disturbed = [number for number in rows if self._disturbed(self._found[number])]
        for place, number in enumerate(disturbed, 1):
            first = self._found[number]
            other = self._begin(first.row, "again, undisturbed", len(disturbed) - place + after)
            if first.measured is None or other is None or other.measured is None or other.cut_short:  # no time for it
                continue
            self._tell(other, again=True)
            if waited_less(first.measured, other.measured):
                self._callbacks.note(f"{first.row.key}: its first measurement is kept, which waited less")
                continue
            self._put(number, other)

    def _add_blocks(self, rows: Sequence[int]) -> None:
        """Measure those of these rows on a GPU that are uneven in another process, too: it may have another core of a
        host that others share, for which such a row waits. Both count."""
        uneven = [number for number in rows if self._uneven(self._found[number])]
        for place, number in enumerate(uneven, 1):
            first = self._found[number]
            other = self._begin(first.row, "again, uneven", len(uneven) - place + 1)
            if first.measured is None or other is None or other.measured is None:  # there was no time
                continue
            self._put(number, dataclasses.replace(first, measured=together(first.measured, other.measured)))
            self._tell(self._found[number], again=True)

    def _whole_s(self, row: BenchRow) -> float:
        """Seconds that a row would take with all its blocks, at its own speed."""
        done = 0 if row.measured is None else len(row.measured.block_rates)
        return (row.wall_s or 0.0) * self._steps_now.total / dataclasses.replace(self._steps_now, repeats=done).total

    def _put(self, number: int, row: BenchRow) -> None:
        """Replace a row by what was measured since."""
        self._found[number] = row
        self._folder.keep(row)
        self._save()

    def _uneven(self, row: BenchRow) -> bool:
        """Return whether blocks of one process are far apart, which had all that the GPU has."""
        found, repeats = row.measured, self._steps_now.repeats
        if found is None or row.cut_short or not self._work.on_gpu or len(found.block_rates) > repeats:
            return False
        return (found.spread or 0.0) > _UNEVEN

    def _disturbed(self, row: BenchRow) -> bool:
        return row.measured is not None and not row.cut_short and self._work.disturbed(row.measured)

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
            raise InputError(f"nothing{more} could be measured: {said}{kept}", hint=more_time())
        if "workload" not in found:
            said = str(found.get("error") or ended.reason)
            raise InputError(f"nothing could be measured: {said}" if not found.get("is_input") else said,
                             hint=found.get("hint") or "see brimful bench --help")  # fmt: skip
        for text in found.get("notes", ()):
            self._callbacks.warning(text)
        return from_json(Workload, json_text(found["workload"]))

    def _measure(self, row: Row | None, watch: Watch, limit_s: float | None) -> Ended:
        until = None if self._deadline is None else self._deadline - _COUNT_S
        return run_plan({**self._plan(row), "until": until}, watch, limit_s=limit_s, folder=self._folder.processes)

    def _plan(self, row: Row | None) -> dict[str, Any]:
        steps = None if row is None else dataclasses.asdict(self._steps_now)
        plain = None if row is None else {**dataclasses.asdict(row), "settings": dict(row.settings)}
        return {"options": dataclasses.asdict(self._options), "row": plain, "steps": steps}

    def _steps(self, workload: Workload, num_rows: int) -> Steps:
        """As many steps as there is time for, at the speed of a plain step."""
        asked, repeats = self._options, self._options.repeats or _REPEATS
        seconds = STEPS_S
        if self._deadline is not None:
            seconds = min(seconds, (self._deadline - time.monotonic()) / num_rows - START_S)
        num = max(seconds, 0.0) / max(workload.step_s or 1.0, 1e-4)
        block = asked.steps or max(1, min(_MOST_BLOCK, int(0.8 * num / repeats)))
        if asked.repeats is None and asked.steps is None and num < repeats + 2:
            repeats = LEAST_BLOCKS
        warm_up = asked.warmup_steps or max(2, min(_MOST_WARM_UP, int(0.2 * num)))
        return Steps(warm_up=warm_up, repeats=repeats, block=block)

    def _left_s(self) -> float | None:
        return None if self._deadline is None else max(1.0, self._deadline - time.monotonic())

    def _expected_s(self) -> float:
        """Seconds of a row: the median of those before it, or a guess."""
        guess = START_S + self._steps_now.total * (self._work.step_s or 1.0)
        return statistics.median(self._walls) if self._walls else guess

    def _fits(self, expected: float, left: float, *, recommends: bool) -> bool:
        """True where there is time for a row, and for the recommended one if there will be one. The first row of a call
        need not leave time for that, and as long as none was measured it is begun whatever is expected: neither must
        keep every call from going on."""
        if not self._begun:
            return expected <= left or (not self._walls and left > _LEAST_S)
        ours = any(each.measured is not None and each.row.side == "brimful" for each in self._found)
        return expected * (2 if recommends and ours else 1) <= left

    def _row(self, row: Row, place: str, after: int) -> BenchRow:
        """One row, measured or as it was. after: how many come after it, the recommended one among them."""
        known = self._known(row)
        if known is not None and known.cut_short:  # other rows have no figures at all
            return known
        if known is not None and (is_final(known) or known.status == "unsupported"):
            self._walls += [known.wall_s] if known.measured is not None and known.wall_s else []
            return known
        found = self._begin(row, place, after)
        if found is None:
            return known or BenchRow(row=row, status="left", reason="no time left")
        if found.status != "left":
            self._folder.keep(found)
        self._num_now += found.cut_short
        return found

    def _known(self, row: Row) -> BenchRow | None:
        """A row as it was measured, or that it cannot be here; None without either."""
        if row.needs_gpu is not None and not self._work.on_gpu:
            return BenchRow(row=row, status="unsupported", reason=f"needs a GPU: {row.needs_gpu}")
        return self._folder.row(row)

    def _begin(self, row: Row, place: str, after: int) -> BenchRow | None:
        """Measure a row; None where there is no time for it. after: how many come after it."""
        expected, left = self._expected_s(), self._left_s()
        if left is not None and not self._fits(expected, left, recommends=after > 0):
            return None
        compiles = bool(row.settings.get("torch_compile"))
        patience = max(120.0, _PATIENCE * expected) + (_COMPILING_S if compiles else 0.0)
        limit = min(_MOST_ROW_S if left is None else left, patience)
        total, last, compiled_s = self._steps_now.total, 0, 0.0

        def told(done: int) -> None:
            nonlocal last, compiled_s
            spent = time.monotonic() - began
            if compiles and done and not last:
                compiled_s = spent
            last, in_steps = done, spent - compiled_s
            here = max(expected - spent, in_steps * (total - done) / done if done > 1 else 0.0)
            later = max(0.0, here) + after * expected
            later = later if left is None else min(later, max(0.0, left - spent))
            self._callbacks.working(f"{place}: {row.key}, step {done} of {total}, {seconds_text(later)} left",
                                    (len(self._found) + done / total) / (len(self._found) + after + 1))  # fmt: skip

        began, self._begun = time.monotonic(), True
        told(0)
        ended = self._measure(row, Watch(told=told), limit)
        found = self._result(row, ended, last, compiled_s)
        if found.cut_short:
            self._cut_s = self._whole_s(found)
            self._walls.append(self._cut_s)
        elif found.measured is not None:
            self._num_now += 1
            self._walls += [] if found.wall_s is None else [found.wall_s]
        return found

    def _result(self, row: Row, ended: Ended, num_steps: int, compiled_s: float) -> BenchRow:
        """The row of an end, after so many steps. compiled_s: until the first, if that was compiled."""
        found, wall_s = ended.found or {}, round(ended.wall_s, 1)
        notes = tuple(found.get("notes") or ())
        if "measured" in found:
            figures = from_json(Measured, json_text(found["measured"]))
            figures = dataclasses.replace(
                figures,
                nvml_bytes=ended.nvml_bytes if self._work.on_gpu else None,
                datasheet_mfu=over(figures.flops_per_s, self._work.datasheet.get(figures.products)),
            )
            measured = BenchRow(row=row, status="measured", measured=figures, notes=notes, wall_s=wall_s)
            if not found.get("cut_short"):
                return measured
            said = f"the budget was over after {len(figures.block_rates)} of {self._steps_now.repeats} blocks"
            return dataclasses.replace(measured, reason=said, cut_short=True)
        reason = str(found.get("error") or ended.reason)
        if ended.timed_out and self._deadline is not None and time.monotonic() >= self._deadline - 1:
            total = self._steps_now.total
            whole_s = compiled_s + (wall_s - compiled_s) * total / max(1, num_steps)
            self._cut_s = whole_s if num_steps else max(2 * wall_s, self._expected_s())
            said = f"the budget was over after {num_steps} of {total} steps, in {wall_s:.0f} s"
            return BenchRow(row=row, status="left", reason=said, wall_s=wall_s)
        ran_out = bool(found.get("out_of_memory")) or ended.killed
        return BenchRow(row=row, status="out_of_memory" if ran_out else "failed", reason=reason, wall_s=wall_s)

    def _recommend(self) -> None:
        """Measure the recommended settings once more as the last row."""
        found = self._all()
        best = self._best(found)
        cut = next((each.wall_s for each in found if each.status == "left" and each.wall_s), None)
        if cut is not None and not any(each.measured is not None for each in found):
            said = f"no row was measured: --budget-s {self._options.budget_s:g} left {cut:.0f} s to the first"
            self._callbacks.warning(f"{said}; {budget_text(self._bench())}")
            return
        if best is None:
            said = "fits, and changes neither arithmetic nor what is learned (optimizer, clipping, weight decay)"
            why = missing_text([each for each in found if each.row.side == "brimful"])
            self._callbacks.warning(f"none is recommended: no row of brimful's was measured that {said}{why}")
            return
        again = self._row(recommended_of(best), "the last row", 0)
        self._found.append(again)
        self._tell(again)
        self._save()

    def _best(self, found: Sequence[BenchRow]) -> Row | None:
        return recommended(found, self._options.memory_limit, on_gpu=self._work.on_gpu)

    def _all(self) -> list[BenchRow]:
        """Rows of this call, those that it has not come to as they are known, and after them those that others have
        begun; what is recommended comes last."""
        reached = {each.row.key: each for each in self._found}
        asked = [reached.get(row.key) or self._known(row) or self._missing(row) for row in self._rows]
        found = [*asked, *self._folder.others(self._rows)]
        if (again := reached.get(f"brimful: {RECOMMENDED}")) is not None:
            return [*found, again]
        if (best := self._best(found)) is None:
            return found
        row = recommended_of(best)
        return [*found, self._known(row) or self._missing(row)]

    def _missing(self, row: Row) -> BenchRow:
        return BenchRow(row=row, status="not_reached", reason=self._not_reached)

    def _save(self) -> Bench:
        """Write all files but the page."""
        bench = self._bench()
        self._folder.write(RESULTS, to_json(bench))
        self._folder.write("results.csv", bench_csv(bench))
        self._folder.write("results.md", bench_markdown(bench))
        return bench

    def _write(self) -> Bench:
        """Write all files."""
        bench = self._save()
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
            rows=tuple(with_mfu(found, self._work)),
            recommended=None if best is None else best.key,
            needs_budget_s=self._needs_s(found),
        )

    def _repeats(self, found: Sequence[BenchRow]) -> str:
        """The command that measures all rows of the table: those of earlier calls, too."""
        asked = words_of(self._options.rows)
        words, identities = [*asked], {row.identity for row in self._rows}
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

    def _needs_s(self, found: Sequence[BenchRow]) -> float | None:
        """Seconds that a call needs to measure one of the rows that are left or cut short; None where this one measured
        some."""
        if (
            self._deadline is None
            or self._num_now
            or not any(each.status == "left" or each.cut_short for each in found)
        ):
            return None
        seconds = 10 * math.ceil((self._before_s + (self._cut_s or self._expected_s())) / 10)
        return float(max(seconds, math.ceil(self._options.budget_s) + 10))

    def _tell(self, found: BenchRow, *, again: bool = False) -> None:
        tell(self._callbacks, self._work, found, again=again)


def _draws(callbacks: Callbacks) -> bool:
    """True where charts can be drawn; what is missing is said."""
    try:
        check_charts()
    except InputError as error:
        callbacks.warning(f"{error}: no page is written, brimful report makes it later ({error.hint})")
        return False
    return True


def run_bench(options: BenchOptions, callbacks: Callbacks, *, command: str, table: Any = None) -> Bench:
    """Measure the rows that `options` ask for and that the output folder lacks, and write its files.

    command: to repeat it. table: of Arrow, data in memory, to be saved where `options` say that they are.
    Raises: InputError for what cannot be done as asked; Interrupted.
    """
    return BenchRun(options, command, callbacks, table).run()

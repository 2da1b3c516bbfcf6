"""Signs of life of a process that trains with others, and the rules by which one of them is found gone or stuck.

A process that waits for others has no limit of its own: whoever it waits for has. Seconds are those of the clock of
the process that reports them, so clocks of hosts need not agree.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from types import FrameType

from brimful.core.phases import Phases
from brimful.core.records import PeakMemory
from brimful.hardware.traffic import Traffic

#: Seconds without progress in a step after which a process is taken to hang, unless its steps take longer.
HANG_S = 8.0
#: Share of that without a sign of life after which a process in steps is taken to be gone.
_SILENT = 0.6
#: Seconds without one: of a process at other work (a call into another library can hold Python's lock for that long),
#: and the least before the system is asked about a process of the same host.
_SILENT_ELSEWHERE_S, _MISSED_S = 30.0, 1.5
#: Times the longest wait so far that a step may take.
_MARGIN = 10.0
#: Limits of work that is not a step, as a whole: compilation and capture, metrics of an evaluation and what is told of
#: it, and what a checkpoint takes besides its files.
CAPTURE_S = 900.0
_LIMITS_S = {"capture": CAPTURE_S, "evaluation": 600.0, "saving": 600.0}
_OTHER_LIMIT_S = 1800.0
#: Limits of a first piece of work, before one was timed, and of a piece of a file: 1 GiB, and its way to the disk.
FIRST_PIECE_S, _FILE_PIECE_S = 60.0, 120.0
#: The same of 8,192 rows that are tokenised, which may be long.
_MANY_ROWS_S = 300.0
_STEPS = ("steps", "input")
#: Processes at one place that a message names.
_NAMED = 4
#: Modules whose code runs while something is compiled or captured.
_COMPILERS = ("torch._dynamo", "torch._inductor", "torch.cuda.graphs", "triton")
#: Modules whose code waits for others on behalf of what called it.
_WAITERS = ("brimful.hardware.ranks", "brimful.hardware.pulse", "brimful.hardware.traffic")


@dataclass(frozen=True, kw_only=True)
class Beat:
    """One sign of life.

    step: optimizer steps begun. phase: of `core.phases`, or `input`. calls: times it began to wait for others.
    waiting: whether it does now. idle_s: since it last got on. limit_s: most of that in this phase. where: line of code
    that it is at, if it has been there for a while. told: signal to stop that it was sent, for the leader. ended:
    whether it has done its part. warnings: that it has for the terminal. tokens, rows, steps_s, waited_s: of its steps
    so far but the first, seconds in all and in waiting. sent_s, hidden_s: of `Traffic` within them; 0 where it is not
    seen. in_pieces: whether it works on pieces as `Pulse.pieces` has them. peak_bytes, limit_bytes: of its memory, None
    until it was asked.
    """

    rank: int
    host: str
    device: str
    process: str
    count: int
    step: int
    phase: str
    calls: int
    waiting: bool
    idle_s: float
    limit_s: float
    where: str | None = None
    told: int | None = None
    ended: bool = False
    warnings: tuple[str, ...] = ()
    tokens: int = 0
    rows: int = 0
    steps_s: float = 0.0
    waited_s: float = 0.0
    sent_s: float = 0.0
    hidden_s: float = 0.0
    in_pieces: bool = False
    peak_bytes: PeakMemory | None = None
    limit_bytes: int | None = None

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Beat:
        given = json.loads(text)
        peak = given["peak_bytes"]
        peak = None if peak is None else PeakMemory(**peak)
        return cls(**given | {"warnings": tuple(given["warnings"]), "peak_bytes": peak})


@dataclass(frozen=True, kw_only=True)
class Lost:
    """A process that is gone, stuck or failed, where it was, and what is known of it. rank: None if it is not known.

    of: the number of processes.
    """

    rank: int | None
    of: int
    why: str
    host: str | None = None
    device: str | None = None
    step: int | None = None
    phase: str | None = None

    def __str__(self) -> str:
        if self.rank is None:
            return f"the {self.of} processes cannot go on: {self.why}"
        at = f"({self.host}, {self.device}), at step {self.step}, in phase {self.phase}"
        return f"process {self.rank} of {self.of} {at}: {self.why}"

    @classmethod
    def found(cls, beat: Beat, of: int, why: str) -> Lost:
        """Return what is lost with the process of a beat."""
        return cls(rank=beat.rank, of=of, why=why, host=beat.host, device=beat.device, step=beat.step, phase=beat.phase)

    @classmethod
    def from_json(cls, text: str | bytes) -> Lost:
        return cls(**json.loads(text))


class Pulse:
    """Place of this process in its work: told by the code that it runs, read by the thread that reports it.

    hang_s: of `HANG_S`. input_s: the same of the next batch, which code of the user's own may have to make.
    """

    def __init__(self, rank: int = 0, device: str = "CPU") -> None:
        self.rank, self.device, self.hang_s, self.input_s = rank, device, HANG_S, HANG_S
        self.step, self.phase, self.calls = 0, "start", 0
        self.told: int | None = None
        self.ended = False
        self.warnings: tuple[str, ...] = ()
        self.peak_bytes: PeakMemory | None = None
        self.limit_bytes: int | None = None
        self.tokens, self.rows, self.traffic = 0, 0, Traffic()
        self._steps_s, self._waited_s, self._longest_s = 0.0, 0.0, 0.0
        self._sent_s, self._blocked_s, self._traffic_by_now = 0.0, 0.0, (0.0, 0.0)
        self._depth, self._reads, self._count = 0, False, 0
        self._piece_limits: tuple[float, float] | None = None  # of the first piece, and of others at least
        self._longest_pieces: dict[str, float] = {}  # by phase
        self._wrote: float | None = None  # when a thread that writes a file got on; None where none does
        self._thread = threading.get_ident()
        self._moved = time.monotonic()
        self._compiled = self._moved  # when it was last seen to compile

    def follow(self, phases: Phases) -> None:
        """Have phases say what this process does, and when a piece of it is done."""
        phases.heard, phases.end_piece = self.enter, self.end_piece
        phases.pieces = partial(self.pieces, first_s=_MANY_ROWS_S, least_s=FIRST_PIECE_S)

    def enter(self, phase: str) -> None:
        """Say what this process does from now on."""
        self.move()
        self.phase = phase

    def begin(self, step: int, *, tokens: int = 0, rows: int = 0) -> None:
        """Say that a step begins, on so many tokens and rows of this process's own.

        The first takes its time, and is not counted.
        """
        self.enter("steps" if self.step else "capture")
        if self.step:
            self.tokens, self.rows = self.tokens + tokens, self.rows + rows
        self.step = step

    def await_input(self) -> None:
        """Say that the next batch is waited for."""
        if self.step:
            self.enter("input")

    def pardon(self, seconds: float) -> None:
        """Take no account of seconds in which no thread of this process ran."""
        self._moved += seconds
        self._compiled += seconds
        if (wrote := self._wrote) is not None:
            self._wrote = wrote + seconds

    def move(self) -> None:
        """Say that work got on."""
        now = time.monotonic()
        passed, self._moved = max(0.0, now - self._moved), now  # a pardon may come after `move`
        traffic = self.traffic.sent_s, self.traffic.blocked_s
        before, self._traffic_by_now = self._traffic_by_now, traffic
        if self.phase in _STEPS:
            self._steps_s += passed
            self._sent_s += traffic[0] - before[0]
            self._blocked_s += traffic[1] - before[1]
            if self._depth:
                self._waited_s += passed
            elif self.phase == "steps":
                self._longest_s = max(self._longest_s, passed)

    @contextmanager
    def pieces(self, *, first_s: float = FIRST_PIECE_S, least_s: float = 0.0) -> Iterator[None]:
        """Within, this process works on pieces alike, and tells the end of each by `end_piece`.

        One may take ten times the longest so far of this phase, but at least `hang_s` and `least_s`. first_s: the same
        of the first one.
        """
        self.move()
        before, self._piece_limits = self._piece_limits, (first_s, least_s)
        try:
            yield
        finally:
            self.move()
            self._piece_limits = before

    def end_piece(self) -> None:
        """Say that a piece of the work is done. What it took to compile is not counted."""
        passed = time.monotonic() - max(self._moved, self._compiled)
        self._longest_pieces[self.phase] = max(self._longest_pieces.get(self.phase, 0.0), passed)
        self.move()

    @contextmanager
    def writing(self) -> Iterator[Callable[[], None]]:
        """Within, this thread writes files, whatever the main one does; what it gets is called after each piece."""
        self._wrote = time.monotonic()
        try:
            yield self._write_on
        finally:
            self._wrote = None

    def _write_on(self) -> None:
        self._wrote = time.monotonic()
        if self.phase == "saving":  # the main thread may wait for it
            self.move()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Within, this process waits for others."""
        self.move()
        self._depth, self.calls = self._depth + 1, self.calls + 1
        try:
            yield
        finally:
            self.move()
            self._depth -= 1

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Within, this process waits for its device, which may wait for those of others."""
        self.move()
        self._reads = True
        try:
            yield
        finally:
            self.move()
            self._reads = False

    def beat(self) -> Beat:
        """Return the next sign of life."""
        self._count += 1
        now, limit_s, where, waits = time.monotonic(), self._limit_s(), None, self._waits
        idle_s, wrote = now - self._moved, self._wrote
        if wrote is not None and now - wrote > _FILE_PIECE_S:  # the main thread may wait for an order
            idle_s, limit_s, where, waits = now - wrote, _FILE_PIECE_S, "writing a checkpoint", False
        elif idle_s > self.hang_s / 2:
            where, compiles = self._where()
            if waits:
                pass
            elif compiles:
                limit_s, self._compiled = max(limit_s, CAPTURE_S), now
            else:  # the rest of a step has its own time after a compilation
                idle_s = min(idle_s, now - self._compiled)
        return Beat(
            rank=self.rank,
            host=socket.gethostname(),
            device=self.device,
            process=f"{os.getpid()} of {system_name()}",
            count=self._count,
            step=self.step,
            phase=self.phase,
            calls=self.calls,
            waiting=waits,
            idle_s=idle_s,
            limit_s=limit_s,
            where=where,
            told=self.told,
            ended=self.ended,
            warnings=self.warnings,
            tokens=self.tokens,
            rows=self.rows,
            steps_s=self._steps_s,
            waited_s=self._waited_s,
            sent_s=self._sent_s,
            hidden_s=max(0.0, self._sent_s - self._blocked_s),
            in_pieces=self._piece_limits is not None,
            peak_bytes=self.peak_bytes,
            limit_bytes=self.limit_bytes,
        )

    @property
    def _waits(self) -> bool:
        return self._depth > 0 or self._reads

    def _limit_s(self) -> float:
        if self.phase in _STEPS:
            least_s = self.input_s if self.phase == "input" else self.hang_s
            return max(least_s, _MARGIN * self._longest_s)
        if self._piece_limits is not None:
            (first_s, least_s), longest_s = self._piece_limits, self._longest_pieces.get(self.phase)
            return max(self.hang_s, first_s if longest_s is None else max(least_s, _MARGIN * longest_s))
        return max(self.hang_s, _LIMITS_S.get(self.phase, _OTHER_LIMIT_S))

    def _where(self) -> tuple[str | None, bool]:
        """Return the line that the main thread is at, and whether something is compiled that it may wait for: by
        itself, or by a thread of torch's, in which the backward pass of a GPU runs."""
        frames = sys._current_frames()
        own = frames.get(self._thread)
        if own is None:
            return None, False
        of_python = {each.ident for each in threading.enumerate() if not isinstance(each, threading._DummyThread)}
        compiles = any(_compiles(frames[ident]) for ident in frames.keys() - of_python | {self._thread})
        within = _caller(own) if self._waits else own
        return f"{Path(within.f_code.co_filename).name}:{within.f_lineno}, {within.f_code.co_name}", compiles


def _caller(frame: FrameType) -> FrameType:
    """Return the innermost frame of ours that says what is waited for, not how."""
    found: FrameType | None = frame
    while found is not None:
        name = str(found.f_globals.get("__name__"))
        if name.startswith("brimful.") and name not in _WAITERS:
            return found
        found = found.f_back
    return frame


def _compiles(frame: FrameType | None) -> bool:
    while frame is not None:
        if str(frame.f_globals.get("__name__")).startswith(_COMPILERS):
            return True
        frame = frame.f_back
    return False


def lost(
    beats: Mapping[int, Beat], silent_s: Mapping[int, float], of: int, *, broken: bool = False, hang_s: float = HANG_S
) -> Lost | None:
    """Return the process that is gone or stuck, if one is.

    beats: the last of each process. silent_s: seconds in which nothing came from it. broken: whether a connection to
    another process has ended: somebody is gone. hang_s: of `HANG_S`.
    """
    live = [beat for beat in beats.values() if not beat.ended]
    for beat in live:
        if (why := _gone(beat, silent_s[beat.rank], broken, hang_s)) is not None:
            return Lost.found(beat, of, why)
    stuck = [beat for beat in live if not beat.waiting and beat.idle_s > beat.limit_s]
    if stuck:
        worst = max(stuck, key=lambda beat: (-beat.step, beat.idle_s - beat.limit_s))
        at = f", at {worst.where}" if worst.where else ""
        return Lost.found(worst, of, f"has not got on for {worst.idle_s:.1f} s{at}")
    if len(live) > 1 and all(beat.waiting and beat.idle_s > beat.limit_s for beat in live):
        return _all_wait(live, of)
    return None


def _all_wait(live: Sequence[Beat], of: int) -> Lost:
    """Return the process that is the furthest behind, if one is, where each waits for another."""
    behind = min(live, key=lambda beat: beat.calls)
    why = f"all processes have waited for one another for {min(beat.idle_s for beat in live):.1f} s"
    places: dict[str, list[int]] = {}
    for beat in live:
        if beat.where is not None:
            places.setdefault(beat.where, []).append(beat.rank)
    if len(places) == 1:
        why += f", at {next(iter(places))}"
    elif places:
        why += ", " + "; ".join(f"{_processes(ranks)} at {where}" for where, ranks in places.items())
    if sum(beat.calls == behind.calls for beat in live) == 1:
        return Lost.found(behind, of, f"{why}, and this one is behind")
    return Lost(rank=None, of=of, why=f"{why}, in step {behind.step}")


def _processes(ranks: Sequence[int]) -> str:
    """Name processes; count them where there are many."""
    if len(ranks) > _NAMED:
        return f"{len(ranks)} processes"
    return f"process{'es' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _gone(beat: Beat, silent_s: float, broken: bool, hang_s: float) -> str | None:
    """Return why a process that is silent is taken to be gone; None while it is not."""
    if silent_s < _MISSED_S:
        return None
    said, state = f"no sign of life for {silent_s:.1f} s", _state(beat)
    if state == "gone":
        return "has ended"
    in_steps = beat.phase in _STEPS or (beat.in_pieces and beat.phase == "evaluation") or beat.waiting or broken
    limit_s = _SILENT * hang_s if in_steps or state == "stopped" else _SILENT_ELSEWHERE_S
    if state == "runs":  # and is starved, or holds Python's lock
        limit_s = max(limit_s, beat.limit_s)
    if silent_s <= limit_s:
        return None
    return f"{said}; it is stopped (SIGSTOP)" if state == "stopped" else said


def _state(beat: Beat) -> str | None:
    """Say whether a process of this host runs, is stopped or gone; None where the system does not say."""
    number, _, namespace = beat.process.partition(" of ")
    if beat.host != socket.gethostname() or not namespace or namespace != system_name():
        return None
    try:
        state = Path(f"/proc/{number}/stat").read_text("ascii", "replace").rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "gone"
    except (OSError, IndexError):
        return None
    return {"Z": "gone", "X": "gone", "T": "stopped", "t": "stopped"}.get(state, "runs")


@cache
def system_name() -> str:
    """Return a name of the system and of what numbers its processes; empty where there is none."""
    with suppress(OSError):
        booted = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
        return f"{booted} {Path('/proc/self/ns/pid').readlink()}"
    return ""

"""Threads that report this process's pulse, read those of the others, and end it when one of them is lost.

The main thread may be in a collective that never returns, so nothing waits for it to notice.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from brimful.core.errors import RanksError, first_line, printable
from brimful.core.place import find_address
from brimful.hardware.pulse import Beat, Lost, Pulse, lost

#: Seconds between two beats, of up to so many processes: more beat more slowly.
_EVERY_S, _AT_ONCE = 0.25, 16
#: Seconds that the main thread has to notice by itself, and to end once it has.
_NOTICE_S, _LEAVE_S = 1.5, 60.0
#: Seconds for the store to answer, and for others to end in.
_ANSWER_S, _ENDS_S = 1.0, 3.0
#: Signs of life by which a process is known to be there: the last ones of one that is gone may be read late.
_ALIVE = 3
_VERDICT, _LAST_ORDER = "lost", "last order"


class Board:
    """Words that processes leave for one another, by a connection of its own: for one thread."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def leave(self, name: str, text: str) -> None:
        """Leave a word under a name that is used once. It is there when this returns."""
        self._store.compare_set(f"word/{name}", "", text)

    def find(self, name: str) -> str | None:
        """Return the word that was left under a name, if there is one yet."""
        key = f"word/{name}"
        return self._store.get(key).decode() if self._store.check([key]) else None


class Watch:
    """Reports a pulse into a store, and watches those of `count` processes.

    store: where all meet; each thread has a connection of its own. on_loss: called where the main thread does not
    notice, before this process ends. own_store: whether the store lives in the first process.
    """

    def __init__(self, pulse: Pulse, store: Any, count: int, *, own_store: bool = True) -> None:
        self.pulse, self._count, self._own_store = pulse, count, own_store
        self._store, self._said = store.clone(), store.clone()
        self.on_loss: Callable[[Lost], None] = lambda _: None
        self.leavings: list[Callable[[], object]] = []  # what a process does before it ends after a loss
        self.found: Lost | None = None
        self.broken = False  # a connection has ended: somebody is gone
        self.last_order: int | None = None  # of the leader, once all is done
        self._threads: list[threading.Thread] = []
        self._beats: dict[int, Beat] = {}
        self._heard: dict[int, float] = {}
        self._answered = time.monotonic()
        self._decided, self._leaving, self._stopped = threading.Event(), threading.Event(), threading.Event()
        self._every_s = _EVERY_S * max(1.0, count / _AT_ONCE)

    def board(self) -> Board:
        """Return a board of the same processes."""
        return Board(self._store.clone())

    def announce(self) -> None:
        """Give a first sign of life."""
        if self.pulse.rank == 0:
            self._store.set(_VERDICT, "")
            self._store.set(_LAST_ORDER, "")
        self._store.set(f"pulse/{self.pulse.rank}", self.pulse.beat().to_json())

    def has_come(self, rank: int) -> bool:
        """Return True if a process has given its first sign of life."""
        return bool(self._store.check([f"pulse/{rank}"]))

    def begin(self) -> None:
        """Begin to report and to watch, now that all are there."""
        self._answered = time.monotonic()
        for work in (self._report, self._look):
            thread = threading.Thread(target=work, name=f"brimful-pulse{work.__name__}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def end(self) -> None:
        """Say that this process has done its part, and stop."""
        self._leaving.set()
        if not self._stopped.is_set():
            self._stopped.set()
            self._threads[0].join(_ANSWER_S)  # it must not write once the first process, and the store, may end
            self.pulse.ended = True
            said = self.pulse.beat().to_json()
            self._briefly(lambda: self._said.set(f"pulse/{self.pulse.rank}", said))

    def say_last(self, order: int) -> None:
        """Leave the leader's last order, for those who cannot hear it because another process is gone."""
        self.last_order = order
        self._briefly(lambda: self._said.set(_LAST_ORDER, str(order)))

    def read_last(self) -> int | None:
        """Return the last order if the leader leaves one within the time that it has to notice that a process is gone.

        None where the leader is the one that is gone.
        """

        def read() -> None:
            until = time.monotonic() + _NOTICE_S + 2 * self._every_s
            while self.last_order is None and time.monotonic() < until:
                self._take_last(self._said.get(_LAST_ORDER).decode())
                time.sleep(self._every_s / 10)

        if self.found is not None and self.found.rank != 0:
            self._briefly(read, _NOTICE_S + 2 * self._every_s + _ANSWER_S)
        return self.last_order

    def _take_last(self, said: str) -> None:
        if said and self.last_order is None:
            self.last_order = int(said)

    def wait_for_ends(self) -> None:
        """Wait for the others to have done their part too, but not for long: the store ends with the first process.

        Where one is lost, they only have to read who.
        """
        others_work = (self.found is None and not self.broken) or self.last_order is not None
        most_s = _ENDS_S if others_work else 2 * self._every_s
        until = time.monotonic() + most_s
        gone = None if self.found is None else self.found.rank
        keys = [f"pulse/{rank}" for rank in range(self._count) if rank != gone]

        def wait() -> None:
            while time.monotonic() < until:
                if all(Beat.from_json(text).ended for text in self._said.multi_get(keys)):
                    return
                time.sleep(_EVERY_S / 10)

        if self.pulse.rank == 0 and (others_work or gone != 0):
            self._briefly(wait, most_s)

    def fail(self, error: BaseException) -> None:
        """Leave word of why this process ends, for the others."""
        if not isinstance(error, RanksError):
            self._publish(Lost.found(self.pulse.beat(), self._count, f"failed: {printable(first_line(error), 500)}"))

    def wait_for_verdict(self, seconds: float) -> Lost | None:
        """Return who is lost, once it is known. Called by the main thread when a connection has ended."""
        self._leaving.set()
        self.broken = True
        self._decided.wait(seconds)
        return self.found

    def verdict(self, seconds: float) -> Lost | None:
        """Return who is lost, if that is known within so many seconds; sooner where all others give signs of life."""
        before, until = {beat.rank: beat.count for beat in self.beats()}, time.monotonic() + seconds
        while not self._decided.wait(self._every_s / 2) and time.monotonic() < until:
            others = [beat for beat in self.beats() if beat.rank != self.pulse.rank]
            if others and all(beat.ended or beat.count >= before.get(beat.rank, 0) + _ALIVE for beat in others):
                break
        return self.found

    def beats(self) -> tuple[Beat, ...]:
        """Return the last sign of life of each process, in their order."""
        return tuple(self._beats[rank] for rank in sorted(self._beats))

    @property
    def speaks(self) -> bool:
        """True if this process is to say who is lost: the first that is not lost itself."""
        return self.pulse.rank == (1 if self.found is not None and self.found.rank == 0 else 0)

    def _report(self) -> None:
        keys = [f"pulse/{rank}" for rank in range(self._count)]
        while not self._stopped.wait(self._every_s):
            try:
                self._store.set(keys[self.pulse.rank], self.pulse.beat().to_json())
                *texts, verdict, last = self._store.multi_get([*keys, _VERDICT, _LAST_ORDER])
            except Exception:  # the store is gone: the other thread notices that nothing comes
                return
            now = self._answered = time.monotonic()
            self._take_last(last.decode())
            for beat in map(Beat.from_json, texts):
                before = self._beats.get(beat.rank)
                if before is None or before.count != beat.count:
                    self._heard[beat.rank], self._beats[beat.rank] = now, beat
            if verdict and self.found is None:
                self._decide(Lost.from_json(verdict))
            self._pass_signals_on()

    def _pass_signals_on(self) -> None:
        """Send the leader's main thread what another process was told: to stop is the leader's order to give."""
        if self.pulse.rank == 0 and self.pulse.told is None:
            told = next((beat.told for beat in self.beats() if beat.rank and beat.told is not None), None)
            if told is not None:
                self.pulse.told = told
                os.kill(os.getpid(), signal.SIGTERM)

    def _look(self) -> None:
        looked = time.monotonic()
        while not self._stopped.wait(self._every_s) and self.found is None:
            missed_s, looked = time.monotonic() - looked - self._every_s, time.monotonic()
            if missed_s > 1.0:  # this process was stopped, or had no core: the others may not have been silent
                self.pulse.pardon(missed_s)
                self._answered += missed_s
                self._heard = {rank: heard + missed_s for rank, heard in dict(self._heard).items()}
            elif (found := self._judge()) is not None:
                self._publish(found)
        if self._stopped.is_set() or self.found is None:
            return
        # A main thread that has noticed says and saves what there is to; one that has not never may.
        if not self._leaving.wait(_NOTICE_S) or not self._stopped.wait(_LEAVE_S):
            self._leave(self.found)

    def _judge(self) -> Lost | None:
        now = time.monotonic()
        unanswered_s = now - self._answered
        if not self._beats:  # the first process may have stopped at once, and the store with it
            silent = self._own_store and self.pulse.rank and unanswered_s > self.pulse.hang_s
            return self._silent_leader() if silent else None
        if unanswered_s > 4 * self._every_s:  # of the others nothing is known, whatever they do
            if self._own_store and self.pulse.rank:
                leader = self._beats[0]
                silent_s = {0: now - self._heard[0]}
                return lost({0: leader}, silent_s, self._count, broken=self.broken, hang_s=self.pulse.hang_s)
            why = "the store of the launcher does not answer"
            return Lost(rank=None, of=self._count, why=why) if unanswered_s > 30 else None
        beats, heard = dict(self._beats), dict(self._heard)
        silent_s = {rank: now - heard.get(rank, now) for rank in beats}  # one may be heard of just now
        return lost(beats, silent_s, self._count, broken=self.broken, hang_s=self.pulse.hang_s)

    def _silent_leader(self) -> Lost:
        host = find_address()[0] or "its host"
        why = "has not answered since all processes met"
        return Lost(rank=0, of=self._count, why=why, host=host, device="unknown", step=0, phase="start")

    def _publish(self, found: Lost) -> None:
        """Make it what all processes have found, unless one of them was first."""

        def publish() -> None:
            nonlocal found
            said = self._said.compare_set(_VERDICT, "", json.dumps(asdict(found)))
            found = Lost.from_json(said) if said else found

        self._briefly(publish)
        self._decide(found)

    @staticmethod
    def _briefly(work: Callable[[], None], most_s: float = _ANSWER_S) -> None:
        """Do work with the store, which may be gone, or be stopped and never answer."""

        def tried() -> None:
            with suppress(Exception):
                work()

        thread = threading.Thread(target=tried, daemon=True)
        thread.start()
        thread.join(most_s)

    def _decide(self, found: Lost) -> None:
        self.found = self.found or found
        self._decided.set()

    def _leave(self, found: Lost) -> None:
        with suppress(Exception):
            self.on_loss(found)
        for leaving in self.leavings:
            with suppress(Exception):
                leaving()
        if self.last_order is not None:  # all was done before it was lost
            os._exit(0)
        if self.speaks:
            error = RanksError(str(found))
            print(f"\nerror: {error}\nhint: {error.hint}", file=sys.stderr, flush=True)
        os._exit(RanksError.exit_code)

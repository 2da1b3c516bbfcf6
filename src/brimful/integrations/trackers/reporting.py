"""Processes that send a run to trackers, as the process that trains sees them: begun, looked at, ended."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from brimful.core import atomic_files
from brimful.core.errors import BrimfulError, DataError, OutputError, listed, printable
from brimful.core.record_kinds import RUN, folder_of
from brimful.core.trackers import TrackerFailure, Trackers, tracker_names
from brimful.integrations.trackers.run_log import is_sending, read_sent, state_path

#: Seconds that a run which has ended waits for a tracker to take the rest.
_WAIT_S = 30.0
#: Program of a tracker's process: it finds packages where this one does.
_PROGRAM = (
    "import json, os, pathlib, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from brimful.integrations.trackers.sending import main; code = main(sys.argv[2], pathlib.Path(sys.argv[3])); "
    "sys.stdout.flush(); sys.stderr.flush(); os._exit(code)"  # all is sent: threads that are left may hang
)


class TrackerProcesses(Trackers):
    """A process for each tracker of `report_to`, begun with the run, with files in its folder `trackers/`.

    stage: told of those that are waited for at the end.
    """

    def __init__(self, report_to: str, *, stage: Callable[[str], None] = lambda _: None) -> None:
        self._names, self._stage = tracker_names(report_to), stage
        self._folder: Path | None = None
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._failures: list[TrackerFailure] = []

    def begin(self, run: Path) -> None:
        if self._folder is not None:
            return
        self._folder = run.absolute()
        for name in self._names:
            try:
                atomic_files.make_folder(self._folder / "trackers")
                self._processes[name] = _start(name, self._folder)
            except (OSError, BrimfulError) as error:
                self._failures.append(TrackerFailure(tracker=name, why=printable(str(error), 300)))

    def failures(self) -> Sequence[TrackerFailure]:
        for name, process in list(self._processes.items()):
            if process.poll() is not None:
                self._ended(name)
        found, self._failures = self._failures, []
        return found

    def end(self, *, wait_s: float | None = None) -> Sequence[TrackerFailure]:
        for process in self._processes.values():
            assert process.stdin is not None
            with suppress(OSError):  # it sends the rest, and ends; a forked process may hold the pipe open
                process.stdin.write(b"\n")
                process.stdin.close()
        limit_s = _WAIT_S if wait_s is None else wait_s
        until, said = time.monotonic() + limit_s, False
        while self._processes and time.monotonic() < until:
            for name, process in list(self._processes.items()):
                with suppress(subprocess.TimeoutExpired):
                    process.wait(0.5)
                    self._ended(name)
            if self._processes and not said:
                self._stage(f"sending the rest to {listed(list(self._processes))}")
                said = True
        for name, process in list(self._processes.items()):
            process.kill()
            process.wait()
            del self._processes[name]
            why = f"it did not take the rest within {limit_s:.0f} s"
            self._failures.append(TrackerFailure(tracker=name, why=why))
        return self.failures()

    def pages(self) -> dict[str, str]:
        """Addresses of the run on the web, by tracker."""
        if self._folder is None:
            return {}
        urls = {name: read_sent(state_path(self._folder, name)).url for name in self._names}
        return {name: url for name, url in urls.items() if url is not None}

    def _ended(self, name: str) -> None:
        process = self._processes.pop(name)
        if process.stdin is not None:
            process.stdin.close()
        if process.returncode != 0:
            assert self._folder is not None
            said = read_sent(state_path(self._folder, name)).failure
            why = said or f"its process ended with code {process.returncode}"
            self._failures.append(TrackerFailure(tracker=name, why=why))


def _start(name: str, folder: Path) -> subprocess.Popen[bytes]:
    """Start the process of a tracker, in a session of its own: Ctrl-C is for the training, which has things to say."""
    command = [sys.executable, "-P", "-c", _PROGRAM, json.dumps(sys.path), name, str(folder)]
    with (folder / "trackers" / f"{name}.log").open("ab") as log:
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True)


def send_run(run: str | Path, report_to: str) -> dict[str, str | None]:
    """Send a run's folder, as far as it was not sent, to each tracker of `report_to`, and wait as long as it takes.

    Returns its address on the web by tracker, None where it has none.

    Raises: DataError where there is no run, and where another process sends it to one of them; OutputError for trackers
    that failed, after all others are done.
    """
    folder = folder_of(Path(run).expanduser())
    if not (folder / RUN).is_file():
        raise DataError("there is no record of a run", file=str(run), hint="--report-to wants the folder of a run")
    if busy := [name for name in tracker_names(report_to) if is_sending(state_path(folder, name))]:
        said = f"the run is being sent to {listed(busy)} by another process already"
        own = "the run is under way and sends its log itself: nothing is left to do"
        hint = own if atomic_files.is_locked(folder) else "give it again once that process has ended"
        raise DataError(said, file=str(run), hint=hint)
    processes = TrackerProcesses(report_to)
    processes.begin(folder)
    if failures := processes.end(wait_s=float("inf")):
        said = "; ".join(f"{each.tracker}: {each.why}" for each in failures)
        logs = listed([str(folder / "trackers" / f"{each.tracker}.log") for each in failures])
        raise OutputError(f"not sent to {said}", hint=f"see {logs}")
    pages = processes.pages()
    return {name: pages.get(name) for name in tracker_names(report_to)}

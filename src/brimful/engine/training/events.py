"""The log of a run: events.jsonl, one line of strict JSON per event, only ever appended to.

Each line is given to the system at once, so a kill loses nothing; `position` also puts the log on the disk. Numbers
that JSON does not have are the texts "nan", "inf" and "-inf", so `float(event["loss"])` holds for every loss.

    with EventLog(folder / "events.jsonl", report=print) as log:
        log.write("step", step=1, loss=0.7)
        position = log.position()  # into the checkpoint; on resume: log.cut(position)

A full disk never stops a training: events that cannot be written are counted in `lost`, reported once, and written
down as an event `events_lost` as soon as there is room again.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from brimful.core import atomic_files
from brimful.core.errors import BrimfulError

_BLOCK_BYTES = 1 << 16


class EventLog:
    """An open log. Opening repairs a torn last line. One writer, one thread.

    lost: events that could not be written since it was opened. report: called once with the first reason. heard: called
    after each event that was written, on the thread that wrote it.
    Raises: DiskFullError or OutputError if the file cannot be opened.
    """

    def __init__(self, path: Path, *, report: Callable[[str], None]) -> None:
        self.path, self.lost = path, 0
        self._report, self._reported = report, False
        self.heard: Callable[[], None] | None = None
        self._unrecorded = 0  # lost events that no events_lost line tells of yet
        self._torn = False  # there may be a part of a line after self._end
        with atomic_files.file_errors(path):
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
            self._end = os.fstat(self._descriptor).st_size
        atomic_files.sync(path.parent)
        self.cut(self._end)

    def write(self, kind: str, **fields: Any) -> None:
        """Append one event: {"kind": kind, **fields}. A disk that is full or failing loses it and goes on.

        Raises: TypeError or ValueError for fields that are not JSON.
        """
        data = _line({"kind": kind, **fields})
        if self._unrecorded:
            data = _line({"kind": "events_lost", "count": self._unrecorded}) + data
        try:
            if self._torn:
                os.ftruncate(self._descriptor, self._end)
            self._torn = True
            self._end += atomic_files.write_all(self._descriptor, data)
            self._torn, self._unrecorded = False, 0
        except OSError as error:
            self.lost += 1
            self._unrecorded += 1
            self._say(f"cannot write {atomic_files.path_text(self.path)}: {error.strerror}; going on without the log")
        if self.heard is not None:
            self.heard()

    def position(self) -> int:
        """Bytes of whole lines so far, all of them on the disk: stored in a checkpoint, given to `cut` on resume."""
        try:
            atomic_files.sync(self.path)
        except BrimfulError as error:
            self._say(f"{error}; going on")
        return self._end

    def cut(self, position: int) -> None:
        """Remove what was logged after `position`, or after the last whole line before it. A shorter log is reported.

        Raises: DiskFullError or OutputError if the file cannot be changed.
        """
        with atomic_files.file_errors(self.path):
            num_bytes = os.fstat(self._descriptor).st_size
            end = _end_of_line(self._descriptor, min(position, num_bytes))
            os.ftruncate(self._descriptor, end)
        if num_bytes < position:
            self._report(
                f"{atomic_files.path_text(self.path)} has lost {position - num_bytes} bytes; they are not in the log"
            )
        atomic_files.sync(self.path)
        self._end, self._torn = end, False

    def close(self) -> None:
        """Put the log on the disk and close it; nothing if it is closed."""
        if self._descriptor < 0:
            return
        self.position()
        # The descriptor may be given to another file from here on: nothing must be written to it through this log.
        descriptor, self._descriptor = self._descriptor, -1
        try:
            os.close(descriptor)
        except OSError as error:  # a network file system may tell of a full disk here
            self._say(f"cannot write {atomic_files.path_text(self.path)}: {error.strerror}; going on without the log")

    def __enter__(self) -> EventLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _say(self, message: str) -> None:
        if not self._reported:
            self._reported = True
            self._report(message)


def _line(event: Mapping[str, Any]) -> bytes:
    # ASCII, so that no text can hold a line break of any script, nor half a surrogate pair that cannot be encoded.
    return json.dumps(_strict(event), allow_nan=False).encode("ascii") + b"\n"


def _strict(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(float(value))
    if isinstance(value, Mapping):
        return {key: _strict(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_strict(item) for item in value]
    return value


def _end_of_line(descriptor: int, end: int) -> int:
    """Offset behind the last line feed of the first `end` bytes; 0 if there is none."""
    while end > 0:
        start = max(0, end - _BLOCK_BYTES)
        found = os.pread(descriptor, end - start, start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        end = start
    return 0

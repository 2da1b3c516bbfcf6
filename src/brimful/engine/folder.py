"""The folder of a run: its names, its record, and who may write into it.

run.json        the record          model/         the classifier in Hugging Face form
events.jsonl    one line an event   checkpoints/   complete checkpoints
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from types import TracebackType

from brimful.core import durable
from brimful.core.errors import OutputError, printable
from brimful.core.options import TrainOptions, differences
from brimful.core.records import Run, from_json, to_json
from brimful.core.units import bytes_text

#: Everything a run may leave in its folder before run.json is there: no reason to refuse the folder.
_OURS = ("run.json", "events.jsonl", "model", "checkpoints", ".lock", "tensorboard")


class RunFolder:
    """The folder of one run, locked against a second writer while it is open."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.record = path / "run.json"
        self.events = path / "events.jsonl"
        self.model = path / "model"
        self.checkpoints = path / "checkpoints"
        self._lock = -1

    def __enter__(self) -> RunFolder:
        with durable.file_errors(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise OutputError(
                f"another process is writing into {durable.path_text(self.path)}",
                hint="wait for it, or use another --output",
            ) from None
        durable.clean_temporaries(self.path)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._lock)

    def read(self) -> Run | None:
        """The record of the run in the folder, None if there is none yet.

        Raises: OutputError for a record that cannot be read.
        """
        try:
            return from_json(Run, self.record.read_text("utf-8"))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise OutputError(
                f"{durable.path_text(self.record)} is not the record of a run: {printable(error)}",
                hint="use another --output, or remove the folder",
            ) from error

    def write(self, run: Run) -> None:
        """Makes `run` the record, whole or not at all."""
        durable.write_bytes(self.record, to_json(run).encode())


def check_free(path: Path, *, resume: bool) -> None:
    """That a new run may begin in `path`, before anything is read or written.

    Raises: OutputError for a folder with another run, or with anything else, in it.
    """
    if not path.exists():
        return
    if not path.is_dir():
        raise OutputError(f"{durable.path_text(path)} is a file", hint="--output is a folder")
    if resume:
        return
    if (path / "run.json").exists():
        raise OutputError(
            f"{durable.path_text(path)} already holds a run", hint="go on with --resume, or use another --output"
        )
    strange = [
        name
        for name in sorted(entry.name for entry in path.iterdir())
        if name not in _OURS and not name.startswith((durable.TEMPORARY, durable.REPLACED))
    ]
    if strange:
        raise OutputError(
            f"{durable.path_text(path)} is not empty: it holds {printable(strange[0])}", hint="use a new folder"
        )


def check_same(run: Run, options: TrainOptions, data_fingerprint: str) -> None:
    """That `options` and the data are those the run was started with.

    Raises: OutputError naming what differs.
    """
    changed = differences(dict(run.options), options)
    if data_fingerprint != run.data_fingerprint:
        changed.append("the data have changed")
    if changed:
        raise OutputError(
            f"{printable(options.output, 200)} cannot be resumed: {'; '.join(changed)}",
            hint="resume with what the run was started with, or start another one in a new folder",
        )


def check_space(path: Path, num_parameters: int, optimizer_bytes: int, num_checkpoints: int) -> None:
    """That the checkpoints and the model of a run will fit on the disk of `path`.

    Raises: OutputError with both numbers.
    """
    weights = 4 * num_parameters
    needed = weights + num_checkpoints * (weights + optimizer_bytes) + (64 << 20)
    existing = next(p for p in (path, *path.absolute().parents) if p.exists())
    free = durable.free_bytes(existing)
    if free is not None and free < needed:
        raise OutputError(
            f"{durable.path_text(path)}: the run needs about {bytes_text(needed)} here, {bytes_text(free)} are free",
            hint="free some space, use another --output, or lower --save-total-limit",
        )

"""The folder of a run: its names, its record, and who may write into it.

run.json        the record          model/         the classifier in Hugging Face form
events.jsonl    one line an event   checkpoints/   complete checkpoints
"""

from __future__ import annotations

import itertools
import os
from contextlib import suppress
from pathlib import Path

from brimful.core import atomic_files
from brimful.core.errors import DiskFullError, OutputError, printable
from brimful.core.options.train import TrainOptions
from brimful.core.records import Run, from_json, to_json
from brimful.core.units import bytes_text

#: What a run may leave in its folder without a run.json: no reason to refuse the folder. A model is: it comes after
#: run.json, so it is somebody else's, perhaps the one to be trained.
_OURS = ("events.jsonl", "checkpoints", atomic_files.LOCK, "tensorboard", "trackers", "wandb")


class RunFolder:
    """The folder of one run, locked against a second writer while it is open."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.record = path / "run.json"
        self.events = path / "events.jsonl"
        self.model = path / "model"
        self.checkpoints = path / "checkpoints"
        self._lock, self._made = -1, False

    def __enter__(self) -> RunFolder:
        with atomic_files.file_errors(self.path):
            self._made = not self.path.exists()
            self.path.mkdir(parents=True, exist_ok=True)
        self._lock = atomic_files.lock_folder(self.path)
        try:
            atomic_files.clean_temporaries(self.path)
        except BaseException:
            os.close(self._lock)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            if self._made and [each.name for each in self.path.iterdir()] == [atomic_files.LOCK]:  # nothing was written
                (self.path / atomic_files.LOCK).unlink()
                self.path.rmdir()
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
                f"{atomic_files.path_text(self.record)} is not the record of a run: {printable(error)}",
                hint="use another --output, or remove the folder",
            ) from error

    def write(self, run: Run) -> None:
        """Makes `run` the record, whole or not at all."""
        atomic_files.write_bytes(self.record, to_json(run).encode())

    def leave_free(self) -> None:
        """Remove the record of a run that has saved nothing, so that another one may begin here."""
        if not (self.model.exists() or any(self.checkpoints.glob("*"))):
            self.record.unlink(missing_ok=True)


def run_in(path: Path) -> Run:
    """The record of the run in the folder `path`. Raises: OutputError if there is none."""
    run = RunFolder(path).read()
    if run is None:
        is_below = (path.parent / "run.json").is_file()
        hint = f"did you mean {atomic_files.path_text(path.parent)}?" if is_below else None
        raise OutputError(
            f"{atomic_files.path_text(path)} holds no run", hint=hint or "give the folder that --output of train named"
        )
    return run


def check_free(path: Path, *, resume: bool) -> None:
    """Check that a new run may begin in `path`, before anything is read or written.

    Raises: OutputError for a folder with another run, or with anything else, in it.
    """
    with atomic_files.file_errors(path):
        if not path.exists():
            return
    if not path.is_dir():
        raise OutputError(f"{atomic_files.path_text(path)} is a file", hint="--output is a folder")
    if (path / "run.json").exists():
        if resume:
            return
        raise OutputError(
            f"{atomic_files.path_text(path)} already holds a run", hint="go on with --resume, or use another --output"
        )
    strange = [
        name
        for name in sorted(entry.name for entry in path.iterdir())
        if name not in _OURS and not name.startswith((atomic_files.TEMPORARY, atomic_files.REPLACED))
    ]
    if strange:
        raise OutputError(
            f"{atomic_files.path_text(path)} is not empty: it holds {printable(strange[0])}", hint="use a new folder"
        )


def differences_of_machine(before: Run, now: Run) -> list[str]:
    """Differences from where the run began that change rounding alone: versions, processors, levers."""

    def facts(run: Run) -> dict[str, object]:
        machine = run.machine
        gpus = ", ".join(gpu.name for gpu in machine.gpus) or None
        levers = {lever.name: lever.value for lever in run.recipe.levers if lever.arithmetic != "training"}
        return {**machine.versions, "CPU": machine.cpu, "CPU cores": machine.num_cores, "GPU": gpus, **levers}

    was, is_now = facts(before), facts(now)
    absent = {"processes": "1"}
    told = [(n, *(facts_of.get(n) or absent.get(n, "none") for facts_of in (was, is_now))) for n in {**is_now, **was}]
    return [f"{name} was {before}, is {after}" for name, before, after in told if before != after]


def bytes_to_save(options: TrainOptions, num_parameters: int, state_bytes: int) -> int:
    """Most bytes of a run's checkpoints and model at a time, with a little for its records.

    state_bytes: of the optimizer's states of a parameter. An adapter's are few, and so are not counted.
    """
    # Besides those kept, the one being written, and the best one where it is looked for.
    num_checkpoints = options.save_total_limit + 1 + (options.metric_for_best_model is not None)
    saved = num_parameters if options.peft is None or options.merge else 0
    trained = num_parameters if options.peft is None and options.freeze is None else 0
    return 4 * saved + num_checkpoints * (4 + state_bytes) * trained + (64 << 20)


def check_space(path: Path, needed: int) -> None:
    """Check that the disk of `path`, which may hold some of a run already, has room for `needed` bytes of it.

    Raises: OutputError with both numbers.
    """
    free, held = atomic_files.free_bytes(path), _saved_bytes(path)
    if free is not None and free + held < needed:
        besides = f" besides the {bytes_text(held)} of its checkpoints" if held else ""
        raise OutputError(
            f"{atomic_files.path_text(path)}: the run needs about {bytes_text(needed)} here, "
            f"{bytes_text(free)} are free{besides}",
            hint="free some space, use another --output, or lower --save-total-limit",
        )


def leave_room(path: Path, needed: int, num_bytes: int) -> None:
    """Check that `num_bytes` more, which a run can do without, leave room for the `needed` bytes of what it must save.

    Raises: DiskFullError with the bytes that are free.
    """
    free = atomic_files.free_bytes(path)
    if free is not None and free + _saved_bytes(path) - num_bytes < needed:
        said = f"{bytes_text(free)} are free in {atomic_files.path_text(path)}, where checkpoints and model need room"
        raise DiskFullError(said, hint="free some space, or lower --save-total-limit")


def _saved_bytes(path: Path) -> int:
    """Bytes of the checkpoints and the model that are in a run's folder."""
    found = 0
    for folder, _, names in itertools.chain(os.walk(path / "checkpoints"), os.walk(path / "model")):
        for name in names:
            with suppress(OSError):  # a file or a folder that goes away meanwhile counts for nothing
                found += Path(folder, name).lstat().st_blocks * 512
    return found

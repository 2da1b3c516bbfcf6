"""The folder of a bench: its rows as they are finished, so that a later call goes on, and what is made of them."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Set
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from brimful.core import atomic_files
from brimful.core.bench import RECOMMENDED, ROWS, SETUP, BenchRow, Row, Steps, Workload
from brimful.core.errors import InputError, OptionError, OutputError, printable
from brimful.core.manifest import MANIFEST
from brimful.core.options.bench import BenchOptions
from brimful.core.options.checks import flag
from brimful.core.records import from_json, json_text, to_json

_DATA = "data.parquet"
#: All that a bench may leave before it has a record of its work.
_BEGINNING = frozenset({ROWS, _DATA, atomic_files.LOCK})
#: Files of other commands, by which their folders are known.
_OTHERS = {
    "run.json": "a run of train",
    MANIFEST: "results of classify",
    "evaluation.json": "an evaluation",
    "config.json": "a model",
}
#: Options that change no row: which rows there are, and what is printed.
_FREE = {"output", "rows", "budget_s", "quiet", "json", "steps", "repeats", "warmup_steps"}
#: Facts of the work that make rows comparable with those of another call.
_SAME = ("device", "data_fingerprint", "parameters", "machine")


class BenchFolder:
    """A bench's folder. Within `locked`, no other process writes into it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        #: Where processes of rows have their folders: what a kill leaves of them, the next call removes.
        self.processes = path / ROWS
        #: Whether the folder stays where the call cannot go on: its work is wanted, and nothing of it was refused.
        self.begun = False

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Make the folder and keep others out. Raises: OutputError, OptionError for a folder of something else."""
        self._check()
        with atomic_files.file_errors(self.path):
            before = {each.name for each in self.path.iterdir()} if self.path.is_dir() else set()
            made = [each for each in (self.path, *self.path.parents) if not each.exists()]
        atomic_files.make_folder(self.path)
        lock = atomic_files.lock_folder(self.path)
        try:
            atomic_files.make_folder(self.path / ROWS)
            atomic_files.clean_temporaries(self.path / ROWS)
            yield
        except InputError:
            if not self.begun and not (self.path / SETUP).exists():
                self._leave(before, made)
            raise
        finally:
            os.close(lock)

    def _check(self) -> None:
        """Raises: OptionError for a file, and for a folder with anything but a bench in it."""
        if not self.path.exists():
            return
        shown = printable(self.path)
        if not self.path.is_dir():
            raise OptionError(f"--output {shown} is a file", hint="give the name of a folder")
        with atomic_files.file_errors(self.path):
            names = {each.name for each in self.path.iterdir()}
        other = next((what for name, what in _OTHERS.items() if name in names), None)
        if other is not None:
            raise OptionError(f"--output {shown} holds {other}: a bench has its own folder", hint="give a new folder")
        strange = {name for name in names - _BEGINNING if not name.startswith(atomic_files.TEMPORARY)}
        if strange and SETUP not in names:
            raise OptionError(f"--output {shown} has other files in it, and no bench", hint="give a new folder")

    def _leave(self, before: Set[str], made: Iterable[Path]) -> None:
        """Remove what this call made. before: names that were there; made: folders that were not, from within."""
        for name in _BEGINNING - before:
            atomic_files.remove(self.path / name)
        with suppress(OSError):  # somebody else has put something there
            for folder in made:
                folder.rmdir()

    def agree(self, options: BenchOptions, workload: Workload, steps: Steps) -> tuple[Steps, Workload]:
        """Steps and rates of this bench: those of its first call, which are kept. Raises: OptionError for another work.

        Steps that are asked for and differ are another work, too.
        """
        path, asked = self.path / SETUP, self._asked(options)
        if not path.exists():
            setup = {"options": asked, "workload": dataclasses.asdict(workload), "steps": dataclasses.asdict(steps)}
            atomic_files.write_bytes(path, json_text(setup, indent=2).encode())
            return steps, workload
        try:
            found = json.loads(path.read_text("utf-8"))
            before = from_json(Workload, json.dumps(found["workload"]))
            kept, was = Steps(**found["steps"]), found["options"]
        except (ValueError, KeyError, TypeError, OSError) as error:
            said = f"{atomic_files.path_text(path)} is no beginning of a bench"
            raise OutputError(said, hint="give another --output") from error
        was = {name: getattr(BenchOptions, name, None) for name in asked} | was  # some may be newer than the folder
        differing = [f"{flag(n)} was {was.get(n)}, is {value}" for n, value in asked.items() if was.get(n) != value]
        differing += [f"the {n} differs" for n in _SAME if getattr(before, n) != getattr(workload, n)]
        hint, threads = _OTHER_OUTPUT, (before.num_threads, workload.num_threads)
        if threads[0] is not None and threads[0] != threads[1]:  # a record of a GPU may be older than the number
            differing.append(f"the number of threads was {threads[0]}, is {threads[1]}")
            hint = f"set OMP_NUM_THREADS={threads[0]}, or {_OTHER_OUTPUT}"
        given = (options.steps, options.repeats, options.warmup_steps)
        for value, now, name in zip(given, (kept.block, kept.repeats, kept.warm_up), _STEP_FLAGS, strict=True):
            if value is not None and value != now:
                differing.append(f"{name} was {now}, is {value}")
        if differing:
            said = f"{printable(self.path)} is a bench of other work: {'; '.join(differing)}"
            raise OptionError(said, hint=hint)
        before = _better_rates(before, workload)
        setup = {**found, "workload": dataclasses.asdict(before)}
        atomic_files.write_bytes(path, json_text(setup, indent=2).encode())
        return kept, before

    @staticmethod
    def _asked(options: BenchOptions) -> dict[str, Any]:
        return {name: value for name, value in dataclasses.asdict(options).items() if name not in _FREE}

    def row(self, row: Row) -> BenchRow | None:
        """The row of these settings as it was measured; None if it was not."""
        found = _read(self._file(row))  # what is not there, or not whole, is measured again
        return None if found is None else dataclasses.replace(found, row=row)

    def others(self, rows: Iterable[Row]) -> list[BenchRow]:
        """Rows that were measured by calls for other rows than these, in the order in which they were."""
        keys = {row.key for row in rows} | {f"brimful: {RECOMMENDED}"}
        files = sorted((self.path / ROWS).glob("*.json"), key=lambda file: file.stat().st_mtime_ns)
        whole = (each for each in map(_read, files) if each is not None and each.row.key not in keys)
        return list({each.row.key: each for each in whole}.values())

    def broken(self) -> list[str]:
        """Names of files of rows that are not whole."""
        return sorted(f"{ROWS}/{file.name}" for file in (self.path / ROWS).glob("*.json") if _read(file) is None)

    def num_measured(self) -> int:
        """Number of rows with figures, the recommended one left out."""
        return sum(each.measured is not None for each in self.others(()))

    def keep(self, found: BenchRow) -> None:
        """Write a finished row."""
        atomic_files.write_bytes(self._file(found.row), to_json(found).encode())

    def save_rows(self, table: Any) -> None:
        """Write rows that are in memory where processes read them. Raises: OptionError for others than the bench's."""
        file, before = self.path / _DATA, None
        if (self.path / SETUP).exists() and file.is_file():
            before = file.read_bytes()
        if before is not None and before != _parquet(table):
            said = f"{printable(self.path)} is a bench of other work: the rows in memory differ"
            raise OptionError(said, hint=_OTHER_OUTPUT)
        save_rows(self.path, table)

    def write(self, name: str, text: str) -> Path:
        """Write a file made of the rows; its path."""
        atomic_files.write_bytes(self.path / name, text.encode())
        return self.path / name

    def _file(self, row: Row) -> Path:
        told = json.dumps([row.key, dict(row.settings)], sort_keys=True)
        return self.path / ROWS / f"{hashlib.sha256(told.encode()).hexdigest()[:16]}.json"


_OTHER_OUTPUT = "give another --output, or remove this one"
_STEP_FLAGS = ("--steps", "--repeats", "--warmup-steps")


def _read(file: Path) -> BenchRow | None:
    """A row's file; None where it is not there, or not whole."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        return from_json(BenchRow, file.read_text("utf-8"))
    return None


def _better_rates(before: Workload, now: Workload) -> Workload:
    """The work with the higher of two rates of each precision: others may have been busy when one was measured."""
    higher = {name for name, rate in now.rates.items() if rate > before.rates.get(name, 0.0)}
    waiting = {name: each for name, each in before.rates_waiting.items() if name not in higher}
    waiting |= {name: each for name, each in now.rates_waiting.items() if name in higher}
    rates = {**before.rates, **{name: now.rates[name] for name in now.rates if name in higher}}
    return dataclasses.replace(before, rates=rates, rates_waiting=waiting)


def rows_file(folder: Path) -> Path:
    """The file of rows that are in memory."""
    return folder / _DATA


def save_rows(folder: Path, table: Any) -> Path:
    """Write rows that are in memory, a table of Arrow, where the processes of a bench read them; the file."""
    atomic_files.write_bytes(rows_file(folder), _parquet(table))
    return rows_file(folder)


def _parquet(table: Any) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    sink = pa.BufferOutputStream()
    pq.write_table(table, sink)
    return bytes(sink.getvalue().to_pybytes())

"""The folder of a bench: its rows as they are finished, so that a later call goes on, and what is made of them."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence, Set
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from brimful.benchmarking.rows import apart, words_of
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
        #: Words of `--rows` of earlier calls.
        self.words: list[str] = []
        self._read: dict[Path, tuple[int, BenchRow | None]] = {}

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
            self._write_setup(asked, workload, steps, words_of(options.rows))
            return steps, workload
        try:
            found = json.loads(path.read_text("utf-8"))
            before = from_json(Workload, json.dumps(found["workload"]))
            kept, was = Steps(**found["steps"]), found["options"]
            self.words = [str(word) for word in found.get("rows", ())]
        except (ValueError, KeyError, TypeError, OSError) as error:
            said = f"{atomic_files.path_text(path)} is no beginning of a bench"
            raise OutputError(said, hint="give another --output") from error
        was = {name: getattr(BenchOptions, name, None) for name in asked} | was  # some may be newer than the folder
        differing = [f"{flag(n)} was {was.get(n)}, is {value}" for n, value in asked.items() if was.get(n) != value]
        differing += [f"the {n} differs" for n in _SAME if getattr(before, n) != getattr(workload, n)]
        hint, threads = _OTHER_OUTPUT, (before.num_threads, workload.num_threads)
        if threads[0] is not None and threads[0] != threads[1] and not workload.on_gpu:  # there they hardly matter
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
        self._write_setup(was, before, kept, list(dict.fromkeys([*self.words, *words_of(options.rows)])))
        return kept, before

    def _write_setup(self, options: dict[str, Any], workload: Workload, steps: Steps, words: list[str]) -> None:
        setup = {"options": options, "workload": dataclasses.asdict(workload), "steps": dataclasses.asdict(steps)}
        atomic_files.write_bytes(self.path / SETUP, json_text({**setup, "rows": words}, indent=2).encode())

    @staticmethod
    def _asked(options: BenchOptions) -> dict[str, Any]:
        return {name: value for name, value in dataclasses.asdict(options).items() if name not in _FREE}

    def row(self, row: Row) -> BenchRow | None:
        """The row of these settings as it was measured; None if it was not."""
        found = self._row_in(self._file(row))  # what is not there, or not whole, is measured again
        return None if found is None else dataclasses.replace(found, row=row)

    def others(self, rows: Sequence[Row]) -> list[BenchRow]:
        """Rows that calls for other rows than these have begun, in the order in which they ended. Where another row has
        the name of one, its precision is added, and rows are compared with what they were compared with."""
        known = [each for _, each in self._known() if each.row.name != RECOMMENDED]
        asked, identities = {row.identity: row.key for row in rows}, dict[str, set[str]]()
        for each in known:
            identities.setdefault(each.row.key, set()).add(each.row.identity)
        found = {each.row.identity: each for each in known if each.row.identity not in asked}
        named = apart(rows, [dataclasses.replace(each.row, base=None) for each in found.values()])
        keys = asked | {row.identity: row.key for row in named}

        def base(key: str | None) -> str | None:
            same = identities.get(key or "", set())  # several where earlier calls had two rows of one name
            return keys[next(iter(same))] if len(same) == 1 else None if same else key

        return [
            dataclasses.replace(each, row=dataclasses.replace(row, base=base(each.row.base)))
            for each, row in zip(found.values(), named, strict=True)
        ]

    def _known(self) -> list[tuple[Path, BenchRow]]:
        """Whole files of rows, the oldest first."""
        files = sorted((self.path / ROWS).glob("*.json"), key=lambda file: file.stat().st_mtime_ns)
        return [(file, found) for file in files if (found := self._row_in(file)) is not None]

    def _row_in(self, file: Path) -> BenchRow | None:
        """A row's file, read once as long as it stays as it is; None where it is not there, or not whole."""
        with suppress(OSError, ValueError, KeyError, TypeError):
            now = file.stat().st_mtime_ns
            if self._read.get(file, (0, None))[0] != now:
                self._read[file] = now, None
                self._read[file] = now, from_json(BenchRow, file.read_text("utf-8"))
            return self._read[file][1]
        return None

    def broken(self) -> list[str]:
        """Names of files of rows that are not whole."""
        return sorted(f"{ROWS}/{file.name}" for file in (self.path / ROWS).glob("*.json") if self._row_in(file) is None)

    def num_measured(self) -> int:
        """Number of rows with figures, the recommended one left out."""
        return sum(each.measured is not None for each in self.others(()))

    def keep(self, found: BenchRow) -> None:
        """Write a finished row."""
        file = self._file(found.row)
        atomic_files.write_bytes(file, to_json(found).encode())
        self._read.pop(file, None)

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
        """The file of a row, by its name and settings, or of the same settings that had another name."""
        told = json.dumps([row.key, dict(row.settings)], sort_keys=True)
        file = self.path / ROWS / f"{hashlib.sha256(told.encode()).hexdigest()[:16]}.json"
        if file.exists():
            return file
        return next((other for other, each in self._known() if each.row.identity == row.identity), file)


_OTHER_OUTPUT = "give another --output, or remove this one"
_STEP_FLAGS = ("--steps", "--repeats", "--warmup-steps")


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

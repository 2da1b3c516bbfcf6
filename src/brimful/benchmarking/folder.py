"""The folder of a bench: its rows as they are finished, so that a later call goes on, and what is made of them."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from brimful.core import atomic_files
from brimful.core.bench import RECOMMENDED, RESULTS, ROWS, SETUP, BenchRow, Row, Steps, Workload
from brimful.core.errors import OptionError, OutputError, printable
from brimful.core.options.bench import BenchOptions
from brimful.core.options.checks import flag
from brimful.core.records import from_json, json_text, to_json

_DATA = "data.parquet"
#: Options that change no row: which rows there are, and what is printed.
_FREE = {"output", "rows", "budget_s", "quiet", "json", "steps", "repeats", "warmup_steps"}
#: Facts of the work that make rows comparable with those of another call.
_SAME = ("device", "data_fingerprint", "parameters", "machine")


class BenchFolder:
    """A bench's folder. Within `locked`, no other process writes into it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Make the folder and keep others out. Raises: OutputError, OptionError for a folder of something else."""
        if self.path.exists() and not self.path.is_dir():
            raise OptionError(f"--output {printable(self.path)} is a file", hint="give the name of a folder")
        known = {SETUP, ROWS, _DATA, atomic_files.LOCK, RESULTS}
        if self.path.is_dir() and (names := {each.name for each in self.path.iterdir()}) and not names & known:
            said = f"--output {printable(self.path)} has other files in it, and no bench"
            raise OptionError(said, hint="give a new folder")
        atomic_files.make_folder(self.path / ROWS)
        lock = atomic_files.lock_folder(self.path)
        try:
            atomic_files.clean_temporaries(self.path / ROWS)
            yield
        finally:
            os.close(lock)

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
        given = (options.steps, options.repeats, options.warmup_steps)
        for value, now, name in zip(given, (kept.block, kept.repeats, kept.warm_up), _STEP_FLAGS, strict=True):
            if value is not None and value != now:
                differing.append(f"{name} was {now}, is {value}")
        if differing:
            said = f"{printable(self.path)} is a bench of other work: {'; '.join(differing)}"
            raise OptionError(said, hint="give another --output, or remove this one")
        return kept, before

    @staticmethod
    def _asked(options: BenchOptions) -> dict[str, Any]:
        return {name: value for name, value in dataclasses.asdict(options).items() if name not in _FREE}

    def row(self, row: Row) -> BenchRow | None:
        """The row of these settings as it was measured; None if it was not."""
        with suppress(OSError, ValueError, KeyError, TypeError):  # not there, or not whole: measured again
            found = from_json(BenchRow, self._file(row).read_text("utf-8"))
            return dataclasses.replace(found, row=row)
        return None

    def others(self, rows: Iterable[Row]) -> list[BenchRow]:
        """Rows that were measured by calls for other rows than these, in the order in which they were."""
        keys = {row.key for row in rows} | {f"brimful: {RECOMMENDED}"}
        files = sorted((self.path / ROWS).glob("*.json"), key=lambda file: file.stat().st_mtime_ns)
        found: dict[str, BenchRow] = {}
        for file in files:
            with suppress(OSError, ValueError, KeyError, TypeError):  # not whole
                each = from_json(BenchRow, file.read_text("utf-8"))
                if each.row.key not in keys:
                    found[each.row.key] = each
        return list(found.values())

    def keep(self, found: BenchRow) -> None:
        """Write a finished row."""
        atomic_files.write_bytes(self._file(found.row), to_json(found).encode())

    def write(self, name: str, text: str) -> Path:
        """Write a file made of the rows; its path."""
        atomic_files.write_bytes(self.path / name, text.encode())
        return self.path / name

    def _file(self, row: Row) -> Path:
        told = json.dumps([row.key, dict(row.settings)], sort_keys=True)
        return self.path / ROWS / f"{hashlib.sha256(told.encode()).hexdigest()[:16]}.json"


_STEP_FLAGS = ("--steps", "--repeats", "--warmup-steps")


def save_rows(folder: Path, table: Any) -> Path:
    """Write rows that are in memory, a table of Arrow, where the processes of a bench read them; the file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    sink = pa.BufferOutputStream()
    pq.write_table(table, sink)
    atomic_files.write_bytes(folder / _DATA, sink.getvalue().to_pybytes())
    return folder / _DATA

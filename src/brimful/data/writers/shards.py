"""The results of a classification on their way to the disk: whole or not at all, gone on with after a kill.

One file:                                          A folder:
    results.parquet.parts/   while it runs             results/
        _manifest.json                                     _manifest.json
        .wal-000000000000.arrow, ...                   part-00000.parquet, ...
        .tmp-results.parquet                               .wal-000004000000.arrow, .tmp-part-00004.parquet
    results.parquet, results.parquet.manifest.json     and no more than the first two kinds in the end

Rows are appended to a log and to the file of results, a window at a time. What the manifest names is on the disk. A
run that is resumed makes the unfinished file of results once more from the log, and so each is made of the same
windows in the same order as if nothing had happened: its bytes are the same.
"""

from __future__ import annotations

import dataclasses
import os
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

import pyarrow as pa

from brimful.core import atomic_files
from brimful.core.atomic_files import path_text
from brimful.core.classification import Classification, Counts
from brimful.core.errors import BrimfulError, OutputError, printable
from brimful.core.manifest import MANIFEST, Column, Manifest, Shard, changes, plain_identity, read_manifest
from brimful.core.records import to_json
from brimful.data.writers.output_path import parse_output
from brimful.data.writers.row_files import TableFile, json_lines
from brimful.data.writers.write_ahead_log import WriteAheadLog, logged_batches, shard_of

#: Seconds between commits; with a window's own, a kill costs about 30 seconds at most.
COMMIT_S = 20.0

_OURS = re.compile(rf"part-\d{{5,}}\.parquet|\.wal-\d+\.arrow|{re.escape(atomic_files.TEMPORARY)}.*")


class ShardedOutput:
    """Results in a file or a folder of shards, a context; no other process can write there meanwhile.

    path: by its suffix a file; without one a folder of Parquet files.
    identity: JSON facts that decide what is written, by a name to show (`--max-length`, `the model`): of the input, the
    model, the options, the versions. A run is gone on with only where all are equal; pyarrow's version is added.
    shard_rows: a shard of a folder ends with the write that brings it to as many rows, or more.
    commit_s: seconds between two points that a killed run can go on from.

    finished: the record, where the run to resume had finished: there is nothing to do. lost: what of that run was found
    damaged and is done again, as a sentence, or None.

    Leaving the context without `finish` keeps all that was written, for --resume.

    Entering raises OutputError where there are other files, another run, or one with another identity; writing
    raises DiskFullError or OutputError, and what is on the disk stays.
    """

    def __init__(
        self, path: Path, *, identity: Mapping[str, Any], resume: bool, shard_rows: int, commit_s: float = COMMIT_S
    ) -> None:
        self.place = parse_output(path)
        self.finished: Classification | None = None
        self.lost: str | None = None
        also = {} if self.place.single else {"--shard-rows": shard_rows}
        self._identity = plain_identity({**identity, **also, "pyarrow": pa.__version__})
        self._resume, self._shard_rows, self._commit_s = resume, shard_rows, commit_s
        self._folder = self.place.folder
        self._manifest = Manifest(status="running", identity=self._identity)
        self._schema: pa.Schema | None = None
        self._columns: tuple[Column, ...] | None = None
        self._live: TableFile | None = None
        self._log: WriteAheadLog | None = None
        self._committed_s = 0.0
        self._lock: int | None = None
        self._made_folder = False

    @property
    def rows_done(self) -> int:
        """Rows written, by earlier runs and this one. Before the first `write` and after the context: on the disk."""
        return sum(shard.num_rows for shard in self._manifest.shards) + self._rows_in_shard()

    @property
    def counts(self) -> Counts:
        """Counts of those rows."""
        return sum((shard.counts for shard in self._manifest.shards), Counts()) + self._counts_in_shard()

    def write(self, table: pa.Table, counts: Counts) -> None:
        """Append the next window of rows.

        Windows have the same rows however often a run is resumed. An empty one tells the columns where there are no
        rows. Raises: OutputError for columns that the form of the file, or the run that is resumed, does not have.
        """
        assert self._lock is not None
        assert self.finished is None
        assert counts.num_rows == table.num_rows, f"{counts.num_rows} rows were counted of {table.num_rows}"
        table = self._checked(table)
        live = self._open_live()  # before the log: a form that cannot hold the columns is no result to go on with
        if batches := table.combine_chunks().to_batches() if table.num_rows else []:
            self._open_log().write(batches, counts)
        self._append(live, batches)
        self._end_shard_if_full()
        if self._log is not None and time.monotonic() - self._committed_s >= self._commit_s:
            self._commit()

    def finish(self, record: Classification) -> tuple[Path, ...]:
        """Make the results what `path` asked for, with `record` in the manifest; returns the files."""
        assert self._lock is not None
        assert self.finished is None
        if self._live is not None and (self._rows_in_shard() or not self._manifest.shards):
            self._end_shard(status="finished", record=record)
        else:
            assert self._manifest.shards, "a result needs its columns: write an empty table where there are no rows"
            self._replace_manifest(status="finished", record=record)
        self.finished = record
        if self.place.single:
            self._move_into_place()
            return self.place.path, self.place.manifest
        return (*(self._folder / shard.file for shard in self._manifest.shards), self.place.manifest)

    # --- the context --------------------------------------------------------------------------------------------------

    def __enter__(self) -> ShardedOutput:
        self._check_folder()
        self._made_folder = not self._folder.exists()
        atomic_files.make_folder(self._folder)
        self._lock = atomic_files.lock_folder(self._folder, output=self.place.path)
        try:
            self._begin()
        except BaseException:
            self._discard_live()
            self._release()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._discard_live()  # first: on a full disk, the log may need its room
            if self._log is not None and self._log.whole:
                self._commit()
        finally:
            self._close_log()
            if not self._manifest.num_rows and not self.finished:
                with suppress(BrimfulError):  # nothing was classified: nothing can be resumed
                    self._clear()
                    atomic_files.remove(self._folder / MANIFEST)
            self._release()

    def _release(self) -> None:
        """Gives the lock back, and removes a folder that nothing was left in."""
        assert self._lock is not None
        with suppress(OSError):
            (self._folder / atomic_files.LOCK).unlink()
            if self.place.single or self._made_folder:
                self._folder.rmdir()
        os.close(self._lock)
        self._lock = None

    def _check_folder(self) -> None:
        """Check that a folder of results is empty or ours."""
        with atomic_files.file_errors(self._folder):
            names = sorted(each.name for each in self._folder.iterdir()) if self._folder.exists() else []
        temporary = atomic_files.TEMPORARY + MANIFEST
        strange = [name for name in names if name != atomic_files.LOCK and not name.startswith(temporary)]
        if strange and MANIFEST not in names and not self.place.single:
            raise OutputError(
                f"{path_text(self._folder)} is not empty: it holds {printable(strange[0])}", hint="use a new folder"
            )

    def _begin(self) -> None:
        found = read_manifest(self._folder / MANIFEST)
        if found is not None and found.status == "running" and not found.num_rows:
            found = None
        if found is not None and not self._resume:
            shown = path_text(self.place.path)
            if found.status == "finished" and not self.place.single:
                raise OutputError(f"{shown} already holds results", hint="use another --output, or remove the folder")
            raise OutputError(
                f"{shown} was begun by a run that did not finish: {found.num_rows:,} rows are done",
                hint=f"go on with --resume, or remove {path_text(self._folder)}",
            )
        if self._resume and found is None and self.place.single:
            found = read_manifest(self.place.manifest)
            if found is not None and not self._made_folder and changes(found.identity, self._identity):
                found = None  # of an older file; a run that was to replace it was killed before it had done anything
        if found is not None:
            self._go_on(found)
        self._clear()
        if self.finished is None:
            self._replace_manifest()
            self._replay()

    def _go_on(self, found: Manifest) -> None:
        """Takes up `found`, or as much of it as is still there.

        Raises: OutputError naming what differs.
        """
        if differences := changes(found.identity, self._identity):
            raise OutputError(
                f"{path_text(self.place.path)} cannot be resumed: {'; '.join(differences)}",
                hint="resume with what the run was started with, or start another one with another --output",
            )
        if found.status == "finished" and self.place.single:
            self._go_on_at_the_end(found)
            return
        self._manifest = self._whole(found)
        self.finished = self._manifest.record

    def _go_on_at_the_end(self, found: Manifest) -> None:
        """One file is finished: only moving it into place may have been left to do."""
        [shard] = found.shards
        if atomic_files.holds(self._live_path(), shard) or atomic_files.holds(self.place.path, shard):
            self._manifest, self.finished = found, found.record
            self._move_into_place()
        elif self.place.path.exists():
            raise OutputError(
                f"{path_text(self.place.path)} is finished, and has been changed since",
                hint="leave --resume out to make it anew, or use another --output",
            )
        else:
            self.lost = f"{shard.file} is missing: all rows are done again"

    def _whole(self, found: Manifest) -> Manifest:
        """`found` up to the first file that is missing or damaged."""
        for shard in found.files:
            if not atomic_files.holds(self._folder / shard.file, shard, growing=shard in found.wal):
                break
        else:
            return found
        self.lost = f"{shard.file} is missing or damaged: row {shard.first_row + 1:,} and those after it are done again"
        return dataclasses.replace(
            found,
            status="running",
            record=None,
            shards=tuple(each for each in found.shards if each.first_row < shard.first_row),
            wal=tuple(each for each in found.wal if each.first_row < shard.first_row),
        )

    def _clear(self) -> None:
        """Removes files of ours that the manifest does not name: no longer needed, or left half done by a kill."""
        named = {shard.file for shard in self._manifest.files}
        if self.place.single and self._manifest.shards:  # whole, and on its way to its place
            named.add(self._live_path().name)
        with atomic_files.file_errors(self._folder):
            names = [each.name for each in self._folder.iterdir()]
        for name in names:
            if _OURS.fullmatch(name) and name not in named:
                atomic_files.remove(self._folder / name)

    def _replay(self) -> None:
        """Makes the file of results that was not finished again, from the log."""
        for shard in self._manifest.wal:
            for batch in logged_batches(self._folder / shard.file, shard):
                self._schema = batch.schema
                self._append(self._open_live(), [batch])
        self._end_shard_if_full()

    # --- rows ---------------------------------------------------------------------------------------------------------

    def _checked(self, table: pa.Table) -> pa.Table:
        """`table` without what its schema says besides names and types, such as the index of a data frame it was."""
        plain = pa.schema([pa.field(field.name, field.type) for field in table.schema])
        if self._columns is None:
            self._columns = tuple(Column(name=field.name, type=str(field.type)) for field in plain)
            before = self._manifest.columns or self._columns
            if self._columns != before:
                raise OutputError(
                    f"{path_text(self.place.path)} cannot be resumed: its columns were {_text(before)}, and are "
                    f"{_text(self._columns)}",
                    hint="resume with the versions that the run was started with, or start another one",
                )
            self._manifest = dataclasses.replace(self._manifest, columns=self._columns)
            self._schema = plain
        assert plain == self._schema, f"columns changed from {self._schema} to {plain}"
        return pa.Table.from_arrays(table.columns, schema=plain)

    def _open_log(self) -> WriteAheadLog:
        if self._log is None:
            assert self._schema is not None
            first_row = self.rows_done
            path = self._folder / f".wal-{first_row:012d}.arrow"
            self._log, self._committed_s = WriteAheadLog(path, self._schema, first_row), time.monotonic()
        return self._log

    def _open_live(self) -> TableFile:
        if self._live is None:
            assert self._schema is not None
            with atomic_files.file_errors(self.place.path):
                self._live = TableFile(self._live_path(), self.place.form, self._schema)
        return self._live

    def _append(self, live: TableFile, batches: list[pa.RecordBatch]) -> None:
        """Each batch is a table to the file: what was written at once is read from the log as one."""
        with atomic_files.file_errors(self.place.path):
            for batch in batches:
                live.write(pa.Table.from_batches([batch]))

    def _live_path(self) -> Path:
        """The file of results that grows."""
        return self._folder / (atomic_files.TEMPORARY + self._name())

    def _name(self) -> str:
        return self.place.path.name if self.place.single else f"part-{len(self._manifest.shards):05d}.parquet"

    def _rows_in_shard(self) -> int:
        return sum(shard.num_rows for shard in self._kept()) + (self._log.counts.num_rows if self._log else 0)

    def _counts_in_shard(self) -> Counts:
        kept = sum((shard.counts for shard in self._kept()), Counts())
        return kept + self._log.counts if self._log else kept

    def _kept(self) -> list[Shard]:
        """Logs before the open one."""
        current = self._log.path.name if self._log else None
        return [shard for shard in self._manifest.wal if shard.file != current]

    # --- what is on the disk ------------------------------------------------------------------------------------------

    def _commit(self) -> None:
        """Makes the rows of the log ones that a killed run goes on from."""
        assert self._log is not None
        self._replace_manifest(wal=(*self._kept(), self._log.sync()))
        self._committed_s = time.monotonic()

    def _end_shard_if_full(self) -> None:
        if self.place.single:
            if self._log is not None and self._log.counts.num_rows >= self._shard_rows:
                self._commit()
                self._close_log()
        elif self._rows_in_shard() >= self._shard_rows:
            self._end_shard()

    def _end_shard(self, **changed: Any) -> None:
        """The file of results that grows is whole, and its rows need no log any more."""
        shard = self._finish_live()
        try:
            self._replace_manifest(shards=(*self._manifest.shards, shard), wal=(), **changed)
        except BrimfulError:  # on a full disk, leaving may still commit the log where this file was
            atomic_files.remove(self._live_path() if self.place.single else self._folder / shard.file)
            raise
        self._close_log()
        self._clear()

    def _close_log(self) -> None:
        if self._log is not None:
            self._log.close()
            self._log = None

    def _finish_live(self) -> Shard:
        """Closes the file of results that grows. In a folder it gets its name; the manifest does not name it yet."""
        assert self._live is not None
        with atomic_files.file_errors(self._live.path):
            written = self._live.finish()
            if not self.place.single:
                self._live.path.replace(self._folder / self._name())
        self._live = None
        atomic_files.sync(self._folder)
        first_row = sum(shard.num_rows for shard in self._manifest.shards)
        return shard_of(self._name(), first_row, written, self._counts_in_shard())

    def _discard_live(self) -> None:
        if self._live is not None:
            self._live.discard()
            self._live = None

    def _move_into_place(self) -> None:
        """Any of this may be done already, and the rest of it is repeated by a run that is resumed."""
        moves = {self._live_path(): self.place.path, self._folder / MANIFEST: self.place.manifest}
        with atomic_files.file_errors(self.place.path):
            for source, final in moves.items():
                if source.exists():
                    source.replace(final)
                    atomic_files.sync(final.parent)

    def _replace_manifest(self, **changed: Any) -> None:
        """The only place that says what is on the disk, and after it is."""
        manifest = dataclasses.replace(self._manifest, **changed)
        atomic_files.write_bytes(self._folder / MANIFEST, to_json(manifest).encode())
        self._manifest = manifest


class LineOutput:
    """Results as JSON lines into a stream such as stdout; each window is on its way when `write` returns."""

    finished = None
    lost = None

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.counts = Counts()

    @property
    def rows_done(self) -> int:
        return self.counts.num_rows

    def write(self, table: pa.Table, counts: Counts) -> None:
        self._stream.write("".join(f"{line}\n" for line in json_lines(table)))
        self._stream.flush()
        self.counts += counts

    def finish(self, record: Classification) -> tuple[Path, ...]:
        """Nothing is left to do; there are no files."""
        return ()

    def __enter__(self) -> LineOutput:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing is held back."""


def _text(columns: tuple[Column, ...]) -> str:
    return printable(", ".join(f"{column.name}: {column.type}" for column in columns), 300)

"""A folder of results that many processes fill: a file for each piece of the input, and one manifest in the end.

    results/
        .claims/                 while it is filled: see `claims`
        part-00000.parquet, ...  a file of results for each piece, whole
        _manifest.json           once all are there

Whoever finishes a piece moves its results here, and whoever finds all pieces done writes the manifest and removes the
claims. Each of these may be done twice, or be left half done by a kill and done by another: the outcome is the same.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

import pyarrow as pa

from brimful.core import atomic_files
from brimful.core.atomic_files import path_text
from brimful.core.classification import Classification, Counts
from brimful.core.errors import OutputError, printable
from brimful.core.manifest import (
    MANIFEST,
    MANIFEST_SUFFIX,
    Manifest,
    Shard,
    changes,
    plain_identity,
    read_manifest,
)
from brimful.core.records import to_json
from brimful.data.writers.claims import CLAIMS, Claim, Claims
from brimful.data.writers.shards import ShardedOutput

#: Name of a piece's fingerprint in its identity.
_PIECE = "the file"
#: Makes the record of the whole from those of the pieces, in their order.
RecordOf = Callable[[Sequence[Classification]], Classification]


class ClaimedOutput:
    """Results of pieces of the input in the folder `path`.

    pieces: a fingerprint of each. names: of the input's file that each has, for the manifest.
    identity: facts that all processes must agree on. own: facts that decide the bytes of a piece besides: work that
    another process began is gone on with only where they are equal, and is done anew elsewhere.
    Raises: OutputError, DiskFullError.
    """

    def __init__(
        self, path: Path, *, identity: Mapping[str, Any], own: Mapping[str, Any], pieces: Sequence[str],
        names: Sequence[str], shard_rows: int, lease_s: float,
    ) -> None:  # fmt: skip
        self._path, self._pieces, self._shard_rows = path, range(len(pieces)), shard_rows
        self._identity = plain_identity({**identity, "--claim": True, "pyarrow": pa.__version__})
        self._fingerprints, self._names, self._of_piece = pieces, names, {**identity, **own}
        self._of_whole = {**self._identity, "the input's files": sha256("\0".join(pieces).encode()).hexdigest()}
        self.claims = Claims(path, len(pieces), lease_s=lease_s)

    def enter(self) -> Classification | None:
        """Join those who fill the folder, or be the first; return the record where all is done already."""
        atomic_files.make_folder(self._path)
        if (finished := self.finished()) is None:
            self._check_folder()
            with suppress(FileNotFoundError):
                if differences := changes(self.claims.enter(self._identity), self._identity):
                    raise self._refused("is filled by processes that were asked for something else", differences)
            finished = self.finished()  # again: it may have been completed before the claims were entered
        if finished is not None:
            self.claims.remove()
        return finished

    def finished(self) -> Classification | None:
        """The record of the whole, None if it is not complete yet."""
        found = read_manifest(self._path / MANIFEST)
        if found is None:
            return None
        if found.record is None:
            raise OutputError(
                f"{path_text(self._path)} was begun by a run without --claim",
                hint="go on with --resume in place of --claim, or use a new folder",
            )
        if differences := changes(found.identity, self._of_whole):
            raise self._refused("holds the results of another run", differences)
        self._check_sizes(found.shards)
        return found.record

    def open(self, claim: Claim) -> ShardedOutput:
        """The place of a piece's results: a context. It goes on with what an owner before is known to have written."""
        claim.work.mkdir()  # not its parents: where they are gone, all is done
        name = self._name(claim.number)
        own = {**self._of_piece, _PIECE: self._fingerprints[claim.number]}
        identity = plain_identity({**own, "pyarrow": pa.__version__})
        for earlier in self.claims.earlier_work(claim):
            with suppress(OSError, OutputError):
                if _copy_work(earlier / name, claim.work / name, identity):
                    break
            shutil.rmtree(claim.work)
            claim.work.mkdir()
        return ShardedOutput(claim.work / name, identity=own, resume=True, shard_rows=self._shard_rows)

    def publish(self, claim: Claim) -> bool:
        """Make a claim's results those of its piece; False if there are some already."""
        if not claim.publish():
            return False
        self._place(claim.number)
        return True

    def complete(self, record_of: RecordOf) -> Classification:
        """Write the manifest of the whole, whose pieces are all done. Another process may do so at the same time."""
        found = [read_manifest(self.claims.result(n) / (self._name(n) + MANIFEST_SUFFIX)) for n in self._pieces]
        manifests = [each for each in found if each is not None and each.record is not None]
        if len(manifests) < len(self._pieces):
            if (finished := self.finished()) is None:
                raise OutputError(f"{path_text(self.claims.folder)} lacks results that were there", hint="start again")
            return finished
        for number, manifest in enumerate(manifests):
            if manifest.identity.get(_PIECE) != self._fingerprints[number]:
                said = f"the input of {path_text(self._path / self._name(number))} has changed since it was classified"
                raise OutputError(said, hint="remove the folder of results, and start again")
            self._place(number)
        shards = self._shards(manifests)
        self._check_sizes(shards)
        record = record_of([each.record for each in manifests if each.record is not None])
        columns = manifests[0].columns
        whole = Manifest(
            status="finished", identity=self._of_whole, columns=columns, shards=tuple(shards), record=record
        )
        atomic_files.sync(self._path)
        atomic_files.write_bytes(self._path / MANIFEST, to_json(whole).encode())
        self.claims.remove()
        return record

    def _name(self, number: int) -> str:
        width = max(5, len(str(len(self._pieces) - 1)))
        return f"part-{number:0{width}d}.parquet"

    def _place(self, number: int) -> None:
        """Move a result to its name, unless that was done. There is one source, so it is moved once."""
        name = self._name(number)
        with suppress(FileNotFoundError), atomic_files.file_errors(self._path):
            try:
                (self.claims.result(number) / name).rename(self._path / name)
            except FileNotFoundError:
                return
        atomic_files.sync(self._path)

    def _shards(self, manifests: Sequence[Manifest]) -> list[Shard]:
        shards, first_row = [], 0
        for number, manifest in enumerate(manifests):
            counts = sum((each.counts for each in manifest.shards), Counts())
            [written] = manifest.shards
            size, digest = written.num_bytes, written.sha256
            shards.append(
                Shard(
                    file=self._name(number),
                    first_row=first_row,
                    num_rows=counts.num_rows,
                    num_bytes=size,
                    sha256=digest,
                    counts=counts,
                    input=self._names[number],
                )
            )
            first_row += counts.num_rows
        return shards

    def _check_sizes(self, shards: Sequence[Shard]) -> None:
        for shard in shards:
            path = self._path / shard.file
            if not path.is_file() or path.stat().st_size != shard.num_bytes:
                raise OutputError(
                    f"{path_text(path)} is missing, or has not the {shard.num_bytes:,} bytes that were written",
                    hint="remove the folder, and start again",
                )

    def _check_folder(self) -> None:
        """Check that the folder is new, or has claims of others."""
        with atomic_files.file_errors(self._path):
            names = sorted(each.name for each in self._path.iterdir())
        strange = [name for name in names if not name.startswith((atomic_files.TEMPORARY, CLAIMS))]
        if strange and CLAIMS not in names and self.finished() is None:
            said = f"{path_text(self._path)} is not empty: it holds {printable(strange[0])}"
            raise OutputError(said, hint="use a new folder")

    def _refused(self, what: str, differences: list[str]) -> OutputError:
        hint = "start all processes with the same command and versions, or use a new folder"
        return OutputError(f"{path_text(self._path)} {what}: {'; '.join(differences)}", hint=hint)


def _copy_work(source: Path, target: Path, identity: Mapping[str, Any]) -> bool:
    """Copy what the owner of `source` is known to have written, a file within a work folder; False if there is nothing.

    Copied, for that owner may wake up and write on in its own. It may do so meanwhile, too: whoever goes on with the
    copy compares the hashes that the manifest has.
    """
    if (finished := read_manifest(source.with_name(source.name + MANIFEST_SUFFIX))) is not None:
        if changes(finished.identity, identity):
            return False
        shutil.copyfile(source, target)
        _write_manifest(target.with_name(target.name + MANIFEST_SUFFIX), finished)
        return True
    parts, own = source.with_name(source.name + ".parts"), target.with_name(target.name + ".parts")
    found = read_manifest(parts / MANIFEST)
    if found is None or changes(found.identity, identity) or not found.num_rows:
        return False
    own.mkdir()
    names = [shard.file for shard in found.wal] + [atomic_files.TEMPORARY + source.name] * bool(found.shards)
    for name in names:
        shutil.copyfile(parts / name, own / name)
    _write_manifest(own / MANIFEST, found)
    return True


def _write_manifest(path: Path, manifest: Manifest) -> None:
    atomic_files.write_bytes(path, to_json(manifest).encode())

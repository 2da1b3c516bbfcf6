"""The manifest beside the results of a classification: their files, and the options and inputs that made them.

A manifest is written after the files that it names, so it names only what is on the disk.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from brimful.core.atomic_files import Written, path_text
from brimful.core.classification import Classification, Counts
from brimful.core.errors import OutputError, printable
from brimful.core.records import from_json, json_text

SCHEMA = 2
#: Name in a folder of results. Readers of folders of Parquet files pass over names that begin like this.
MANIFEST = "_manifest.json"
#: Added to the name of a single file of results.
MANIFEST_SUFFIX = ".manifest.json"


def is_manifest(path: Path) -> bool:
    """True if `path` is the manifest of a classification, and so no data."""
    beside = path.with_name(path.name.removesuffix(MANIFEST_SUFFIX))
    return path.name == MANIFEST or (path != beside and beside.exists())


@dataclass(frozen=True, kw_only=True)
class Column:
    """A column of the results; its type as Arrow names it."""

    name: str
    type: str


@dataclass(frozen=True, kw_only=True)
class Shard(Written):
    """Rows that are in one file, from `first_row` (0 is the first of the input) on, with what was counted of them.

    file: its name in its folder. num_bytes, sha256: of the file; of one that still grows, of its beginning. input: the
    input's file that its rows are of, where each has results of its own (--claim).
    """

    file: str
    first_row: int
    num_rows: int
    counts: Counts
    input: str | None = None


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The results of one classification.

    identity: name -> value of everything that decides the results; a run resumes only if all are equal.
    columns: empty before the first rows. shards: files of results, in the order of their rows.
    wal: write-ahead logs with the rows after those, until they are in a finished file of results.
    record: None until `status` is finished.
    """

    status: Literal["running", "finished"]
    identity: Mapping[str, Any]
    columns: tuple[Column, ...] = ()
    shards: tuple[Shard, ...] = ()
    wal: tuple[Shard, ...] = ()
    record: Classification | None = None
    schema: int = SCHEMA

    @property
    def num_rows(self) -> int:
        """Rows that are safely on the disk: the first of the input."""
        return sum(shard.num_rows for shard in self.files)

    @property
    def counts(self) -> Counts:
        return sum((shard.counts for shard in self.files), Counts())

    @property
    def files(self) -> tuple[Shard, ...]:
        return (*self.shards, *self.wal)


def read_manifest(path: Path) -> Manifest | None:
    """The manifest in `path`, None if there is none. Raises: OutputError for one that cannot be understood."""
    try:
        manifest = from_json(Manifest, path.read_text("utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise OutputError(
            f"{path_text(path)} is not the manifest of a classification: {printable(error)}",
            hint="use another --output, or remove it",
        ) from error
    if manifest.schema != SCHEMA:
        raise OutputError(
            f"{path_text(path)} has schema {printable(manifest.schema)}, and this version of brimful knows {SCHEMA}",
            hint="go on with the version that wrote it, or use another --output",
        )
    return manifest


_DIGEST = re.compile("[0-9a-f]{32,}")


def plain_identity(identity: Mapping[str, Any]) -> dict[str, Any]:
    """`identity` as it comes back from JSON: tuples as lists, keys as text."""
    plain: dict[str, Any] = json.loads(json_text(dict(identity)))
    return plain


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Differences of two identities, as `--max-length was 128, is 256`; of digests, only that they changed."""
    names = dict.fromkeys((*now, *before))
    return [_change(name, before.get(name), now.get(name)) for name in names if before.get(name) != now.get(name)]


def _change(name: str, was: Any, now: Any) -> str:
    if any(isinstance(value, str) and _DIGEST.fullmatch(value) for value in (was, now)):
        return f"{name} {'have' if name.endswith(' files') else 'has'} changed"
    was, now = ("not given" if value is None else printable(value, 60) for value in (was, now))
    return f"{name} was {was}, is {now}"

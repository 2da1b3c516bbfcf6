"""Files that survive a kill and a power cut: the only place that syncs, renames into place and removes.

A file is written under a temporary name in its own folder, synced, renamed, and then its folder is synced: whoever
looks sees the old content or the new one, never a part. `clean_temporaries` removes what a kill left behind.
One process writes into a folder at a time. What goes wrong is raised as DiskFullError or OutputError naming the path.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import sys
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from brimful.core.errors import BrimfulError, DiskFullError, OutputError, printable
from brimful.core.units import bytes_text

Data: TypeAlias = bytes | bytearray | memoryview

#: Names of files and folders that are being written.
TEMPORARY = ".tmp-"
#: Name of a folder while another takes its place: `.old-model` was `model`.
REPLACED = ".old-"

# EFBIG: the limit on the size of one file (ulimit -f) is met like a full disk, by writing less or elsewhere.
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


@dataclass(frozen=True, kw_only=True)
class Written:
    """What was written into one file: its size, and the SHA-256 of its content in hexadecimal."""

    num_bytes: int
    sha256: str


def path_text(path: Path) -> str:
    """`path` on one printable line, never cut short: its end is what tells one file from another."""
    return printable(path, sys.maxsize)


@contextmanager
def file_errors(path: Path) -> Iterator[None]:
    """Raise every OSError of the block as DiskFullError or OutputError that names `path`."""
    try:
        yield
    except OSError as error:
        raise _as_ours(error, path) from error


def _as_ours(error: OSError, path: Path) -> BrimfulError:
    said = f"cannot write {path_text(path)}: {error.strerror or printable(error)}"
    if error.errno not in _FULL:
        return OutputError(said, hint="choose another --output, or make this one writable")
    return DiskFullError(
        f"{said} ({bytes_text(free_bytes(path))} free on this disk)", hint="free some space, then go on with --resume"
    )


def temporary_path(path: Path) -> Path:
    """A new name beside `path` under which to write what shall become `path`."""
    return path.with_name(f"{TEMPORARY}{path.name}-{uuid.uuid4().hex[:8]}")


def write_bytes(path: Path, data: Data) -> None:
    """Make `data` the content of `path`: all of it or, after a kill or a power cut, none of it."""
    write_chunks(path, [data])


def write_chunks(path: Path, chunks: Iterable[Data]) -> Written:
    """Like `write_bytes` for content made piece by piece, hashed on its way."""
    temporary = temporary_path(path)
    digest, num_bytes = hashlib.sha256(), 0
    with file_errors(path):
        try:
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
            try:
                for chunk in chunks:
                    digest.update(chunk)
                    num_bytes += write_all(descriptor, chunk)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            temporary.replace(path)
        except BaseException:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise
    sync_folder(path.parent)
    return Written(num_bytes=num_bytes, sha256=digest.hexdigest())


def write_all(descriptor: int, data: Data) -> int:
    """Write all of `data` to an open file and return its bytes. Nothing is synced.

    Raises: OSError as the system gave it; a part may have been written by then.
    """
    rest = memoryview(data)
    num_bytes = rest.nbytes
    while rest.nbytes:
        rest = rest.cast("B")
        rest = rest[os.write(descriptor, rest) :]
    return num_bytes


def sync_file(path: Path) -> None:
    """Return when the content of `path` is on the disk."""
    with file_errors(path):
        _sync(path, os.O_RDONLY)


def sync_folder(path: Path) -> None:
    """Return when the names in `path` are on the disk: what was created, renamed and removed directly in it."""
    with file_errors(path):
        try:
            _sync(path, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:
            # Some network file systems sync names by themselves and refuse to be asked to.
            if error.errno != errno.EINVAL:
                raise


def _sync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Return when all files and folders under `folder` are on the disk. Links are not followed."""
    with file_errors(folder):
        entries = list(folder.iterdir())
    for path in entries:
        if path.is_symlink():
            continue
        if path.is_dir():
            sync_tree(path)
        else:
            sync_file(path)
    sync_folder(folder)


def make_folder(path: Path) -> None:
    """Make `path` and its parents where they are missing, on the disk when this returns."""
    with file_errors(path):
        missing = [folder for folder in path.parents if not folder.exists()]
        path.mkdir(parents=True, exist_ok=True)
    for folder in (*reversed(missing), path):
        sync_folder(folder.parent)


def replace_folder(temporary: Path, final: Path) -> None:
    """Make the folder `temporary` the new `final`, synced, whether `final` exists or not.

    Two renames when it exists. A kill between them leaves the old folder under the name `.old-<final>`, which
    `clean_temporaries` puts back. `temporary` is a sibling of `final` (see `temporary_path`).
    """
    if temporary.parent != final.parent:
        raise ValueError(f"{temporary} and {final} are not in the same folder")
    sync_tree(temporary)
    old = final.with_name(REPLACED + final.name)
    with file_errors(final):
        if final.exists() or final.is_symlink():
            remove(old)
            final.rename(old)
        try:
            temporary.rename(final)
        except OSError:
            if old.exists():
                old.rename(final)
            raise
    sync_folder(final.parent)
    remove(old)


def remove(path: Path) -> None:
    """Remove a file, a link or a whole folder; nothing if it is not there."""
    with file_errors(path):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def clean_temporaries(folder: Path) -> list[Path]:
    """Remove what killed writers left directly in `folder`, and return it. A folder half replaced is put back first."""
    if not folder.is_dir():
        return []
    with file_errors(folder):
        names = sorted(path.name for path in folder.iterdir())
        for name in names:
            final = folder / name.removeprefix(REPLACED)
            if name.startswith(REPLACED) and not final.exists():
                (folder / name).rename(final)
    left = [folder / name for name in names if name.startswith((TEMPORARY, REPLACED))]
    left = [path for path in left if path.exists() or path.is_symlink()]
    for path in left:
        remove(path)
    sync_folder(folder)
    return left


def free_bytes(path: Path) -> int | None:
    """Bytes that can still be written on the disk of `path`, which need not exist yet; None if the system does not say.

    Quotas are not seen.
    """
    absolute = path.absolute()
    for place in (absolute, *absolute.parents):
        try:
            return shutil.disk_usage(place).free
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError:
            return None
    return None

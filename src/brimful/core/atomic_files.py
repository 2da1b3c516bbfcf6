"""Files that survive a kill and a power cut: the only place that syncs, renames into place and removes.

A file is written under a temporary name in its own folder, synced, renamed, and then its folder is synced: whoever
looks sees the old content or the new one, never a part. `clean_temporaries` removes what a kill left behind.
One process writes into a folder at a time. What goes wrong is raised as DiskFullError or OutputError naming the path.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
import sys
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from brimful.core.errors import DiskFullError, OutputError, printable
from brimful.core.units import bytes_text

Data: TypeAlias = bytes | bytearray | memoryview

#: Names of files and folders that are being written.
TEMPORARY = ".tmp-"
#: Bytes after which a growing file is synced: what is left at its end takes no longer.
_SYNC_BYTES = 1 << 30
#: Name of a folder while another takes its place: `.old-model` was `model`.
REPLACED = ".old-"
#: File in a folder that the process writing into it holds locked.
LOCK = ".lock"

# EFBIG: the limit on the size of one file (ulimit -f) is met like a full disk, by writing less or elsewhere.
FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


@dataclass(frozen=True, kw_only=True)
class Written:
    """Size of a written file, and the SHA-256 of its content in hexadecimal."""

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
        said = f"cannot write {path_text(path)}: {error.strerror or printable(error)}"
        if error.errno not in FULL:
            raise OutputError(said, hint="choose another --output, or make this one writable") from error
        said += f" ({bytes_text(free_bytes(path))} free on this disk)"
        raise DiskFullError(said, hint="free some space, then go on with --resume") from error


def temporary_path(path: Path) -> Path:
    """A new name beside `path` under which to write what shall become `path`."""
    return path.with_name(f"{TEMPORARY}{path.name}-{uuid.uuid4().hex[:8]}")


def write_bytes(path: Path, data: Data) -> None:
    """Make `data` the content of `path`: all of it or, after a kill or a power cut, none of it."""
    write_chunks(path, [data])


def write_chunks(path: Path, chunks: Iterable[Data], *, progress: Callable[[], None] = lambda: None) -> Written:
    """Like `write_bytes` for content made piece by piece, hashed on its way.

    progress: called after each piece, and whenever so much is on the disk that a sync of the rest is short.
    """
    temporary = temporary_path(path)
    with file_errors(path):
        file = GrowingFile(temporary)
        try:
            try:
                unsynced = 0
                for chunk in chunks:
                    unsynced += file.write(chunk)
                    if unsynced >= _SYNC_BYTES:
                        file.sync()
                        unsynced = 0
                    progress()
                written = file.sync()
            finally:
                file.close()
            temporary.replace(path)
        except BaseException:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise
    sync(path.parent)
    return written


class GrowingFile:
    """A new file that grows at its end and is hashed on its way. Nothing is sure to be on the disk before `sync`.

    Raises: OSError as the system gave it, FileExistsError among them.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._digest, self._num_bytes = hashlib.sha256(), 0
        self._descriptor: int | None = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)

    def write(self, data: Data) -> int:
        """Append `data` and return its bytes.

        After `close` it goes nowhere: libraries have last words when they are collected, and nobody waits for those.
        """
        if self._descriptor is None:
            return memoryview(data).nbytes
        num_bytes = write_all(self._descriptor, data)
        self._digest.update(data)
        self._num_bytes += num_bytes
        return num_bytes

    def sync(self) -> Written:
        """Return what was written so far, when it is on the disk. The file can grow on."""
        assert self._descriptor is not None
        os.fsync(self._descriptor)
        return Written(num_bytes=self._num_bytes, sha256=self._digest.hexdigest())

    def close(self) -> None:
        """Let go of the file, synced or not."""
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            os.close(descriptor)


def holds(path: Path, written: Written, *, growing: bool = False) -> bool:
    """True if `path` holds the bytes of `written` and no more, or of a growing file begins with them.

    False also for a missing file. Raises: OutputError if it cannot be read.
    """
    digest, left = hashlib.sha256(), written.num_bytes
    with file_errors(path):
        try:
            if not growing and path.stat().st_size != written.num_bytes:
                return False
            with path.open("rb", buffering=0) as file:
                while left and (chunk := file.read(min(left, 1 << 20))):
                    digest.update(chunk)
                    left -= len(chunk)
        except FileNotFoundError:
            return False
    return left == 0 and digest.hexdigest() == written.sha256


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


def sync(path: Path) -> None:
    """Return when the content of a file, or the names directly in a folder, are on the disk."""
    with file_errors(path):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        except OSError as error:
            # Some network file systems sync names by themselves and refuse to be asked to.
            if error.errno != errno.EINVAL or not path.is_dir():
                raise
        finally:
            os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Return when all files and folders under `folder` are on the disk. Links are not followed."""
    with file_errors(folder):
        entries = list(folder.iterdir())
    for path in entries:
        if not path.is_symlink():
            (sync_tree if path.is_dir() else sync)(path)
    sync(folder)


def lock_folder(folder: Path, *, output: Path | None = None) -> int:
    """Keep other processes from writing into `folder`, which exists, until the returned descriptor is closed.

    output: what to call it in the error, if it is not `folder`. Raises: OutputError if another process has the lock.
    """
    with file_errors(output or folder):
        while True:
            descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # Whoever had it may have removed the file on leaving: a lock on that one keeps nobody out.
                if (folder / LOCK).exists() and os.path.samestat(os.fstat(descriptor), (folder / LOCK).stat()):
                    return descriptor
            except BlockingIOError:
                os.close(descriptor)
                raise OutputError(
                    f"another process is writing into {path_text(output or folder)}",
                    hint="wait for it, or use another --output",
                ) from None
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)


def is_locked(folder: Path) -> bool:
    """Return True if a process is writing into a folder, as far as can be seen from here."""
    try:
        descriptor = os.open(folder / LOCK, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def make_folder(path: Path) -> None:
    """Make `path` and its parents where they are missing, on the disk when this returns."""
    with file_errors(path):
        missing = [folder for folder in path.parents if not folder.exists()]
        path.mkdir(parents=True, exist_ok=True)
    for folder in (*reversed(missing), path):
        sync(folder.parent)


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
    sync(final.parent)
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
        left = [path for path in sorted(folder.iterdir()) if path.name.startswith((TEMPORARY, REPLACED))]
    for path in left:
        remove(path)
    sync(folder)
    return left


def free_bytes(path: Path) -> int | None:
    """Bytes that can still be written on the disk of `path`, which need not exist yet; None if the system does not say.

    Quotas are not seen.
    """
    absolute = path.absolute()
    try:
        return shutil.disk_usage(next(each for each in (absolute, *absolute.parents) if each.exists())).free
    except OSError:
        return None

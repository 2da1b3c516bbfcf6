"""Claims: processes on any machines that share a folder share out pieces of work among them, without a server.

    .claims/
        identity.json       facts that all of them agree on
        00003.2.claim       piece 3 was claimed for the second time; its owner changes this file while it works
        00003.2.left        that owner has left the piece undone; 00003.2.failed: the piece cannot be done, and why
        00003.2.work/       files that this owner writes, and nobody else
        00003.done/         the result of piece 3: the work folder of the first owner that ended it

A claim is a file that only one process can create, and is never taken away: where its owner has shown no sign of life
for a lease, another process creates the next claim of the piece, with a folder of its own. An owner that was only
stopped, and wakes up, writes where nobody reads; its rename to 00003.done is refused, for that folder is there, and has
files. So each piece has one result, whole, whoever is killed or stopped, and whenever.

No clocks are compared. A sign of life is a change of the claim's file, and a lease is measured by the watcher's own
monotonic clock between two looks at it.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from brimful.core import atomic_files
from brimful.core.errors import OutputError
from brimful.core.records import json_text

#: Name of the folder of claims; readers pass over it.
CLAIMS = ".claims"
_IDENTITY = "identity.json"
_CLAIM = re.compile(r"(\d+)\.(\d+)\.(claim|left|failed|work)")
_DONE = re.compile(r"(\d+)\.done")
#: Signs of life in a lease: a few may be late, or lost.
_BEATS = 6


@dataclass(frozen=True)
class Failure:
    """A piece that cannot be done: a message and its hint."""

    number: int
    message: str
    hint: str | None


@dataclass
class _Seen:
    """Claims as one look at the folder finds them. last: of each piece its newest claim."""

    done: set[int] = field(default_factory=set)
    last: dict[int, int] = field(default_factory=dict)
    left: set[tuple[int, int]] = field(default_factory=set)
    failed: set[tuple[int, int]] = field(default_factory=set)


class Claim:
    """A piece of work that this process has claimed: number `number`, for the `generation`th time.

    Signs of life are given within `working`. Raises: OutputError for a folder that cannot be written.
    """

    def __init__(self, folder: Path, number: int, generation: int, lease_s: float) -> None:
        self.number, self.generation = number, generation
        self._folder, self._every_s = folder, lease_s / _BEATS
        self._owner = {"host": socket.gethostname(), "pid": os.getpid(), "token": secrets.token_hex(8)}
        self._beat, self._failed = 0, False
        self._ended, self._lost = threading.Event(), threading.Event()

    def create(self) -> bool:
        """Create the claim's file; False if another process has. Raises: FileNotFoundError without the folder."""
        try:
            descriptor = os.open(self._path("claim"), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        except FileExistsError:
            return False
        with os.fdopen(descriptor, "wb") as file:
            file.write(self._life())
        return True

    @property
    def work(self) -> Path:
        """The folder that this process alone writes into."""
        return self._path("work")

    @property
    def lost(self) -> bool:
        """True once another process has claimed the piece too, or done it, as far as was seen by now."""
        return self._lost.is_set()

    def look(self) -> bool:
        """Look whether the claim is lost, and return it."""
        later, done = self._name(self.generation + 1, "claim"), self._folder / f"{self.number:05d}.done"
        if later.exists() or done.exists() or not self._path("claim").exists():
            self._lost.set()
        return self.lost

    @contextmanager
    def working(self) -> Iterator[None]:
        """Within, a thread gives signs of life. Afterwards the piece is published, failed, or left to others."""
        thread = threading.Thread(target=self._live, name="brimful-claim", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._ended.set()
            thread.join()
            if not self._failed and not self.look():
                self._leave("left", b"")

    def publish(self) -> bool:
        """Make the work folder the result of the piece; False if there is one already, and this one is not needed."""
        try:
            atomic_files.sync_tree(self.work)
            with atomic_files.file_errors(self.work):
                self.work.rename(self._folder / f"{self.number:05d}.done")
            atomic_files.sync(self._folder)
        except OutputError:  # the result is there, or all claims are gone
            if self.look():
                return False
            raise
        return True

    def fail(self, message: str, hint: str | None) -> None:
        """Say that the piece cannot be done, so that nobody else tries before it is asked for again."""
        self._failed = True
        self._leave("failed", json_text({"message": message, "hint": hint}).encode())

    def _leave(self, how: str, said: bytes) -> None:
        with suppress(OutputError):  # a folder that is gone: all is done, or somebody removed it
            atomic_files.write_bytes(self._path(how), said)

    def _live(self) -> None:
        while not self._ended.wait(self._every_s):
            self._beat += 1
            # Never created anew: a folder of claims that is gone stays so. A lost beat is made up for by the next.
            with suppress(OSError):
                descriptor = os.open(self._path("claim"), os.O_WRONLY)
                try:
                    os.pwrite(descriptor, self._life(), 0)
                finally:
                    os.close(descriptor)
            self.look()

    def _life(self) -> bytes:
        return json_text({**self._owner, "beat": f"{self._beat:012d}"}).encode()  # as long each time

    def _name(self, generation: int, kind: str) -> Path:
        return self._folder / f"{self.number:05d}.{generation}.{kind}"

    def _path(self, kind: str) -> Path:
        return self._name(self.generation, kind)


class Claims:
    """The folder of claims on pieces 0 to `num_pieces` - 1 within `output`, which exists.

    lease_s: seconds without a sign of life after which a claim is followed by another.
    """

    def __init__(self, output: Path, num_pieces: int, *, lease_s: float) -> None:
        self.folder, self._num_pieces, self._lease_s = output / CLAIMS, num_pieces, lease_s
        self._watched: dict[tuple[int, int], tuple[bytes, float]] = {}
        self._failed_before: set[tuple[int, int]] = set()

    def enter(self, identity: Mapping[str, Any]) -> Mapping[str, Any]:
        """Create the folder where there is none, and return the identity of those who work in it.

        Raises: FileNotFoundError where the folder is gone meanwhile: all is done.
        """
        if not (self.folder / _IDENTITY).exists():
            self._create(identity)
        found: dict[str, Any] = json.loads((self.folder / _IDENTITY).read_bytes())
        self._failed_before = self._look().failed
        return found

    def _create(self, identity: Mapping[str, Any]) -> None:
        """Make a folder with an identity, and give it its name, unless another process was first."""
        own = atomic_files.temporary_path(self.folder)
        with atomic_files.file_errors(self.folder):
            own.mkdir()
        try:
            atomic_files.write_bytes(own / _IDENTITY, json_text(dict(identity)).encode())
            with atomic_files.file_errors(self.folder):
                own.rename(self.folder)
        except OutputError:
            if own.exists() and not (self.folder / _IDENTITY).exists():
                raise
            atomic_files.remove(own)

    def take(self) -> Claim | None:
        """Claim a piece that nobody works on, in their order; None if there is none now.

        Raises: FileNotFoundError where the folder is gone: all is done.
        """
        seen = self._look()
        open_pieces = [number for number in range(self._num_pieces) if number not in seen.done]
        new = [number for number in open_pieces if number not in seen.last]
        ended = [number for number in open_pieces if number in seen.last and self._has_ended(seen, number)]
        for number in (*new, *ended):
            claim = Claim(self.folder, number, seen.last.get(number, 0) + 1, self._lease_s)
            if claim.create() and not claim.look():
                return claim
        return None

    def _has_ended(self, seen: _Seen, number: int) -> bool:
        """True for a piece whose owner has left it, or has shown no sign of life for a lease."""
        key = (number, seen.last[number])
        if key in seen.failed:
            return key in self._failed_before
        if key in seen.left:
            return True
        life, now = self._read(*key), time.monotonic()
        before, since = self._watched.setdefault(key, (life, now))
        if life != before:
            self._watched[key] = (life, now)
            return False
        return now - since >= self._lease_s

    def _read(self, number: int, generation: int) -> bytes:
        try:
            return (self.folder / f"{number:05d}.{generation}.claim").read_bytes()
        except FileNotFoundError:
            return b""

    def _look(self) -> _Seen:
        seen = _Seen()
        for name in os.listdir(self.folder):  # noqa: PTH208  (names alone: there may be many)
            if found := _DONE.fullmatch(name):
                seen.done.add(int(found[1]))
            elif found := _CLAIM.fullmatch(name):
                key = (int(found[1]), int(found[2]))
                seen.last[key[0]] = max(seen.last.get(key[0], 0), key[1])
                if found[3] in ("left", "failed"):
                    (seen.left if found[3] == "left" else seen.failed).add(key)
        return seen

    def num_done(self) -> int:
        """Pieces that have a result."""
        return len(self._look().done)

    def owners(self) -> list[str]:
        """Host and process of those who work on a piece now, as they say."""
        seen, said = self._look(), set()
        for number, generation in seen.last.items():
            if number not in seen.done and (number, generation) not in seen.failed | seen.left:
                with suppress(ValueError, KeyError, TypeError):
                    owner = json.loads(self._read(number, generation))
                    said.add(f"{owner['host']} process {owner['pid']}")
        return sorted(said)

    def failures(self) -> list[Failure]:
        """Pieces without a result whose newest claim says that they cannot be done."""
        seen, found = self._look(), []
        for number, generation in sorted(seen.failed):
            if number not in seen.done and seen.last[number] == generation:
                path = self.folder / f"{number:05d}.{generation}.failed"
                said = json.loads(path.read_bytes())
                found.append(Failure(number, said["message"], said["hint"]))
        return found

    def earlier_work(self, claim: Claim) -> list[Path]:
        """Work folders of owners of this piece before, the latest first. They may still be written into."""
        earlier = (self.folder / f"{claim.number:05d}.{each}.work" for each in range(claim.generation - 1, 0, -1))
        return [path for path in earlier if path.is_dir()]

    def result(self, number: int) -> Path:
        """The folder of the result of a piece."""
        return self.folder / f"{number:05d}.done"

    def remove(self) -> None:
        """Remove all claims, once the whole is complete: under another name first, so that nobody works on in them."""
        with suppress(OSError):
            self.folder.rename(atomic_files.temporary_path(self.folder))
        for gone in self.folder.parent.glob(f"{atomic_files.TEMPORARY}{CLAIMS}-*"):  # also those of killed processes
            with suppress(OutputError, OSError):  # a network file system keeps open files for a while
                atomic_files.remove(gone)

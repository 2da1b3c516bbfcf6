"""Files that survive: order of operations, state of the folder at each of them, errors named."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from brimful.core import atomic_files
from brimful.core.errors import BrimfulError, DiskFullError, OutputError

OPERATIONS = ("open", "write", "fsync", "close", "replace", "rename", "unlink", "mkdir", "rmdir")


def watch(patch: pytest.MonkeyPatch, before: Callable[[str, tuple[Any, ...]], None]) -> None:
    """Call `before` with the name and arguments of each operation that changes a disk."""

    def watched(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def operation(*args: Any, **named: Any) -> Any:
            before(name, args)
            return real(*args, **named)

        return operation

    for name in OPERATIONS:
        patch.setattr(os, name, watched(name, getattr(os, name)))


def snapshots(root: Path, work: Callable[[], object], copies: Path) -> Iterator[Path]:
    """`root` as a kill would leave it before each operation of `work`, and after the last."""
    taken: list[Path] = []

    def snapshot(*_: object) -> None:
        taken.append(copies / str(len(taken)))
        with pytest.MonkeyPatch.context() as real:
            for name, function in reals.items():
                real.setattr(os, name, function)
            shutil.copytree(root, taken[-1], symlinks=True)

    reals = {name: getattr(os, name) for name in OPERATIONS}
    with pytest.MonkeyPatch.context() as patch:
        watch(patch, snapshot)
        work()
    snapshot()
    yield from taken


def test_write_bytes_replaces_and_leaves_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    for data in (b"first", bytearray(b""), memoryview(b"third")):
        atomic_files.write_bytes(path, data)
        assert path.read_bytes() == data
    assert list(tmp_path.iterdir()) == [path]


def test_write_chunks_tells_what_it_wrote(tmp_path: Path) -> None:
    chunks = (bytes([i]) * i for i in range(5))
    written = atomic_files.write_chunks(tmp_path / "a", chunks)
    content = (tmp_path / "a").read_bytes()
    assert content == b"\x01\x02\x02\x03\x03\x03\x04\x04\x04\x04"
    assert written == atomic_files.Written(num_bytes=10, sha256=hashlib.sha256(content).hexdigest())


def test_write_chunks_tells_of_each_and_syncs_so_many_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    fsync = os.fsync

    def counted(descriptor: int) -> None:
        synced.append(os.fstat(descriptor).st_size)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", counted)
    monkeypatch.setattr(atomic_files, "_SYNC_BYTES", 5)
    told: list[int] = []
    atomic_files.write_chunks(tmp_path / "file", [b"123"] * 5, progress=lambda: told.append(1))
    assert len(told) == 5
    assert synced[:3] == [6, 12, 15]


def test_a_file_holds_what_was_written_and_no_more(tmp_path: Path) -> None:
    path = tmp_path / "file"
    assert not atomic_files.holds(path, atomic_files.Written(num_bytes=0, sha256=""))
    written = atomic_files.write_chunks(path, [b"a", b"bc"])
    assert atomic_files.holds(path, written)
    assert atomic_files.holds(path, written, growing=True)
    path.write_bytes(b"abcd")
    assert not atomic_files.holds(path, written)
    assert atomic_files.holds(path, written, growing=True)
    path.write_bytes(b"ab!")
    assert not atomic_files.holds(path, written)


def test_views_of_wider_items_and_of_none(tmp_path: Path) -> None:
    wide = memoryview(bytes(range(16))).cast("I")
    assert atomic_files.write_chunks(tmp_path / "a", [wide, memoryview(b"")]).num_bytes == 16
    assert (tmp_path / "a").read_bytes() == bytes(range(16))


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: real(descriptor, data[:3]))
    atomic_files.write_bytes(tmp_path / "a", b"0123456789")
    assert (tmp_path / "a").read_bytes() == b"0123456789"
    atomic_files.write_bytes(tmp_path / "a", memoryview(bytes(range(16))).cast("I"))
    assert (tmp_path / "a").read_bytes() == bytes(range(16))


def test_content_is_synced_before_its_name_and_its_name_before_the_return(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    watch(monkeypatch, lambda name, args: done.append(name))
    atomic_files.write_bytes(tmp_path / "a", b"data")
    assert done == ["open", "write", "fsync", "close", "replace", "open", "fsync", "close"]


def test_permissions_are_those_of_any_new_file(tmp_path: Path) -> None:
    atomic_files.write_bytes(tmp_path / "a", b"")
    (tmp_path / "b").touch()
    assert (tmp_path / "a").stat().st_mode == (tmp_path / "b").stat().st_mode


def test_write_is_whole_or_not_at_all_at_every_kill(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (root / "a").write_bytes(b"old")
    found = []
    for copy in snapshots(root, lambda: atomic_files.write_bytes(root / "a", b"new content"), tmp_path / "copies"):
        found.append((copy / "a").read_bytes())
        left = atomic_files.clean_temporaries(copy)
        assert all(path.name.startswith(atomic_files.TEMPORARY) for path in left)
        assert [path.name for path in copy.iterdir()] == ["a"]
    assert found[0] == b"old"
    assert found[-1] == b"new content"
    assert set(found) == {b"old", b"new content"}


@pytest.mark.parametrize("operation", ["open", "write", "fsync", "close", "replace"])
@pytest.mark.parametrize(
    ("number", "error"),
    [
        (errno.ENOSPC, DiskFullError),
        (errno.EDQUOT, DiskFullError),
        (errno.EFBIG, DiskFullError),
        (errno.EACCES, OutputError),
        (errno.EROFS, OutputError),
        (errno.EIO, OutputError),
    ],
)
def test_failures_name_the_path_and_keep_the_old_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, operation: str, number: int, error: type[BrimfulError]
) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"old")
    with monkeypatch.context() as patch:
        real = os.close

        def fail(*args: Any, **named: Any) -> None:
            if operation == "close":
                real(args[0])
            raise OSError(number, os.strerror(number))

        patch.setattr(os, operation, fail)
        with pytest.raises(error, match=os.strerror(number)) as raised:
            atomic_files.write_bytes(path, b"new")
    assert str(path) in str(raised.value)
    assert raised.value.hint
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_an_error_of_the_maker_of_chunks_passes_through(tmp_path: Path) -> None:
    def chunks() -> Iterator[bytes]:
        yield b"some"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        atomic_files.write_chunks(tmp_path / "a", chunks())
    assert list(tmp_path.iterdir()) == []


def test_a_name_that_is_taken_is_never_written_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "precious").write_bytes(b"kept")
    (tmp_path / ".tmp-a").symlink_to(tmp_path / "precious")
    monkeypatch.setattr(atomic_files, "temporary_path", lambda path: tmp_path / ".tmp-a")
    with pytest.raises(OutputError, match="File exists"):
        atomic_files.write_bytes(tmp_path / "a", b"new")
    assert (tmp_path / "precious").read_bytes() == b"kept"


def test_messages_are_one_line_and_end_with_the_end_of_the_path(tmp_path: Path) -> None:
    folder = tmp_path / "no\nsuch" / ("x" * 200)
    with pytest.raises(OutputError) as raised:
        atomic_files.write_bytes(folder / "the-file", b"")
    assert "\n" not in str(raised.value)
    assert "the-file: No such file" in str(raised.value)


def test_a_full_disk_tells_what_is_free(tmp_path: Path) -> None:
    with (
        pytest.raises(DiskFullError, match=r"No space left on device \(.+ free on this disk\)"),
        atomic_files.file_errors(tmp_path / "a"),
    ):
        raise OSError(errno.ENOSPC, "No space left on device")


def test_writing_over_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with pytest.raises(OutputError):
        atomic_files.write_bytes(tmp_path / "a", b"")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def model(folder: Path, text: str) -> Path:
    (folder / "parts").mkdir(parents=True)
    (folder / "config.json").write_text(text)
    (folder / "parts" / "weights").write_text(text * 9)
    (folder / "link").symlink_to("nowhere")
    return folder


def text_of(folder: Path) -> str:
    text = (folder / "config.json").read_text()
    assert (folder / "parts" / "weights").read_text() == text * 9
    return text


def test_replace_folder_where_nothing_was(tmp_path: Path) -> None:
    final = tmp_path / "model"
    atomic_files.replace_folder(model(atomic_files.temporary_path(final), "new"), final)
    assert text_of(final) == "new"
    assert list(tmp_path.iterdir()) == [final]


def test_replace_folder_is_old_or_new_at_every_kill(tmp_path: Path) -> None:
    root = tmp_path / "root"
    final = model(root / "model", "old")
    model(root / ".old-model", "older")  # left by an earlier kill
    temporary = model(atomic_files.temporary_path(final), "new")
    found = []
    for copy in snapshots(root, lambda: atomic_files.replace_folder(temporary, final), tmp_path / "copies"):
        atomic_files.clean_temporaries(copy)
        found.append(text_of(copy / "model"))
        assert [path.name for path in copy.iterdir()] == ["model"]
    assert list(root.iterdir()) == [final]
    assert found == sorted(found, reverse=True)
    assert set(found) == {"old", "new"}


def test_replace_folder_syncs_all_content_first_and_names_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    final = model(tmp_path / "model", "old")
    temporary = model(atomic_files.temporary_path(final), "new")
    done: list[str] = []
    with monkeypatch.context() as patch:
        watch(patch, lambda name, args: done.append(name))
        atomic_files.replace_folder(temporary, final)
    assert done[:12] == ["open", "fsync", "close"] * 4, "two files and two folders"
    assert [name for name in done[12:18] if name != "unlink"] == ["rename", "rename", "open", "fsync", "close"]


def test_replace_folder_puts_the_old_one_back_when_it_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    final = model(tmp_path / "model", "old")
    temporary = model(atomic_files.temporary_path(final), "new")
    real, calls = os.rename, []

    def rename(*args: Any, **named: Any) -> None:
        calls.append(args)
        if len(calls) == 2:
            raise OSError(errno.EIO, "Input/output error")
        real(*args, **named)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", rename)
        with pytest.raises(OutputError, match="model: Input/output error"):
            atomic_files.replace_folder(temporary, final)
    assert text_of(final) == "old"


def test_replace_folder_wants_siblings(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="same folder"):
        atomic_files.replace_folder(model(tmp_path / "a" / "x", "new"), tmp_path / "x")


def test_clean_temporaries_removes_only_its_own(tmp_path: Path) -> None:
    (tmp_path / ".tmp-a-0123").write_text("torn")
    model(tmp_path / ".tmp-model-4567", "torn")
    (tmp_path / ".tmp-link").symlink_to("nowhere")
    model(tmp_path / ".old-model", "old")
    for name in (".tmpfile", "tmp-a", ".hidden", "old-model"):
        (tmp_path / name).touch()
    left = atomic_files.clean_temporaries(tmp_path)
    assert [path.name for path in left] == [".tmp-a-0123", ".tmp-link", ".tmp-model-4567"]
    assert {path.name for path in tmp_path.iterdir()} == {".tmpfile", "tmp-a", ".hidden", "old-model", "model"}
    assert text_of(tmp_path / "model") == "old"
    assert atomic_files.clean_temporaries(tmp_path) == []
    assert atomic_files.clean_temporaries(tmp_path / "not there") == []


def test_remove_whatever_it_is(tmp_path: Path) -> None:
    kept = model(tmp_path / "kept", "kept")
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(kept)
    for path in (tmp_path / "file", tmp_path / "link", tmp_path / "not there", model(tmp_path / "folder", "x")):
        atomic_files.remove(path)
    assert list(tmp_path.iterdir()) == [kept]
    assert text_of(kept) == "kept"


def test_make_folder_syncs_every_parent_it_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    with monkeypatch.context() as patch:
        watch(patch, lambda name, args: opened.append(str(args[0])) if name == "open" else None)
        atomic_files.make_folder(tmp_path / "a" / "b")
        atomic_files.make_folder(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()
    assert opened == [str(tmp_path), str(tmp_path / "a"), str(tmp_path / "a")]


def test_make_folder_over_a_file_or_below_one(tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    for path in (tmp_path / "a", tmp_path / "a" / "b"):
        with pytest.raises(OutputError, match=str(path)):
            atomic_files.make_folder(path)


def test_make_folder_by_relative_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    atomic_files.make_folder(Path("a/b"))
    atomic_files.write_bytes(Path("c"), b"here")
    assert (tmp_path / "a" / "b").is_dir()
    assert (tmp_path / "c").read_bytes() == b"here"


def test_sync_of_what_is_not_there(tmp_path: Path) -> None:
    for sync in (atomic_files.sync, atomic_files.sync_tree):
        with pytest.raises(OutputError, match="not there"):
            sync(tmp_path / "not there")


def test_a_file_system_that_cannot_sync_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fsync(descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fsync)
    number = errno.EINVAL
    atomic_files.sync(tmp_path)
    number = errno.EIO
    with pytest.raises(OutputError):
        atomic_files.sync(tmp_path)


def test_free_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = atomic_files.free_bytes(tmp_path / "not" / "there" / "yet")
    assert free is not None
    assert free > 0
    (tmp_path / "file").touch()
    assert atomic_files.free_bytes(tmp_path / "file" / "below") is not None

    def refuse(path: object) -> None:
        raise PermissionError

    monkeypatch.setattr(shutil, "disk_usage", refuse)
    assert atomic_files.free_bytes(tmp_path) is None

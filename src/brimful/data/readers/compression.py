"""Files as bytes: decompressed by the end of their name, and checked before anyone parses them.

What a row is, and what is in it, is the business of the readers (delimited.py, json_rows.py, formats.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa

from brimful.core.errors import DataError, first_line
from brimful.data.file_names import split_suffix

_HEAD_BYTES = 64 * 1024
_BLOCKS_BYTES = (4 << 20, 64 << 20, 1 << 30)
_POINTER = b"version https://git-lfs.github.com/spec/v1"
_NOT_TEXT = {
    b"PK\x03\x04": ("a zip archive or an Excel workbook", "unpack it, or save the sheet as CSV"),
    b"\x1f\x8b": ("compressed by gzip", "let its name end in .gz"),
    b"\x28\xb5\x2f\xfd": ("compressed by zstd", "let its name end in .zst"),
    b"PAR1": ("a Parquet file", "let its name end in .parquet"),
    b"ARROW1": ("an Arrow file", "let its name end in .arrow"),
    b"\xff\xfe": ("UTF-16", "convert it: iconv -f utf-16 -t utf-8"),
    b"\xfe\xff": ("UTF-16", "convert it: iconv -f utf-16 -t utf-8"),
}


@contextlib.contextmanager
def reading(file: str) -> Iterator[pa.NativeFile]:
    """The decompressed bytes of `file` as a stream. Raises DataError where it cannot be opened, read or unpacked."""
    with reading_packed(file) as (stream, _):
        yield stream


@contextlib.contextmanager
def reading_packed(file: str) -> Iterator[tuple[pa.NativeFile, pa.NativeFile]]:
    """As `reading`, and beside it the file as it lies on the disk, whose position says how far reading has come."""
    codec = split_suffix(file)[1]
    try:
        with pa.OSFile(file) as packed:
            if codec is None:
                yield packed, packed
                return
            with pa.CompressedInputStream(packed, codec) as stream:
                yield stream, packed
    except OSError as error:
        if error.errno is None and codec:
            raise DataError(
                f"cannot be unpacked as {codec} ({first_line(error)})",
                file=file,
                hint="it is cut off or damaged: copy or download it again",
            ) from error
        raise DataError(
            f"cannot be read ({error.strerror or first_line(error)})", file=file, hint="may this user read it?"
        ) from error


def check_whole(file: str) -> None:
    """Raises DataError for an empty file, and for one that git-lfs has left a pointer for."""
    with Path(file).open("rb") as raw:
        head = raw.read(len(_POINTER))
    if not head:
        raise DataError("is empty", file=file, hint="it needs rows of texts: is it the right file?")
    if head == _POINTER:
        raise DataError("is a git-lfs pointer, not the data", file=file, hint="fetch the data: git lfs pull")


def check_text(file: str) -> None:
    """Raises DataError where the decompressed file has no characters, or does not begin like text."""
    with reading(file) as stream:
        head = stream.read(_HEAD_BYTES)
    for magic, (what, hint) in _NOT_TEXT.items():
        if head.startswith(magic):
            raise DataError(f"is not UTF-8 text but {what}", file=file, hint=hint)
    if _is_binary(head):
        offset = head.index(b"\0")
        raise DataError(f"is not text: NUL byte at offset {offset}", file=file, hint="is its name what it holds?")
    if len(head) < _HEAD_BYTES and not head.removeprefix(b"\xef\xbb\xbf").strip():
        raise DataError("is empty", file=file, hint="it needs rows of texts: is it the right file?")


def _is_binary(head: bytes) -> bool:
    """Whether the first line has a NUL byte, or these, as in UTF-16, and bytes that are not UTF-8 are many. A text may
    have some of both, the names of columns none."""
    in_first_line = b"\0" in head.partition(b"\n")[0]
    return in_first_line or (
        b"\0" in head and (head.count(b"\0") + head.decode("utf-8", "replace").count("\ufffd")) * 4 > len(head)
    )


def in_blocks(read: Callable[[int], pa.Table]) -> pa.Table:
    """`read(block_bytes)` with blocks as large as the longest row asks for: pyarrow wants each row within two."""
    for block_bytes in _BLOCKS_BYTES:
        try:
            return read(block_bytes)
        except pa.ArrowInvalid as error:
            if "straddling" not in str(error) or block_bytes == _BLOCKS_BYTES[-1]:
                raise
    raise AssertionError("the last block size returns or raises")


def not_utf8(raw: bytes, *, file: str | None = None, row: int | None = None) -> DataError:
    """The error for bytes that are not UTF-8, showing the first of them as \\xff and what stands around it."""
    error = _decode_error(raw)
    start = error.start if error else 0
    around = raw[:start].decode()[-20:] + raw[start : start + 80].decode("utf-8", "backslashreplace")[:24]
    hint = "convert it, for example: iconv -f windows-1252 -t utf-8"
    return DataError("is not UTF-8", file=file, row=row, value=around, hint=hint)


def _decode_error(raw: bytes) -> UnicodeDecodeError | None:
    try:
        raw.decode()
    except UnicodeDecodeError as error:
        return error
    return None

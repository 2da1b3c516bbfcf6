"""Bytes of files, decompressed by the end of their names."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pyarrow as pa

from brimful.core.errors import DataError, first_line
from brimful.data.file_names import split_suffix

#: For files of which the end, or a part, is not as it was written.
COPY_AGAIN = "it is cut off or damaged: copy or download it again"


@contextlib.contextmanager
def reading(file: str) -> Iterator[tuple[pa.NativeFile, pa.NativeFile]]:
    """The decompressed bytes of `file` as a stream, and the file on the disk, whose position says how far it was read.

    Raises: DataError where it cannot be opened, read or unpacked.
    """
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
            said = f"cannot be unpacked as {codec} ({first_line(error)})"
            raise DataError(said, file=file, hint=COPY_AGAIN) from error
        said = f"cannot be read ({error.strerror or first_line(error)})"
        raise DataError(said, file=file, hint="may this user read it?") from error


def not_utf8(raw: bytes, *, file: str | None = None) -> DataError:
    """The error for bytes that are not UTF-8, with the first of them as \\xff and its surroundings."""
    try:
        raw.decode()
        start = 0
    except UnicodeDecodeError as error:
        start = error.start
    around = raw[:start].decode()[-20:] + raw[start : start + 80].decode("utf-8", "backslashreplace")[:24]
    hint = "name its encoding, for example: --encoding windows-1252"
    return DataError("is not UTF-8", file=file, value=around, hint=hint)

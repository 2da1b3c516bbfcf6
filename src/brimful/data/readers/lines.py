"""Bytes of text in blocks that end where a line ends: of a file, decompressed, or of a pipe as they arrive."""

from __future__ import annotations

import contextlib
import io
import itertools
import select
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

import pyarrow as pa

from brimful.core.errors import DataError
from brimful.data.file_names import split_suffix
from brimful.data.readers.compression import reading
from brimful.data.readers.parts import BLOCK_BYTES
from brimful.data.readers.text_encoding import BOM, TextDecoder

#: A longer line, or record of CSV, is not read, as it would have to be held in memory.
ROW_BYTES = 32 << 20
TOO_LONG = DataError(f"is longer than {ROW_BYTES >> 20} MiB", hint="cut it, or split it into several rows")
#: Bytes of a file that are read to see its header or keys.
HEAD_BYTES = 64 << 10

_PAUSE_S = 0.1


class Block(NamedTuple):
    """Whole lines, or None in place of one line that is too long. is_last: whether nothing follows, where known."""

    data: bytes | None
    is_last: bool = False


class FileLines:
    """The lines of a file. line_ends: the bytes that end a line. share: how much of the file was read, 0 to 1.

    encoding: None to see it; utf-8 leaves bytes that are not UTF-8 as they are.
    """

    def __init__(self, file: str, line_ends: tuple[bytes, ...] = (b"\n",), encoding: str | None = "utf-8") -> None:
        self.file, self._line_ends, self._encoding = file, line_ends, encoding
        self._decoder = TextDecoder(file, encoding)
        self.size_bytes = Path(file).stat().st_size
        self.share = 0.0

    def blocks(self, block_bytes: int | None = None) -> Generator[Block, None, None]:
        """All lines, without a byte-order mark, in blocks of about `block_bytes`. Raises: DataError where damaged."""
        block_bytes = block_bytes or BLOCK_BYTES
        with reading(self.file) as (stream, packed):
            first = _filled(stream, block_bytes)
            decoder = self._decoder = TextDecoder(self.file, self._encoding, first)
            reads = itertools.chain(filter(None, [first]), iter(lambda: _filled(stream, block_bytes), b""))
            recoded = decoder.recoded(reads) if decoder.recodes else reads
            bom = BOM
            for data, is_last in _whole_lines(recoded, self._line_ends, None if decoder.recodes else block_bytes):
                self.share = min(1.0, packed.tell() / max(1, self.size_bytes))
                yield Block(data and decoder.utf8(data.removeprefix(bom)), is_last)
                bom = b""

    def head(self) -> Block:
        """The first lines, of about HEAD_BYTES."""
        with contextlib.closing(self.blocks(HEAD_BYTES)) as blocks:
            return next(blocks, Block(b"", is_last=True))

    def note(self) -> str | None:
        """One line about the encoding of what was read last; None where there is nothing to say."""
        return self._decoder.note()

    def windows(self, count: int) -> Iterator[bytes]:
        """Whole lines from up to `count` places all over the file, where it is not compressed and long enough."""
        if self._decoder.recodes or split_suffix(self.file)[1] is not None or self.size_bytes < count * 2 * HEAD_BYTES:
            return
        with reading(self.file) as (stream, _):
            for index in range(1, count + 1):
                stream.seek(self.size_bytes * index // (count + 1))
                window = stream.read(HEAD_BYTES)
                yield window[window.find(b"\n") + 1 : window.rfind(b"\n") + 1]


class PipeLines:
    """The lines of a pipe, which can be read once. They come as they arrive, many at a time where they arrive fast."""

    file = "stdin"
    note = staticmethod(lambda: None)
    size_bytes: int | None = None
    share = 0.0

    def __init__(self, pipe: BinaryIO) -> None:
        # Without the buffer: whoever waits for a pipe in it holds its lock, and without that no process can end well.
        unbuffered = getattr(pipe, "raw", pipe)
        self._read: Callable[[int], bytes] = getattr(unbuffered, "read1", unbuffered.read)
        self._pipe = pipe
        self._head = b""

    def head(self, is_enough: Callable[[bytes], bool]) -> bytes:
        """The first bytes: as many as are enough, come without a pause, and make no more than a block."""
        while data := self._arrived(_PAUSE_S):
            self._head += data
            if is_enough(self._head) or len(self._head) >= BLOCK_BYTES:
                break
        self._head = self._head.removeprefix(BOM)
        return self._head

    def blocks(self) -> Iterator[Block]:
        """All lines, those of the head too."""
        head = [self._head] if self._head else []
        return _whole_lines(itertools.chain(head, iter(lambda: self._arrived(0), b"")), (b"\n",))

    def _arrived(self, pause_s: float) -> bytes:
        """Waits for bytes, then takes those that follow without a longer pause, up to a block. b"": the pipe ended."""
        taken = [self._read(BLOCK_BYTES)]
        while taken[-1] and sum(map(len, taken)) < BLOCK_BYTES and self._has_more(pause_s):
            taken.append(self._read(BLOCK_BYTES))
        return b"".join(taken)

    def _has_more(self, pause_s: float) -> bool:
        try:
            return bool(select.select([self._pipe.fileno()], [], [], pause_s)[0])
        except (OSError, ValueError, io.UnsupportedOperation):  # it has no number, or not one that can be waited for
            return False


def _filled(stream: pa.NativeFile, num_bytes: int) -> bytes:
    """Fewer than `num_bytes` only at the end."""
    data = [stream.read(num_bytes)]
    while data[-1] and sum(map(len, data)) < num_bytes:
        data.append(stream.read(num_bytes - sum(map(len, data))))
    return b"".join(data)


def _whole_lines(
    reads: Iterator[bytes], line_ends: tuple[bytes, ...], block_bytes: int | None = None
) -> Iterator[Block]:
    """block_bytes: a read that gives fewer is the last, None where that says nothing."""
    begun: list[bytes] = []  # what was read of a line whose end was not
    passing_over = False
    for data in reads:
        is_last = block_bytes is not None and len(data) < block_bytes
        if passing_over:
            cut = min((at + len(end) for end in line_ends if (at := data.find(end)) >= 0), default=0)
            data, passing_over = data[cut:] if cut else b"", not cut
        cut = len(data) if is_last else max(data.rfind(end) + len(end) for end in line_ends)
        if data[:cut]:
            yield Block(b"".join([*begun, data[:cut]]), is_last)
            begun = []
        begun.append(data[cut:])
        if sum(map(len, begun)) > ROW_BYTES:
            yield Block(None)
            begun, passing_over = [], True
    if rest := b"".join(begun):
        yield Block(rest, is_last=True)

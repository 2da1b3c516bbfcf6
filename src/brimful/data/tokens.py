"""Texts to token ids, once and in parallel, kept in flat memory-mapped arrays.

The `tokenizers` library is called directly, on slices of an Arrow column; what stays is one array of ids and one of
offsets, so that ten million rows cost their tokens and eight bytes each, and no Python object.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa
from tokenizers import Tokenizer

from brimful.core.errors import DataError, OptionError

#: Rows handed to `tokenizers` at once: enough for its threads, few enough for the lists it returns.
_SLICE = 8192


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """Token ids of N sequences, end to end.

    ids: (total,) int32. offsets: (N + 1,) int64. types: (total,) uint8 token types, None if the model has none.
    num_truncated: sequences that were cut at the longest length.
    """

    ids: np.ndarray
    offsets: np.ndarray
    types: np.ndarray | None
    num_truncated: int

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> np.ndarray:
        """(N,) int64: tokens of each sequence, special tokens counted."""
        return np.diff(self.offsets)

    def sequence(self, index: int) -> np.ndarray:
        """Token ids of one sequence."""
        return self.ids[self.offsets[index] : self.offsets[index + 1]]

    def sequence_types(self, index: int) -> np.ndarray | None:
        """Token types of one sequence, None if the model has none."""
        return None if self.types is None else self.types[self.offsets[index] : self.offsets[index + 1]]


class Encoder:
    """A fast tokenizer as a plain function from texts to ids, cut at `max_length` tokens. `backend` is changed."""

    def __init__(self, backend: Tokenizer, max_length: int, *, with_types: bool) -> None:
        self.backend, self.max_length, self.with_types = backend, max_length, with_types

    @classmethod
    def from_tokenizer(cls, tokenizer: Any, max_length: int, *, with_types: bool) -> Encoder:
        """An encoder with a Hugging Face fast tokenizer's behaviour. The tokenizer itself keeps its settings.

        Raises: OptionError if `max_length` leaves no room for text beside the special tokens.
        """
        backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        special = max(backend.num_special_tokens_to_add(False), backend.num_special_tokens_to_add(True))
        if max_length <= special:
            raise OptionError(
                f"--max-length is {max_length}, and the tokenizer adds {special} special tokens to a text",
                hint=f"use at least {special + 1}",
            )
        backend.no_padding()
        backend.encode_special_tokens = bool(getattr(tokenizer, "split_special_tokens", False))
        backend.enable_truncation(max_length, direction=getattr(tokenizer, "truncation_side", "right"))
        return cls(backend, max_length, with_types=with_types and "token_type_ids" in tokenizer.model_input_names)

    def __getstate__(self) -> tuple[str, bool, int, bool]:
        # What a backend writes of itself leaves out whether special tokens in a text are split.
        return self.backend.to_str(), self.backend.encode_special_tokens, self.max_length, self.with_types

    def __setstate__(self, state: tuple[str, bool, int, bool]) -> None:
        backend, split_special_tokens, self.max_length, self.with_types = state
        self.backend = Tokenizer.from_str(backend)
        self.backend.encode_special_tokens = split_special_tokens

    def __call__(self, texts: Sequence[str], pairs: Sequence[str] | None = None) -> list[Any]:
        """One `tokenizers.Encoding` a text, or a text pair."""
        inputs = list(texts) if pairs is None else list(zip(texts, pairs, strict=True))
        encodings: list[Any] = self.backend.encode_batch_fast(inputs)
        return encodings


def tokenize(
    encoder: Encoder,
    texts: pa.ChunkedArray,
    pairs: pa.ChunkedArray | None = None,
    *,
    folder: Path | None = None,
    progress: Callable[[int], None] | None = None,
    place: Callable[[int], tuple[str, int]] | None = None,
    may_be_empty: bool = False,
) -> Tokens:
    """Token ids of every row of an Arrow column of strings.

    folder: where the arrays are kept, in files without a name that go with the process. progress: called with the
    number of rows done. place: file and row number of a row, for errors.
    Raises: DataError for a row that gives no token at all, unless may_be_empty.
    """
    num_rows = len(texts)
    offsets = np.zeros(num_rows + 1, dtype=np.int64)
    num_truncated = 0
    with _Spool(np.int32, folder) as ids, _Spool(np.uint8, folder) as types:
        for start in range(0, num_rows, _SLICE):
            part = texts.slice(start, _SLICE).to_pylist()
            encodings = encoder(part, None if pairs is None else pairs.slice(start, _SLICE).to_pylist())
            lengths = np.fromiter((len(e.ids) for e in encodings), np.int64, len(encodings))
            if not may_be_empty and not lengths.all():
                row = start + int(lengths.argmin())
                file, number = place(row) if place else (None, row + 1)
                raise DataError(
                    "no token of the text is known to the tokenizer",
                    file=file,
                    row=number,
                    value=part[row - start],
                    hint="leave the row out, or use the model's own tokenizer",
                )
            offsets[start + 1 : start + 1 + len(lengths)] = offsets[start] + np.cumsum(lengths)
            ids.append([e.ids for e in encodings])
            if encoder.with_types:
                types.append([e.type_ids for e in encodings])
            num_truncated += sum(bool(e.overflowing) for e in encodings)
            if progress:
                progress(min(start + _SLICE, num_rows))
        return Tokens(
            ids=ids.array(),
            offsets=offsets,
            types=types.array() if encoder.with_types else None,
            num_truncated=num_truncated,
        )


class _Spool:
    """An array that grows in a file and is mapped when it is whole. The file has no name left when it is read."""

    def __init__(self, dtype: Any, folder: Path | None) -> None:
        self._dtype = np.dtype(dtype)
        self._file: IO[bytes] = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115  (closed by __exit__)

    def __enter__(self) -> _Spool:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def append(self, rows: Sequence[Sequence[int]]) -> None:
        self._file.write(np.concatenate([np.asarray(row, dtype=self._dtype) for row in rows]).tobytes())

    def array(self) -> np.ndarray:
        self._file.flush()
        size = os.fstat(self._file.fileno()).st_size
        if size == 0:
            return np.zeros(0, dtype=self._dtype)
        return np.memmap(self._file, dtype=self._dtype, mode="r", shape=(size // self._dtype.itemsize,))

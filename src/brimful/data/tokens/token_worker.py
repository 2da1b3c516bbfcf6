"""A process that tokenises: slices of texts in at its standard input, token ids out at its standard output.

It imports numpy and tokenizers only (0.2 s, 42 MB), never the user's main module, and ends when its input does: so it
does not outlive the process that started it, however that one ended.
"""

from __future__ import annotations

import itertools
import os
import pickle
import sys
from dataclasses import dataclass
from typing import IO, Self

import numpy as np

from brimful.core.errors import BrimfulError, DataError, printable
from brimful.data.tokens.encoder import Encoder, Tokens

#: What a process is started with, after its interpreter; the folders that modules are found in follow.
COMMAND = ("-c", "import sys; sys.path[:] = sys.argv[1:]; from brimful.data.tokens.token_worker import serve; serve()")
#: It is one thread among many processes, and its libraries have no use for more.
ENVIRONMENT = {"TOKENIZERS_PARALLELISM": "false", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Texts:
    """N texts as Arrow keeps them. bounds: (N + 1,) int64, byte positions; utf8: uint8, from `bounds[0]` on."""

    bounds: np.ndarray
    utf8: np.ndarray

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def __getitem__(self, rows: slice) -> Self:
        bounds = self.bounds[rows.start : rows.stop + 1]
        first = self.bounds[0]
        return type(self)(bounds, self.utf8[bounds[0] - first : bounds[-1] - first])

    def strings(self) -> list[str]:
        """The texts themselves."""
        utf8 = self.utf8.tobytes()
        bounds = (self.bounds - self.bounds[0]).tolist()
        return [utf8[start:stop].decode() for start, stop in itertools.pairwise(bounds)]


def answer(encoder: Encoder, texts: Texts, pairs: Texts | None, use_cache: bool) -> Tokens | BrimfulError:
    """The tokens, or what went wrong."""
    try:
        return encoder.encode(texts.strings(), None if pairs is None else pairs.strings(), use_cache=use_cache)
    except BrimfulError as error:
        return error
    except BaseException as error:  # a panic inside of tokenizers is no Exception, and must not be the end of a thread
        return DataError(f"the tokenizer failed with {type(error).__name__}: {printable(error)}")


def send(stream: IO[bytes], thing: object) -> None:
    """Writes one thing whole; arrays go as they lie in memory."""
    pickle.dump(thing, stream, protocol=5)
    stream.flush()


def serve() -> None:
    """Reads an encoder, says that it is there (None), and answers slices until the input ends."""
    requests = sys.stdin.buffer
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints must not get between the answers
    try:
        encoder = pickle.load(requests)
        send(answers, None)
        while True:
            send(answers, answer(encoder, *pickle.load(requests)))
    except (EOFError, BrokenPipeError, pickle.UnpicklingError):  # nobody asks, or waits, any more
        os._exit(0)

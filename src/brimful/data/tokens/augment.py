"""A user's function on each text, per sample and epoch, with tokenising, in worker processes."""

from __future__ import annotations

import importlib
import importlib.util
import multiprocessing
import os
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import numpy as np

from brimful.core.cores import num_cores
from brimful.core.errors import DataError, OptionError, encodes, printable
from brimful.data.tokens.encoder import OTHER_TOKENIZER, Encoder, Tokens

Transform = Callable[[str, random.Random], str]


def load_transform(name: str) -> Transform:
    """The function called `file.py:function` or `module:function`.

    Raises: OptionError if there is no such file, module or function.
    """
    where, _, function = name.rpartition(":")
    shown, hint = f"--transform {printable(name)!r}", "write file.py:function or module:function"
    if not where:
        raise OptionError(f"{shown} names no function", hint=hint)
    try:
        if where.endswith(".py"):
            spec = importlib.util.spec_from_file_location(f"brimful_transform_{Path(where).stem}", where)
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules[spec.name] = module
            spec.loader.exec_module(module)
        else:
            module = importlib.import_module(where)
        found = getattr(module, function)
    except Exception as error:  # the file is the user's, and may raise anything
        why = f"{type(error).__name__}: {printable(error)}"
        raise OptionError(f"{shown} cannot be loaded: {why}", hint=hint) from error
    if not callable(found):
        raise OptionError(f"{shown} is not a function", hint=hint)
    return cast(Transform, found)


class Augmenter:
    """Worker processes that transform and tokenise. Results depend on (seed, epoch, sample), not on the workers."""

    def __init__(self, transform: str, encoder: Encoder, *, seed: int, num_workers: int | None) -> None:
        load_transform(transform)  # here first: a mistake is one line, not a broken pool
        self._seed = seed
        self._pool = ProcessPoolExecutor(
            max_workers=num_workers or min(8, num_cores() or 1),
            mp_context=multiprocessing.get_context("spawn"),
            initializer=_start_worker,
            initargs=(transform, encoder),
        )

    def submit(
        self, epoch: int, samples: np.ndarray, texts: Sequence[str], pairs: Sequence[str] | None
    ) -> Future[Tokens]:
        """Tokens of each sample, in order, when they are done.

        Raises: DataError, here or from the future, for a transform that failed. Read futures under `worker_errors`.
        """
        given = (self._seed, epoch, samples.tolist(), list(texts), None if pairs is None else list(pairs))
        # Processes that start here are born deaf to Ctrl-C, before they can say so themselves.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            with worker_errors():
                return self._pool.submit(_work, *given)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def close(self) -> None:
        """Ends the workers without waiting for work nobody will read."""
        self._pool.shutdown(wait=False, cancel_futures=True)


@contextmanager
def worker_errors() -> Iterator[None]:
    """Says in one line that a worker process is gone."""
    try:
        yield
    except BrokenProcessPool as error:
        raise DataError(
            "a worker process of --transform was ended, or did not start",
            hint="it may have run out of memory: try fewer --num-workers; a script needs `if __name__ == '__main__':`",
        ) from error


class _Worker:
    """State of a worker process between batches."""

    transform: Transform
    encoder: Encoder


def _start_worker(transform: str, encoder: Encoder) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the main process's to handle
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _Worker.transform = load_transform(transform)
    _Worker.encoder = encoder


def _end_with_parent() -> None:
    """A main process that was killed can tell its workers nothing: they would wait for it for ever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _work(seed: int, epoch: int, samples: list[int], texts: list[str], pairs: list[str] | None) -> Tokens:
    return _transformed_tokens(_Worker.transform, _Worker.encoder, seed, epoch, samples, texts, pairs)


def try_transform(
    transform: Transform,
    encoder: Encoder,
    seed: int,
    texts: Sequence[str],
    pairs: Sequence[str] | None,
    place: Callable[[int], tuple[str, int]],
) -> None:
    """Call a transform for each of the first rows as it is called in the first epoch. place: file and row of each.

    Raises: DataError for the first row that it fails for.
    """
    for sample, text in enumerate(texts):
        try:
            _transformed_tokens(
                transform, encoder, seed, 0, [sample], [text], None if pairs is None else [pairs[sample]]
            )
        except DataError as error:
            file, row = place(sample)
            raise DataError(error.message, file=file, row=row, value=error.value, hint=error.hint) from None


def _transformed_tokens(
    transform: Transform,
    encoder: Encoder,
    seed: int,
    epoch: int,
    samples: list[int],
    texts: list[str],
    pairs: list[str] | None,
) -> Tokens:
    changed = [
        [
            _transformed(transform, text, f"{seed} {epoch} {sample} {column}")
            for sample, text in zip(samples, values, strict=True)
        ]
        for column, values in enumerate((texts, pairs))
        if values is not None
    ]
    found = encoder.encode(*changed)
    if not found.lengths.all():
        empty = int(found.lengths.argmin())
        said = f"the transform left no token the tokenizer knows: it gave {printable(changed[0][empty])!r}"
        raise DataError(said, value=texts[empty], hint="return the text as it was where nothing is left of it")
    for row, said in encoder.beyond_vocabulary(found).items():
        raise DataError(f"after the transform, {said}", value=texts[row], hint=OTHER_TOKENIZER)
    return found


def _transformed(transform: Transform, text: str, seed: str) -> str:
    try:
        changed = transform(text, random.Random(seed))
    except Exception as error:
        said = f"the transform failed with {type(error).__name__}: {printable(error)}"
        raise DataError(said, value=text, hint="it is called with the text and a random.Random") from None
    if not isinstance(changed, str):
        raise DataError(f"the transform gave {type(changed).__name__}, not a text", value=text, hint="return a str")
    if not encodes(changed):
        said = f"the transform gave a text that cannot be encoded (half a surrogate pair): '{printable(changed)}'"
        raise DataError(said, value=text, hint="do not cut texts between bytes or code units")
    return changed

"""Windows of texts to token ids, in parallel and in order: a tokenizer of its own for each of several processes.

In the parent a row costs no Python: texts leave as the bytes of their Arrow column, ids come back as arrays. Only of
some texts the parent makes ids itself, twice: looking words up (see `words`) goes on as long as that changes nothing.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing.spawn
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from brimful.core.errors import BrimfulError, DataError, printable
from brimful.data.tokens import token_worker
from brimful.data.tokens.encoder import FIRST_COMPARED, Encoder, Tokens, compared_rows, offsets_of
from brimful.data.tokens.token_worker import Texts

#: Most rows and bytes of text of a slice: 10 to 50 ms of a worker, so that windows spread over all and end together.
_SLICE_ROWS = 1024
_SLICE_BYTES = 1 << 18
#: In one process, one slice is tokenised by all threads while the ids of another are gathered.
_LANES_HERE = 2
#: How soon threads of this process leave the work to the workers, once these are up.
_POLL_S = 0.02
#: How long a process whose output has ended may take to end itself.
_DEATH_S = 10.0

#: Less text than this is tokenised before workers have started, or not much later.
_FEWEST_BYTES = 4 << 20
_MOST_WORKERS = 14


def choose_workers(num_bytes: float | None, device_type: str, cores: int) -> int:
    """Number of processes to tokenise `num_bytes` of text, 0 for threads of this process. None: size unknown.

    On a CPU the model needs the cores. Beside a GPU, two cores are left to reading, launching and writing. A worker
    gives some 0.5 M tokens a second where `tokenizers` does the work, 14 of them 7 M; where words can be looked up
    (see `words`), several times that, and most of them idle. A row costs the parent 0.6 us. Threads share the
    interpreter's lock with the launching of kernels: they are for inputs that are over before processes have paid for
    their start, and for machines without cores to spare.
    """
    if device_type == "cpu" or (num_bytes is not None and num_bytes < _FEWEST_BYTES):
        return 0
    workers = min(cores - 2, _MOST_WORKERS)
    return workers if workers >= 2 else 0


class TokenStream:
    """Tokenises windows of texts, several at once. Use as a context manager: leaving it ends threads and processes.

    encoder: of all texts. num_workers: processes; 0 for threads of this process. They start with the first window, in
    the background: until one is up, threads of this process tokenise. warn: hears, once, if words cannot be looked up.
    """

    def __init__(self, encoder: Encoder, *, num_workers: int, warn: Callable[[str], None] = lambda _: None) -> None:
        self.encoder, self._num_workers, self._warn = encoder, num_workers, warn
        self._num_first = FIRST_COMPARED
        self._packed_encoder = pickle.dumps(encoder) if num_workers else b""
        # CPython 3.11's SimpleQueue loses the time limit now and then where several threads wait.
        self._slices: queue.Queue[_Slice | None] = queue.Queue()
        self._lanes: list[threading.Thread] = []
        self._lock = threading.Lock()  # of what follows
        self._windows: set[_Window] = set()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._closed = False
        self._error: DataError | None = None
        self._worker_is_up = threading.Event()

    def __enter__(self) -> TokenStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def submit(
        self, texts: pa.Array | pa.ChunkedArray, pairs: pa.Array | pa.ChunkedArray | None = None
    ) -> Future[Tokens]:
        """Token ids of all rows of a window, when they are done. texts, pairs: (N,) string or large_string.

        A null text gives no token at all, an empty one its special tokens. Any number of windows may be under way; the
        memory of those is the caller's to bound. Whether words are looked up is decided here, by texts of this window
        and of those before it, never by how fast they are.
        Raises: DataError, here or from the future, if a worker process was ended, or the tokenizer failed.
        """
        window = _Window.cut(texts, pairs)
        if pairs is None:
            self._check(window.texts)
        use_cache = self.encoder.use_cache
        with self._lock:
            if self._closed:
                raise RuntimeError("the token stream is closed")
            if self._error is not None:
                raise self._error
            self._windows.add(window)
            if not self._lanes:
                self._start()
        for piece in window.slices(use_cache):
            self._slices.put(piece)
        return window.future

    @property
    def failed(self) -> bool:
        """True if a worker died, so that every further window would fail."""
        return self._error is not None

    def _check(self, texts: Texts) -> None:
        """Compares some texts of a window; of the first one, many."""
        rows = compared_rows(len(texts), first=self._num_first)
        self._num_first = 0
        try:
            said = self.encoder.check([texts[slice(row, row + 1)].strings()[0] for row in rows.tolist()])
        except KeyboardInterrupt:
            raise
        except BaseException:  # a panic inside of tokenizers, for one: the slice that the text is in will tell
            return
        if said is not None:
            self._warn(said)

    def close(self) -> None:
        """Ends workers and threads without waiting for work nobody will read; futures not done are cancelled."""
        with self._lock:
            self._closed = True
            windows, self._windows = self._windows, set()
            for process in self._processes:
                process.kill()
        for window in windows:
            window.future.cancel()
        for _ in self._lanes:
            self._slices.put(None)
        for lane in self._lanes:
            lane.join()

    def _start(self) -> None:
        works = [self._tokenize_here] * _LANES_HERE + [self._tokenize_there] * self._num_workers
        self._lanes = [
            threading.Thread(target=self._lane, args=(work,), name="brimful-tokens", daemon=True) for work in works
        ]
        for lane in self._lanes:
            lane.start()

    def _lane(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # no memory to join a window in, for one: whoever waits must hear of it
            self._fail(DataError(f"tokenising failed with {type(error).__name__}: {printable(error)}"))

    def _tokenize_here(self) -> None:
        """A thread that tokenises until the first worker can, or until the end if there is to be none."""
        while not self._worker_is_up.is_set():
            with contextlib.suppress(queue.Empty):
                piece = self._slices.get(timeout=_POLL_S)
                if piece is None or self._closed:
                    return
                self._done(piece, token_worker.answer(self.encoder, piece.texts, piece.pairs, piece.use_cache))

    def _tokenize_there(self) -> None:
        """A thread that has a worker process of its own tokenise."""
        process: subprocess.Popen[bytes] | None = None
        try:
            process = self._open_worker()
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(self._packed_encoder)
            process.stdin.flush()
            pickle.load(process.stdout)
            self._worker_is_up.set()
            while (piece := self._slices.get()) is not None and not self._closed:
                token_worker.send(process.stdin, (piece.texts, piece.pairs, piece.use_cache))
                self._done(piece, pickle.load(process.stdout))
        except (OSError, EOFError, pickle.UnpicklingError) as error:
            self._fail(_death(process, error))
        finally:
            if process is not None:
                _end(process)

    def _open_worker(self) -> subprocess.Popen[bytes]:
        # The process inherits what its thread is deaf to: stopping is the main process's to decide.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        executable = os.fsdecode(multiprocessing.spawn.get_executable() or sys.executable)
        process = subprocess.Popen(
            [executable, *token_worker.COMMAND, *sys.path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | token_worker.ENVIRONMENT,
        )
        with self._lock:
            self._processes.append(process)
            if self._closed:
                process.kill()
        return process

    def _done(self, piece: _Slice, found: Tokens | BrimfulError) -> None:
        if isinstance(found, BrimfulError):
            piece.window.fail(found)
        elif piece.window.receive(piece.number, found):
            piece.window.finish()
        else:
            return
        with self._lock:
            self._windows.discard(piece.window)

    def _fail(self, error: DataError) -> None:
        """Ends all: a slice is lost, and where one worker was ended the next one will be."""
        with self._lock:
            if self._closed or self._error is not None:
                return
            self._error = error
            windows, self._windows = self._windows, set()
        for window in windows:
            window.fail(error)


def _death(process: subprocess.Popen[bytes] | None, error: Exception) -> DataError:
    hint = "it may have run out of memory: try fewer workers"
    if process is None:
        return DataError(f"a worker process that tokenises did not start: {printable(error)}", hint=hint)
    try:
        code = process.wait(_DEATH_S)
    except subprocess.TimeoutExpired:  # it lives, and what it said cannot be read
        return DataError(f"a worker process that tokenises cannot be read: {printable(error)}")
    how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
    return DataError(f"a worker process that tokenises was ended {how}", hint=hint)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    for stream in (process.stdin, process.stdout):
        assert stream is not None
        with contextlib.suppress(OSError):  # what was left to write has no reader
            stream.close()
    process.wait()


@dataclass(frozen=True)
class _Slice:
    window: _Window
    number: int
    texts: Texts
    pairs: Texts | None
    use_cache: bool


@dataclass(eq=False)
class _Window:
    """One submission: its texts without nulls, where they are cut, and the parts that are back.

    given_N: which rows have a text, None if all.
    """

    texts: Texts
    pairs: Texts | None
    given_N: npt.NDArray[np.bool_] | None
    cuts: list[int]
    future: Future[Tokens] = field(default_factory=Future)
    parts: dict[int, Tokens] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def cut(cls, texts: Any, pairs: Any) -> _Window:
        columns = [texts] if pairs is None else [texts, pairs]
        if len({len(column) for column in columns}) > 1:
            raise ValueError(f"{len(texts):,} texts, and {len(pairs):,} to pair them with")
        given_N = None
        if any(column.null_count for column in columns):
            mask = columns[0].is_valid() if pairs is None else pc.and_(columns[0].is_valid(), columns[1].is_valid())
            columns = [column.filter(mask) for column in columns]
            given_N = mask.to_numpy(zero_copy_only=False) if isinstance(mask, pa.Array) else mask.to_numpy()
        flat = [_flat(column) for column in columns]
        sizes = np.sum([column.bounds - column.bounds[0] for column in flat], axis=0)
        return cls(flat[0], None if pairs is None else flat[1], given_N, _cuts(sizes))

    def slices(self, use_cache: bool) -> Iterator[_Slice]:
        for number, (start, stop) in enumerate(itertools.pairwise(self.cuts)):
            rows = slice(start, stop)
            yield _Slice(self, number, self.texts[rows], None if self.pairs is None else self.pairs[rows], use_cache)

    def receive(self, number: int, part: Tokens) -> bool:
        """Take a part; return True for the last one."""
        with self.lock:
            self.parts[number] = part
            return len(self.parts) == len(self.cuts) - 1

    def finish(self) -> None:
        tokens = Tokens.join([self.parts[number] for number in range(len(self.parts))])
        if self.given_N is not None:
            lengths, truncated = np.zeros(len(self.given_N), np.int64), np.zeros(len(self.given_N), np.bool_)
            lengths[self.given_N], truncated[self.given_N] = tokens.lengths, tokens.truncated
            tokens = replace(tokens, offsets=offsets_of(lengths), truncated=truncated)
        with contextlib.suppress(InvalidStateError):  # it was cancelled
            self.future.set_result(tokens)

    def fail(self, error: BrimfulError) -> None:
        with contextlib.suppress(InvalidStateError):  # it was cancelled, or has failed
            self.future.set_exception(error)


def _flat(column: Any) -> Texts:
    """The buffers of an Arrow column without nulls."""
    column = column.cast(pa.large_string())
    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    _, bounds, utf8 = array.buffers()
    if len(array) == 0 or bounds is None:
        return Texts(np.zeros(1, dtype=np.int64), np.zeros(0, dtype=np.uint8))
    bounds_N = np.frombuffer(bounds, np.int64, len(array) + 1, array.offset * 8)
    every = np.zeros(0, dtype=np.uint8) if utf8 is None else np.frombuffer(utf8, np.uint8)
    return Texts(bounds_N, every[bounds_N[0] : bounds_N[-1]])


def _cuts(sizes: np.ndarray) -> list[int]:
    """Start of each slice, and end of the last. sizes: (N + 1,) bytes up to each row."""
    num_rows = len(sizes) - 1
    cuts = [0]
    while cuts[-1] < num_rows or len(cuts) == 1:
        start = cuts[-1]
        by_size = int(np.searchsorted(sizes, sizes[start] + _SLICE_BYTES, side="right")) - 1
        cuts.append(min(max(by_size, start + 1), start + _SLICE_ROWS, num_rows))
    return cuts

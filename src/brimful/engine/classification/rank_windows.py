"""Windows of rows shared by the processes that a launcher has started: each takes its turn, and the first writes all.

Every process reads the rows and cuts the same windows; number n is that of process n modulo their number, which
tokenises and computes it. The first process asks for each window of another one when it is its turn to be written, so
rows keep their order, nobody is more than a few windows ahead, and it alone decides when to stop.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from brimful.core.callbacks import Callbacks
from brimful.core.errors import DataError, RanksError
from brimful.core.records import OutOfMemory
from brimful.data.tokens.encoder import Tokens
from brimful.engine.classification.gpu_workers import Job
from brimful.engine.classification.request import Asked
from brimful.engine.classification.runner import Checked, Result, Runner, make_runner
from brimful.engine.classification.stages import Stages, run_stages
from brimful.engine.inference import Done
from brimful.hardware.pulse import CAPTURE_S, FIRST_PIECE_S
from brimful.hardware.ranks import Ranks
from brimful.levers.precision import choose_forward_precision

_SAME_FILES = "give all processes the same files"


@dataclass(frozen=True, kw_only=True)
class Begin:
    """Order to take part in a pass. rows_done: those before it. use_cache: whether words are looked up.

    token_budget: most tokens of a micro-batch, None if memory never ran out.
    """

    job: Job
    rows_done: int = 0
    use_cache: bool = True
    token_budget: int | None = None


@dataclass(frozen=True, kw_only=True)
class End:
    """Order to end. record: of the pass, None where it did not come to its end."""

    record: Any = None


@dataclass(frozen=True, kw_only=True)
class _Give:
    """Order to send the next window."""


class _Ended(Exception):  # noqa: N818  (it is not an error)
    """The leader has ended before this process's windows have."""

    def __init__(self, record: Any) -> None:
        super().__init__()
        self.record = record


@contextmanager
def leading(ranks: Ranks) -> Iterator[list[Any]]:
    """Within, other processes take part; then they end. What is put into the list is the record that they get."""
    records: list[Any] = []
    try:
        yield records
    finally:
        for rank in range(1, ranks.count):
            with suppress(RanksError):  # it is gone, and was named where it was needed
                _send(ranks, End(record=records[0] if records else None), rank)


def begin(ranks: Ranks, order: Begin) -> None:
    """Have the others begin, as the leader."""
    ranks.pulse.enter("evaluation")
    for rank in range(1, ranks.count):
        _send(ranks, order, rank)


@dataclass
class _Turn:
    """A window on its way. asked: None until it is there. mark: of the rows that another process has read for it."""

    rank: int
    asked: Asked | None = None
    mark: int | None = None


class SharedStages:
    """Stages of a pass whose windows come from all processes in turn; of one process alone, its own.

    Arguments are those of `run_stages`. hear: called with each time that memory ran out in another process. mark: of
    `Texts`, of a window.
    """

    def __init__(
        self, ranks: Ranks, *, tokenise: Callable[[Any], Callable[[], Asked]], compute: Callable[[Asked], Result],
        write: Callable[[Any, Asked, np.ndarray], None], hear: Callable[[OutOfMemory], None],
        mark: Callable[[Any], int],
    ) -> None:  # fmt: skip
        self._ranks, self._tokenise, self._compute, self._write = ranks, tokenise, compute, write
        self._hear, self._mark, self._next = hear, mark, 0

    def pieces(self) -> AbstractContextManager[None]:
        """Within, windows are pieces of work by which others see that this process gets on."""
        return _pieces(self._ranks)

    def tokenise(self, window: Any) -> Callable[[], _Turn]:
        """Begin with a window, if it is this process's."""
        rank, self._next = self._next % self._ranks.count, self._next + 1
        if rank:
            return lambda: _Turn(rank)
        waiting = self._tokenise(window)
        return lambda: _Turn(0, waiting())

    def compute(self, turn: _Turn) -> Result:
        """Launch it, if it is this process's."""
        return _Given(self._ranks, turn, self._hear) if turn.asked is None else self._compute(turn.asked)

    def write(self, window: Any, turn: _Turn, logits_PC: np.ndarray) -> None:
        """Write it, whosever it was. Raises: DataError where another process has read other rows for it."""
        assert turn.asked is not None
        if turn.mark is not None and turn.mark != self._mark(window):
            raise DataError(f"process {turn.rank} reads other rows than process 0", hint=_SAME_FILES)
        self._ranks.pulse.end_piece()
        self._write(window, turn.asked, logits_PC)


class _Given:
    """Result of a window that another process computes, asked for in the order of windows, by one thread."""

    def __init__(self, ranks: Ranks, turn: _Turn, hear: Callable[[OutOfMemory], None]) -> None:
        self._ranks, self._turn, self._hear, self.busy_s = ranks, turn, hear, 0.0

    def result(self) -> np.ndarray:
        _send(self._ranks, _Give(), self._turn.rank)
        found: Done
        self._turn.asked, self._turn.mark, found = _receive(self._ranks, self._turn.rank)
        self.busy_s = found.busy_s
        for each in found.out_of_memory:
            self._hear(each)
        return found.logits_NC


def awaited(ranks: Ranks) -> Begin | End:
    """Wait for the leader's order to begin, or to end at once."""
    ranks.pulse.enter("evaluation")
    order: Begin | End = _receive(ranks, 0)
    return order


def runner_of(order: Begin, checked: Checked, device: torch.device) -> tuple[Runner, list[OutOfMemory]]:
    """Return a runner like the leader's, and the list of each time that memory runs out in it."""
    heard: list[OutOfMemory] = []
    runner = make_runner(
        checked,
        order.job.options,
        choose_forward_precision(order.job.precision, device),  # type: ignore[arg-type]
        sample=order.job.sample,
        num_tokens=order.job.num_tokens,
        callbacks=Callbacks(),
        hear=heard.append,
    )
    if order.token_budget is not None:
        runner.forward.limit_to(order.token_budget)
    return runner, heard


def take_part(
    ranks: Ranks,
    windows: Iterable[Any],
    *,
    tokenise: Callable[[Any], Callable[[], Asked]],
    compute: Callable[[Asked], Result],
    mark: Callable[[Any], int],
    heard: list[OutOfMemory],
) -> Any:
    """Compute this process's windows for the leader until it ends; return the record.

    mark: of `Texts`, of a window. heard: each time that memory ran out here, which is told with the next window.
    Raises: DataError where the leader has more windows.
    """
    results: deque[Result] = deque()

    def launch(asked: Asked) -> Result:
        results.append(result := compute(asked))
        return result

    def write(window: Any, asked: Asked, logits_PC: np.ndarray) -> None:
        ranks.pulse.end_piece()
        if isinstance(order := _receive(ranks, 0), End):
            raise _Ended(order.record)
        done = Done(logits_PC, results.popleft().busy_s, tuple(heard))
        _send(ranks, (replace(asked, sequences=_lengths_alone(asked.sequences)), mark(window), done), 0)
        heard.clear()

    own = (window for number, window in enumerate(_readable(windows)) if number % ranks.count == ranks.rank)
    try:
        with _pieces(ranks):
            run_stages(own, tokenise=tokenise, compute=launch, write=write, stages=Stages(), stop=lambda: False)
    except _Ended as ended:
        return ended.record
    if isinstance(order := _receive(ranks, 0), End):
        return order.record
    raise DataError("there are fewer rows here than in process 0", hint=_SAME_FILES)


def _pieces(ranks: Ranks) -> AbstractContextManager[None]:
    return ranks.pulse.pieces(first_s=CAPTURE_S, least_s=FIRST_PIECE_S)


def _readable(windows: Iterable[Any]) -> Iterator[Any]:
    """Windows up to one that cannot be read, of which the leader speaks: it reads it, too."""
    with suppress(DataError):
        yield from windows


def _lengths_alone(tokens: Tokens) -> Tokens:
    return Tokens(ids=np.empty(0, np.int32), offsets=tokens.offsets, types=None, truncated=tokens.truncated)


def _send(ranks: Ranks, what: Any, to: int) -> None:
    ranks.send(np.frombuffer(pickle.dumps(what), np.uint8).copy(), to)


def _receive(ranks: Ranks, sender: int) -> Any:
    return pickle.loads(ranks.receive(sender).tobytes())

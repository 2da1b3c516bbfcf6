"""Checkpoints written beside training: a thread writes a copy in host memory while the next steps run.

What was begun is not there yet: until `settle` says so, a kill leaves the checkpoint before. One is written at a time.
A state too large to be copied is written at once, from the tensors as they are. Where processes have a part of it each,
all write theirs, and the first writes the manifest once it knows all files.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from brimful.core.atomic_files import Written
from brimful.core.errors import DiskFullError, OutputError, first_line
from brimful.engine.training.checkpoint import rotate, save_checkpoint, save_part
from brimful.hardware.memory import free_host_bytes, is_out_of_memory
from brimful.hardware.pulse import Lost, Pulse
from brimful.hardware.watch import Board
from brimful.step.state import StepState

#: Share of the host's free memory that copies may take.
_MOST_OF_FREE = 0.25
#: Seconds between two looks for what another process has written.
_LOOK_S = 0.02
#: Seconds that others have to write what they have begun, once one of them is gone.
_ENDS_S = 15.0


class PartLostError(OutputError):
    """A process that has a part of a checkpoint is gone."""


@dataclass(frozen=True, kw_only=True)
class Saved:
    """A checkpoint whose writing has ended. failure: the reason why it is not there; None where it is."""

    step: int
    failure: DiskFullError | PartLostError | None


class CheckpointWriter:
    """Writes the checkpoints of one run and removes its old ones.

    folder: of the checkpoints. keep: of the newest, besides those protected. processes: that copy a part each. pulse:
    of this process, by which others see that a file grows.
    """

    def __init__(self, folder: Path, run: str, *, keep: int, processes: int = 1, pulse: Pulse | None = None) -> None:
        self._folder, self._run, self._keep, self._pulse = folder, run, keep, pulse or Pulse()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoints")
        self._copies = _Copies(processes)
        self._step = 0
        self._writing: Future[None] | None = None

    def begin(
        self,
        step: int,
        *,
        state: StepState,
        loop: Mapping[str, Any],
        protect: Collection[int],
        passed_over: Collection[int],
        second: int | None = None,
        others: Callable[[Callable[[], None]], Mapping[str, Written]] = lambda _: {},
    ) -> None:
        """Begin to save a checkpoint: `state` may change when this returns. The one before must be settled.

        protect, passed_over: as `rotate` has them, which follows where the checkpoint could be saved. second: as
        `save_checkpoint` has it. others: of `OthersParts.coming`.
        """
        assert self._writing is None
        kept = (step, dict(loop), frozenset(protect), frozenset(passed_over), second, others)
        self._step = step
        if (copied := self._copies.of(state)) is not None:
            self._writing = self._thread.submit(self._write, copied, *kept)
            return
        self._writing = Future()
        try:
            self._write(state, *kept)
        except BaseException as error:
            self._writing.set_exception(error)
        else:
            self._writing.set_result(None)

    def fail(self, step: int, error: Exception) -> None:
        """Take a checkpoint that could not be begun for one that failed."""
        self._step, self._writing = step, Future()
        self._writing.set_exception(error)

    @property
    def ended(self) -> bool:
        """True if `settle` would not wait."""
        return self._writing is None or self._writing.done()

    def settle(self) -> Saved | None:
        """Wait for the checkpoint that was begun last, and say what became of it; None if that was said before.

        Raises: what `save_checkpoint` and `rotate` raise, but for a full disk and a process that is gone.
        """
        writing, self._writing = self._writing, None
        if writing is None:
            return None
        failure: DiskFullError | PartLostError | None = None
        try:
            writing.result()
        except (DiskFullError, PartLostError) as error:
            failure = error
        return Saved(step=self._step, failure=failure)

    def wait(self, seconds: float) -> None:
        """Wait for what was begun, but no longer."""
        if (writing := self._writing) is not None:
            wait([writing], timeout=seconds)

    def close(self) -> None:
        """Wait for what was begun."""
        self._thread.shutdown()

    def _write(
        self,
        state: StepState,
        step: int,
        loop: Mapping[str, Any],
        protect: Collection[int],
        passed_over: Collection[int],
        second: int | None,
        others: Callable[[Callable[[], None]], Mapping[str, Written]],
    ) -> None:
        with self._pulse.writing() as progress:

            def theirs() -> Mapping[str, Written]:
                return others(progress)

            save_checkpoint(
                *(self._folder, step),
                run=self._run,
                state=state,
                loop=loop,
                second=second,
                others=theirs,
                progress=progress,
            )
            rotate(self._folder, self._keep, protect, run=self._run, newest=step, passed_over=passed_over)


class PartWriter:
    """Writes this process's parts of the checkpoints of one run, and says on `board` what it has written.

    folder: of the checkpoints. pulse: of this process, by which others see that a file grows. processes: that write a
    part each.
    """

    def __init__(self, folder: Path, pulse: Pulse, processes: int, board: Board) -> None:
        self._folder, self._pulse, self._board = folder, pulse, board
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoints")
        self._copies = _Copies(processes)
        self._writing: Future[None] | None = None
        self._number = 0

    def begin(self, step: int, second: int, state: StepState) -> None:
        """Begin to write the part of a checkpoint: `state` may change when this returns. second: of `save_part`."""
        given = (step, second, self._next_word())
        if (copied := self._copies.of(state)) is not None:
            self._writing = self._thread.submit(self._write, copied, *given)
        else:
            self._write(state, *given)

    def fail(self, error: Exception) -> None:
        """Say that the part of a checkpoint cannot be written."""
        self._say(self._next_word(), _failed(error))

    def close(self) -> None:
        """Wait for what was begun."""
        self._thread.shutdown()

    def _next_word(self) -> str:
        """Wait for what was begun, and return what the next part is told by."""
        if self._writing is not None:
            self._writing.result()
        self._number += 1
        return _word(self._number, self._pulse.rank)

    def _write(self, state: StepState, step: int, second: int, word: str) -> None:
        said: dict[str, Any]
        try:
            with self._pulse.writing() as progress:
                files = save_part(self._folder, step, second, self._pulse.rank, state, progress=progress)
            said = {"files": {name: asdict(written) for name, written in files.items()}}
        except Exception as error:  # whatever it is, the first process waits for a word
            said = _failed(error)
        self._say(word, said)

    def _say(self, word: str, said: dict[str, Any]) -> None:
        self._board.leave(word, json.dumps(said))


class OthersParts:
    """Waits for the files that other processes write of one checkpoint after another, as `PartWriter` says them.

    lost: says which of them is gone, if one is.
    """

    def __init__(self, count: int, board: Board, lost: Callable[[], Lost | None]) -> None:
        self._count, self._board, self._lost, self._number = count, board, lost, 0

    def coming(self) -> Callable[[Callable[[], None]], Mapping[str, Written]]:
        """Return what waits for those of the next checkpoint, and calls what it is given meanwhile.

        Raises, when that is called: DiskFullError, OutputError, PartLostError.
        """
        self._number += 1
        return partial(self._files, self._number)

    def _files(self, number: int, progress: Callable[[], None]) -> dict[str, Written]:
        files: dict[str, Written] = {}
        for rank in range(1, self._count):
            said = json.loads(self._said(number, rank, progress))
            if "failed" in said:
                raise (DiskFullError if said["full"] else OutputError)(f"process {rank}: {said['failed']}")
            files |= {name: Written(**written) for name, written in said["files"].items()}
        return files

    def _said(self, number: int, rank: int, progress: Callable[[], None]) -> str:
        """Wait for a process's word. Where another one is gone, it has some time yet to write what it has begun."""
        until = math.inf
        while True:
            lost = self._lost()  # before the last look: who is gone may have left its word
            if (text := self._board.find(_word(number, rank))) is not None:
                return text
            if lost is not None and (lost.rank in (None, rank) or time.monotonic() > until):
                raise PartLostError("another process is gone, and with it its part")
            until = until if lost is None else min(until, time.monotonic() + _ENDS_S)
            progress()
            time.sleep(_LOOK_S)


def _failed(error: Exception) -> dict[str, Any]:
    return {"failed": first_line(error), "full": isinstance(error, DiskFullError)}


def _word(number: int, rank: int) -> str:
    return f"part/{number}/{rank}"


class _Copies:
    """Copies of states in host memory that is kept for the next one: fresh memory is slow to write to."""

    def __init__(self, processes: int) -> None:
        self._copies: dict[tuple[str, ...], Tensor] = {}
        self._most = _MOST_OF_FREE / processes  # they may be on one host, and copy at once

    def of(self, state: StepState) -> StepState | None:
        """Copy a state; None where it does not fit in host memory: it is to be written without copies."""
        return self._copied_if_room(state) if self._fits(state) else None

    def _fits(self, state: StepState) -> bool:
        """Return whether copies fit in host memory: those of before are written over."""
        free = free_host_bytes()
        return bool(self._copies) or (free is not None and state.num_bytes < self._most * free)

    def _copied_if_room(self, state: StepState) -> StepState | None:
        """Copy all tensors, as `_copied`; None where memory runs out: then the checkpoint is written without copies."""
        try:
            return self._copied(state)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        self._copies = {}
        return None

    def _copied(self, state: StepState) -> StepState:
        """Copy all tensors."""
        copies: dict[tuple[str, ...], Tensor] = {}

        def copied(tensors: Mapping[str, Tensor], *names: str) -> dict[str, Tensor]:
            found = {}
            for name, tensor in tensors.items():
                place = (*names, name)
                known = self._copies.get(place)
                if known is None or known.shape != tensor.shape or known.dtype != tensor.dtype:
                    known = torch.empty(tensor.shape, dtype=tensor.dtype)
                copies[place] = found[name] = known.copy_(tensor.detach())
            return found

        optimizer = {
            name: replace(kept, tensors=copied(kept.tensors, "optimizer", name))
            for name, kept in state.optimizer.items()
        }
        whole = replace(
            state,
            weights=copied(state.weights, "weights"),
            buffers=copied(state.buffers, "buffers"),
            optimizer=optimizer,
        )
        self._copies = copies
        return whole

"""Checkpoints written beside training: a thread writes a copy in host memory while the next steps run.

What was begun is not there yet: until `settle` says so, a kill leaves the checkpoint before. One is written at a time.
A state too large to be copied is written at once, from the tensors as they are.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from brimful.core.errors import DiskFullError
from brimful.engine.training.checkpoint import rotate, save_checkpoint
from brimful.hardware.memory import free_host_bytes, is_out_of_memory
from brimful.step.state import StepState

#: Share of the host's free memory that copies may take.
_MOST_OF_FREE = 0.25


@dataclass(frozen=True, kw_only=True)
class Saved:
    """A checkpoint whose writing has ended. failure: the reason why it is not there; None where it is."""

    step: int
    failure: DiskFullError | None


class CheckpointWriter:
    """Writes the checkpoints of one run and removes its old ones.

    folder: of the checkpoints. keep: of the newest, besides those protected.
    """

    def __init__(self, folder: Path, run: str, *, keep: int) -> None:
        self._folder, self._run, self._keep = folder, run, keep
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoints")
        self._copies: dict[tuple[str, ...], Tensor] = {}
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
    ) -> None:
        """Begin to save a checkpoint: `state` may change when this returns. The one before must be settled.

        protect, passed_over: as `rotate` has them, which follows where the checkpoint could be saved.
        """
        assert self._writing is None
        kept = (step, dict(loop), frozenset(protect), frozenset(passed_over))
        self._step = step
        if self._fits(state) and (copied := self._copied_if_room(state)) is not None:
            self._writing = self._thread.submit(self._write, copied, *kept)
            return
        self._writing = Future()
        try:
            self._write(state, *kept)
        except BaseException as error:
            self._writing.set_exception(error)
        else:
            self._writing.set_result(None)

    @property
    def ended(self) -> bool:
        """True if `settle` would not wait."""
        return self._writing is None or self._writing.done()

    def settle(self) -> Saved | None:
        """Wait for the checkpoint that was begun last, and say what became of it; None if that was said before.

        Raises: what `save_checkpoint` and `rotate` raise, but for a full disk.
        """
        writing, self._writing = self._writing, None
        if writing is None:
            return None
        failure = None
        try:
            writing.result()
        except DiskFullError as error:
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
    ) -> None:
        save_checkpoint(self._folder, step, run=self._run, state=state, loop=loop)
        rotate(self._folder, self._keep, protect, run=self._run, newest=step, passed_over=passed_over)

    def _fits(self, state: StepState) -> bool:
        """Return whether copies fit in host memory: those of before are written over."""
        free = free_host_bytes()
        return bool(self._copies) or (free is not None and state.num_bytes < _MOST_OF_FREE * free)

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
        """Copy all tensors into host memory that is kept for the next time: fresh memory is slow to write to."""
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

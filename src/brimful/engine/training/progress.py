"""Progress of a training in numbers, as it is told and logged."""

from __future__ import annotations

from brimful.core.callbacks import Progress, StepsDone
from brimful.engine.prepare import Prepared
from brimful.engine.training.loop_state import LoopState


def progress_of(
    state: LoopState, prepared: Prepared, *, now: float, since: tuple[float, int, int], memory_bytes: int | None
) -> Progress:
    """Progress after the last step that was applied, which was done at `now`.

    since: seconds, samples and tokens when progress was last told. Where no step was done after that, rates are of the
    whole training.
    """
    seconds, samples, tokens = since if now > since[0] else (0.0, 0, 0)
    passed = max(now - seconds, 1e-9)
    left = max(0, prepared.num_steps - _done(state, prepared))
    return Progress(
        step=state.applied,
        num_steps=prepared.num_steps,
        epoch=state.consumed / prepared.order.batches_per_epoch,
        loss=state.window_loss / state.window_batches,
        learning_rate=state.learning_rate or 0.0,
        grad_norm=state.grad_norm or 0.0,
        tokens_per_s=(state.tokens - tokens) / passed,
        samples_per_s=(state.samples - samples) / passed,
        left_s=left * now / state.applied if state.applied else None,
        memory_bytes=memory_bytes,
    )


def steps_done(state: LoopState, prepared: Prepared, *, now: float, ahead: int) -> StepsDone:
    """Steps that are done at `now`. ahead: of them, that the loop has not heard of yet."""
    done = _done(state, prepared) + ahead
    return StepsDone(
        done=done,
        num_steps=prepared.num_steps,
        loss=state.window_loss / state.window_batches if state.window_batches else None,
        steps_per_s=done / max(now, 1e-9),
        left_s=max(0, prepared.num_steps - done) * now / max(1, done),
    )


def _done(state: LoopState, prepared: Prepared) -> int:
    """Steps by which a run's end is counted."""
    return state.applied if prepared.num_batches is None else state.consumed

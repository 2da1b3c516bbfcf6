"""Progress of a training loop, as checkpoints keep it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class LoopState:
    """State of the training loop: JSON in every checkpoint.

    num_steps: of the run, as it was asked for by then. token_budget: limit of the layout since memory ran out, None if
    it never did. out_of_memory: each time, as JSON. learning_rate, grad_norm: of the last step that was applied, if
    there was one.
    """

    consumed: int = 0
    applied: int = 0
    skipped: int = 0
    skipped_in_a_row: int = 0
    samples: int = 0
    tokens: int = 0
    train_s: float = 0.0
    window_loss: float = 0.0
    window_batches: int = 0
    learning_rate: float | None = None
    grad_norm: float | None = None
    best_value: float | None = None
    best_step: int | None = None
    best_metrics: dict[str, float] = field(default_factory=dict)
    without_improvement: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    metrics_step: int | None = None
    ended_early: bool = False
    num_steps: int | None = None
    token_budget: int | None = None
    out_of_memory: list[dict[str, Any]] = field(default_factory=list)
    events_position: int = 0

"""Options of `profile`."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from brimful.core.options.checks import check_positive
from brimful.core.options.train import TrainOptions


@dataclass(frozen=True, kw_only=True)
class ProfileOptions(TrainOptions):
    """Options of `profile`: those of `train` that a step depends on, so that one file can serve both.

    The others (`NOT_OF_A_STEP`) are no flags of `profile`; a --config may hold them, and they are ignored.
    """

    output: str = ""
    """Nothing is saved."""
    steps: int = 20
    """Steps to time, and then to trace, on the run's first batches."""
    trace: str | None = None
    """File for the traced steps as a Chrome trace, compressed if its name ends in .gz."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "steps")


#: Fields of TrainOptions that a single step does not depend on.
NOT_OF_A_STEP = frozenset(
    {"output", "eval_steps", "save_steps", "save_total_limit", "logging_steps", "metric_for_best_model"}
    | {"early_stopping_patience", "resume", "dry_run", "report_to", "baselines", "report", "push_to_hub"}
    | {"launcher", "num_processes", "hang_timeout"}
)


def flags_of(kind: type[Any]) -> tuple[dataclasses.Field[Any], ...]:
    """Fields of a command's options that are its flags."""
    hidden = NOT_OF_A_STEP if issubclass(kind, ProfileOptions) else frozenset()
    return tuple(field for field in dataclasses.fields(kind) if field.name not in hidden)

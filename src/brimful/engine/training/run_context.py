"""One training run, as the parts of its loop share it."""

from __future__ import annotations

from dataclasses import dataclass, field

from brimful.core.callbacks import Callbacks
from brimful.core.options.train import TrainOptions
from brimful.core.phases import Phases
from brimful.core.records import Run
from brimful.engine.assemble import Built
from brimful.engine.prepare import Prepared
from brimful.engine.training.baselines import Baselines
from brimful.engine.training.events import EventLog
from brimful.engine.training.loop_state import LoopState
from brimful.engine.training.run_folder import RunFolder


@dataclass(kw_only=True)
class RunContext:
    """A run: options, model and rows, the folder it is written to, and how far it is.

    record: as `run.json` will hold it. state: as checkpoints hold it.
    """

    options: TrainOptions
    prepared: Prepared
    built: Built
    folder: RunFolder
    events: EventLog
    callbacks: Callbacks
    phases: Phases
    baselines: Baselines
    record: Run
    state: LoopState = field(default_factory=LoopState)

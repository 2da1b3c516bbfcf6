"""Progress and evaluations as TensorBoard events, in the run's own folder."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from brimful.core.callbacks import Callbacks, Progress
from brimful.core.errors import OptionError
from brimful.core.records import Run


class TensorBoard(Callbacks):
    """Writes scalars by applied step into `folder`, made when there is something to write.

    A resumed run writes on from where it resumes: what stood behind that step is hidden.
    Raises: OptionError if tensorboard is not installed.
    """

    def __init__(self, folder: Path) -> None:
        if importlib.util.find_spec("tensorboard") is None:
            raise OptionError("--report-to tensorboard needs tensorboard", hint="pip install 'brimful[tensorboard]'")
        self._folder = folder
        self._writer: Any = None

    def progress(self, progress: Progress) -> None:
        """Loss, learning rate, gradient norm and speed."""
        for name in ("loss", "learning_rate", "grad_norm", "tokens_per_s", "samples_per_s"):
            self._at(progress.step).add_scalar(f"train/{name}", getattr(progress, name), progress.step)

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        """Each metric."""
        for name, value in metrics.items():
            self._at(step).add_scalar(f"eval/{name}", value, step)
        self._at(step).flush()

    def finished(self, run: Run, folder: str) -> None:
        """The file is closed."""
        if self._writer is not None:
            self._writer.close()

    def _at(self, step: int) -> Any:
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self._folder), purge_step=step)  # type: ignore[no-untyped-call]
        return self._writer

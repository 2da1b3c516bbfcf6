"""Progress and evaluations as TensorBoard events, in the run's own folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from brimful.core.errors import OptionError
from brimful.core.listener import Listener, Progress


class TensorBoard(Listener):
    """Writes scalars by applied step. A resumed run writes on from where it resumes.

    Raises: OptionError if tensorboard is not installed.
    """

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise OptionError(
                "--report-to tensorboard needs tensorboard", hint="pip install 'brimful[tensorboard]'"
            ) from None
        self._writer = SummaryWriter(str(folder))  # type: ignore[no-untyped-call]

    def progress(self, progress: Progress) -> None:
        """Loss, learning rate, gradient norm and speed."""
        for name in ("loss", "learning_rate", "grad_norm", "tokens_per_s", "samples_per_s"):
            self._writer.add_scalar(f"train/{name}", getattr(progress, name), progress.step)  # type: ignore[no-untyped-call]

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        """Each metric."""
        for name, value in metrics.items():
            self._writer.add_scalar(f"eval/{name}", value, step)  # type: ignore[no-untyped-call]
        self._writer.flush()  # type: ignore[no-untyped-call]

"""Data parallelism: several processes, each with the model, that share the rows of each batch and sum gradients."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from brimful.core.errors import OptionError
from brimful.core.option_checks import ADAMW_ONLY, flag
from brimful.core.options import TrainOptions
from brimful.levers.lever import Assembly, Cost, Lever, StepWork, Verdict
from brimful.levers.packing import Packing

_DEFAULTS = {field.name: field.default for field in dataclasses.fields(TrainOptions)}


@dataclass(frozen=True, kw_only=True)
class DataParallel(Lever):
    """Processes that take each step together."""

    name = "processes"
    source = "Li et al. 2020, arXiv 2006.15704; shares by Graham 1969, Bounds on multiprocessing timing anomalies"
    count: int

    @classmethod
    def supports(cls, assembly: Assembly) -> Verdict:
        """Return whether a batch may be split among processes."""
        equivalence = assembly.lever(Packing).equivalence
        asked = [name for name in ADAMW_ONLY if getattr(assembly.options, name) != _DEFAULTS[name]]
        if asked:
            return Verdict(ok=False, because=f"{flag(asked[0])} is for one process so far")
        if equivalence.independent:
            return Verdict(ok=True, because="the loss of a row is its own")
        return Verdict(ok=False, because=f"rows of a batch influence one another: {equivalence.reason}")

    @classmethod
    def choose(cls, assembly: Assembly) -> DataParallel | None:
        """Take as many as a launcher has started."""
        if assembly.num_ranks == 1 or not assembly.training:
            return None
        verdict = cls.supports(assembly)
        if not verdict.ok:
            raise OptionError(
                f"{assembly.num_ranks} processes cannot take this run's steps: {verdict.because}",
                hint="start one process",
            )
        reason = "started by a launcher; each takes a share of a batch's tokens, and gradients are summed"
        return cls(value=str(assembly.num_ranks), reason=reason, count=assembly.num_ranks)

    def cost(self, work: StepWork) -> Cost:
        """Count gradients gathered in fp32 before they are summed. How long that takes depends on the link."""
        return Cost(step_bytes=4 * work.num_trained)

    def apply(self, assembly: Assembly) -> None:
        """Leave it to the step, which is given the processes."""

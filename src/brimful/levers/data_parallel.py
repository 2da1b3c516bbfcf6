"""Data parallelism: several processes, each with the model, that share the rows of each batch and sum gradients."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from brimful.core.errors import OptionError
from brimful.core.options.checks import ADAMW_ONLY, flag
from brimful.core.options.train import TrainOptions
from brimful.core.records import Arithmetic
from brimful.hardware.peers import why_not_linked
from brimful.levers.facts import recomputes
from brimful.levers.lever import Assembly, Cost, Lever, StepWork, Verdict
from brimful.levers.packing import Packing
from brimful.levers.sharding import OF_WEIGHTS, Sharding, fuses
from brimful.levers.tensor_parallel import TensorParallel
from brimful.levers.update_memory import asked_savings
from brimful.models.model_stats import layers_of

_DEFAULTS = {field.name: field.default for field in dataclasses.fields(TrainOptions)}


@dataclass(frozen=True, kw_only=True)
class DataParallel(Lever):
    """Processes that take each step together.

    half: whether gradients are in bf16 on their way. overlap: whether they are sent while the backward pass goes on.
    copies: whether GPUs copy to one another's memory what NCCL sends else.
    """

    name = "processes"
    source = "Li et al. 2020, arXiv 2006.15704; shares by Graham 1969, Bounds on multiprocessing timing anomalies"
    count: int
    half: bool = False
    overlap: bool = True
    copies: bool = False

    @property
    def arithmetic(self) -> Arithmetic:
        """Effect on results."""
        return "rounding" if self.half else "exact"

    @classmethod
    def supports(cls, assembly: Assembly) -> Verdict:
        """Return whether a batch may be split among processes."""
        equivalence = assembly.lever(Packing).equivalence
        asked = [name for name in ADAMW_ONLY if getattr(assembly.options, name) != _DEFAULTS[name]]
        sharding = assembly.find(Sharding)
        if sharding is not None and sharding.value in OF_WEIGHTS and asked == ["optimizer_offload"]:
            asked = []
        if asked:
            but = ", or for --sharding parameters" if asked == ["optimizer_offload"] else ""
            return Verdict(ok=False, because=f"{flag(asked[0])} is for one process so far{but}")
        if equivalence.independent:
            return Verdict(ok=True, because="the loss of a row is its own")
        return Verdict(ok=False, because=f"rows of a batch influence one another: {equivalence.reason}")

    @classmethod
    def choose(cls, assembly: Assembly) -> DataParallel | None:
        """Take as many as a launcher has started."""
        options = assembly.options
        if not assembly.training or not isinstance(options, TrainOptions):
            return None
        if assembly.num_ranks == 1:
            if options.reduce_dtype != "fp32":
                assembly.warn(f"--reduce-dtype {options.reduce_dtype} has no effect: one process sends no gradients")
            if options.peer_copies:
                assembly.warn("--peer-copies has no effect: one process sends nothing")
            return None
        groups = assembly.num_ranks // options.tensor_parallel
        if groups == 1:  # all have the same rows
            return None
        verdict = cls.supports(assembly)
        if not verdict.ok:
            raise OptionError(
                f"{assembly.num_ranks} processes cannot take this run's steps: {verdict.because}",
                hint="start one process",
            )
        if options.batch_size < groups:
            assembly.warn(
                f"a batch has {options.batch_size} row{'s' * (options.batch_size > 1)} for {groups} processes: the"
                " others have no work; raise --batch-size"
            )
        half, overlap = options.reduce_dtype == "bf16", not _runs_layers_twice(assembly)
        copies, why_sent = _copies(assembly)
        reason = "started by a launcher; each takes a share of a batch's tokens, and gradients are summed"
        reason += ", in bf16 on their way," if half else ""
        sharding = assembly.find(Sharding)
        if assembly.find(TensorParallel) is not None:
            reason = f"{groups} groups of {options.tensor_parallel} processes, started by a launcher; each group takes"
            reason += " a share of a batch's tokens, and gradients are summed after the backward pass"
            return cls(value=str(groups), reason=reason, count=groups, overlap=False)
        if sharding is not None and sharding.value in OF_WEIGHTS:
            overlap, said = True, " layer by layer"
        else:
            said = " beside the backward pass" if overlap else " after the backward pass, in which layers run twice"
        reason += f", by copies between the GPUs' memory,{said}" if copies else said
        return cls(
            value=str(assembly.num_ranks),
            reason=f"{reason}; by NCCL, as {why_sent}" if why_sent else reason,
            count=assembly.num_ranks,
            half=half,
            overlap=overlap,
            copies=copies,
        )

    def cost(self, work: StepWork) -> Cost:
        """Count gradients gathered in fp32, and their copies in bf16. How long sums take depends on the link."""
        return Cost(resident_bytes=(8 if self.half else 4) * work.num_trained)

    def apply(self, assembly: Assembly) -> None:
        """Leave it to the step, which is given the processes."""


def _copies(assembly: Assembly) -> tuple[bool, str]:
    """Return whether to copy between GPUs' memory, and why not where parts are sent that could be copied.

    Raises: OptionError where copies were asked for and have no place.
    """
    options, sharding = assembly.options, assembly.find(Sharding)
    assert isinstance(options, TrainOptions)
    if options.peer_copies is False:
        return False, ""
    cut = "none" if sharding is None else sharding.value
    by_layers = cut == "parameters" and _on_gpus(assembly)
    by_parts = by_layers or (cut == "states" and fuses(assembly))
    why = ""
    if not by_parts:
        why = "they are for GPUs, with --sharding parameters, or states that our kernels update"
    elif by_layers and asked_savings(options) is not None:
        why = "weights come from host memory for their turn"
    elif options.reduce_dtype == "bf16":
        why = "they move gradients to be summed in fp32, and --reduce-dtype is bf16"
    elif options.memory_limit is not None:
        why = "memory that GPUs reach one another's is outside of --memory-limit"
    if options.peer_copies:
        if why:
            raise OptionError(f"--peer-copies does not work here: {why}", hint="leave it out")
        return True, ""
    why_not = why or why_not_linked(assembly.num_ranks)
    return not why_not, why_not if by_parts else ""


def _on_gpus(assembly: Assembly) -> bool:
    return assembly.device.type == "cuda"


def _runs_layers_twice(assembly: Assembly) -> bool:
    """Return whether a weight may get gradients more than once in a backward pass: of layers that share it, and are
    computed again one by one."""
    if not recomputes(assembly.options):  # type: ignore[arg-type]
        return False
    layers = layers_of(assembly.model)
    within = [id(p) for layer in layers or () for p in layer.parameters()]
    return layers is None or len(within) != len(set(within))

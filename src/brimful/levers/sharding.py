"""Optimizer states, gradients and weights of which each of several processes keeps a part alone.

    our kernels update it, and it fits            states cut: each process updates a part, and sends it
    fits one GPU whole                            nothing is cut: each process has all
    fits with states cut, gradients, weights      cut: the first of these that fits

Where each process updates a part, all of them have less to do, and send less than for sums of whole gradients. Further
cuts cost time, and a model that fits needs none of them.
"""

from __future__ import annotations

from dataclasses import dataclass

from brimful.core.errors import OptionError
from brimful.core.options.checks import ADAMW, flag
from brimful.core.options.train import TrainOptions
from brimful.core.units import bytes_text
from brimful.hardware.memory import device_free_bytes, free_host_bytes
from brimful.levers.facts import recomputes
from brimful.levers.lever import Assembly, Cost, Lever, StepWork, Verdict
from brimful.levers.update_memory import asked_savings
from brimful.models.model_stats import layers_of, linear_parameters
from brimful.models.tensor_plan import TensorPlan
from brimful.step.updates.fully_sharded import layer_groups
from brimful.step.updates.fused_adamw import can_fuse

#: Ways to cut, each keeping less than the one before.
_CUTS = ("states", "gradients", "parameters")
#: Ways in which weights are in parts, too.
OF_WEIGHTS = ("parameters", "deepspeed")
#: Ways in which our own kernels may update weights.
FUSED_CUTS = ("none", "states")
#: Names of a configuration's fields that count experts.
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
#: Share of free memory that weights, gradients and states may take; activations have the rest.
_MOST = 0.8


@dataclass(frozen=True, kw_only=True)
class Sharding(Lever):
    """The part of a training's memory that each process keeps, of `count`."""

    name = "sharding"
    source = "Rajbhandari et al. 2020, arXiv 1910.02054"
    count: int

    @classmethod
    def supports(cls, assembly: Assembly) -> Verdict:
        """Return whether an update may be cut: AdamW with fp32 states, and SGD without momentum."""
        options = assembly.options
        assert isinstance(options, TrainOptions)
        if options.optim not in (*ADAMW, "sgd"):
            return Verdict(ok=False, because=f"{options.optim} may look at whole weights; AdamW and SGD do not")
        if options.optim_args:
            return Verdict(ok=False, because=f"{flag('optim_args')} {options.optim_args} needs torch's own update")
        return Verdict(ok=True, because="each number is updated by itself")

    @classmethod
    def choose(cls, assembly: Assembly) -> Sharding | None:
        """Take what was asked for; for `auto` the least that fits."""
        options, count = assembly.options, assembly.num_ranks
        if not assembly.training or not isinstance(options, TrainOptions):
            return None
        asked = options.sharding
        if options.tensor_parallel > 1:
            return cls(value="none", reason="--tensor-parallel cuts weights and all that goes with them", count=count)
        if count == 1:
            if asked not in ("auto", "none"):
                assembly.warn(f"--sharding {asked} has no effect: one process has all")
            return None
        verdict = cls.supports(assembly)
        if asked != "auto":
            weights = cls._of_weights(assembly)
            if asked == "deepspeed" and assembly.precision.scaled:
                weights = Verdict(ok=False, because="its engine has a loss scale of its own; bf16 needs none")
            why_not = next((each for each in (verdict, weights) if not each.ok), None)
            if asked != "none" and why_not is not None and (why_not is verdict or asked in OF_WEIGHTS):
                said = f"--sharding {asked} does not work here: {why_not.because}"
                raise OptionError(said, hint="leave --sharding out: auto takes what fits and works")
            return cls(value=asked, reason="asked for", count=count)
        return cls._that_fits(assembly, verdict)

    @classmethod
    def _of_weights(cls, assembly: Assembly) -> Verdict:
        """Return whether weights may be cut: all processes must reach the same ones in each pass."""
        config, options = assembly.model.config, assembly.options
        experts = [name for name in _EXPERTS if getattr(config, name, None)]
        if experts:
            return Verdict(ok=False, because="processes would wait for experts that their own tokens do not reach")
        if assembly.adapter is not None or getattr(options, "peft", None) is not None:
            return Verdict(ok=False, because="an adapter's frozen weights are not cut")
        held = [id(p) for module in assembly.model.modules() for p in module._parameters.values() if p is not None]
        if len(held) != len(set(held)):
            return Verdict(ok=False, because="modules share a weight, and each is put together for its own turn")
        given = getattr(options, "gradient_checkpointing", "none")
        if given not in ("none", "full"):
            return Verdict(ok=False, because=f"--gradient-checkpointing {given} is for whole weights; take full")
        return Verdict(ok=True, because="each layer is put together for its turn")

    @classmethod
    def _that_fits(cls, assembly: Assembly, verdict: Verdict) -> Sharding:
        count, free = assembly.num_ranks, _free_bytes(assembly)
        needs = {name: needed_bytes(assembly, name) for name in ("none", *_CUTS)}
        whole = f"weights, gradients and states take {bytes_text(needs['none'])} of each process"
        if verdict.ok and fuses(assembly) and (free is None or needs["states"] <= _MOST * free):
            return cls(value="states", reason="each process updates its part of the weights, and sends it", count=count)
        if free is None or needs["none"] <= _MOST * free:
            return cls(value="none", reason=f"{whole}, and it has room for them whole", count=count)
        said = f"{whole}, and {bytes_text(free)} are free"
        if not verdict.ok:
            return cls(value="none", reason=f"{said}; {verdict.because}", count=count)
        weights = cls._of_weights(assembly)
        cuts = _CUTS if weights.ok else _CUTS[:-1]
        chosen = next((name for name in cuts if needs[name] <= _MOST * free), cuts[-1])
        reason = f"{said}; cut, {bytes_text(needs[chosen])}"
        if needs[chosen] > _MOST * free:
            more = "--optimizer-offload, or more processes" if weights.ok else weights.because
            more += "; or --tensor-parallel" if TensorPlan.of(assembly.model) is not None else ""
            assembly.warn(f"{reason}: that may not fit either ({more})")
        return cls(value=chosen, reason=reason, count=count)

    def cost(self, work: StepWork) -> Cost:
        """Count what other processes keep, as less. Sending weights takes time that depends on the link."""
        elsewhere = 1 - 1 / self.count
        bytes_each = {"none": 0, "states": 8, "gradients": 12, "parameters": 16, "deepspeed": 20}[self.value]
        sums = 4 / self.count if self.value == "states" else 0  # of its part, beside whole gradients
        return Cost(resident_bytes=round((sums - bytes_each * elsewhere) * work.num_trained))

    def apply(self, assembly: Assembly) -> None:
        """Leave it to the optimizer, which is asked for an update that is cut."""


def fuses(assembly: Assembly) -> bool:
    """Return whether our kernels update the weights, as far as cuts do not decide it."""
    options = assembly.options
    assert isinstance(options, TrainOptions)
    ours = options.optim in ADAMW and not options.optim_args and asked_savings(options) is None
    decays = min(options.adam_beta1, options.adam_beta2) > 0
    return ours and decays and can_fuse(assembly.model, assembly.device)


def needed_bytes(assembly: Assembly, sharding: str) -> int:
    """Bytes that a process keeps on its device of weights in fp32, their copies in half precision, gradients, their
    sums, and AdamW's states, at most. Weights in parts are taken to be put together in fp32 for their turn, and copies
    in half precision to be kept for the backward pass, as fused layers keep those that they put side by side, unless
    layers are computed again there. Two groups of layers are whole at a time, and one's gradients, which are copied
    once more to be sent."""
    options = assembly.options
    assert isinstance(options, TrainOptions)
    on_host = assembly.device.type != "cpu" and (options.optimizer_offload or options.offload_folder is not None)
    parameters, linear = list(assembly.model.parameters()), linear_parameters(assembly.model)
    trained = sum(p.numel() for p in parameters if p.requires_grad)
    frozen = sum(p.nbytes for p in parameters if not p.requires_grad)
    copies = 2 * sum(p.numel() for p in parameters if id(p) in linear) if assembly.precision.half is not None else 0
    part = 1 / assembly.num_ranks
    each = {
        "none": 4 + 8 + 8,
        "states": 4 + 8 + 12 * part,
        "gradients": 4 + 12 * part,
        "parameters": 16 * part,
        "deepspeed": 20 * part,
    }[sharding]
    if sharding not in OF_WEIGHTS:
        return int(trained * each + copies + frozen)
    whole = 0 if recomputes(options) else copies
    if sharding == "parameters":
        groups = layer_groups(list(layers_of(assembly.model) or ()))
        sizes = (sum(p.numel() for layer in group for p in layer.parameters()) for group in groups)
        whole += 4 * 4 * max(sizes, default=0)  # two groups' weights, one's gradients, and their copy
    return whole if on_host else int(trained * each + frozen * part + whole)


def _free_bytes(assembly: Assembly) -> int | None:
    if assembly.device.type == "cuda":
        return device_free_bytes(assembly.device)
    free = free_host_bytes()
    return None if free is None else free // assembly.num_ranks

"""Tensor parallelism: several processes have one model's weights together, each a part of every layer, cut by
transformers' own plan for the model.

    fits one GPU whole, or with states, gradients, weights in parts    --sharding, which sends less
    does not, and its GPUs are of one machine                          tensor parallelism: sums in each half of a layer

It is taken where it is asked for: what it sends is in the way of every layer, forward and backward.
"""

from __future__ import annotations

from dataclasses import dataclass

from brimful.core.errors import OptionError
from brimful.core.options.train import TrainOptions
from brimful.levers.lever import Assembly, Cost, Lever, StepWork, Verdict
from brimful.models.model_stats import linear_parameters
from brimful.models.tensor_plan import TensorPlan

#: Ways to recompute that are the same in all processes, by what --gradient-checkpointing begins with.
_ALIKE = ("none", "full", "every")
#: Names of probabilities of dropout of attention's weights in configurations.
_ATTENTION_DROPOUT = ("attention_dropout", "attention_probs_dropout_prob", "attn_pdrop")


@dataclass(frozen=True, kw_only=True)
class TensorParallel(Lever):
    """Groups of `size` processes that have the weights together, of `count` processes in all.

    cut_share: of all weights, those that are in parts.
    """

    name = "tensor_parallel"
    source = "Shoeybi et al. 2019, arXiv 1909.08053; transformers' tp_plan"
    count: int
    size: int
    cut_share: float

    @classmethod
    def supports(cls, assembly: Assembly) -> Verdict:
        """Return whether the model has a plan that so many processes can carry out."""
        options, plan = assembly.options, assembly.fact(plan_of)
        assert isinstance(options, TrainOptions)
        kind = assembly.model.config.model_type
        if assembly.adapter is not None:
            return Verdict(ok=False, because="an adapter's frozen weights are not cut")
        if plan is None:
            return Verdict(ok=False, because=f"transformers has no plan for {kind}")
        if (why_not := plan.why_not(assembly.model, options.tensor_parallel)) is not None:
            return Verdict(ok=False, because=f"{why_not} ({kind})")
        if options.optim not in ("adamw_torch", "adamw_torch_fused", "sgd"):
            return Verdict(ok=False, because=f"{options.optim} may look at whole weights; AdamW and SGD do not")
        if not options.gradient_checkpointing.startswith(_ALIKE):
            because = f"--gradient-checkpointing {options.gradient_checkpointing} is not the same in all processes"
            return Verdict(ok=False, because=because)
        return Verdict(ok=True, because="its layers are products of parts and sums")

    @classmethod
    def choose(cls, assembly: Assembly) -> TensorParallel | None:
        """Take it where it is asked for."""
        options = assembly.options
        if not assembly.training or not isinstance(options, TrainOptions) or options.tensor_parallel == 1:
            return None
        size, count = options.tensor_parallel, assembly.num_ranks
        verdict = cls.supports(assembly)
        if count % size:
            because = "there is one process" if count == 1 else f"there are {count} processes"
            verdict = Verdict(ok=False, because=because)
        if not verdict.ok:
            said = f"--tensor-parallel {size} does not work here: {verdict.because}"
            raise OptionError(said, hint="leave it out, or use --sharding parameters")
        plan = assembly.fact(plan_of)
        assert plan is not None
        sizes = {name: p.numel() for name, p in assembly.model.named_parameters()}
        cut = sum(number for name, number in sizes.items() if plan.is_cut(name)) / max(1, sum(sizes.values()))
        reason = f"asked for; by transformers' plan each process has 1/{size} of {cut:.0%} of the weights, and computes"
        reason += " its part of every layer, on the rows of its group" if count > size else " its part of every layer"
        cls._warn_of_masks(assembly)
        return cls(value=str(size), reason=reason, count=count, size=size, cut_share=cut)

    @classmethod
    def _warn_of_masks(cls, assembly: Assembly) -> None:
        config = assembly.model.config.get_text_config()
        rates = [getattr(config, name, None) for name in _ATTENTION_DROPOUT]
        if any(isinstance(rate, float) and rate > 0 for rate in rates):
            assembly.warn("dropout of attention has the same masks in the heads of each process of a group")

    def cost(self, work: StepWork) -> Cost:
        """Count weights, gradients and states that others have, as less. How long sums take depends on the link."""
        elsewhere = self.cut_share * (1 - 1 / self.size)
        return Cost(resident_bytes=-round(16 * elsewhere * work.num_trained))

    def apply(self, assembly: Assembly) -> None:
        """Leave it to the optimizer, which is asked for an update of parts: weights are cut as the step is made."""


def plan_of(assembly: Assembly) -> TensorPlan | None:
    """Return transformers' plan for the model, if it has one."""
    return TensorPlan.of(assembly.model)


def cut_bytes(assembly: Assembly, found: TensorParallel) -> int:
    """Bytes that a process keeps of weights in fp32, gradients and AdamW's states."""
    parameters, linear = list(assembly.model.parameters()), linear_parameters(assembly.model)
    trained = sum(p.numel() for p in parameters if p.requires_grad)
    frozen = sum(p.nbytes for p in parameters if not p.requires_grad)
    copies = 2 * sum(p.numel() for p in parameters if id(p) in linear) if assembly.precision.half is not None else 0
    part = 1 - found.cut_share * (1 - 1 / found.size)
    return int((16 * trained + frozen + copies) * part)

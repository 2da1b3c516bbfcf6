"""Optimizers by transformers' `optim` names. AdamW on a GPU is updated by kernels of our own
(`step/updates/fused_adamw.py`), elsewhere by torch's fused ones; the arithmetic is the same.

`adamw_torch` and `adamw_torch_fused` run the same kernels, unless `--optim-args` names some of torch's. Those of
`optimizer_names` run as Trainer makes them, but that the device's numbers say when a step is skipped: the host waits
for these in every step.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.trainer_pt_utils import get_parameter_names

from brimful.core import records
from brimful.core.options.checks import ADAMW, adamw_kernels, flag
from brimful.core.options.choices import OptimizerChoice, ShardingChoice
from brimful.core.options.train import TrainOptions
from brimful.core.records import Arithmetic
from brimful.hardware.peers import peers_of
from brimful.levers.data_parallel import DataParallel
from brimful.levers.facts import equivalence_of
from brimful.levers.lever import Assembly, Cost, Lever, StepWork, Verdict
from brimful.levers.optimizer_names import (
    OPTIMIZERS,
    WITH_32_BITS,
    NamedOptimizer,
    check_installed,
    decides_on_device,
    make_optimizers,
    without_effect,
)
from brimful.levers.packing import Packing
from brimful.levers.sharding import FUSED_CUTS, Sharding
from brimful.levers.streaming import Streaming
from brimful.levers.tensor_parallel import TensorParallel, plan_of
from brimful.levers.update_memory import asked_savings, check_savings, described
from brimful.models.model_stats import linear_parameters
from brimful.models.packed.cut_check import CutCheck
from brimful.step.precision import Precision
from brimful.step.updates.bucketed_adamw import (
    GRADIENTS_UNDER_WAY,
    MOST_STAYING,
    STATES_UNDER_WAY,
    BucketedAdamW,
    Savings,
)
from brimful.step.updates.deepspeed_update import DeepSpeedUpdate
from brimful.step.updates.fully_sharded import FullyShardedUpdate
from brimful.step.updates.fused_adamw import FusedAdamW, can_fuse
from brimful.step.updates.fused_sharded import SENT_BYTES, FusedShardedAdamW
from brimful.step.updates.given_adamw import GivenAdamW, OwnersAdamW
from brimful.step.updates.given_update import GivenUpdate, Gradients
from brimful.step.updates.sharded import ShardedUpdate
from brimful.step.updates.streamed_adamw import StreamedAdamW
from brimful.step.updates.tensor_parallel import TensorParallelUpdate
from brimful.step.updates.torch_update import TorchUpdate
from brimful.step.updates.update import Update

_ADAMW = "Loshchilov and Hutter 2019, arXiv 1711.05101; torch.optim"
_IN_FP32 = NamedOptimizer(state_bytes=8, source=_ADAMW)
#: Names of parameters that do not decay: those of transformers' `Trainer.get_decay_parameter_names` (5.17 to 5.23).
_NOT_DECAYED = (r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)")


@dataclass(frozen=True, kw_only=True)
class Optimizer(Lever):
    """An optimizer and its hyperparameters. The learning rate belongs to the step, which reads it from its schedule.

    fused: whether it is updated by our own kernels. copies: whether these keep the weights of Linear layers in half
    precision beside their fp32 masters, where products are in it. savings: memory that its update does without.
    parts: processes that share what our kernels update. by_copies: whether they copy what is sent else. must_copy: not
    even where GPUs turn out not to reach one another's memory.
    """

    name = "optimizer"
    source = _ADAMW
    value: OptimizerChoice
    reason: str = "asked for"
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    optim_args: str | None = None
    fused: bool = False
    copies: bool = True
    savings: Savings | None = None
    sharding: ShardingChoice = "none"
    parts: int = 1
    by_copies: bool = False
    must_copy: bool = False
    offload_folder: str | None = None

    @property
    def named(self) -> NamedOptimizer | None:
        """Facts about one that is neither AdamW in fp32 nor SGD."""
        return OPTIMIZERS.get(self.value)

    @property
    def torch_kernels(self) -> dict[str, bool]:
        """Kernels of torch's AdamW that were asked for: empty for the fastest there are."""
        return adamw_kernels(self.value, self.optim_args)

    @property
    def arithmetic(self) -> Arithmetic:
        """Effect on results."""
        saved = self.savings or Savings()
        if saved.weights is not None or saved.states != torch.float32 or saved.late_clipping:
            return "training"
        return "exact" if self.named is None else self.named.arithmetic

    @classmethod
    def supports(cls, assembly: Assembly) -> Verdict:
        """Return whether our fused kernels update it here; torch's do everywhere."""
        asked = asked_optimizer(assembly.options)  # type: ignore[arg-type]
        if asked.value not in ADAMW:
            return Verdict(ok=False, because="ours are of AdamW")
        if asked.torch_kernels:
            return Verdict(ok=False, because="--optim-args names torch's")
        if asked.savings is not None or _cut(assembly) not in FUSED_CUTS or assembly.find(TensorParallel) is not None:
            return Verdict(ok=False, because="ours update all weights at once")
        if not min(asked.beta1, asked.beta2) > 0:
            return Verdict(ok=False, because="ours need decays above 0")
        return Verdict(ok=can_fuse(assembly.model), because="ours are for fp32 weights on a GPU")

    @classmethod
    def choose(cls, assembly: Assembly) -> Optimizer | None:
        """Take the one asked for, by the fastest kernels there are for it."""
        if not assembly.training:
            return None
        assembly.lever(Packing)  # puts the model on its device
        assembly.find(Streaming)  # or leaves its layers elsewhere
        if assembly.optimizer is not None:
            return _given(assembly.optimizer)
        asked, verdict = asked_optimizer(assembly.options), cls.supports(assembly)  # type: ignore[arg-type]
        for name in without_effect(asked.value):
            if getattr(assembly.options, name) != getattr(TrainOptions, name):
                assembly.warn(f"{flag(name)} has no effect on --optim {asked.value}")
        kernels = "our fused kernels" if verdict.ok else f"torch's fused kernels ({verdict.because})"
        whose = "the default" if asked.value == TrainOptions.optim else "asked for"
        reason = f"{whose}; {kernels}, fp32 weights and states"
        if asked.torch_kernels:
            reason = f"asked for; {_kernels_said(asked.torch_kernels)}, fp32 weights and states"
        if asked.savings is not None:
            check_savings(assembly, asked.savings)
            said = described(asked.savings, streamed=assembly.options.stream_weights)
            reason = f"asked for: torch's fused kernel, a bucket of weights at a time; {said}"
        if asked.named is not None:
            ours = decides_on_device(asked.value, assembly.device, (asked.beta1, asked.beta2))
            reason = "asked for; as transformers' Trainer makes it, fp32 weights"
            if ours and asked.named.package == "bitsandbytes":
                reason = "asked for; bitsandbytes' states, updated by our kernel, fp32 weights"
            reason += ", embeddings with states in 32 bits" if asked.value in WITH_32_BITS else ""
            if asked.named.package == "schedulefree":
                reason += f"; learning rate {assembly.options.lr_scheduler_type}, and weights are averaged"  # type: ignore[union-attr]
            reason += "; not paged on a CPU" if "paged" in asked.value and assembly.device.type == "cpu" else ""
            reason += "" if ours else "; the host waits for each step's gradient"
        cut, together = _cut(assembly), assembly.find(DataParallel)
        if cut != "none":
            where = " in host memory" if asked.savings is not None else ""
            kernels = "DeepSpeed's engine around torch's" if cut == "deepspeed" else _kernels_of_parts(assembly, asked)
            kernels = "our fused kernels" if verdict.ok else kernels
            reason = f"{whose}; {kernels} on this process's part{where}, fp32 weights and states"
        if assembly.find(TensorParallel) is not None:
            kernels = _kernels_of_parts(assembly, asked)
            reason = f"{whose}; {kernels} on this process's part, fp32 weights and states"
        return replace(
            asked,
            fused=verdict.ok,
            sharding=cut,
            parts=assembly.num_ranks if cut == "states" and verdict.ok else 1,
            by_copies=together is not None and together.copies,
            must_copy=bool(assembly.options.peer_copies),  # type: ignore[union-attr]
            copies=assembly.precision.half is not None and assembly.fact(equivalence_of).half_weights,
            reason=reason,
        )

    def line(self) -> records.Lever:
        """Its line in the recipe, with the source of the optimizer that was chosen."""
        return replace(super().line(), source=self.source if self.named is None else self.named.source)

    @property
    def state_bytes(self) -> int:
        """Bytes of states of a trained parameter: two fp32 for AdamW, none for plain SGD."""
        if self.savings is not None:
            return 2 * self.savings.states.itemsize
        if self.named is not None:
            return self.named.state_bytes
        return 0 if self.value == "sgd" and not self.optim_args else 4 if self.value == "sgd" else 8

    @property
    def device_state_bytes(self) -> int:
        """Bytes of states that are on the device."""
        return 0 if self.savings is not None and self.savings.on_host else self.state_bytes

    @property
    def gradient_bytes(self) -> int:
        """Bytes of gradients of a trained parameter at the end of a backward pass."""
        return 0 if self.savings is not None and self.savings.in_backward else 4

    def cost(self, work: StepWork) -> Cost:
        """Gradients, states and copies of weights, and seconds of reading and writing them.

        With copies, gradients of these weights are in half precision too, and autocast casts nothing.
        """
        copies = 2 * work.trained_linear if self.fused and self.copies else 0
        has_wide = self.value in WITH_32_BITS or (self.savings is not None and self.savings.states == torch.uint8)
        in_32_bits = max(0, work.num_trained - work.trained_linear) if has_wide else 0
        saved = 2 * work.trained_linear if self.savings is not None and self.savings.weights is not None else 0
        wide = OPTIMIZERS.get(WITH_32_BITS.get(self.value, ""), _IN_FP32).state_bytes if self.device_state_bytes else 0
        return Cost(
            resident_bytes=self.device_state_bytes * (work.num_trained - in_32_bits)
            + wide * in_32_bits
            + copies
            - saved
            + self.staying_bytes(work.num_trained, work.trained_linear),
            step_bytes=self.gradient_bytes * work.num_trained - 2 * copies + self._bytes_under_way(work.num_trained),
            step_s=(self.moved_bytes(work.num_trained) - 3 * copies) / work.bytes_per_s,
        )

    def staying_bytes(self, num_trained: int, trained_linear: int) -> int:
        """Bytes of states of a table of words, which stay where all others are in host memory, about."""
        if self.savings is None or not (self.savings.on_host and self.savings.in_backward):
            return 0
        wide = 8 if self.savings.states == torch.uint8 else self.state_bytes  # of what is no Linear weight
        tables = wide * max(0, num_trained - trained_linear)
        return tables if tables <= MOST_STAYING * (tables + self.state_bytes * trained_linear) else 0

    def _bytes_under_way(self, num_trained: int) -> int:
        """Bytes of buckets on the device, where gradients and states are there for their update alone."""
        if self.savings is None:
            return 0
        gradients = min(4 * num_trained, GRADIENTS_UNDER_WAY) if self.savings.in_backward else 0
        return gradients + (min(self.state_bytes * num_trained, STATES_UNDER_WAY) if self.savings.on_host else 0)

    def moved_bytes(self, num_parameters: int, num_idle: int = 0) -> int:
        """Bytes that one update must read and write at least: weight and states, read and written, and the fp32
        gradient, read twice, once for its norm.

        num_idle: of the parameters, how many never had a gradient, and are left alone once that was read.
        """
        each = 2 * 4 + 2 * 4 + 2 * self.state_bytes
        return each * (num_parameters - num_idle) + 2 * 4 * num_idle

    def apply(self, assembly: Assembly) -> None:
        """Make the update of the model's trained parameters."""
        assert assembly.schedule is not None
        max_grad_norm = assembly.options.max_grad_norm  # type: ignore[union-attr]
        if assembly.optimizer == "elsewhere":
            assembly.update = Gradients(assembly.model)
            return
        if isinstance(assembly.optimizer, OwnersAdamW):
            owners = assembly.optimizer.optimizer
            assembly.update = GivenAdamW(assembly.model, owners, max_grad_norm=max_grad_norm)
            return
        if assembly.optimizer is not None:
            assembly.update = GivenUpdate(
                assembly.model, assembly.optimizer, max_grad_norm=max_grad_norm, scaled=assembly.precision.scaled
            )
            return
        if assembly.find(TensorParallel) is not None:
            assembly.update = self._of_parts(assembly)
            return
        assembly.update = self.update(
            assembly.model,
            assembly.schedule,
            assembly.precision,
            max_grad_norm=max_grad_norm,
        )

    def update(self, model: nn.Module, schedule: Tensor, precision: Precision, *, max_grad_norm: float) -> Update:
        """Make the update of a model's trained parameters. schedule: (steps + 1,) learning rate by applied steps."""
        decayed = decayed_names(model)
        if self.sharding != "none" and not self.fused:
            cut = self.settings(model, precision, max_grad_norm=max_grad_norm)
            offload = self.savings is not None and self.savings.on_host
            if self.sharding == "deepspeed":
                return DeepSpeedUpdate(
                    model, schedule, device=precision.device, offload=offload, folder=self.offload_folder, **cut
                )
            if self.sharding == "parameters":
                half = precision.half if self.copies else None
                parts = FullyShardedUpdate(
                    model, schedule, device=precision.device, offload=offload, product_dtype=half, **cut
                )
                if self.by_copies:
                    parts.find_peers, parts.must_copy = peers_of, self.must_copy
                return parts
            return ShardedUpdate(model, schedule, scatters_gradients=self.sharding == "gradients", **cut)
        if self.fused:
            kind = FusedAdamW if self.sharding == "none" else FusedShardedAdamW
            ours = kind(
                model,
                schedule,
                max_grad_norm=max_grad_norm,
                scaled=precision.scaled,
                betas=(self.beta1, self.beta2),
                epsilon=self.epsilon,
                weight_decay=dict.fromkeys(decayed, self.weight_decay),
                half=precision.half if self.copies else None,
                parts=self.parts,
                bucket_bytes=SENT_BYTES if self.parts > 1 and not self.by_copies else None,
            )
            if isinstance(ours, FusedShardedAdamW) and self.by_copies:
                ours.find_peers, ours.must_copy = peers_of, self.must_copy
            return ours
        if self.savings is not None:
            given: dict[str, Any] = {
                "max_grad_norm": max_grad_norm,
                "scaled": precision.scaled,
                "betas": (self.beta1, self.beta2),
                "epsilon": self.epsilon,
                "weight_decay": dict.fromkeys(decayed, self.weight_decay),
                "savings": replace(self.savings, linear=frozenset(linear_parameters(model))),
            }
            streamed = getattr(model, "streamed_layers", None)
            if streamed is None:
                return BucketedAdamW(model, schedule, **given)
            return StreamedAdamW(model, schedule, streamed=streamed, device=precision.device, **given)
        return self._by_torch(model, schedule, precision, decayed, max_grad_norm=max_grad_norm)

    def _by_torch(
        self, model: nn.Module, schedule: Tensor, precision: Precision, decayed: set[str], *, max_grad_norm: float
    ) -> TorchUpdate:
        """Make the update by an optimizer of torch's kind."""
        groups = parameter_groups(model, decayed, self.weight_decay)

        def make(learning_rate: Tensor) -> torch.optim.Optimizer | list[torch.optim.Optimizer]:
            if self.named is not None or (self.optim_args and self.value not in ADAMW):
                given = self._hyperparameters(schedule)
                return make_optimizers(self.value, groups, embedding_weights(model), given, learning_rate)
            if self.value == "sgd":
                return torch.optim.SGD(groups, lr=learning_rate, fused=True)
            kernels = self.torch_kernels or {"fused": True}
            fused = kernels.get("fused", False)
            return torch.optim.AdamW(
                groups,
                lr=learning_rate if fused else float(schedule.max()),
                betas=(self.beta1, self.beta2),
                eps=self.epsilon,
                fused=fused,
                foreach=kernels.get("foreach", False),
                capturable=fused and learning_rate.is_cuda,
            )

        packaged = self.named is not None and self.named.package in ("torchao", "bitsandbytes")
        own_states = packaged and not decides_on_device(self.value, precision.device, (self.beta1, self.beta2))
        return TorchUpdate(
            model, make, schedule, max_grad_norm=max_grad_norm, scaled=precision.scaled, own_states=own_states
        )

    def settings(self, model: nn.Module, precision: Precision, *, max_grad_norm: float) -> dict[str, Any]:
        """Arguments of updates that are made in parts."""
        return {
            "max_grad_norm": max_grad_norm,
            "scaled": precision.scaled,
            "kind": "sgd" if self.value == "sgd" else "adamw",
            "betas": (self.beta1, self.beta2),
            "epsilon": self.epsilon,
            "weight_decay": dict.fromkeys(decayed_names(model), self.weight_decay),
        }

    def _of_parts(self, assembly: Assembly) -> TensorParallelUpdate:
        """Make the update of weights that processes have together."""
        plan, packing, device = assembly.fact(plan_of), assembly.lever(Packing), assembly.device
        assert plan is not None
        assert assembly.schedule is not None
        form = packing.equivalence.form if packing.packed else None
        check = CutCheck(assembly.model, form, max_length=assembly.max_length, device=device)
        max_grad_norm: float = assembly.options.max_grad_norm  # type: ignore[union-attr]
        given = self.settings(assembly.model, assembly.precision, max_grad_norm=max_grad_norm)
        return TensorParallelUpdate(assembly.model, assembly.schedule, plan=plan, check=check, device=device, **given)

    def _hyperparameters(self, schedule: Tensor) -> dict[str, Any]:
        """By their names in transformers' TrainingArguments."""
        return {
            "learning_rate": float(schedule.max()),
            "adam_beta1": self.beta1,
            "adam_beta2": self.beta2,
            "adam_epsilon": self.epsilon,
            "optim_args": self.optim_args,
            "weight_decay": self.weight_decay,
            "warmup_steps": 0,  # of an optimizer's own: the schedule has one
        }


def _cut(assembly: Assembly) -> ShardingChoice:
    """Return the way in which processes keep parts."""
    sharding = assembly.find(Sharding)
    return "none" if sharding is None else cast(ShardingChoice, sharding.value)


def _given(optimizer: torch.optim.Optimizer | OwnersAdamW | str) -> Optimizer:
    """The lever of an optimizer that is not ours to make."""
    if isinstance(optimizer, OwnersAdamW):
        reason = "the loop's own, by the learning rate of its groups; our fused kernels, fp32 weights and states"
        return Optimizer(value=cast(Any, "AdamW"), reason=reason, fused=True, copies=False)
    if isinstance(optimizer, str):
        return Optimizer(value=cast(Any, "none"), reason="the loop updates by itself; gradients are left in .grad")
    reason = "the loop's own, by the learning rates of its groups"
    return Optimizer(value=cast(Any, type(optimizer).__name__), reason=reason)


def asked_optimizer(options: TrainOptions) -> Optimizer:
    """The optimizer and its hyperparameters as they were asked for. Raises: OptionError if its package is missing."""
    check_installed(options.optim)
    return Optimizer(
        value=options.optim,
        weight_decay=options.weight_decay,
        beta1=options.adam_beta1,
        beta2=options.adam_beta2,
        epsilon=options.adam_epsilon,
        optim_args=options.optim_args,
        savings=asked_savings(options),
        offload_folder=options.offload_folder,
    )


def _kernels_said(kernels: Mapping[str, bool]) -> str:
    """Say which of torch's AdamW updates weights."""
    if kernels.get("fused"):
        return "torch's fused kernels"
    said = "torch's foreach kernels" if kernels.get("foreach") else "torch's loop over weights"
    return f"{said}; the host waits for each step's gradient"


def _kernels_of_parts(assembly: Assembly, asked: Optimizer) -> str:
    """Say which kernels update this process's part of weights that are cut."""
    in_parts = _cut(assembly) == "parameters" or assembly.find(TensorParallel) is not None
    ours = in_parts and asked.value in ADAMW and asked.savings is None and assembly.device.type == "cuda"
    if ours and min(asked.beta1, asked.beta2) > 0:
        return "our kernel, and torch's fused ones for small weights,"
    return "torch's fused kernels"


def embedding_weights(model: nn.Module) -> list[Tensor]:
    """Tables of embeddings."""
    return [module.weight for module in model.modules() if isinstance(module, nn.Embedding)]


def decayed_names(model: nn.Module) -> set[str]:
    """Names of the parameters that weight decay is for, by the rule of transformers' Trainer: all but biases and norms,
    found by their names and as parts of `nn.LayerNorm`."""
    return set(get_parameter_names(model, [nn.LayerNorm], list(_NOT_DECAYED)))


def parameter_groups(model: nn.Module, decayed: Collection[str], weight_decay: float) -> list[dict[str, Any]]:
    """Groups of trained parameters for torch's optimizers: those that decay, and all others."""
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for name, p in trained if (name in decayed) == decays], "weight_decay": rate}
        for decays, rate in ((True, weight_decay), (False, 0.0))
    ]
    return [group for group in groups if group["params"]]

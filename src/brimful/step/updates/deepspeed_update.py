"""AdamW and SGD on weights of which each process keeps a part, by DeepSpeed's engine (ZeRO-3).

As `fully_sharded`, in another library's hands: for states on an NVMe disk. Each module's weights are put together for
its turn. Clipping, the update and whether it is skipped are the engine's, on the host. Its gradients are means over
processes, so losses are multiplied by their number. A parameter without a gradient has one of zeros.
Source: Rajbhandari et al. 2021, arXiv 2104.07857.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from brimful.core.errors import OptionError
from brimful.core.place import find_local_count
from brimful.hardware.ranks import ALONE, Ranks
from brimful.measurement.memory import Kept
from brimful.models.model_stats import layers_of
from brimful.step.state import Counters, StepState
from brimful.step.updates.deepspeed_parts import OwnParts, SwapFolder
from brimful.step.updates.own_state import own_state
from brimful.step.updates.update import Update

#: Weights of a process that are updated at once where they are on a disk. Four times as many numbers are in memory.
_GROUP = 100_000_000
#: Bytes on the disk for each weight of a process: weight, gradient and two moments, and all but the gradient once more
#: while a checkpoint is written.
_DISK_BYTES = 28


class DeepSpeedUpdate(Update):
    """AdamW, or SGD without momentum, by DeepSpeed. weight_decay: by name of parameters that have any.

    offload: whether weights, gradients and states are in host memory. folder: of a disk, for these.
    """

    on_device = False
    gathers_state = True
    gathers_weights = True
    releases_together = True

    def __init__(
        self, model: nn.Module, schedule: Tensor, *, max_grad_norm: float, scaled: bool, device: torch.device,
        kind: Literal["adamw", "sgd"], betas: tuple[float, float], epsilon: float, weight_decay: Mapping[str, float],
        offload: bool, folder: str | None = None,
    ) -> None:  # fmt: skip
        super().__init__(model, schedule, max_grad_norm=max_grad_norm, scaled=scaled, device=device)
        self._kind, self._betas, self._epsilon, self._offload = kind, betas, epsilon, offload
        self._weight_decay, self._folder = weight_decay, folder
        self._shared_ranks: Ranks = ALONE
        self._half = False
        self._swaps: SwapFolder | None = None
        self._deepspeed: Any = None
        self._engine: Any = None

    def share(self, ranks: Ranks, *, half: bool = False, overlap: bool = True) -> None:
        """As `Update` has it, once they `meet`."""
        self._shared_ranks, self._half = ranks, half
        self._deepspeed = _deepspeed(self.device, needs_disk=self._folder is not None)
        if self._folder is not None:
            own = sum(parameter.numel() for parameter in self.parameters) / ranks.count
            self._swaps = SwapFolder(Path(self._folder), round(_DISK_BYTES * own * find_local_count()))
            if ranks.watch is not None:
                ranks.watch.leavings.append(self._swaps.remove)

    def meet(self) -> str:
        """Cut weights, one after another on the device, as all processes do together."""
        deepspeed, ranks, half = self._deepspeed, self._shared_ranks, self._half
        folder = None if self._swaps is None else self._swaps.path
        config = _config(ranks, half=half, offload=self._offload, folder=folder, clipping=self.max_grad_norm)
        self._own_forms = [(module, dict(module.__dict__)) for module in self.model.modules()]
        deepspeed.init_distributed(dist_backend="gloo" if self.device.type == "cpu" else "nccl")
        for layer in leaves_of(self.model):  # it looks after each module within otherwise, which takes the host longer
            deepspeed.utils.set_z3_leaf_module(layer, True)
        own_hooks = [set(hooks) for hooks in _hooks(self.model)]
        deepspeed.zero.Init(module=self.model, config_dict_or_path=config)
        engine, *_ = deepspeed.initialize(
            model=self.model, optimizer=self._torch_optimizer(), config=config, dist_init_required=False
        )
        for hooks, before in zip(_hooks(self.model), own_hooks, strict=True):
            for key in set(hooks) - before:  # a packed pass calls the base model and the head's modules
                del hooks[key]
        for name, buffer in self.model.named_buffers():
            owner, _, own = name.rpartition(".")
            self.model.get_submodule(owner)._buffers[own] = buffer.to(self.device)
        self._engine, self._optimizer = engine, engine.optimizer
        return ""

    def _torch_optimizer(self) -> torch.optim.Optimizer:
        decays = sorted({self._weight_decay.get(name, 0.0) for name in self.named}, reverse=True)
        groups: list[dict[str, Any]] = []
        for decay in decays:
            chosen = [p for name, p in self.named.items() if self._weight_decay.get(name, 0.0) == decay]
            groups.append({"params": chosen, "weight_decay": decay})
        if self._kind == "sgd":
            return torch.optim.SGD(groups, lr=0.0)
        return torch.optim.AdamW(groups, lr=0.0, betas=self._betas, eps=self._epsilon)

    def begin(self) -> None:
        """As `Update` has it. Others take part in each pass: a step that fails here is not taken again."""
        self.committed = True

    def before(self) -> None:
        """Have the engine begin with another micro-batch."""
        self._engine.set_gradient_accumulation_boundary(True)  # gradients are added up until the update
        self._optimizer.clear_backward_seen_flag()
        self._optimizer.parameter_offload.get_param_coordinator().reset_step()
        for parameter in self.named.values():  # its part is the engine's
            parameter.grad = None

    def backward(self, loss: Tensor) -> None:
        """As `Update` has it."""
        self._engine.backward(loss * self._shared_ranks.count)

    def reduce(self) -> None:
        """As `Update` has it; gradients were summed in the backward passes."""
        self._shared_ranks.sum([self.loss])

    def apply(self, *, gathered: bool) -> Tensor:
        """As `Update` has it. The host waits for the device."""
        rate = float(self.schedule[min(int(self.applied), len(self.schedule) - 1)])
        for group in self._optimizer.optimizer.param_groups:
            group["lr"] = rate
        self._engine.step()
        skipped = bool(self._optimizer.overflow)
        norm = math.nan if skipped else float(self._engine.get_global_grad_norm())
        readings = torch.tensor(
            [float(self.loss), norm, rate, 1.0, float(skipped)], dtype=torch.float64, device=self.device
        )
        self.applied.add_(int(not skipped))
        self.loss.zero_()
        return readings

    def abandon(self) -> None:
        """As `Update` has it."""
        super().abandon()
        self._engine.zero_grad()

    def state(self) -> StepState:
        """As `Update` has it, of this process's parts; those of a disk are in another file of it."""
        started = self._kind == "adamw" and int(self.applied) > 0
        own = self._own_parts().saved(started=started)
        steps = {name: torch.tensor(float(self.applied)) for name in self.named if started}
        counters = Counters(applied=int(self.applied), scale=1.0, growth=int(self.growth), used=self._used_names())
        return own_state(own, steps, self.model, counters, leads=self._shared_ranks.leads)

    def load_state(self, state: StepState) -> None:
        """As `Update` has it, each process of its part."""
        with torch.no_grad():
            self._own_parts().load(state.weights, state.optimizer, self.named)
            for name, buffer in self.model.named_buffers():
                buffer.copy_(state.buffers[name])
            for name in ("applied", "growth"):
                getattr(self, name).fill_(getattr(state.counters, name))

    def _own_parts(self) -> OwnParts:
        rank, folder = self._shared_ranks.rank, None if self._swaps is None else self._swaps.path
        return OwnParts(self._optimizer, self.named, rank=rank, kind=self._kind, folder=folder)

    def release(self) -> None:
        """Put all weights together, in host memory of the process that leads: its model is a plain one again."""
        import deepspeed

        whole = {}
        for name, parameter in self.model.named_parameters():
            with deepspeed.zero.GatheredParameters([parameter]):
                if self._shared_ranks.leads:
                    whole[name] = nn.Parameter(parameter.detach().to("cpu", copy=True), parameter.requires_grad)
        self._engine.destroy()
        if self._swaps is not None:
            self._swaps.remove()
        for module, form in self._own_forms:
            for key in set(module.__dict__) - set(form):
                del module.__dict__[key]
        for name, plain in whole.items():
            owner, _, own = name.rpartition(".")
            self.model.get_submodule(owner)._parameters[own] = plain
        self.named = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        self.parameters = list(self.named.values())
        self._engine = self._optimizer = None

    def weights(self) -> dict[str, Tensor]:
        """As `Update` has it, of their shapes alone: no process has one whole."""
        shapes = {name: getattr(parameter, "ds_shape", parameter.shape) for name, parameter in self.named.items()}
        return {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}

    def kept(self) -> Kept:
        """As `Update` has it, of this process's parts that are on the device."""
        parts = [p.ds_tensor for p in self.model.parameters() if hasattr(p, "ds_tensor")]
        return Kept.of(self.device, [*parts, *self.model.buffers()], iter(()), self._state_tensors())

    def _state_tensors(self) -> Iterator[Tensor]:
        for state in self._optimizer.optimizer.state.values() if self._engine is not None else ():
            yield from (each for each in state.values() if isinstance(each, Tensor))

    def _used_names(self) -> tuple[str, ...]:
        return tuple(self.named) if int(self.applied) else ()


def leaves_of(model: Any) -> list[nn.Module]:
    """Return the layers that are one module each to DeepSpeed: those behind the first that is trained, as it sums up a
    layer's gradients when that of its input comes; none where some are computed again, in a backward pass of their own.
    """
    layers = list(layers_of(model) or ())
    if any(getattr(layer, "gradient_checkpointing", False) for layer in layers):
        return []
    trained = [number for number, layer in enumerate(layers) if any(p.requires_grad for p in layer.parameters())]
    return layers[trained[0] + 1 :] if trained else []


def _deepspeed(device: torch.device, *, needs_disk: bool) -> Any:
    """Return the package, which has not said anything. Raises: OptionError for a disk that it cannot use."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu" if device.type == "cpu" else "cuda")
    os.environ.setdefault("DEEPSPEED_LOG_LEVEL", "error")
    import deepspeed
    from deepspeed.utils import logger

    logger.setLevel("ERROR")
    warnings.filterwarnings("ignore", message=r"`torch\.distributed\.", category=FutureWarning)  # names it calls
    if device.type == "cpu":  # its own collectives in shared memory would be compiled
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if needs_disk:
        from deepspeed.ops.op_builder import AsyncIOBuilder

        if not AsyncIOBuilder().is_compatible():
            raise OptionError(
                "--offload-folder needs DeepSpeed's async_io, which cannot be built here",
                hint="install libaio-dev and a compiler, or leave it out for host memory",
            )
    return deepspeed


def _config(ranks: Ranks, *, half: bool, offload: bool, folder: Path | None, clipping: float) -> dict[str, Any]:
    """Return DeepSpeed's configuration: ZeRO-3 of torch's optimizer in fp32, a batch at a time."""
    zero: dict[str, Any] = {"stage": 3, "stage3_param_persistence_threshold": 0}
    if offload or folder is not None:
        zero["offload_param"] = {"device": "cpu"}
        zero["offload_optimizer"] = {"device": "cpu"}
    if folder is not None:
        zero["offload_optimizer"] = {"device": "nvme", "nvme_path": str(folder)}
        zero["sub_group_size"] = _GROUP
    return {
        "train_batch_size": ranks.count,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": clipping,
        "zero_optimization": zero,
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
        "communication_data_type": "bf16" if half else "fp32",
        "steps_per_print": 1 << 30,
    }


def _hooks(model: Any) -> tuple[dict[int, Any], ...]:
    """Hooks around the whole model, which others may have copies of."""
    return model._forward_pre_hooks, model._forward_hooks

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
from brimful.hardware.ranks import ALONE, Ranks
from brimful.measurement.memory import Kept
from brimful.step.state import Counters, ParameterState, StepState
from brimful.step.updates.update import Update

_MOMENTS = ("exp_avg", "exp_avg_sq")


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
        self._deepspeed: Any = None
        self._engine: Any = None

    def share(self, ranks: Ranks, *, half: bool = False, overlap: bool = True) -> None:
        """As `Update` has it, once they `meet`."""
        self._shared_ranks, self._half = ranks, half
        self._deepspeed = _deepspeed(self.device, self._folder)

    def meet(self) -> None:
        """Cut weights, one after another on the device, as all processes do together."""
        deepspeed, ranks, half = self._deepspeed, self._shared_ranks, self._half
        config = _config(ranks, half=half, offload=self._offload, folder=self._folder, clipping=self.max_grad_norm)
        self._own_forms = [(module, dict(module.__dict__)) for module in self.model.modules()]
        deepspeed.init_distributed(dist_backend="gloo" if self.device.type == "cpu" else "nccl")
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
        """As `Update` has it, in host memory of the process that leads; all others send their parts, and get none."""
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        leads, weights, states = self._shared_ranks.leads, dict[str, Tensor](), dict[str, ParameterState]()
        started = self._kind == "adamw" and int(self.applied) > 0
        for name, parameter in self._cut_parameters():
            shape = parameter.ds_shape
            whole = safe_get_full_fp32_param(parameter)
            moments = [safe_get_full_optimizer_state(parameter, key) for key in _MOMENTS] if started else []
            if leads:
                weights[name] = whole.view(shape).to("cpu", copy=True)
                kept = {k: m.view(shape).to("cpu", copy=True) for k, m in zip(_MOMENTS, moments, strict=False)}
                step = {"step": torch.tensor(float(self.applied))}
                states |= {name: ParameterState(tensors=step | kept)} if started else {}
        counters = Counters(applied=int(self.applied), scale=1.0, growth=int(self.growth), used=self._used_names())
        return StepState(weights=weights, buffers=dict(self.model.named_buffers()), optimizer=states, counters=counters)

    def load_state(self, state: StepState) -> None:
        """As `Update` has it, each process of its part."""
        from deepspeed.utils import safe_set_local_fp32_param, safe_set_local_optimizer_state

        self._make_states()
        zeros, steps = torch.zeros(()), [0.0]
        with torch.no_grad():
            for name, parameter in self._cut_parameters():
                own = self._part(state.weights[name], parameter)
                safe_set_local_fp32_param(parameter, own)
                parameter.ds_tensor.copy_(own)
                if self._kind == "sgd":
                    continue
                kept = state.optimizer[name].tensors if name in state.optimizer else {}
                steps.append(float(kept.get("step", zeros)))
                for key in _MOMENTS:
                    moment = self._part(kept[key], parameter) if key in kept else torch.zeros_like(own)
                    safe_set_local_optimizer_state(parameter, moment, key)
            for each in self._optimizer.optimizer.state.values():
                each["step"].fill_(max(steps))
            for name, buffer in self.model.named_buffers():
                buffer.copy_(state.buffers[name])
            for name in ("applied", "growth"):
                getattr(self, name).fill_(getattr(state.counters, name))

    def _cut_parameters(self) -> Iterator[tuple[str, Any]]:
        """Trained parameters by name, with what the engine has put on them."""
        yield from self.named.items()

    def _make_states(self) -> None:
        """Make states that the first step would make."""
        inner = self._optimizer.optimizer
        for flat in self._optimizer.fp32_partitioned_groups_flat if self._kind == "adamw" else ():
            state = inner.state[flat]
            state.setdefault("step", torch.tensor(0.0))
            for key in _MOMENTS:
                state.setdefault(key, torch.zeros_like(flat))

    def _part(self, whole: Tensor, parameter: Any) -> Tensor:
        """This process's part of a whole tensor, in equal parts with zeros behind the last."""
        size, flat = parameter.ds_tensor.numel(), whole.flatten()
        part = torch.zeros(size, dtype=parameter.ds_tensor.dtype, device=parameter.ds_tensor.device)
        own = flat[self._shared_ranks.rank * size : (self._shared_ranks.rank + 1) * size]
        part[: len(own)] = own
        return part

    def release(self) -> None:
        """Put all weights together, in host memory of the process that leads: its model is a plain one again."""
        import deepspeed

        whole = {}
        for name, parameter in self.model.named_parameters():
            with deepspeed.zero.GatheredParameters([parameter]):
                if self._shared_ranks.leads:
                    whole[name] = nn.Parameter(parameter.detach().to("cpu", copy=True), parameter.requires_grad)
        self._engine.destroy()
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


def _deepspeed(device: torch.device, folder: str | None) -> Any:
    """Return the package, which has not said anything. Raises: OptionError for a disk that it cannot use."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu" if device.type == "cpu" else "cuda")
    os.environ.setdefault("DEEPSPEED_LOG_LEVEL", "error")
    import deepspeed
    from deepspeed.utils import logger

    logger.setLevel("ERROR")
    warnings.filterwarnings("ignore", message=r"`torch\.distributed\.", category=FutureWarning)  # names it calls
    if device.type == "cpu":  # its own collectives in shared memory would be compiled
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if folder is not None:
        from deepspeed.ops.op_builder import AsyncIOBuilder

        if not AsyncIOBuilder().is_compatible():
            raise OptionError(
                "--offload-folder needs DeepSpeed's async_io, which cannot be built here",
                hint="install libaio-dev and a compiler, or leave it out for host memory",
            )
    return deepspeed


def _config(ranks: Ranks, *, half: bool, offload: bool, folder: str | None, clipping: float) -> dict[str, Any]:
    """Return DeepSpeed's configuration: ZeRO-3 of torch's optimizer in fp32, a batch at a time."""
    zero: dict[str, Any] = {"stage": 3, "stage3_param_persistence_threshold": 0}
    if offload or folder is not None:
        zero["offload_param"] = {"device": "cpu"}
        zero["offload_optimizer"] = {"device": "cpu"}
    if folder is not None:
        zero["offload_optimizer"] = {"device": "nvme", "nvme_path": str(Path(folder).absolute())}
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

"""Layers whose weights torch's FSDP2 puts together for their turn, by hooks of its own around a call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

#: What torch 2.11 to 2.13 note of a pass: of the whole model, of what is sent, and of a group of weights.
_OF_PASS = {"iter_forward_root": None, "post_backward_final_callback_queued": False}
_OF_SENT = {"all_gather_state": None, "reduce_scatter_state": None}
_OF_GROUP = {
    "_all_gather_result": None, "_post_reduce_event": None, "_reshard_after_forward_event": None,
    "_all_reduce_state": None, "_partial_reduce_output": None,
}  # fmt: skip
_LISTS_OF_SENT = ("post_forward_order", "reduce_scatter_states", "_last_post_reduce_events")

#: What an attribute's name begins with in which torch keeps that a module is sharded.
STATE_OF_FSDP = "__composable_api_state_key_"


def is_of_fsdp(hook: Any) -> bool:
    """Return whether sharding has put a hook there."""
    inner = getattr(hook, "__wrapped__", hook)
    return "fsdp" in (getattr(inner, "__module__", "") or "")


def only_of_fsdp(module: nn.Module) -> bool:
    """Return whether a module has hooks around its calls, and sharding has put all of them there."""
    hooks = list(_hooks_around(module))
    return bool(hooks) and all(map(is_of_fsdp, hooks)) and not (module._backward_hooks or module._backward_pre_hooks)


def call_between_hooks(module: nn.Module, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call what stands for a module's code, weights being whole within. As `nn.Module` calls hooks of `only_of_fsdp`:
    those before are given keywords, and return both; one that returns None changes nothing."""
    for hook in module._forward_pre_hooks.values():
        args, kwargs = hook(module, args, kwargs) or (args, kwargs)  # type: ignore[misc, call-arg]
    out = call(*args, **kwargs)
    for hook in module._forward_hooks.values():
        found = hook(module, args, out)  # type: ignore[call-arg]
        out = out if found is None else found
    return out


def forget_pass(model: nn.Module) -> None:
    """Have weights in parts as they were before a pass that was left in its midst, and whose gradients are not wanted.

    torch's own `reset_iter_state`, of 2.13, waits for what was sent. Of a capture that was refused nothing was.
    """
    from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

    states = {id(state): state for m in model.modules() if (state := _state_of(m)) is not None}
    for state in states.values():
        state._training_state = TrainingState.IDLE
        state._modules_to_run_forward.clear()
        _set(state._state_ctx, _OF_PASS)
        _set(state._comm_ctx, _OF_SENT)
        for name in _LISTS_OF_SENT:
            getattr(state._comm_ctx, name, []).clear()
        for group in _groups_of(state):
            _set(group, _OF_GROUP)
            group._training_state = TrainingState.IDLE
            group._post_forward_indices.clear()
            for parameter in group.fsdp_params:
                parameter.unsharded_accumulated_grad = None
                if (whole := getattr(parameter, "_unsharded_param", None)) is not None:
                    whole.grad = None
            group._to_sharded()


@dataclass(frozen=True, kw_only=True)
class Sent:
    """A module's whole weights, as they are sent: their bytes, and the half precision that they and their gradients are
    in on their way, None where that is their own."""

    num_bytes: int
    half: torch.dtype | None


def sent_of(module: nn.Module) -> Sent:
    """Return what is sent of a module that FSDP2 cuts: nothing where all of its weights are parts of other modules'."""
    num_bytes, half = 0, None
    for group in _groups_of(_state_of(module)):
        half, count = group.mp_policy.param_dtype, group.mesh_info.shard_mesh_size
        for each in group.fsdp_params:
            dtype = half or each.sharded_param.dtype
            num_bytes += each.padded_sharded_param_size.numel() * count * dtype.itemsize
    return Sent(num_bytes=num_bytes, half=half)


def is_awaited(modules: Iterable[nn.Module], memory: Tensor) -> bool:
    """Return whether whole weights of one of these modules arrive in a memory, and nothing has copied them out yet."""
    results = (group._all_gather_result for module in modules for group in _groups_of(_state_of(module)))
    return any(result is not None and _is_in(result, memory) for result in results)


def is_read(module: nn.Module, memory: Tensor) -> bool:
    """Return whether whole weights may be copied out of a memory yet, which nothing that is launched waits for."""
    last = _last_read(module)
    return last is not None and _is_in(last.all_gather_result, memory)


def await_read(module: nn.Module, memory: Tensor) -> None:
    """Have what is launched next come after whole weights were copied out of a memory."""
    if is_read(module, memory) and (event := _last_read(module).event) is not None:
        _state_of(module)._comm_ctx.device_handle.current_stream().wait_event(event)


def forget_order(module: nn.Module) -> None:
    """Forget the order of forward passes that no backward pass followed, as evaluations: the next backward pass would
    bring their last weights back, and a graph would for as long as it is replayed."""
    context = _state_of(module)._comm_ctx
    order = getattr(context, "post_forward_order", ())  # there is none before the first pass
    for group in order:
        group._post_forward_indices.clear()
    if order:
        order.clear()


def forget_cut(module: nn.Module, kind: type) -> None:
    """Have a module forget that FSDP2 has cut it, and what it sends by; its weights stay parts.

    kind: its class before it was cut.
    """
    from torch.distributed._composable_state import _module_state_mapping

    module.__class__ = kind
    _module_state_mapping.pop(module, None)
    loading = (module._load_state_dict_pre_hooks, module._load_state_dict_post_hooks, module._state_dict_pre_hooks)
    for hooks in (module._forward_pre_hooks, module._forward_hooks, *loading):
        for key in [key for key, hook in hooks.items() if is_of_fsdp(hook)]:
            del hooks[key]  # type: ignore[attr-defined]
    for name in [name for name in vars(module) if name.startswith(STATE_OF_FSDP)]:
        delattr(module, name)


def _last_read(module: nn.Module) -> Any:
    return _state_of(module)._comm_ctx.all_gather_state


def _is_in(result: Any, memory: Tensor) -> bool:
    return bool(result.all_gather_output.data_ptr() == memory.data_ptr())


def _state_of(module: nn.Module) -> Any:
    from torch.distributed.fsdp._fully_shard._fsdp_state import _get_module_fsdp_state

    return _get_module_fsdp_state(module)


def _groups_of(state: Any) -> Sequence[Any]:
    found = getattr(state, "_fsdp_param_groups", None)  # since torch 2.12
    return found or [group for group in [getattr(state, "_fsdp_param_group", None)] if group is not None]


def _set(owner: Any, values: dict[str, Any]) -> None:
    """Set the attributes that are there: not all versions of torch have all."""
    for name, value in values.items():
        if hasattr(owner, name):
            setattr(owner, name, value)


def _hooks_around(module: nn.Module) -> Iterator[Any]:
    yield from module._forward_pre_hooks.values()
    yield from module._forward_hooks.values()

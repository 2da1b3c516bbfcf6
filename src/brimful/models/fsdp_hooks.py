"""Layers whose weights torch's FSDP2 puts together for their turn, by hooks of its own around a call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

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
    from torch.distributed.fsdp._fully_shard._fsdp_state import _get_module_fsdp_state

    states = {id(state): state for m in model.modules() if (state := _get_module_fsdp_state(m)) is not None}
    for state in states.values():
        state._training_state = TrainingState.IDLE
        state._modules_to_run_forward.clear()
        _set(state._state_ctx, _OF_PASS)
        _set(state._comm_ctx, _OF_SENT)
        for name in _LISTS_OF_SENT:
            getattr(state._comm_ctx, name, []).clear()
        for group in getattr(state, "_fsdp_param_groups", None) or filter(None, [state._fsdp_param_group]):
            _set(group, _OF_GROUP)
            group._training_state = TrainingState.IDLE
            group._post_forward_indices.clear()
            for parameter in group.fsdp_params:
                parameter.unsharded_accumulated_grad = None
                if (whole := getattr(parameter, "_unsharded_param", None)) is not None:
                    whole.grad = None
            group._to_sharded()


def _set(owner: Any, values: dict[str, Any]) -> None:
    """Set the attributes that are there: not all versions of torch have all."""
    for name, value in values.items():
        if hasattr(owner, name):
            setattr(owner, name, value)


def _hooks_around(module: nn.Module) -> Iterator[Any]:
    yield from module._forward_pre_hooks.values()
    yield from module._forward_hooks.values()

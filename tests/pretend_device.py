"""A device on the CPU that does what a GPU does in a capture: it neither answers the host nor takes what the host has.

Registered with torch for the whole process, so it is used in processes of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

aten = torch.ops.aten
#: Operators that look for how many there are.
_COUNTING = (aten.nonzero.default, aten.unique_consecutive.default, aten._unique2.default, aten.masked_select.default)
#: Operators that copy single numbers of the host, which others take as arguments of their kernels.
_COPYING = (aten.where.self, aten.copy_.default, aten.index_put.default, aten.index_put_.default)


class OnDevice(torch.Tensor):
    """A tensor of the device. held: its numbers."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> OnDevice:
        made: Any = torch.Tensor._make_wrapper_subclass(
            cls, held.shape, held.stride(), held.storage_offset(), dtype=held.dtype, device=torch.device("pretend:0")
        )
        made.held = held.detach()
        return made

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError("the device is not there")


class PretendDevice(TorchDispatchMode):
    """Within, tensors can be on device `pretend`."""

    def __init__(self) -> None:
        super().__init__()
        self.is_capturing = False

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Within, what a capture does not allow is an error."""
        self.is_capturing = True
        try:
            yield
        finally:
            self.is_capturing = False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        to = kwargs.get("device")
        leaves = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        there = [leaf for leaf in leaves if isinstance(leaf, OnDevice)]
        here = [leaf for leaf in leaves if not isinstance(leaf, OnDevice)]
        leaves_host = to is not None and torch.device(to).type == "pretend"
        if to is not None:
            kwargs["device"] = torch.device("cpu")
        self._check(function, there, here, sent=leaves_host, fetched=bool(there) and to is not None and not leaves_host)
        holders = {id(leaf.held): leaf for leaf in there}
        found = function(
            *pytree.tree_map_only(OnDevice, lambda leaf: leaf.held, args),
            **pytree.tree_map_only(OnDevice, lambda leaf: leaf.held, kwargs),
        )
        if not (leaves_host if to is not None else there):
            return found
        return pytree.tree_map_only(
            Tensor, lambda each: holders[id(each)] if id(each) in holders else OnDevice(each), found
        )

    def _check(self, function: Any, there: list[Any], here: list[Any], *, sent: bool, fetched: bool) -> None:
        rows = any(leaf.ndim for leaf in here)
        if there and rows and function not in (aten.copy_.default, aten.index.Tensor, *_COPYING):
            raise RuntimeError(f"Expected all tensors to be on the same device: {function}")
        if not self.is_capturing:
            return
        copied = (sent and here) or (there and here and (rows or function in _COPYING)) or fetched
        if copied:
            raise RuntimeError(f"Cannot copy between CPU and CUDA tensors during CUDA graph capture: {function}")
        if there and (function is aten._local_scalar_dense.default or function in _COUNTING):
            raise RuntimeError(f"CUDA error: operation not permitted when stream is capturing: {function}")
        by_mask = function in (aten.index.Tensor, *_COPYING) and any(leaf.dtype == torch.bool for leaf in there[1:])
        if by_mask and function is not aten.where.self and function is not aten.copy_.default:
            raise RuntimeError(f"CUDA error: operation not permitted when stream is capturing: {function}")


def register() -> None:
    """The device is known to torch from now on."""
    _setup_privateuseone_for_python_backend("pretend")
    torch.pretend.get_amp_supported_dtype = lambda: [torch.bfloat16]  # type: ignore[attr-defined]


def to_pretend(model: nn.Module) -> nn.Module:
    """The model with its parameters and buffers on the device; those that are shared still are."""
    moved: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                made = nn.Parameter(OnDevice(parameter.detach()), parameter.requires_grad)
                module._parameters[name] = moved.setdefault(id(parameter), made)
        for name, buffer in list(module._buffers.items()):
            if buffer is not None:
                module._buffers[name] = OnDevice(buffer)
    return model

"""Scans of state-space layers as a pass computes them: Mamba's without a loop of torch's, Mamba-2's in chunks that are
no longer than the rows.

Where the package mamba_ssm is missing, transformers scans Mamba's states (Jamba, Zamba) position by position, and those
of Mamba-2 (Zamba2) in chunks of 256 positions as released, to which it pads each row; within a chunk it computes each
pair of positions. The length of a chunk decides over the order of sums, and over nothing else.

A module's forward is transformers' own code, with the scan that it calls by name replaced in a copy of its globals.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from importlib.util import find_spec
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from brimful.kernels.layers.selective_scan import LONGEST, has_kernels, selective_scan

#: transformers' names of both scans, and the package whose kernels it takes for them where it is installed.
_SCAN, _CHUNKED, _KERNELS = "mamba_selective_scan", "mamba2_chunk_scan", "mamba_ssm"
#: Longest chunk, and what one is a multiple of: pairs of positions and states between chunks are then as many numbers
#: in a model of heads and states of 64.
_CHUNK, _MULTIPLE = 64, 8
#: Arguments of the scan that decide between ways to compute it, none of which is taken.
_WAYS = frozenset({"use_mambapy", "use_associative_scan"})


class OwnScans:
    """The scans of one model, as its modules are when this is made: passes end with these."""

    def __init__(self, model: nn.Module) -> None:
        self._calls = [(each, call) for each in model.modules() if (call := _with_own_scan(each)) is not None]
        chunked: list[Any] = [each for each in model.modules() if _forward_that_calls(each, _CHUNKED)]
        self._chunks = [(each, size) for each in chunked if isinstance(size := getattr(each, "chunk_size", None), int)]

    @contextmanager
    def for_rows(self, length: int, *, compiled: bool) -> Iterator[None]:
        """Within, a pass over rows of so many tokens scans in these ways. So does a layer that is recomputed once the
        pass is over, within a block of its own.

        compiled: whether torch compiles a module. Then Mamba's scans are transformers': its compiler has a scan.
        """
        calls = [] if compiled else [(each, call) for each, call in self._calls if "forward" not in vars(each)]
        chunk = min(_CHUNK, -(-length // _MULTIPLE) * _MULTIPLE)
        try:
            for each, call in calls:
                vars(each)["forward"] = MethodType(call, each)
            for each, size in self._chunks:
                each.chunk_size = min(size, chunk)
            yield
        finally:
            for each, _ in calls:
                del vars(each)["forward"]
            for each, size in self._chunks:
                each.chunk_size = size


def _forward_that_calls(module: nn.Module, scan: str) -> FunctionType | None:
    """The forward of the module's class, without what was put around it; None where it does not call this scan, or a
    package computes it, or hooks of accelerate move what it reads."""
    code = inspect.unwrap(type(module).forward)
    if not isinstance(code, FunctionType) or scan not in code.__code__.co_names or find_spec(_KERNELS) is not None:
        return None
    return None if any(hasattr(each, "_hf_hook") for each in module.modules()) else code


def _with_own_scan(module: nn.Module) -> FunctionType | None:
    """The module's forward with our scan; None where it calls none of transformers' own."""
    code = _forward_that_calls(module, _SCAN)
    if code is None:
        return None
    told = code.__globals__ | {_SCAN: _in_place_of(code.__globals__[_SCAN])}
    call = FunctionType(code.__code__, told, code.__name__, code.__defaults__, code.__closure__)
    call.__kwdefaults__ = code.__kwdefaults__
    return call


def _in_place_of(theirs: Callable[..., Any]) -> Callable[..., Any]:
    """The scan with transformers' arguments; its own where more is asked than ours does."""

    @wraps(theirs)
    def scan(
        hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None,
        z: Tensor | None = None, delta_bias: Tensor | None = None, delta_softplus: bool = False, **others: Any,
    ) -> Any:  # fmt: skip
        asked = any(value is not None and value is not False for name, value in others.items() if name not in _WAYS)
        too_long = has_kernels(hidden_states) and hidden_states.shape[-1] > LONGEST
        if asked or too_long or hidden_states.dtype == torch.float64:
            given = {"D": D, "z": z, "delta_bias": delta_bias, "delta_softplus": delta_softplus}
            return theirs(hidden_states, dt, A, B, C, **given, **others)
        return selective_scan(hidden_states, dt, A, B, C, D_D=D, z_BDL=z, bias_D=delta_bias, softplus=delta_softplus)

    return scan

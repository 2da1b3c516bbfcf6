"""Scans of layers with a state as a pass computes them: Mamba's (Jamba, Zamba), Mamba-2's (Zamba2) and the gated delta
rule (Qwen3.5, Qwen3-Next).

Where a package with kernels is missing, transformers scans Mamba's states position by position, and the others in
chunks of 256 and 64 positions. A module's forward is transformers' own code here, with the scan that it calls by name
replaced in a copy of its globals. What a scan of ours is not made for transformers' own computes.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from importlib.util import find_spec
from inspect import signature
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from brimful.kernels.layers.chunked_scan import chunked_scan
from brimful.kernels.layers.gated_delta import gated_delta_rule
from brimful.kernels.layers.selective_scan import LONGEST, has_kernels, selective_scan

#: Arguments that choose between ways to compute the same numbers, and those with which transformers' own refuse.
_WAYS = frozenset({"chunk_size", "use_mambapy", "use_associative_scan"})
_REFUSED = frozenset({"seq_idx", "cu_seqlens"})
#: Held while forwards are put into modules and taken away.
_lock = threading.Lock()


class OwnScans:
    """The scans of one model, as its modules are when this is made."""

    def __init__(self, model: nn.Module) -> None:
        kinds = {kind: _with_own_scan(kind) for kind in {type(each) for each in model.modules()}}
        found = [(each, kinds[type(each)]) for each in model.modules()]
        self._calls = [(each, call) for each, call in found if call is not None and not _has_hooks(each)]

    @property
    def found(self) -> bool:
        """True where there are any."""
        return bool(self._calls)

    @contextmanager
    def scanning(self) -> Iterator[None]:
        """Within, modules scan so, but for those with a forward of someone's own. They end as they were once the last
        of several passes is over."""
        with _lock:
            ours = [each for each, call in self._calls if _begun(each, call)]
        try:
            yield
        finally:
            with _lock:
                for each in ours:
                    _end(each)


class _OwnForward:
    """Stands for the forward of a module while passes run it."""

    def __init__(self, module: nn.Module, call: Callable[..., Any]) -> None:
        self.passes = 0
        self._module, self._call = module, call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(self._module, *args, **kwargs)

    def __reduce__(self) -> Any:
        """Copies of the module that are made within a pass have its class's forward, until their own next one."""
        return _OwnForward, (self._module, type(self._module).forward)


def _begun(module: nn.Module, call: FunctionType) -> bool:
    """Have a pass more run the module's forward as ours; False where it has one of someone's own."""
    forward = vars(module).get("forward")
    if forward is not None and not isinstance(forward, _OwnForward):
        return False
    if forward is None or not forward.passes:
        forward = vars(module)["forward"] = _OwnForward(module, call)
    forward.passes += 1
    return True


def _end(module: nn.Module) -> None:
    """Take our forward away with the last pass."""
    forward = vars(module).get("forward")
    if isinstance(forward, _OwnForward):
        forward.passes -= 1
        if not forward.passes:
            del vars(module)["forward"]


def _has_hooks(module: nn.Module) -> bool:
    """True where accelerate moves what the module reads."""
    return any(hasattr(each, "_hf_hook") for each in module.modules())


def _with_own_scan(kind: type[nn.Module]) -> FunctionType | None:
    """The forward of a class of transformers' with our scan; None where it calls none of transformers' own, or someone
    put something around it."""
    code = kind.forward
    while isinstance(code, FunctionType) and hasattr(code, "__wrapped__") and _is_of_transformers(code):
        code = code.__wrapped__
    if not isinstance(code, FunctionType) or hasattr(code, "__wrapped__"):
        return None
    names = [name for name in _OWN if name in code.__code__.co_names and find_spec(_KERNELS[name]) is None]
    if not names:
        return None
    told = code.__globals__ | {name: _OWN[name](code.__globals__[name]) for name in names}
    # A compiler knows functions by their code, and the globals of the first one it met.
    call = FunctionType(code.__code__.replace(), told, code.__name__, code.__defaults__, code.__closure__)
    call.__kwdefaults__ = code.__kwdefaults__
    return call


def _is_of_transformers(function: FunctionType) -> bool:
    """True for a function that transformers put around another."""
    return str(function.__globals__.get("__name__")).startswith("transformers.")


def _selective(theirs: Callable[..., Any]) -> Callable[..., Any]:
    """Mamba's scan, with transformers' arguments."""
    more = _more_than_ours(theirs)

    @wraps(theirs)
    def scan(
        hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None,
        z: Tensor | None = None, delta_bias: Tensor | None = None, delta_softplus: bool = False, **others: Any,
    ) -> Any:  # fmt: skip
        too_long = has_kernels(hidden_states) and hidden_states.shape[-1] > LONGEST
        if _asked(others, more) or too_long or hidden_states.dtype == torch.float64:
            given = {"D": D, "z": z, "delta_bias": delta_bias, "delta_softplus": delta_softplus}
            return theirs(hidden_states, dt, A, B, C, **given, **others)
        return selective_scan(hidden_states, dt, A, B, C, D_D=D, z_BDL=z, bias_D=delta_bias, softplus=delta_softplus)

    return scan


def _chunked(theirs: Callable[..., Any]) -> Callable[..., Any]:
    """Mamba-2's scan, with transformers' arguments."""
    more = _more_than_ours(theirs)

    @wraps(theirs)
    def scan(
        hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk_size: int, D: Tensor | None = None,
        dt_bias: Tensor | None = None, dt_softplus: bool = False, dt_limit: tuple[float, float] = (0.0, math.inf),
        **others: Any,
    ) -> Any:  # fmt: skip
        if _asked(others, more) or hidden_states.dtype == torch.float64:
            given = {"D": D, "dt_bias": dt_bias, "dt_softplus": dt_softplus, "dt_limit": dt_limit}
            return theirs(hidden_states, dt, A, B, C, chunk_size, **given, **others)
        return chunked_scan(hidden_states, dt, A, B, C, D_H=D, bias_H=dt_bias, softplus=dt_softplus, limits=dt_limit)

    return scan


def _gated_delta(theirs: Callable[..., Any]) -> Callable[..., Any]:
    """The gated delta rule, with transformers' arguments; it returns a state, too, which is None here."""
    more = _more_than_ours(theirs)

    @wraps(theirs)
    def scan(
        query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, *,
        use_qk_l2norm_in_kernel: bool = False, **others: Any,
    ) -> Any:  # fmt: skip
        if _asked(others, more) or query.dtype == torch.float64:
            return theirs(query, key, value, g, beta, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, **others)
        return gated_delta_rule(query, key, value, g, beta, normed=use_qk_l2norm_in_kernel), None

    return scan


def _more_than_ours(theirs: Callable[..., Any]) -> frozenset[str]:
    """Arguments that our scans do not have: of a state to begin with, or one to return. What transformers' own does not
    name either it leaves out."""
    return (frozenset(signature(theirs).parameters) | _REFUSED) - _WAYS


def _asked(given: dict[str, Any], names: frozenset[str]) -> bool:
    """True where one of these arguments is given, and not as what stands for none."""
    return any(value is not None and value is not False for name, value in given.items() if name in names)


#: transformers' names of scans, and what is called in their place.
_OWN = {
    "mamba_selective_scan": _selective,
    "mamba2_chunk_scan": _chunked,
    "torch_chunk_gated_delta_rule": _gated_delta,
}
#: The packages whose kernels transformers takes for them where these are installed.
_KERNELS = dict.fromkeys(_OWN, "mamba_ssm") | {"torch_chunk_gated_delta_rule": "fla"}

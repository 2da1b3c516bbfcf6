"""Layers called by recordings of their code, rewritten onto our kernels: what stands where torch's dynamo would.

torch's dynamo makes the same graph of the code's bytecode, in a second or two; a recording takes some milliseconds. It
follows layers whose inputs are (1, T, ...), vectors, and plain values. Layers of one kind share a recording: it is made
twice, of two numbers of tokens, of segments and of the layer, and what differs between the two graphs must be such a
number itself. Code that decides by one of them is left to dynamo, as is all else that a recording does not show: hooks,
changes in place, tensors from elsewhere, and layers that our kernels do not cover. Layers on padded rows are recorded
shape by shape.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from brimful.kernels.forward_context import active_context
from brimful.models.fusion.calls import AS_THEY_ARE, PLAIN, TWO, Call, CannotRecordError
from brimful.models.fusion.recorder import graph_of, parameters_of
from brimful.models.model_stats import LAYER_NUMBERS

_SETTINGS = (*PLAIN, FunctionType, BuiltinFunctionType)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


#: What takes values in the order of a graph's placeholders, and gives what the layer gives.
Run = Callable[..., Any]


class Recorded:
    """Stands where `nn.Module` looks for a compiled form of itself: its recorded code, rewritten.

    cover: makes what runs of a graph, or None if it does not cover that. otherwise: makes what is called then. fixed:
    whether each shape has a recording of its own. forms: what was made, which modules may share.
    """

    def __init__(
        self, module: nn.Module, cover: Callable[[GraphModule], Run | None], otherwise: Callable[[nn.Module], Run],
        *, fixed: bool = False, forms: dict[Any, Run | None] | None = None,
    ) -> None:  # fmt: skip
        self._module, self._cover, self._otherwise, self._fixed = weakref.ref(module), cover, otherwise, fixed
        self._forms = {} if forms is None else forms
        self._other: Run | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module: Any = self._module()
        context = active_context()
        given = (args, kwargs, None if context is None else context.attention)
        try:
            call = Call(given, fixed=self._fixed)
            key = (call.shown, _mode(call.device), *_settings(module))
            if key not in self._forms:
                self._forms[key] = self._record(module, call)
            form = self._forms[key]
        except CannotRecordError:
            form = None
        if form is not None:
            return form(*(holder[name] for holder, name in parameters_of(module)), *call.tensors, *call.longest)
        if self._other is None:
            self._other = self._otherwise(module)
        return self._other(*args, **kwargs)

    def _record(self, module: nn.Module, call: Call) -> Run | None:
        try:
            graph, other = (graph_of(module, call, sizes) for sizes in (AS_THEY_ARE if self._fixed else TWO))
        except Exception:  # whatever its code does that tensors without numbers cannot
            return None
        return self._cover(GraphModule(nn.Module(), graph)) if str(graph) == str(other) else None


def record_calls(
    modules: Iterable[nn.Module], cover: Callable[[GraphModule], Run | None], *, backend: Any = None,
    fixed: bool = False,
) -> None:  # fmt: skip
    """Have modules called by what `cover` makes of their recorded code.

    backend: of dynamo, that compiles them otherwise; without it they run as they are. fixed: as of `Recorded`.
    """
    forms: dict[Any, Run | None] = {}
    otherwise = _as_it_is if backend is None else partial(_by_dynamo, backend)
    for module in modules:
        made: Any = Recorded(module, cover, otherwise, fixed=fixed, forms=forms)
        module._compiled_call_impl = made


def _as_it_is(module: nn.Module) -> Run:
    return module._call_impl


def _by_dynamo(backend: Any, module: nn.Module) -> Run:
    compiled: Run = torch.compile(module._call_impl, dynamic=True, backend=backend)
    return compiled


def _mode(device: str) -> tuple[Any, ...]:
    """State of torch that functions compute by, besides their arguments."""
    return torch.is_grad_enabled(), torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)


def _settings(module: nn.Module) -> Iterator[Any]:
    """Kinds and settings of a layer's modules, and kinds of its parameters. Raises: CannotRecordError for hooks."""
    for each in module.modules():
        found = vars(each)
        if any(found[name] for name in _HOOKS):
            raise CannotRecordError
        yield type(each), *((name, _setting(value)) for name, value in found.items() if _is_setting(name))
        for tensors in (each._parameters, each._buffers):
            yield tuple(None if t is None else (type(t), t.dtype, t.shape, t.requires_grad) for t in tensors.values())


def _is_setting(name: str) -> bool:
    return name not in LAYER_NUMBERS and not name.startswith("_")


def _setting(value: Any) -> Any:
    """Return what a setting is told apart by: anything that may change is another one in each module."""
    if isinstance(value, tuple):
        return tuple(map(_setting, value))
    return value if isinstance(value, _SETTINGS) else id(value)

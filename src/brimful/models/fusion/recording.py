"""Layers called by recordings of their code, rewritten onto our kernels: what stands where torch's dynamo would.

torch's dynamo makes the same graph of the code's bytecode, in one to three seconds; a recording takes tenths of one. It
follows layers whose inputs are (1, T, ...), vectors, and plain values. Layers of one kind share a recording: it is made
of three numbers of tokens and of segments, and what differs between the graphs must be such a number itself. Code that
decides by one of them, or by the layer's number, is left to dynamo, as is all else that a recording does not show:
hooks, changes in place, what a layer keeps from call to call, tensors from elsewhere, settings that are objects of a
model's own, and layers that our kernels do not cover. Layers on padded rows are recorded shape by shape.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache, partial
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule
from transformers import PreTrainedConfig

from brimful.kernels.forward_context import active_context
from brimful.models.fsdp_hooks import STATE_OF_FSDP, only_of_fsdp
from brimful.models.fusion.calls import ANY, AS_THEY_ARE, PLAIN, Call, CannotRecordError
from brimful.models.fusion.recorder import graph_of, mode_of, modules_of, parameters_of
from brimful.models.model_stats import LAYER_NUMBERS

#: Types of most settings, found faster.
_COMMON = frozenset(PLAIN)
_SETTINGS = (*PLAIN, FunctionType, BuiltinFunctionType)
#: What is no setting: a layer's number, what `nn.Module` has of its own, and what stands around a layer's code.
_NO_SETTINGS = LAYER_NUMBERS | (vars(nn.Module()).keys() - {"training"})
_NO_SETTINGS |= {"_compiled_call_impl", "_gradient_checkpointing_func"}
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

#: Where a configuration keeps the names of its attention, and of how it computes experts.
_ATTENTION, _EXPERTS = "_attn_implementation_internal", "_experts_implementation_internal"

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
            modules = modules_of(module)
            key = (call.shown, mode_of(call.device), *_settings(modules))
            if key not in self._forms:
                self._forms[key] = self._record(module, call)
            form = self._forms[key]
        except CannotRecordError:
            form = None
        if form is not None:
            return form(*(holder[name] for holder, name in parameters_of(modules)), *call.tensors, *call.longest)
        if self._other is None:
            self._other = self._otherwise(module)
        return self._other(*args, **kwargs)

    def _record(self, module: nn.Module, call: Call) -> Run | None:
        try:
            graph, *others = (graph_of(module, call, sizes) for sizes in (AS_THEY_ARE if self._fixed else ANY))
            is_one = all(str(other) == str(graph) for other in others)
            return self._cover(GraphModule(nn.Module(), graph)) if is_one else None
        except Exception:  # whatever its code does that tensors without numbers cannot
            return None


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
    return module.forward if only_of_fsdp(module) else module._call_impl  # hooks of its weights run around this


def _by_dynamo(backend: Any, module: nn.Module) -> Run:
    compiled: Run = torch.compile(module._call_impl, dynamic=True, backend=backend)
    return compiled


def _settings(modules: Sequence[nn.Module]) -> Iterator[Any]:
    """Kinds and settings of a layer and of its modules, kinds of their parameters, and which of these are one.

    Raises: CannotRecordError for hooks other than those around it that put its weights together, and for settings that
    cannot be told apart.
    """
    first = dict[int, int]()
    for each in modules:
        found = vars(each)
        if any(map(found.__getitem__, _HOOKS)) and not (each is modules[0] and only_of_fsdp(each)):
            raise CannotRecordError
        yield type(each), *((name, _setting(found[name])) for name in _names_of_settings(tuple(found)))
        yield tuple(each._modules)
        for tensors in (each._parameters, each._buffers):
            for name, t in tensors.items():
                if t is not None:
                    yield name, type(t), t.dtype, t.shape, t.requires_grad, first.setdefault(id(t), len(first))


@lru_cache(maxsize=1024)
def _names_of_settings(names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name for name in names if name not in _NO_SETTINGS and not name.startswith(STATE_OF_FSDP))


def _setting(value: Any) -> Any:
    """Return what a setting is told apart by. Raises: CannotRecordError for an object that may be any."""
    if type(value) in _COMMON or isinstance(value, _SETTINGS):
        return type(value), value
    if isinstance(value, list | tuple):
        return type(value), *map(_setting, value)
    if isinstance(value, set | frozenset):
        return type(value), frozenset(map(_setting, value))
    if isinstance(value, dict):
        return type(value), *((_setting(name), _setting(each)) for name, each in value.items())
    if isinstance(value, PreTrainedConfig):
        own = vars(value)  # what a configuration is asked for passes through its class: 14 microseconds
        return id(value), own.get(_ATTENTION) or value._attn_implementation, own.get(_EXPERTS)
    raise CannotRecordError

"""A layer's code as a graph of torch's functions, recorded as it runs on tensors without numbers.

torch's dynamo makes the same graph of the code's bytecode, in a second or two; a recording takes some milliseconds. It
follows layers whose inputs are (1, T, ...) and plain values. Layers of one kind share a recording: it is made twice, of
two numbers of tokens and two numbers of the layer, and what differs between the two graphs must be the number of tokens
itself. Code that asks for either is left to dynamo, as is all else that a recording does not show: hooks, changes in
place, tensors from elsewhere, and layers that our kernels do not cover. Layers on padded rows are recorded shape by
shape.
"""

from __future__ import annotations

import dataclasses
import operator
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.function import BackwardCFunction
from torch.fx import Graph, GraphModule, Node
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from brimful.kernels.forward_context import active_context
from brimful.models.fusion.nodes import TOKENS
from brimful.models.model_stats import LAYER_NUMBERS

#: Numbers of tokens that are recorded, both primes, of which widths are no multiples, and what is added to the layer's.
_COUNTS = ((TOKENS, 0), (61, 1009))
_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)
_SETTINGS = (*_PLAIN, FunctionType, BuiltinFunctionType)
#: Methods by which Python's operators show, and the functions that dynamo has in their place.
_OPERATORS: dict[str, Any] = {
    "add": operator.add, "mul": operator.mul, "sub": operator.sub, "neg": operator.neg, "div": operator.truediv,
    "true_divide": operator.truediv, "matmul": operator.matmul, "__getitem__": operator.getitem,
    "__iadd__": operator.iadd, "add_": operator.iadd,
}  # fmt: skip
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

#: What takes values in the order of a graph's placeholders, and gives what the layer gives.
Run = Callable[..., Any]


class _CannotRecordError(Exception):
    """A layer that a recording does not show."""


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
            values, shown, tokens = _flat(given, fixed=self._fixed)
            key = (shown, _mode(values[0].device.type), *_settings(module))
            if key not in self._forms:
                self._forms[key] = self._record(module, given, tokens)
            form = self._forms[key]
        except _CannotRecordError:
            form = None
        if form is not None:
            return form(*(holder[name] for holder, name in _parameters(module)), *values)
        if self._other is None:
            self._other = self._otherwise(module)
        return self._other(*args, **kwargs)

    def _record(self, module: nn.Module, given: Any, tokens: int) -> Run | None:
        try:
            counts = ((0, further) for _, further in _COUNTS) if self._fixed else _COUNTS
            graph, other = (_graph_of(module, given, tokens, *each) for each in counts)
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
    """Kinds and settings of a layer's modules, and kinds of its parameters. Raises: _CannotRecordError for hooks."""
    for each in module.modules():
        found = vars(each)
        if any(found[name] for name in _HOOKS):
            raise _CannotRecordError
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


def _parameters(module: nn.Module) -> Iterator[tuple[dict[str, Any], str]]:
    """Places of a layer's parameters and buffers."""
    for each in module.modules():
        for tensors in (each._parameters, each._buffers):
            yield from ((tensors, name) for name, tensor in tensors.items() if tensor is not None)


def _flat(given: Any, *, fixed: bool) -> tuple[list[Tensor], Any, int]:
    """The tensors of a call, what else it shows, and its tokens, 0 where shapes are `fixed`.

    Raises: _CannotRecordError for anything else in it.
    """
    values: dict[int, Tensor] = {}  # each once
    shown = _shown(given, values)
    tensors = list(values.values())
    tokens = 0 if fixed else next((t.shape[1] for t in tensors if t.ndim > 1 and t.shape[0] == 1), 0)
    if not tensors or (not fixed and tokens < 2) or any(type(t) not in (Tensor, nn.Parameter) for t in tensors):
        raise _CannotRecordError
    kinds = tuple((t.dtype, t.device, t.requires_grad, _shape(t, tokens, -1)) for t in tensors)
    return tensors, (shown, kinds), tokens


def _shown(value: Any, values: dict[int, Tensor]) -> Any:
    """Return what a call shows of one argument: of a tensor its place among `values`, which it is added to."""
    if isinstance(value, Tensor):
        values.setdefault(id(value), value)
        return list(values).index(id(value))
    if isinstance(value, _PLAIN):
        return type(value), value
    if isinstance(value, list | tuple):
        return type(value), *(_shown(each, values) for each in value)
    if isinstance(value, dict):
        return dict, *((name, _shown(each, values)) for name, each in value.items())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return type(value), *(_shown(getattr(value, field.name), values) for field in dataclasses.fields(value))
    raise _CannotRecordError


def _shape(tensor: Tensor, tokens: int, count: int) -> tuple[int, ...]:
    """The shape of (1, T, ...), or of (T,), with another number of tokens; any other shape as it is."""
    shape, place = list(tensor.shape), 0 if tensor.ndim == 1 else 1
    if tokens and tensor.ndim and shape[place] == tokens and (place == 0 or shape[0] == 1):
        shape[place] = count
    return tuple(shape)


def _graph_of(module: nn.Module, given: Any, tokens: int, count: int, further: int) -> Graph:
    """The graph of a call with `count` tokens, of a layer whose number is higher by `further`.

    Placeholders: parameters and buffers, then the call's tensors.
    """
    tensors, *_ = _flat(given, fixed=not tokens)
    recorder, fakes, device = _Recorder(count), FakeTensorMode(), tensors[0].device.type
    enabled, dtype = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.set_grad_enabled(torch.is_grad_enabled()))
        stack.enter_context(torch.autocast(device, dtype, enabled=enabled, cache_enabled=False))
        places = list(_parameters(module))
        inner = [recorder.placeholder(fakes.from_tensor(holder[name])) for holder, name in places]
        stack.enter_context(fakes)
        stack.enter_context(_swapped(places, inner))
        numbers = list(_numbers(module))
        stack.enter_context(_swapped(numbers, [holder[name] + further for holder, name in numbers]))
        made = {id(t): recorder.placeholder(_empty(t, _shape(t, tokens, count))) for t in tensors}
        args, kwargs, told = _with_tensors(given, made)
        context = active_context()
        if context is not None:
            stack.enter_context(dataclasses.replace(context, attention=told).active())
        with recorder:
            out = module._call_impl(*args, **kwargs)
    return recorder.finished(out)


def _empty(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    made = torch.empty(shape, dtype=like.dtype, device=like.device)
    return made.requires_grad_(True).clone() if like.requires_grad else made  # no leaf: layers may add to it in place


def _with_tensors(given: Any, made: dict[int, Tensor]) -> Any:
    """The same arguments with other tensors."""
    if isinstance(given, Tensor):
        return made[id(given)]
    if isinstance(given, list | tuple):
        return type(given)([_with_tensors(each, made) for each in given])
    if isinstance(given, dict):
        return {name: _with_tensors(each, made) for name, each in given.items()}
    if dataclasses.is_dataclass(given) and not isinstance(given, type):
        fields = {field.name: getattr(given, field.name) for field in dataclasses.fields(given)}
        return dataclasses.replace(given, **{name: _with_tensors(each, made) for name, each in fields.items()})
    return given


@contextmanager
def _swapped(places: Sequence[tuple[dict[str, Any], str]], values: Sequence[Any]) -> Iterator[None]:
    """Within, other values are in these places."""
    kept = [holder[name] for holder, name in places]
    try:
        for (holder, name), value in zip(places, values, strict=True):
            holder[name] = value
        yield
    finally:
        for (holder, name), value in zip(places, kept, strict=True):
            holder[name] = value


def _numbers(module: nn.Module) -> Iterator[tuple[dict[str, Any], str]]:
    """Places where modules of a layer keep its number."""
    for each in module.modules():
        yield from ((vars(each), name) for name in LAYER_NUMBERS & vars(each).keys() if vars(each)[name] is not None)


def _gradients_of(out: Any) -> set[Any]:
    """The functions by which autograd would go back from a call's results."""
    found, left = set[Any](), [each.grad_fn for each in pytree.tree_leaves(out) if isinstance(each, Tensor)]
    while left:
        function = left.pop()
        if function is not None and function not in found:
            found.add(function)
            left += [before for before, _ in function.next_functions]
    return found


def _is_written_out(function: Any) -> bool:
    """True for a gradient that code of the model's own computes: the functions in it are not what it is of."""
    own = isinstance(function, BackwardCFunction)
    return own and not type(function).__name__.startswith("GeneratedBackwardFor_")  # of an operator


class _Recorder(TorchFunctionMode):
    """Writes down each function that is called on tensors. count: of tokens; 0 where it is a number like others."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.graph, self._count = Graph(), count
        self._nodes: dict[int, Node] = {}
        self._kept: list[Tensor] = []  # no other tensor is to have the id of one
        self._num_tokens: Node | None = None

    def placeholder(self, tensor: Tensor) -> Tensor:
        """An input of the graph; the tensor itself, or what is known in its place."""
        if id(tensor) not in self._nodes:
            self._note(self.graph.placeholder(f"given_{len(self._nodes)}"), tensor)
        else:
            self.graph.placeholder(f"again_{len(self.graph.nodes)}").meta["example_value"] = tensor
        return tensor

    def finished(self, out: Any) -> Graph:
        """The graph with its output. Raises: _CannotRecordError where gradients are not those of its functions."""
        if any(map(_is_written_out, _gradients_of(out))):
            raise _CannotRecordError
        self.graph.output(self._argument(out))
        self.graph.lint()
        return self.graph

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function, and write it down if it makes tensors."""
        kwargs = kwargs or {}
        out = function(*args, **kwargs)
        if out is None:
            raise _CannotRecordError  # it changes something
        several = isinstance(out, tuple | list) and any(isinstance(each, Tensor) for each in out)
        if not several and not isinstance(out, Tensor):
            return out
        name = function.__name__
        if name == "__get__" or (name.endswith("_") and name != "__getitem__" and not self._is_own_sum(name, args)):
            raise _CannotRecordError
        node = self._call(function, name, tuple(self._argument(each) for each in args),
                          {key: self._argument(each) for key, each in kwargs.items()})  # fmt: skip
        if not several:
            self._note(node, out)
            return out
        node.meta["example_value"] = out
        for index, each in enumerate(out):
            if isinstance(each, Tensor):
                self._note(self.graph.call_function(operator.getitem, (node, index)), each)
        return out

    def _is_own_sum(self, name: str, args: tuple[Any, ...]) -> bool:
        """Return whether something is added in place to a tensor that nobody has seen but who made it."""
        node = self._nodes.get(id(args[0]))
        return name in ("add_", "__iadd__") and node is not None and node.op != "placeholder" and not node.users

    def _call(self, function: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Node:
        is_method = type(function).__name__ in ("method_descriptor", "wrapper_descriptor")
        if not is_method:
            return self.graph.call_function(function, args, kwargs)
        if name in _OPERATORS and not kwargs:
            return self.graph.call_function(_OPERATORS[name], args)
        if name.startswith("__"):
            raise _CannotRecordError
        return self.graph.call_method(name, args, kwargs)

    def _note(self, node: Node, tensor: Tensor) -> None:
        node.meta["example_value"] = tensor
        self._nodes[id(tensor)] = node
        self._kept.append(tensor)

    def _argument(self, given: Any) -> Any:
        """An argument as the graph has it. Raises: _CannotRecordError for a tensor from elsewhere."""
        if isinstance(given, Tensor):
            if id(given) not in self._nodes:
                raise _CannotRecordError
            return self._nodes[id(given)]
        if isinstance(given, list | tuple):
            return type(given)([self._argument(each) for each in given])
        if isinstance(given, dict):
            return {name: self._argument(each) for name, each in given.items()}
        if isinstance(given, slice):
            return slice(*(self._argument(each) for each in (given.start, given.stop, given.step)))
        if isinstance(given, int) and not isinstance(given, bool) and given and self._count and not given % self._count:
            if given != self._count:
                raise _CannotRecordError  # it is made of that number
            return self._tokens()
        return given

    def _tokens(self) -> Node:
        """The number of tokens, of the first input that has one a token."""
        if self._num_tokens is None:
            inputs = [node for node in self.graph.nodes if node.op == "placeholder"]
            first = next(node for node in inputs if node.meta["example_value"].shape[:2] == (1, self._count))
            with self.graph.inserting_after(inputs[-1]):
                self._num_tokens = self.graph.call_method("size", (first, 1))
            self._num_tokens.meta["example_value"] = self._count
        return self._num_tokens

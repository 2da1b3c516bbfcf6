"""A layer's code as a graph of torch's functions, recorded as it runs on tensors without numbers.

torch's dynamo makes the same graph of the code's bytecode, in a second or two; a recording takes some milliseconds. It
follows layers whose inputs are (1, T, ...), vectors, and plain values. Layers of one kind share a recording: it is made
twice, of two numbers of tokens, of segments and of the layer, and what differs between the two graphs must be such a
number itself. Code that decides by one of them is left to dynamo, as is all else that a recording does not show: hooks,
changes in place, tensors from elsewhere, and layers that our kernels do not cover. Layers on padded rows are recorded
shape by shape.
"""

from __future__ import annotations

import dataclasses
import operator
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
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
from brimful.kernels.layout import Segments
from brimful.models.fusion.nodes import TOKENS
from brimful.models.model_stats import LAYER_NUMBERS

_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)
_SETTINGS = (*_PLAIN, FunctionType, BuiltinFunctionType)
#: Methods by which Python's operators show, and the functions that dynamo has in their place.
_OPERATORS: dict[str, Any] = {
    "add": operator.add, "mul": operator.mul, "sub": operator.sub, "neg": operator.neg, "div": operator.truediv,
    "true_divide": operator.truediv, "matmul": operator.matmul, "__getitem__": operator.getitem,
    "__iadd__": operator.iadd, "add_": operator.iadd,
}  # fmt: skip
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@dataclass(frozen=True, kw_only=True)
class _Sizes:
    """Numbers that a recording is made of: primes, of which widths are no multiples.

    tokens, longest: of a row, and of its longest segment, 0 where they are what they are. others: lengths of vectors of
    anything but tokens. further: what is added to the layer's number.
    """

    tokens: int = 0
    longest: int = 0
    others: int = 0
    further: int = 0


_TWO = (
    _Sizes(tokens=TOKENS, longest=3_000_017, others=4_000_037),
    _Sizes(tokens=61, longest=59, others=67, further=1009),
)
#: Of layers whose shapes are fixed.
_AS_THEY_ARE = (_Sizes(), _Sizes(further=1009))

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
            call = _Call(given, fixed=self._fixed)
            key = (call.shown, _mode(call.device), *_settings(module))
            if key not in self._forms:
                self._forms[key] = self._record(module, call)
            form = self._forms[key]
        except _CannotRecordError:
            form = None
        if form is not None:
            return form(*(holder[name] for holder, name in _parameters(module)), *call.tensors, *call.longest)
        if self._other is None:
            self._other = self._otherwise(module)
        return self._other(*args, **kwargs)

    def _record(self, module: nn.Module, call: _Call) -> Run | None:
        try:
            graph, other = (_graph_of(module, call, sizes) for sizes in (_AS_THEY_ARE if self._fixed else _TWO))
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


class _Call:
    """A call of a layer, by what it gives. Raises: _CannotRecordError for anything but tensors and plain values.

    given: arguments, named ones, and what attention is told. tensors: each once. longest: the longest segment's length,
    if there are any. tokens: of its row, 0 where shapes are fixed. shown: all by which its recording is another's.
    """

    def __init__(self, given: Any, *, fixed: bool) -> None:
        self.given, self._tensors, self._longest = given, dict[int, Tensor](), set[int]()
        shown = self._show(given)
        self.tensors, self.longest = list(self._tensors.values()), list(self._longest)
        rows = (t for t in self.tensors if t.ndim > 1 and t.shape[0] == 1)
        self.tokens = 0 if fixed else next((row.shape[1] for row in rows), 0)
        others = any(type(t) not in (Tensor, nn.Parameter) for t in self.tensors)
        if not self.tensors or others or len(self.longest) > 1 or (not fixed and self.tokens < 2):
            raise _CannotRecordError
        self.device = self.tensors[0].device.type
        free = _Sizes() if fixed else _Sizes(tokens=-1, others=-1)
        kinds = tuple((t.dtype, t.device, t.requires_grad, self._shape(t, free, by_length=False)) for t in self.tensors)
        self.shown = (shown, kinds)

    def _show(self, value: Any) -> Any:
        """Return what is shown of an argument: of a tensor its place."""
        if isinstance(value, Tensor):
            self._tensors.setdefault(id(value), value)
            return list(self._tensors).index(id(value))
        if isinstance(value, _PLAIN):
            return type(value), value
        if isinstance(value, list | tuple):
            return type(value), *map(self._show, value)
        if isinstance(value, dict):
            return dict, *((name, self._show(each)) for name, each in value.items())
        if isinstance(value, Segments):
            self._longest.add(value.max_length)
            value = dataclasses.replace(value, max_length=0)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return type(value), *(self._show(getattr(value, field.name)) for field in dataclasses.fields(value))
        raise _CannotRecordError

    def _shape(self, tensor: Tensor, sizes: _Sizes, *, by_length: bool = True) -> tuple[int, ...]:
        """The shape of (1, T, ...) or of a vector with other sizes; any other shape as it is.

        by_length: whether a vector with as many numbers as there are tokens has one of each.
        """
        shape = list(tensor.shape)
        if not self.tokens:
            return tuple(shape)
        if len(shape) == 1:
            return (sizes.tokens if by_length and shape[0] == self.tokens else sizes.others,)
        if len(shape) > 1 and shape[:2] == [1, self.tokens]:
            shape[1] = sizes.tokens
        return tuple(shape)

    def empty(self, sizes: _Sizes) -> dict[int, Tensor]:
        """Tensors of these sizes in the place of its own."""
        found = {}
        for each in self.tensors:
            made = torch.empty(self._shape(each, sizes), dtype=each.dtype, device=each.device)
            # No leaf: layers may add to it in place.
            found[id(each)] = made.requires_grad_(True).clone() if each.requires_grad else made
        return found

    def over(self, made: dict[int, Tensor], sizes: _Sizes) -> Any:
        """The given arguments with other tensors."""
        return self._over(self.given, made, sizes)

    def _over(self, value: Any, made: dict[int, Tensor], sizes: _Sizes) -> Any:
        if isinstance(value, Tensor):
            return made[id(value)]
        if isinstance(value, list | tuple):
            return type(value)([self._over(each, made, sizes) for each in value])
        if isinstance(value, dict):
            return {name: self._over(each, made, sizes) for name, each in value.items()}
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
            fields = {name: self._over(each, made, sizes) for name, each in fields.items()}
            fields |= {"max_length": sizes.longest} if isinstance(value, Segments) and sizes.longest else {}
            return dataclasses.replace(value, **fields)
        return value


def _graph_of(module: nn.Module, call: _Call, sizes: _Sizes) -> Graph:
    """The graph of a call of these sizes.

    Placeholders: parameters and buffers, the call's tensors, and the length of the longest segment if there are any.
    """
    recorder, fakes, device = _Recorder(sizes), FakeTensorMode(), call.device
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
        stack.enter_context(_swapped(numbers, [holder[name] + sizes.further for holder, name in numbers]))
        made = call.empty(sizes)
        for tensor in made.values():
            recorder.placeholder(tensor)
        if call.longest:
            recorder.place_longest()
        args, kwargs, told = call.over(made, sizes)
        context = active_context()
        if context is not None:
            stack.enter_context(dataclasses.replace(context, attention=told).active())
        with recorder:
            out = module._call_impl(*args, **kwargs)
    return recorder.finished(out)


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
    """Writes down each function that is called on tensors."""

    def __init__(self, sizes: _Sizes) -> None:
        super().__init__()
        self.graph, self._sizes = Graph(), sizes
        self._nodes: dict[int, Node] = {}
        self._kept: list[Tensor] = []  # no other tensor is to have the id of one
        self._num_tokens: Node | None = None
        self._longest: Node | None = None

    def place_longest(self) -> None:
        """Have the length of the longest segment as an input of the graph."""
        self._longest = self.graph.placeholder("longest")
        self._longest.meta["example_value"] = self._sizes.longest

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
        return self._number(given) if type(given) is int and given else given

    def _number(self, given: int) -> Any:
        """A number as the graph has it. Raises: _CannotRecordError for one that is made of those that may change."""
        if given == self._sizes.tokens:
            return self._tokens()
        if given == self._sizes.longest and self._longest is not None:
            return self._longest
        if any(size and given % size == 0 for size in (self._sizes.tokens, self._sizes.longest, self._sizes.others)):
            raise _CannotRecordError
        return given

    def _tokens(self) -> Node:
        """The number of tokens, of the first input that has one a token."""
        if self._num_tokens is None:
            inputs = [node for node in self.graph.nodes if node.op == "placeholder"]
            first = next(node for node in inputs if node.meta["example_value"].shape[:2] == (1, self._sizes.tokens))
            with self.graph.inserting_after(inputs[-1]):
                self._num_tokens = self.graph.call_method("size", (first, 1))
            self._num_tokens.meta["example_value"] = self._sizes.tokens
        return self._num_tokens

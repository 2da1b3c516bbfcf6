"""A layer's code written down as a graph of torch's functions, as it runs on tensors without numbers."""

from __future__ import annotations

import copy
import dataclasses
import operator
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.fx import Graph, Node
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from brimful.kernels.forward_context import active_context
from brimful.models.fusion.calls import Call, CannotRecordError, Sizes
from brimful.models.model_stats import LAYER_NUMBERS

_HOLDERS = (dict, list, set)
#: Methods by which Python's operators show, and the functions that dynamo has in their place.
_OPERATORS: dict[str, Any] = {
    "add": operator.add, "mul": operator.mul, "sub": operator.sub, "neg": operator.neg, "div": operator.truediv,
    "true_divide": operator.truediv, "matmul": operator.matmul, "__getitem__": operator.getitem,
    "__iadd__": operator.iadd, "add_": operator.iadd,
}  # fmt: skip
#: Methods that give a tensor itself where it is what they would make of it, whatever its memory.
_CASTS = ("to", "float", "half", "bfloat16", "double", "type_as")


def graph_of(module: nn.Module, call: Call, sizes: Sizes) -> Graph:
    """The graph of a call of these sizes, of a copy of the module's own state.

    Placeholders: parameters and buffers, the call's tensors, and the length of the longest segment if there are any.
    Raises: CannotRecordError where the layer leaves something behind.
    """
    with_gradients, enabled, dtype = mode = mode_of(call.device)
    recorder, fakes, layer = _Recorder(sizes, partial(mode_of, call.device), mode), FakeTensorMode(), _copied(module)
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.set_grad_enabled(with_gradients))
        stack.enter_context(saved_tensors_hooks(_as_it_is, _as_it_is))  # checkpoints count what is saved
        stack.enter_context(torch.autocast(call.device, dtype, enabled=enabled, cache_enabled=False))
        for holder, name in parameters_of(modules_of(layer)):
            holder[name] = recorder.placeholder(fakes.from_tensor(holder[name]))
        for each in layer.modules():
            numbers = [name for name in LAYER_NUMBERS & vars(each).keys() if vars(each)[name] is not None]
            vars(each).update(dict.fromkeys(numbers, _NUMBER))
        before = list(_state_of(layer))
        stack.enter_context(fakes)
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
            out = layer._call_impl(*args, **kwargs)
    after = list(_state_of(layer))
    if len(after) != len(before) or any(one is not two for one, two in zip(before, after, strict=True)):
        raise CannotRecordError
    return recorder.finished(out)


def mode_of(device: str) -> tuple[bool, bool, torch.dtype]:
    """State of torch that functions compute by: whether gradients and autocast are on, and autocast's dtype."""
    return torch.is_grad_enabled(), torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)


def _copied(module: nn.Module) -> nn.Module:
    """Copies of a layer's modules with the same parameters: what their code changes of itself is not the model's. The
    layer's own hooks, by which its weights are whole by now, are left out."""
    copies: dict[nn.Module, nn.Module] = {}
    for each in module.modules():
        copies[each] = object.__new__(type(each))
        found = {name: copy.copy(value) if isinstance(value, _HOLDERS) else value for name, value in vars(each).items()}
        vars(copies[each]).update(found)
    for each in copies.values():
        each._modules.update((name, copies[child]) for name, child in each._modules.items() if child is not None)
    layer = copies[module]
    layer._forward_pre_hooks, layer._forward_hooks = OrderedDict(), OrderedDict()
    return layer


def _state_of(module: nn.Module) -> Iterator[Any]:
    """Everything that a layer's modules hold, and what is in it."""
    for each in module.modules():
        for name, value in vars(each).items():
            yield name
            yield value
            yield from value.values() if isinstance(value, dict) else value if isinstance(value, _HOLDERS) else ()


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


class _Unasked:
    """A layer's number, which code may hand on. What it would decide by it is another layer's way, too."""

    def _refuse(self, *_: Any) -> Any:
        raise CannotRecordError

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __hash__ = _refuse  # type: ignore[assignment]
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __mod__ = __floordiv__ = __truediv__ = _refuse
    __bool__ = __int__ = __index__ = __float__ = __str__ = __repr__ = __format__ = _refuse


_NUMBER = _Unasked()


def _is_plain_output(out: Any) -> bool:
    """True for tensors and None, and tuples and lists of these."""
    if type(out) in (tuple, list):
        return all(map(_is_plain_output, out))
    return out is None or isinstance(out, Tensor)


def _says_nothing_else(out: Any) -> bool:
    """True for what a function that only reads its arguments may return besides tensors."""
    if isinstance(out, tuple):  # sizes and strides
        return all(isinstance(each, int) for each in out)
    return isinstance(out, bool | int | float | torch.dtype | torch.device | torch.layout)


def _casts_nothing(name: str, out: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a cast has given the tensor itself, for its dtype or device: as in all calls of a recording."""
    kinds = set(map(type, (*args, *kwargs.values())))
    return name in _CASTS and out is args[0] and not kinds & {bool, torch.memory_format}


def _memory_of(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def modules_of(module: nn.Module) -> list[nn.Module]:
    """A layer's modules as `nn.Module.modules` has them, in a sixth of its time: they are asked for at each call."""
    found, waiting = dict[nn.Module, None](), [module]
    while waiting:
        each = waiting.pop()
        if each not in found:
            found[each] = None
            waiting.extend(child for child in reversed(each._modules.values()) if child is not None)
    return list(found)


def parameters_of(modules: Iterable[nn.Module]) -> Iterator[tuple[dict[str, Any], str]]:
    """Places of parameters and buffers of a layer's modules."""
    for each in modules:
        for tensors in (each._parameters, each._buffers):
            yield from ((tensors, name) for name, tensor in tensors.items() if tensor is not None)


class _Recorder(TorchFunctionMode):
    """Writes down each function that is called on tensors, all in one mode of torch.

    Functions with a gradient of their own are seen by it: they run without gradients.
    """

    def __init__(self, sizes: Sizes, mode: Callable[[], Any], wanted: Any) -> None:
        super().__init__()
        self.graph, self._sizes, self._mode, self._wanted = Graph(), sizes, mode, wanted
        self._nodes: dict[int, Node] = {}
        self._holders = Counter[int]()  # tensors by the memory that they are in
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
        """The graph with its output. Raises: CannotRecordError for an output that is an object of a model's own."""
        if not _is_plain_output(out):
            raise CannotRecordError
        self.graph.output(self._argument(out))
        self.graph.lint()
        return self.graph

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function, and write it down if it makes tensors."""
        kwargs, name = kwargs or {}, function.__name__
        given = [each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        versions = [each._version for each in given]
        out = function(*args, **kwargs)
        changed = [each for each, version in zip(given, versions, strict=True) if each._version != version]
        if self._mode() != self._wanted or (changed and not self._is_own_sum(name, changed, given)):
            raise CannotRecordError
        if _casts_nothing(name, out, args, kwargs):
            return out
        several = isinstance(out, tuple | list) and any(isinstance(each, Tensor) for each in out)
        if not several and not isinstance(out, Tensor):
            if _says_nothing_else(out):
                return out
            raise CannotRecordError  # it changes something
        if name == "__get__":
            raise CannotRecordError
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

    def _is_own_sum(self, name: str, changed: list[Tensor], given: list[Tensor]) -> bool:
        """Return whether something is added in place to a tensor that nobody has seen but who made it."""
        node = self._nodes.get(id(given[0]))
        if name not in ("add_", "__iadd__") or len(changed) != 1 or changed[0] is not given[0] or node is None:
            return False
        return node.op != "placeholder" and not node.users and self._holders[_memory_of(given[0])] == 1

    def _call(self, function: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Node:
        is_method = type(function).__name__ in ("method_descriptor", "wrapper_descriptor")
        if not is_method:
            return self.graph.call_function(function, args, kwargs)
        if name in _OPERATORS and not kwargs:
            return self.graph.call_function(_OPERATORS[name], args)
        if name.startswith("__"):
            raise CannotRecordError
        return self.graph.call_method(name, args, kwargs)

    def _note(self, node: Node, tensor: Tensor) -> None:
        node.meta["example_value"] = tensor
        if id(tensor) not in self._nodes:
            self._kept.append(tensor)
            self._holders[_memory_of(tensor)] += 1
        self._nodes[id(tensor)] = node

    def _argument(self, given: Any) -> Any:
        """An argument as the graph has it. Raises: CannotRecordError for a tensor from elsewhere."""
        if isinstance(given, Tensor):
            if id(given) not in self._nodes:
                raise CannotRecordError
            return self._nodes[id(given)]
        if isinstance(given, torch.Size):
            return tuple(self._argument(each) for each in given)
        if isinstance(given, list | tuple):
            return type(given)([self._argument(each) for each in given])
        if isinstance(given, dict):
            return {name: self._argument(each) for name, each in given.items()}
        if isinstance(given, slice):
            return slice(*(self._argument(each) for each in (given.start, given.stop, given.step)))
        return self._number(given) if type(given) is int and given else given

    def _number(self, given: int) -> Any:
        """A number as the graph has it. Raises: CannotRecordError for one that is made of those that may change."""
        if given == self._sizes.tokens:
            return self._tokens()
        if given == self._sizes.longest and self._longest is not None:
            return self._longest
        if self._sizes.is_made_of(given):
            raise CannotRecordError
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

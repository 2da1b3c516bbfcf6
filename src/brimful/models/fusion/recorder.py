"""A layer's code written down as a graph of torch's functions, as it runs on tensors without numbers."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.function import BackwardCFunction
from torch.fx import Graph, Node
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from brimful.kernels.forward_context import active_context
from brimful.models.fusion.calls import Call, CannotRecordError, Sizes
from brimful.models.model_stats import LAYER_NUMBERS

#: Methods by which Python's operators show, and the functions that dynamo has in their place.
_OPERATORS: dict[str, Any] = {
    "add": operator.add, "mul": operator.mul, "sub": operator.sub, "neg": operator.neg, "div": operator.truediv,
    "true_divide": operator.truediv, "matmul": operator.matmul, "__getitem__": operator.getitem,
    "__iadd__": operator.iadd, "add_": operator.iadd,
}  # fmt: skip


def graph_of(module: nn.Module, call: Call, sizes: Sizes) -> Graph:
    """The graph of a call of these sizes.

    Placeholders: parameters and buffers, the call's tensors, and the length of the longest segment if there are any.
    """
    recorder, fakes, device = _Recorder(sizes), FakeTensorMode(), call.device
    enabled, dtype = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    with_gradients = torch.is_grad_enabled()
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.set_grad_enabled(with_gradients))
        stack.enter_context(torch.autocast(device, dtype, enabled=enabled, cache_enabled=False))
        places = list(parameters_of(module))
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


def parameters_of(module: nn.Module) -> Iterator[tuple[dict[str, Any], str]]:
    """Places of a layer's parameters and buffers."""
    for each in module.modules():
        for tensors in (each._parameters, each._buffers):
            yield from ((tensors, name) for name, tensor in tensors.items() if tensor is not None)


class _Recorder(TorchFunctionMode):
    """Writes down each function that is called on tensors."""

    def __init__(self, sizes: Sizes) -> None:
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
        """The graph with its output. Raises: CannotRecordError where gradients are not those of its functions."""
        if any(map(_is_written_out, _gradients_of(out))):
            raise CannotRecordError
        self.graph.output(self._argument(out))
        self.graph.lint()
        return self.graph

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function, and write it down if it makes tensors."""
        kwargs = kwargs or {}
        out = function(*args, **kwargs)
        if out is None:
            raise CannotRecordError  # it changes something
        several = isinstance(out, tuple | list) and any(isinstance(each, Tensor) for each in out)
        if not several and not isinstance(out, Tensor):
            return out
        name = function.__name__
        if name == "__get__" or (name.endswith("_") and name != "__getitem__" and not self._is_own_sum(name, args)):
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
            raise CannotRecordError
        return self.graph.call_method(name, args, kwargs)

    def _note(self, node: Node, tensor: Tensor) -> None:
        node.meta["example_value"] = tensor
        self._nodes[id(tensor)] = node
        self._kept.append(tensor)

    def _argument(self, given: Any) -> Any:
        """An argument as the graph has it. Raises: CannotRecordError for a tensor from elsewhere."""
        if isinstance(given, Tensor):
            if id(given) not in self._nodes:
                raise CannotRecordError
            return self._nodes[id(given)]
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
        if any(size and given % size == 0 for size in (self._sizes.tokens, self._sizes.longest, self._sizes.others)):
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

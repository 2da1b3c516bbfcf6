"""Reading graphs of layers, dynamo's or recorded ones: which node is which call, of what; and putting another in its
place."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import Graph, Node

from brimful.kernels.layers import postnorm_ops

#: The number of tokens that stands for any in a recorded graph, where dynamo has a symbol.
TOKENS = 2_000_003
_LINEAR = ("input", "weight", "bias", "extra")


def replace(graph: Graph, node: Node, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """Puts a call in the place of a node, for all its readers."""
    with graph.inserting_before(node):
        new = graph.call_function(function, arguments)
    new.meta = dict(node.meta)
    node.replace_all_uses_with(new)


def is_call(node: Any, *targets: Any) -> bool:
    """True if something is a node that calls one of these functions."""
    return isinstance(node, Node) and node.op == "call_function" and node.target in targets


def is_method(node: Any, *names: str) -> bool:
    """True if something is a node that calls one of these methods."""
    return isinstance(node, Node) and node.op == "call_method" and node.target in names


def arguments(node: Any, target: Any, names: tuple[str, ...]) -> dict[str, Any] | None:
    """Arguments of a call by name, None where they are left out; None if it is another call."""
    return _by_name(node, names) if is_call(node, target) else None


def method_arguments(node: Any, target: str, names: tuple[str, ...]) -> dict[str, Any] | None:
    """The same of a method; the first name is that of the tensor itself."""
    return _by_name(node, names) if is_method(node, target) else None


def _by_name(node: Node, names: tuple[str, ...]) -> dict[str, Any] | None:
    if len(node.args) > len(names) or not set(node.kwargs) <= set(names):
        return None
    return dict.fromkeys(names) | dict(zip(names, node.args, strict=False)) | dict(node.kwargs)


def any_linear(node: Any) -> dict[str, Any] | None:
    """Arguments of a Linear layer, and the `extra` that an adapter adds to it, None without one."""
    for target in (torch._C._nn.linear, postnorm_ops.linear):
        if (call := arguments(node, target, _LINEAR)) is not None:
            return call
    return None


def linear_call(node: Any) -> dict[str, Any] | None:
    """The same of a Linear layer that has one reader."""
    call = any_linear(node)
    return call if call is not None and len(node.users) == 1 else None


def dropped_linear(node: Any) -> tuple[dict[str, Any], Any] | None:
    """The arguments of a linear and the probability of the dropout on it, 0 without one; each has one reader."""
    p: Any = 0.0
    if is_call(node, F.dropout):
        call = dropout_call(node)
        if call is None or len(node.users) != 1:
            return None
        p, node = probability(call), call["input"]
    linear = linear_call(node)
    return None if linear is None else (linear, p)


def dropout_call(node: Any) -> dict[str, Any] | None:
    """Arguments of a dropout of which the graph says whether it is for training."""
    call = arguments(node, F.dropout, ("input", "p", "training", "inplace"))
    return call if call is not None and isinstance(call["training"], bool) else None


def probability(call: dict[str, Any]) -> Any:
    """Probability of a dropout: 0 outside training."""
    if not call["training"]:
        return 0.0
    return 0.5 if call["p"] is None else call["p"]


def layer_norm(node: Any) -> dict[str, Any] | None:
    """The arguments of a LayerNorm over one axis with a gain; None if it is something else."""
    call = arguments(node, F.layer_norm, ("input", "normalized_shape", "weight", "bias", "eps"))
    if call is None or call["weight"] is None or len(call["normalized_shape"]) != 1:
        return None
    return call | {"eps": 1e-5 if call["eps"] is None else call["eps"]}


def uncast(node: Any) -> Any:
    """The node before any casts."""
    while is_method(node, "float") or (is_method(node, "to") and _is_to_dtype(node)):
        node = node.args[0]
    return node


def _is_to_dtype(node: Node) -> bool:
    asked = (*node.args[1:], *node.kwargs.values())
    return len(asked) == 1 and isinstance(asked[0], torch.dtype)


def both_ways(node: Any, target: Any) -> Iterator[tuple[Any, Any]]:
    """The two operands of a sum or product of tensors, in either order; nothing for anything else."""
    if is_call(node, target) and all(isinstance(each, Node) for each in node.args):
        left, right = node.args
        yield left, right
        yield right, left


def is_sum(node: Any) -> bool:
    """True if a node adds two others and has one reader; in place only where nobody else sees that."""
    if not is_call(node, operator.add, operator.iadd) or len(node.users) != 1:
        return False
    changed = node.args[0]
    in_place = node.target is operator.iadd
    return not in_place or (isinstance(changed, Node) and changed.op != "placeholder" and len(changed.users) == 1)


def made(node: Any) -> torch.Tensor | None:
    """The example of what a node makes, if that is a tensor."""
    found = node.meta.get("example_value") if isinstance(node, Node) else None
    return found if isinstance(found, torch.Tensor) else None


def shape_of(node: Any) -> tuple[Any, ...]:
    """The shape of what a node makes, with symbols in it; () if that is no tensor."""
    found = made(node)
    return () if found is None else tuple(found.shape)


def same_shape(node: Any, other: Any) -> bool:
    """True if two nodes make tensors of one shape."""
    return made(node) is not None and made(other) is not None and shape_of(node) == shape_of(other)


def is_symbol(number: Any) -> bool:
    """True for a number of tokens that stands for any."""
    return isinstance(number, torch.SymInt) or (isinstance(number, int) and number == TOKENS)


def is_parameter(node: Any) -> bool:
    """True if a node is a parameter of the module."""
    return isinstance(node, Node) and isinstance(node.meta.get("example_value"), torch.nn.Parameter)

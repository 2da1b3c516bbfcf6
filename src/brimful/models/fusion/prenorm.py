"""Patterns of pre-norm layers (ModernBERT, Llama, Qwen): one stream of residuals, gated activations, rotary embeddings.
And attention, in these layers and in post-norm ones.

Each function replaces one pattern if it ends at a node. What else read an intermediate result still reads it, in a
graph that is then not covered.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import Graph, Node

from brimful.kernels.layers import postnorm_ops, prenorm_ops
from brimful.kernels.layers.low_rank import low_rank
from brimful.models.fusion.nodes import (
    any_linear,
    arguments,
    both_ways,
    dropout_call,
    dropped_linear,
    is_call,
    is_method,
    is_parameter,
    layer_norm,
    linear_call,
    made,
    method_arguments,
    probability,
    replace,
    same_shape,
    shape_of,
    uncast,
)


@dataclass(frozen=True, kw_only=True)
class _Norm:
    """Input and gain of a norm; LayerNorm without a shift if `centred`, else RMSNorm."""

    input: Node
    gain: Node
    eps: Any
    centred: bool


def _norm(node: Any) -> _Norm | None:
    call = layer_norm(node)
    if call is not None:
        found = _Norm(input=call["input"], gain=call["weight"], eps=call["eps"], centred=True)
        return found if call["bias"] is None else None
    return _rms_norm(node)


def _rms_norm(node: Any) -> _Norm | None:
    """gain * (x * rsqrt(mean(x ** 2) + eps)), with casts anywhere."""
    for gain, scaled in both_ways(node, operator.mul):
        for x, root in both_ways(uncast(scaled), operator.mul):
            eps = _root_of_mean_square(root, x)
            if eps is not None and is_parameter(gain) and shape_of(gain) == shape_of(x)[-1:]:
                return _Norm(input=uncast(x), gain=gain, eps=eps, centred=False)
    return None


def _root_of_mean_square(node: Any, x: Any) -> Any:
    """The eps of rsqrt(mean(x ** 2) + eps) over the last axis; None if it is something else."""
    if not is_call(node, torch.rsqrt) or not is_call(node.args[0], operator.add):
        return None
    mean, eps = node.args[0].args
    call = method_arguments(mean, "mean", ("input", "dim", "keepdim"))
    if call is None or call["dim"] not in (-1, [-1], (-1,)) or call["keepdim"] is not True:
        return None
    square = call["input"]
    return eps if is_method(square, "pow") and square.args == (x, 2) else None


def norm(graph: Graph, node: Node) -> None:
    """A norm that only linears read, of the stream of residuals or of what a linear adds to it."""
    found = _norm(node)
    if found is None or not node.users or not all(_is_product(user, node) for user in node.users):
        return
    total, norm_of = found.input, (found.gain, found.eps)
    added = _added(total)
    with graph.inserting_before(node):
        if added is None:
            both = graph.call_function(prenorm_ops.norm, (total, *norm_of, found.centred))
        else:
            linear, residual, p = added
            of_linear = (linear["input"], linear["weight"], linear["bias"])
            given = (*of_linear, residual, *norm_of, p, found.centred, linear["extra"])
            both = graph.call_function(prenorm_ops.linear_add_norm, given)
        rows, stream = (graph.call_function(operator.getitem, (both, part)) for part in range(2))
    rows.meta, stream.meta = dict(node.meta), dict(total.meta)
    node.replace_all_uses_with(rows)
    later = _later(node)
    total.replace_all_uses_with(stream, delete_user_cb=lambda user: user in later)


def _is_product(node: Node, rows: Node) -> bool:
    call = any_linear(node)
    return (call is not None and call["input"] is rows) or (is_call(node, low_rank) and node.args[0] is rows)


def _later(node: Node) -> set[Node]:
    """The nodes behind one."""
    found = set()
    while node.next.op != "root":
        node = node.next
        found.add(node)
    return found


def linear_add(graph: Graph, node: Node) -> None:
    """residual + dropout(linear(x))."""
    added = _added(node)
    if added is not None:
        linear, residual, p = added
        given = (linear["input"], linear["weight"], linear["bias"], residual, p, linear["extra"])
        replace(graph, node, prenorm_ops.linear_add, given)


def _added(node: Any) -> tuple[dict[str, Any], Node, Any] | None:
    """A linear, the residual that it is added to, and the probability of the dropout between."""
    for branch, residual in both_ways(node, operator.add):
        found = dropped_linear(branch)
        if found is not None and same_shape(branch, residual):
            return found[0], residual, found[1]
    return None


def gated(graph: Graph, node: Node) -> None:
    """dropout(activation(a) * b), of linears a and b of one input or of the halves of one linear."""
    for activated, other in both_ways(node, operator.mul):
        activation, a = _activation(activated)
        if activation is None or len(activated.users) != 1:
            continue
        linears = _halves(a, other) or _of_one_input([linear_call(a), linear_call(other)])
        if linears is None:
            continue
        end, p = _dropped(node)
        weights, biases = [each["weight"] for each in linears], [each["bias"] for each in linears]
        given = (linears[0]["input"], weights, biases, activation, p, _extras(linears))
        replace(graph, end, prenorm_ops.linear_gated, given)
        return


def _activation(node: Any) -> tuple[str | None, Any]:
    """The name of an activation that kernels have, and what it is applied to."""
    call = arguments(node, torch._C._nn.gelu, ("input", "approximate"))
    if call is not None and call["approximate"] in (None, "none"):
        return "gelu", call["input"]
    call = arguments(node, F.silu, ("input", "inplace"))
    return (None, None) if call is None or call["inplace"] else ("silu", call["input"])


def _halves(a: Any, b: Any) -> list[dict[str, Any]] | None:
    """The linear whose first half a is and whose second half b is."""
    if not all(is_call(each, operator.getitem) and each.args[1] == part for part, each in enumerate((a, b))):
        return None
    call = method_arguments(a.args[0], "chunk", ("input", "chunks", "dim"))
    if call is None or a.args[0] is not b.args[0] or call["chunks"] != 2 or shape_of(a) != shape_of(b):
        return None
    linear = linear_call(call["input"])
    return [linear] if linear is not None and call["dim"] in (-1, len(shape_of(a)) - 1) else None


def _of_one_input(linears: list[dict[str, Any] | None]) -> list[dict[str, Any]] | None:
    """The linears, if all are, read the same, and have a bias or none have."""
    found = [linear for linear in linears if linear is not None]
    if len(found) != len(linears) or len({linear["input"] for linear in found}) != 1:
        return None
    return found if len({linear["bias"] is None for linear in found}) == 1 else None


def _extras(linears: list[dict[str, Any]]) -> list[Any]:
    """The extras of linears; [] where none has any."""
    found = [linear["extra"] for linear in linears]
    return found if any(each is not None for each in found) else []


def _dropped(node: Node) -> tuple[Node, Any]:
    """The dropout that is a node's only reader, and its probability; the node itself and 0 without one."""
    user = next(iter(node.users), None)
    call = dropout_call(user)
    return (node, 0.0) if user is None or call is None or len(node.users) != 1 else (user, probability(call))


@dataclass(frozen=True, kw_only=True)
class _Heads:
    """Heads as attention reads them, and how they came of a linear.

    part: which third of the linear they are; None if they are all of it. norm: of each head. angles: cosines and sines
    that turn them. repeats: how often each head is there.
    """

    linear: dict[str, Any]
    part: int | None
    num_heads: int
    head_dim: int
    repeats: int
    norm: _Norm | None
    angles: tuple[Node, Node] | None

    @property
    def is_projection(self) -> bool:
        """True for what a linear of their own made of them, and nothing else."""
        return self.part is None and self.repeats == 1 and self.norm is None and self.angles is None


def attention(graph: Graph, node: Node) -> None:
    """varlen_attention of projections of one input, as they are or with queries and keys turned by the same angles."""
    if not is_call(node, torch.ops.brimful.varlen_attention.default):
        return
    found = [each for each in map(_heads, node.args[:3]) if each is not None]
    if len(found) != 3:
        return
    linears = [found[0].linear] if found[0].part == 0 else _of_one_input([each.linear for each in found])
    if linears is None:
        return
    (q, k, _), offsets, settings = found, node.args[3], list(node.args[5:])
    given = (linears[0]["input"], [each["weight"] for each in linears], [each["bias"] for each in linears])
    extras = _extras(linears)
    if all(each.is_projection and shape_of(each.linear["weight"]) == shape_of(q.linear["weight"]) for each in found):
        _replace_attention(
            graph, node, postnorm_ops.projected_attention, (*given, offsets, q.num_heads, settings, extras)
        )
    elif _fit(*found):
        assert q.angles is not None
        gains = [None if each.norm is None else each.norm.gain for each in (q, k)]
        eps = [0.0 if each.norm is None else each.norm.eps for each in (q, k)]
        sizes = (q.num_heads, k.num_heads, q.head_dim)
        rotated = (*given, gains, eps, *q.angles, offsets, *sizes, settings, extras)
        _replace_attention(graph, node, prenorm_ops.rotary_attention, rotated)


def _replace_attention(graph: Graph, node: Node, function: Any, given: tuple[Any, ...]) -> None:
    """Puts a call in the place of varlen_attention, if only its output is read."""
    outputs = list(node.users)
    if len(outputs) != 1 or not is_call(outputs[0], operator.getitem) or outputs[0].args[1] != 0:
        return
    replace(graph, outputs[0], function, given)
    graph.erase_node(outputs[0])
    graph.erase_node(node)


def _fit(q: _Heads, k: _Heads, v: _Heads) -> bool:
    """True if one kernel makes queries, keys and values of one product."""
    parts = (q.part, k.part, v.part)
    one = parts == (0, 1, 2) and q.linear["weight"] is k.linear["weight"] is v.linear["weight"]
    return (
        (one or parts == (None, None, None))
        and q.repeats == 1
        and k.repeats == v.repeats
        and q.num_heads == k.num_heads * k.repeats
        and (q.num_heads, q.head_dim, k.num_heads) == (q.num_heads, k.head_dim, v.num_heads)
        and q.angles is not None
        and q.angles == k.angles
        and v.angles is None
        and (q.norm is None) == (k.norm is None)
        and v.norm is None
    )


def _heads(node: Any) -> _Heads | None:
    """Heads (H, T, D) of a linear (1, T, N), by view, a norm, transpose, rotation, squeeze, and repetition."""
    node, repeats = _repeated(uncast(node))
    squeezed = method_arguments(node, "squeeze", ("input", "dim"))
    if squeezed is None or squeezed["dim"] != 0:
        return None
    node = uncast(squeezed["input"])
    turned = _turned(node)
    node, angles = (node, None) if turned is None else turned
    call = method_arguments(node, "transpose", ("input", "first", "second"))
    if call is None or {call["first"], call["second"]} != {1, 2}:
        return None
    found = _rms_norm(call["input"])
    apart = uncast(call["input"] if found is None else found.input)
    if len(shape_of(apart)) != 4 or not isinstance(shape_of(apart)[2], int):
        return None
    linear, part = _linear_of(apart)
    if linear is None:
        return None
    _, _, num_heads, head_dim = shape_of(apart)
    return _Heads(
        linear=linear, part=part, num_heads=num_heads, head_dim=head_dim, repeats=repeats, norm=found, angles=angles
    )


def _repeated(node: Any) -> tuple[Any, int]:
    """Node repeated along the first axis, and the number of repeats; the node itself and 1 if none."""
    call = method_arguments(node, "repeat_interleave", ("input", "repeats", "dim"))
    if call is None or call["dim"] != 0 or not isinstance(call["repeats"], int):
        return node, 1
    return uncast(call["input"]), call["repeats"]


def _linear_of(node: Node) -> tuple[dict[str, Any] | None, int | None]:
    """The linear (1, T, N) behind (1, T, H, D), and which third of it that is, None if it is all."""
    part: Any = None
    if is_call(node, operator.getitem):
        call = method_arguments(node.args[0], "unbind", ("input", "dim"))
        if call is None or call["dim"] not in (-3, 2):
            return None, None
        part, node = node.args[1], call["input"]
    if not is_method(node, "view", "reshape", "unflatten"):
        return None, None
    linear, viewed = node.args[0], shape_of(node)
    thirds = () if part is None else (3,)
    if viewed[:-2] != (*shape_of(linear)[:2], *thirds) or shape_of(linear)[0] != 1:
        return None, None
    return any_linear(linear), part


def _turned(node: Any) -> tuple[Any, tuple[Node, Node]] | None:
    """Input x and angles of a rotary embedding: x * cos + cat(-second half, first half) * sin."""
    for straight, across in both_ways(node, operator.add):
        for x, cos in both_ways(straight, operator.mul):
            for crossed, sin in both_ways(across, operator.mul):
                if uncast(x) is _crossed(crossed) and all(_is_angle(each, x) for each in (cos, sin)):
                    return uncast(x), (cos, sin)
    return None


def _crossed(node: Any) -> Any:
    """The x of cat(-second half of x, first half of x) along the last axis; None for anything else."""
    call = arguments(node, torch.cat, ("tensors", "dim"))
    if call is None or call["dim"] != -1 or len(call["tensors"]) != 2 or not is_call(call["tensors"][0], operator.neg):
        return None
    second, first = call["tensors"][0].args[0], call["tensors"][1]
    if not all(is_call(each, operator.getitem) for each in (second, first)):
        return None
    x, middle = first.args[0], shape_of(first.args[0])[-1] // 2
    halves = (Ellipsis, slice(None, middle, None)), (Ellipsis, slice(middle, None, None))
    same = uncast(second.args[0]) is uncast(x) and (first.args[1], second.args[1]) == halves
    return uncast(x) if same else None


def _is_angle(node: Any, x: Any) -> bool:
    """True if a node makes numbers for each token and channel of x (1, H, T, D), equal for all heads, not learned."""
    found, (*_, tokens, channels) = made(node), shape_of(x)
    return found is not None and not found.requires_grad and shape_of(node) == (1, 1, tokens, channels)

"""Patterns of post-norm layers (BERT, RoBERTa, DistilBERT), and of embeddings and linears anywhere.

Each function replaces one pattern if it ends at a node, where every intermediate result has no other reader.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import Graph, Node

from brimful.kernels.layers import postnorm_ops
from brimful.kernels.layers.embedding import MOST_TABLES
from brimful.models.fusion.nodes import (
    arguments,
    dropout_call,
    dropped_linear,
    is_call,
    is_sum,
    layer_norm,
    linear_call,
    probability,
    replace,
    same_shape,
)

_SAME = ("view", "reshape", "transpose", "to")


def embeddings(graph: Graph, node: Node) -> None:
    """dropout(layer_norm(embedding + embedding + ...))."""
    drop = dropout_call(node)
    call = None if drop is None else layer_norm(drop["input"])
    if drop is None or call is None or len(drop["input"].users) != 1:
        return
    found = _embedding_calls(call["input"])
    if found is None or len(found) > MOST_TABLES or torch.are_deterministic_algorithms_enabled():
        return
    if any(each["weight"].meta["example_value"].dtype != torch.float32 for each in found):
        return
    replace(
        graph,
        node,
        postnorm_ops.embeddings_norm,
        ([each["input"] for each in found], [each["weight"] for each in found],
         [each["padding_idx"] for each in found], call["weight"], call["bias"], call["eps"], probability(drop)),
    )  # fmt: skip


def _embedding_calls(node: Any) -> list[dict[str, Any]] | None:
    """Arguments of the embeddings that a sum is of, from left to right."""
    if not isinstance(node, Node) or len(node.users) != 1:
        return None
    if is_sum(node):
        left, right = (_embedding_calls(each) for each in node.args)
        return None if left is None or right is None else left + right
    names = ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")
    call = arguments(node, F.embedding, names)
    if call is None or call["max_norm"] is not None or call["scale_grad_by_freq"] or call["sparse"]:
        return None
    return [call]


def add_norm(graph: Graph, node: Node) -> None:
    """layer_norm(dropout(linear(x)) + residual)."""
    call = layer_norm(node)
    if call is None or call["bias"] is None or not is_sum(call["input"]):
        return
    total = call["input"]
    for branch, residual in (total.args, reversed(total.args)):
        found = dropped_linear(branch)
        if found is not None and found[0]["bias"] is not None and same_shape(branch, residual):
            linear, p = found
            replace(
                graph,
                node,
                postnorm_ops.linear_dropout_add_norm,
                (linear["input"], linear["weight"], linear["bias"], residual, call["weight"], call["bias"],
                 call["eps"], p),
            )  # fmt: skip
            return


def gelu(graph: Graph, node: Node) -> None:
    """gelu(linear(x)), exact."""
    call = arguments(node, torch._C._nn.gelu, ("input", "approximate"))
    if call is None or call["approximate"] not in (None, "none"):
        return
    linear = linear_call(call["input"])
    if linear is not None and linear["bias"] is not None:
        replace(graph, node, postnorm_ops.linear_gelu, (linear["input"], linear["weight"], linear["bias"]))


def attention(graph: Graph, node: Node) -> None:
    """varlen_attention of three projections of one input, each reshaped to heads and nothing else."""
    if not is_call(node, torch.ops.brimful.varlen_attention.default):
        return
    queries, keys, values, offsets, _, *settings = node.args
    linears = [_projection(each) for each in (queries, keys, values)]
    if any(linear is None for linear in linears):
        return
    found: list[dict[str, Any]] = [linear for linear in linears if linear is not None]
    shapes = {tuple(linear["weight"].meta["example_value"].shape) for linear in found}
    if len({linear["input"] for linear in found}) != 1 or len(shapes) != 1:
        return
    if len({linear["bias"] is None for linear in found}) != 1:
        return
    num_heads = int(queries.meta["example_value"].shape[0])  # type: ignore[union-attr]
    replace_attention(
        graph,
        node,
        postnorm_ops.projected_attention,
        (found[0]["input"], [linear["weight"] for linear in found], [linear["bias"] for linear in found], offsets,
         num_heads, settings),
    )  # fmt: skip


def replace_attention(graph: Graph, node: Node, function: Any, given: tuple[Any, ...]) -> None:
    """Puts a call in the place of varlen_attention, if only its output is read, and without the seed it had."""
    outputs, seed = list(node.users), node.args[4]
    if len(outputs) != 1 or not is_call(outputs[0], operator.getitem) or outputs[0].args[1] != 0:
        return
    replace(graph, outputs[0], function, given)
    graph.erase_node(outputs[0])
    graph.erase_node(node)
    if isinstance(seed, Node) and not seed.users:  # each site draws its own
        graph.erase_node(seed)


def _projection(node: Any) -> dict[str, Any] | None:
    """The linear behind heads (H, T, D) made of (1, T, H * D) by view, transpose, [0] and a cast."""
    seen = []
    while isinstance(node, Node) and len(node.users) == 1:
        if node.op == "call_method" and node.target in _SAME:
            seen.append(node.target)
            if node.target == "transpose" and node.args[1:] not in ((1, 2), (2, 1)):
                return None
        elif is_call(node, operator.getitem) and node.args[1] == 0:
            seen.append("[0]")
        else:
            break
        node = node.args[0]
    if [each for each in seen if each != "to"] not in (
        ["[0]", "transpose", "view"],
        ["[0]", "transpose", "reshape"],
    ):
        return None
    return linear_call(node)


def linear(graph: Graph, node: Node) -> None:
    """Any linear that is left."""
    call = arguments(node, torch._C._nn.linear, ("input", "weight", "bias"))
    if call is not None and node.users:
        replace(graph, node, postnorm_ops.linear, (call["input"], call["weight"], call["bias"]))

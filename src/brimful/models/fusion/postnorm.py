"""Patterns of post-norm layers (BERT, RoBERTa, DistilBERT), and of embeddings and linears anywhere.

Each function replaces one pattern if it ends at a node, where every intermediate result has no other reader.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import Graph, Node

from brimful.kernels.layers import postnorm_ops
from brimful.kernels.layers.embedding import MOST_TABLES
from brimful.models.fusion.nodes import (
    any_linear,
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
    shape_of,
)


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
                 call["eps"], p, linear["extra"]),
            )  # fmt: skip
            return


def gelu(graph: Graph, node: Node) -> None:
    """gelu(linear(x)), exact."""
    call = arguments(node, torch._C._nn.gelu, ("input", "approximate"))
    if call is None or call["approximate"] not in (None, "none"):
        return
    linear = linear_call(call["input"])
    if linear is not None and linear["bias"] is not None:
        given = (linear["input"], linear["weight"], linear["bias"], linear["extra"])
        replace(graph, node, postnorm_ops.linear_gelu, given)


def linear(graph: Graph, node: Node) -> None:
    """Any linear that is left."""
    call = None if is_call(node, postnorm_ops.linear) else any_linear(node)
    if call is not None and node.users and len(shape_of(call["input"])) > 1 and len(shape_of(call["weight"])) == 2:
        replace(graph, node, postnorm_ops.linear, (call["input"], call["weight"], call["bias"]))

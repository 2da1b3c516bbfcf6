"""The pattern of a low-rank adapter (LoRA) at a Linear layer: one product more that other patterns take along."""

from __future__ import annotations

import operator
from typing import Any

from torch.fx import Graph, Node

from brimful.kernels.layers import postnorm_ops
from brimful.kernels.layers.low_rank import low_rank
from brimful.models.fusion.nodes import both_ways, is_call, is_parameter, linear_call, same_shape, uncast


def adapted(graph: Graph, node: Node) -> None:
    """linear(x) + scale * linear(linear(x)), of which the last two are without bias: a linear with an extra."""
    for base, branch in both_ways(node, operator.add):
        linear, found = linear_call(base), _low_rank(branch)
        if linear is None or linear["extra"] is not None or found is None or not same_shape(base, branch):
            continue
        x, down, up, scale = found
        if uncast(linear["input"]) is not x:
            continue
        with graph.inserting_before(node):
            extra = graph.call_function(low_rank, (linear["input"], down, up, scale))
            both = graph.call_function(postnorm_ops.linear, (linear["input"], linear["weight"], linear["bias"], extra))
        extra.meta, both.meta = dict(branch.meta), dict(node.meta)
        node.replace_all_uses_with(both)
        return


def _low_rank(node: Any) -> tuple[Node, Node, Node, float] | None:
    """Input before any casts, both matrices, and the number that their product is multiplied by."""
    if not is_call(node, operator.mul) or len(node.users) != 1:
        return None
    made, scale = node.args if isinstance(node.args[0], Node) else reversed(node.args)
    up = linear_call(made)
    down = None if up is None else linear_call(uncast(up["input"]))
    if up is None or down is None or not isinstance(scale, int | float):
        return None
    both = (up, down)
    if not all(each["bias"] is None and each["extra"] is None and is_parameter(each["weight"]) for each in both):
        return None
    return uncast(down["input"]), down["weight"], up["weight"], scale

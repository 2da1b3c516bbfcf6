"""Transformer layers and embeddings rewritten onto fused kernels, found by what they compute and not by their names.

A layer's code is recorded (`recording.py`), or traced by torch's dynamo; its graph serves every number of tokens. In it

    linear -> + scale * (linear -> linear)
    sum of embeddings -> layer_norm -> dropout
    linear -> dropout -> + residual -> layer_norm
    linear -> gelu
    three linears of one input -> variable-length attention
    layer_norm without shift, or RMSNorm, of a stream of residuals -> linears
    linear -> dropout -> + stream of residuals
    linear or two -> gelu or silu of one half -> * other half -> dropout
    linear or three -> RMSNorm of heads -> rotary embeddings -> variable-length attention
    linear

are replaced by the functions of `kernels.layers.postnorm_ops` and `prenorm_ops`. If nothing but views is left over,
the graph runs as it is; with anything else in it, the layer goes to torch's own compiler unchanged.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from brimful.core.errors import printable
from brimful.kernels.attention import distance_bias
from brimful.kernels.forward_context import current
from brimful.kernels.layers import postnorm_ops, prenorm_ops
from brimful.kernels.layers.low_rank import low_rank
from brimful.kernels.layers.seeded_dropout import SeededDropout
from brimful.models.fusion import adapters, postnorm, prenorm
from brimful.models.fusion.nodes import is_parameter

#: What a rewritten layer may have besides our functions: views, and numbers read from modules.
_FREE_FUNCTIONS = {operator.getitem}
_FREE_METHODS = {
    "view", "reshape", "transpose", "contiguous", "size", "item", "to", "flatten", "unflatten", "permute", "unsqueeze",
    "squeeze",
}  # fmt: skip

#: What computes on hidden states. Attention with a bias by distance stands beside its projections.
_OURS: set[Any] = {
    distance_bias.OPERATOR, postnorm_ops.linear, postnorm_ops.linear_gelu, postnorm_ops.linear_dropout_add_norm,
    postnorm_ops.projected_attention, postnorm_ops.embeddings_norm, prenorm_ops.norm, prenorm_ops.linear_add_norm,
    prenorm_ops.linear_add, prenorm_ops.linear_gated, prenorm_ops.rotary_attention, low_rank,
}  # fmt: skip

#: In an order in which none takes a part of another, and norms see who reads them.
_PATTERNS = (
    adapters.adapted, postnorm.embeddings, postnorm.add_norm, prenorm.norm, prenorm.linear_add, prenorm.attention,
    prenorm.gated, postnorm.gelu, postnorm.linear,
)  # fmt: skip
#: Those that need nothing of the rest of a layer.
_PATTERNS_OF_PARTS = (postnorm.add_norm, postnorm.gelu, postnorm.linear)


def layer_backend(
    graph_module: GraphModule, inputs: Sequence[Any], *, note: Callable[[str], None]
) -> Callable[..., Any]:
    """A backend of torch.compile for layers: fused kernels where they cover one, torch's inductor elsewhere.

    note: hears of a layer that neither can do, and that runs as it is.
    """
    fused = fuse(graph_module)
    return inductor_backend(graph_module, inputs, note=note) if fused is None else fused


def inductor_backend(
    graph_module: GraphModule, inputs: Sequence[Any], *, note: Callable[[str], None]
) -> Callable[..., Any]:
    """A backend of torch.compile: its own, or the layer as it is where that cannot do it, which `note` hears of."""
    from torch._dynamo.exc import RestartAnalysis
    from torch._inductor.compile_fx import compile_fx

    compiled: Callable[..., Any] = graph_module
    try:
        compiled = compile_fx(graph_module, list(inputs))  # type: ignore[assignment]
    except RestartAnalysis:  # not a failure: the compiler asks for the graph in another form
        raise
    except Exception as refusal:  # whatever the compiler cannot do here, the layer runs without it
        note(f"a layer runs uncompiled: {printable(refusal)}")

    def run(*arguments: Any) -> Any:
        if not current().seeded_dropout:
            return compiled(*arguments)
        with SeededDropout():  # what the compiler makes of dropout cannot be drawn again
            return graph_module(*arguments)

    return run


def embedding_backend(graph_module: GraphModule, inputs: Sequence[Any], *, before_fused: bool) -> Callable[..., Any]:
    """The same for embeddings, of which a model has one: not worth a compilation where nothing is fused.

    before_fused: whether layers that read them may be fused, by their attention. Others sum in fp32, all of them.
    """
    return cover_embeddings(graph_module, before_fused=before_fused) or graph_module


def cover_embeddings(graph_module: GraphModule, *, before_fused: bool) -> Callable[..., Any] | None:
    """The embeddings on our functions; None if they do not cover them. before_fused: as of `embedding_backend`."""
    fused = fuse(graph_module)
    if fused is None:
        return None

    def run(*arguments: Any) -> Any:
        with replace(current(), half_residuals=before_fused and current().half_residuals).active():
            return fused(*arguments)

    return run


def fuse(graph_module: GraphModule) -> GraphModule | None:
    """The graph on our functions; None if they do not cover it. The graph given is left as it is."""
    found = _rewritten(graph_module, _PATTERNS)
    tokens = _of_tokens(found.graph)
    covered = tokens and all(_is_ours_or_free(node) for node in found.graph.nodes if node in tokens)
    return found if covered else None


def fuse_parts(graph_module: GraphModule) -> Callable[..., Any] | None:
    """A layer on padded rows, with what our functions cover of it; None if that is nothing, or if some of its weights
    are frozen, whose gradients our functions would compute. Residuals stay in fp32, as the layer has them."""
    examples = [node.meta["example_value"] for node in graph_module.graph.find_nodes(op="placeholder")]
    if any(isinstance(each, torch.nn.Parameter) and not each.requires_grad for each in examples):
        return None
    found = _rewritten(graph_module, _PATTERNS_OF_PARTS)
    if not any(node.op == "call_function" and node.target in _OURS for node in found.graph.nodes):
        return None

    def run(*arguments: Any) -> Any:
        dropout = SeededDropout() if current().seeded_dropout else nullcontext()
        with replace(current(), half_residuals=False).active(), dropout:
            return found(*arguments)

    return run


def _rewritten(graph_module: GraphModule, patterns: Sequence[Callable[[Graph, Node], None]]) -> GraphModule:
    """A copy of the graph on our functions wherever these patterns are, with a view of a parameter for each reader."""
    graph = Graph()
    graph.output(graph.graph_copy(graph_module.graph, {}))
    found = GraphModule(graph_module, graph)
    for pattern in patterns:
        for node in list(found.graph.nodes):
            pattern(found.graph, node)
        found.graph.eliminate_dead_code()
    for node in found.graph.find_nodes(op="placeholder"):
        if is_parameter(node) and len(node.users) > 1:
            _share(node)
    found.recompile()
    return found


def _of_tokens(graph: Graph) -> set[Node]:
    """Everything that is made of hidden states, (1, T, H), or of ids, (1, T). What is made of tables of positions alone
    is small, and runs as it is."""
    found: set[Node] = set()
    for node in graph.nodes:
        if _is_given_by_token(node) or any(each in found for each in node.all_input_nodes):
            found.add(node)
    return found


def _is_given_by_token(node: Node) -> bool:
    made = node.meta.get("example_value")
    if node.op != "placeholder" or not isinstance(made, torch.Tensor):
        return False
    return made.ndim == (3 if made.is_floating_point() else 2)


def _is_ours_or_free(node: Node) -> bool:
    made = node.meta.get("example_value")
    if isinstance(made, torch.Tensor) and not made.is_floating_point():
        return True  # arithmetic on indices
    if node.op == "call_function":
        return node.target in _FREE_FUNCTIONS or node.target in _OURS
    return node.op != "call_method" or node.target in _FREE_METHODS


def _share(weight: Node) -> None:
    """Gives each reader of a parameter a view of its own: gradients then meet where autograd adds them, and so are not
    computed beside the backward pass."""
    for user in list(weight.users):
        with weight.graph.inserting_before(user):
            view = weight.graph.call_function(torch.ops.aten.alias.default, (weight,))
        view.meta = dict(weight.meta)
        user.replace_input_with(weight, view)

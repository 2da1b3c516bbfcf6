"""Transformer layers and embeddings rewritten onto fused kernels, found by what they compute and not by their names.

A layer is traced once by torch's dynamo; its graph serves all layers of one kind and every number of tokens. In it

    sum of embeddings -> layer_norm -> dropout
    linear -> dropout -> + residual -> layer_norm
    linear -> gelu
    three linears of one input -> variable-length attention
    linear

are replaced by the functions of `kernels.blocks`. If nothing but views is left over, the graph runs as it is; with
anything else in it, the layer goes to torch's own compiler unchanged.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import Graph, GraphModule, Node

from brimful.core.errors import printable
from brimful.kernels import blocks
from brimful.kernels.embedding import MOST_TABLES

#: What a rewritten layer may have besides our functions: views, and numbers read from modules.
_FREE_FUNCTIONS = {operator.getitem}
_FREE_METHODS = {"view", "reshape", "transpose", "contiguous", "size", "item", "to", "flatten", "unflatten", "permute"}
_SAME = ("view", "reshape", "transpose", "to")


def layer_backend(
    graph_module: GraphModule, inputs: Sequence[Any], *, note: Callable[[str], None]
) -> Callable[..., Any]:
    """A backend of torch.compile for layers: fused kernels where they cover one, torch's inductor elsewhere.

    note: hears of a layer that neither can do, and that runs as it is.
    """
    fused = fuse(graph_module)
    if fused is not None:
        return fused
    from torch._dynamo.exc import RestartAnalysis
    from torch._inductor.compile_fx import compile_fx

    compiled: Callable[..., Any] = graph_module
    try:
        compiled = compile_fx(graph_module, list(inputs))  # type: ignore[assignment]
    except RestartAnalysis:  # not a failure: the compiler asks for the graph in another form
        raise
    except Exception as refusal:  # whatever the compiler cannot do here, the layer runs without it
        note(f"a layer runs uncompiled: {printable(refusal)}")
    return compiled


def embedding_backend(graph_module: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """The same for embeddings, of which a model has one: not worth a compilation where nothing is fused."""
    fused: Callable[..., Any] = fuse(graph_module) or graph_module
    return fused


def fuse(graph_module: GraphModule) -> GraphModule | None:
    """The graph on our functions; None if they do not cover it. The graph given is left as it is."""
    graph = Graph()
    graph.output(graph.graph_copy(graph_module.graph, {}))
    found = GraphModule(graph_module, graph)
    rewrite = _Rewrite(found.graph)
    for node in list(found.graph.nodes):
        rewrite.embeddings(node)
        rewrite.attention(node)
        rewrite.add_norm(node)
        rewrite.gelu(node)
    for node in list(found.graph.nodes):
        rewrite.linear(node)
    found.graph.eliminate_dead_code()
    weights = [node for node in found.graph.nodes if node.op == "placeholder" and _is_parameter(node)]
    if any(len(node.users) > 1 for node in weights):  # its gradients would meet before the update
        return None
    if not all(_is_ours_or_free(node) for node in found.graph.nodes):
        return None
    found.recompile()
    return found


def _is_ours_or_free(node: Node) -> bool:
    made = node.meta.get("example_value")
    if isinstance(made, torch.Tensor) and not made.is_floating_point():
        return True  # arithmetic on indices
    if node.op == "call_function":
        return node.target in _FREE_FUNCTIONS or node.target in _OURS
    return node.op != "call_method" or node.target in _FREE_METHODS


_OURS: set[Any] = {
    blocks.linear, blocks.linear_gelu, blocks.linear_dropout_add_norm, blocks.projected_attention,
    blocks.embeddings_norm,
}  # fmt: skip


@dataclass
class _Rewrite:
    """Replaces one pattern at a time, where every intermediate result has no other reader."""

    graph: Graph

    def _replace(self, node: Node, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        with self.graph.inserting_before(node):
            new = self.graph.call_function(function, arguments)
        new.meta = dict(node.meta)
        node.replace_all_uses_with(new)

    def embeddings(self, node: Node) -> None:
        """dropout(layer_norm(embedding + embedding + ...))."""
        drop = _arguments(node, F.dropout, ("input", "p", "training", "inplace"))
        call = None if drop is None else _norm(drop["input"])
        if drop is None or call is None or len(drop["input"].users) != 1 or not isinstance(drop["training"], bool):
            return
        found = self._embedding_calls(call["input"])
        if found is None or len(found) > MOST_TABLES or torch.are_deterministic_algorithms_enabled():
            return
        if any(each["weight"].meta["example_value"].dtype != torch.float32 for each in found):
            return
        self._replace(
            node,
            blocks.embeddings_norm,
            ([each["input"] for each in found], [each["weight"] for each in found],
             [each["padding_idx"] for each in found], call["weight"], call["bias"], call["eps"],
             _probability(drop) if drop["training"] else 0.0),
        )  # fmt: skip

    def _embedding_calls(self, node: Any) -> list[dict[str, Any]] | None:
        """Arguments of the embeddings that a sum is of, from left to right."""
        if not isinstance(node, Node) or len(node.users) != 1:
            return None
        if _is_sum(node):
            left, right = (self._embedding_calls(each) for each in node.args)
            return None if left is None or right is None else left + right
        names = ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")
        call = _arguments(node, F.embedding, names)
        if call is None or call["max_norm"] is not None or call["scale_grad_by_freq"] or call["sparse"]:
            return None
        return [call]

    def add_norm(self, node: Node) -> None:
        """layer_norm(dropout(linear(x)) + residual)."""
        call = _norm(node)
        if call is None:
            return
        total = call["input"]
        if not _is_sum(total):
            return
        for branch, residual in (total.args, reversed(total.args)):
            found = self._dropped_linear(branch)
            if found is not None and _same_shape(branch, residual):
                linear, p = found
                self._replace(
                    node,
                    blocks.linear_dropout_add_norm,
                    (linear["input"], linear["weight"], linear["bias"], residual, call["weight"], call["bias"],
                     call["eps"], p),
                )  # fmt: skip
                return

    def _dropped_linear(self, node: Any) -> tuple[dict[str, Any], Any] | None:
        """The arguments of a linear with bias and the probability of the dropout on it, 0 without one."""
        p: Any = 0.0
        if _is_call(node, F.dropout):
            call = _arguments(node, F.dropout, ("input", "p", "training", "inplace"))
            if call is None or len(node.users) != 1 or not isinstance(call["training"], bool):
                return None
            p, node = (_probability(call) if call["training"] else 0.0), call["input"]
        linear = _arguments(node, torch._C._nn.linear, ("input", "weight", "bias"))
        if linear is None or linear["bias"] is None or len(node.users) != 1:
            return None
        return linear, p

    def gelu(self, node: Node) -> None:
        """gelu(linear(x)), exact."""
        call = _arguments(node, torch._C._nn.gelu, ("input", "approximate"))
        if call is None or call["approximate"] not in (None, "none"):
            return
        linear = _arguments(call["input"], torch._C._nn.linear, ("input", "weight", "bias"))
        if linear is None or linear["bias"] is None or len(call["input"].users) != 1:
            return
        self._replace(node, blocks.linear_gelu, (linear["input"], linear["weight"], linear["bias"]))

    def attention(self, node: Node) -> None:
        """varlen_attention of three projections of one input, each reshaped to heads and nothing else."""
        if not _is_call(node, torch.ops.brimful.varlen_attention.default):
            return
        queries, keys, values, offsets, seed, *settings = node.args
        linears = [self._projection(each) for each in (queries, keys, values)]
        if any(linear is None for linear in linears):
            return
        found: list[dict[str, Any]] = [linear for linear in linears if linear is not None]
        shapes = {tuple(linear["weight"].meta["example_value"].shape) for linear in found}
        if len({linear["input"] for linear in found}) != 1 or len(shapes) != 1:
            return
        if len({linear["bias"] is None for linear in found}) != 1:
            return
        outputs = list(node.users)
        if len(outputs) != 1 or not _is_call(outputs[0], operator.getitem) or outputs[0].args[1] != 0:
            return
        num_heads = int(queries.meta["example_value"].shape[0])  # type: ignore[union-attr]
        arguments = (
            found[0]["input"], [linear["weight"] for linear in found], [linear["bias"] for linear in found], offsets,
            num_heads, settings,
        )  # fmt: skip
        self._replace(outputs[0], blocks.projected_attention, arguments)
        self.graph.erase_node(outputs[0])
        self.graph.erase_node(node)
        if isinstance(seed, Node) and not seed.users:  # each site draws its own
            self.graph.erase_node(seed)

    def _projection(self, node: Any) -> dict[str, Any] | None:
        """The linear behind heads (H, T, D) made of (1, T, H * D) by view, transpose, [0] and a cast."""
        seen = []
        while isinstance(node, Node) and len(node.users) == 1:
            if node.op == "call_method" and node.target in _SAME:
                seen.append(node.target)
                if node.target == "transpose" and node.args[1:] not in ((1, 2), (2, 1)):
                    return None
            elif _is_call(node, operator.getitem) and node.args[1] == 0:
                seen.append("[0]")
            else:
                break
            node = node.args[0]
        if [each for each in seen if each != "to"] not in (
            ["[0]", "transpose", "view"],
            ["[0]", "transpose", "reshape"],
        ):
            return None
        linear = _arguments(node, torch._C._nn.linear, ("input", "weight", "bias"))
        return linear if linear is not None and len(node.users) == 1 else None

    def linear(self, node: Node) -> None:
        """Any linear that is left."""
        call = _arguments(node, torch._C._nn.linear, ("input", "weight", "bias"))
        if call is None or not node.users:
            return
        self._replace(node, blocks.linear, (call["input"], call["weight"], call["bias"]))


def _norm(node: Any) -> dict[str, Any] | None:
    """The arguments of a LayerNorm over one axis with gain and shift; None if it is something else."""
    call = _arguments(node, F.layer_norm, ("input", "normalized_shape", "weight", "bias", "eps"))
    if call is None or call["weight"] is None or call["bias"] is None or len(call["normalized_shape"]) != 1:
        return None
    return call | {"eps": 1e-5 if call["eps"] is None else call["eps"]}


def _is_sum(node: Any) -> bool:
    """Whether a node adds two others and has one reader; in place only where nobody else sees that."""
    if not _is_call(node, operator.add, operator.iadd) or len(node.users) != 1:
        return False
    changed = node.args[0]
    in_place = node.target is operator.iadd
    return not in_place or (isinstance(changed, Node) and changed.op != "placeholder" and len(changed.users) == 1)


def _same_shape(node: Any, other: Any) -> bool:
    made = [each.meta.get("example_value") if isinstance(each, Node) else None for each in (node, other)]
    return all(isinstance(each, torch.Tensor) for each in made) and made[0].shape == made[1].shape  # type: ignore[union-attr]


def _probability(call: dict[str, Any]) -> Any:
    return 0.5 if call["p"] is None else call["p"]


def _is_parameter(node: Node) -> bool:
    return isinstance(node.meta.get("example_value"), torch.nn.Parameter)


def _is_call(node: Any, *targets: Any) -> bool:
    return isinstance(node, Node) and node.op == "call_function" and node.target in targets


def _arguments(node: Any, target: Any, names: tuple[str, ...]) -> dict[str, Any] | None:
    """Arguments of a call by name, None where they are left out; None if it is another call."""
    if not _is_call(node, target):
        return None
    if len(node.args) > len(names) or not set(node.kwargs) <= set(names):
        return None
    return dict.fromkeys(names) | dict(zip(names, node.args, strict=False)) | dict(node.kwargs)

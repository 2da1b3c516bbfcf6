"""The last layer of a model whose head reads one token a sequence: all but keys and values of that token alone.

The layer's graph, rewritten onto fused kernels, is cut at its attention: what comes after works on each token by
itself, and so is given the first tokens only. Logits and gradients are those of the whole layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node
from torch.utils.weak import WeakTensorKeyDictionary

from brimful.kernels.layers import postnorm_ops
from brimful.kernels.layers.cls_attention import first_rows, projected_first_attention
from brimful.models.fusion import fuse, layer_backend
from brimful.models.fusion.nodes import is_parameter, is_symbol


class ShorteningBackend:
    """A backend of torch.compile for all layers of such a model; one trace serves them, in the last one cut short.

    last: the last layer, known by its parameters, which no other layer may share. It is not kept alive: dynamo keeps
    backends as long as the process lives. note: as of `layer_backend`.
    """

    def __init__(self, last: nn.Module, note: Callable[[str], None]) -> None:
        self._note = note
        self._parameters: Any = WeakTensorKeyDictionary((parameter, None) for parameter in last.parameters())
        self.pooled, self.shared = False, 0

    def __call__(self, graph_module: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        return self.cover(graph_module) or self._as_it_is(layer_backend(graph_module, inputs, note=self._note))

    def cover(self, graph_module: GraphModule) -> Callable[..., Any] | None:
        """The graph on our functions, in the last layer cut short; None if they do not cover it."""
        whole, short = fuse(graph_module), fuse(graph_module)
        if whole is None or short is None:
            return None
        if not pool_first(short):
            return self._as_it_is(whole)
        placeholders = [node for node in graph_module.graph.nodes if node.op == "placeholder"]
        weight = next(index for index, node in enumerate(placeholders) if is_parameter(node))
        shared = _shared_parameters(short)

        def run(*arguments: Any) -> Any:
            self.pooled = arguments[weight] in self._parameters
            self.shared = shared
            return (short if self.pooled else whole)(*arguments)

        return run

    def _as_it_is(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:  # a layer may have several forms, one for training and one for evaluation
            self.pooled = False
            return compiled(*arguments)

        return run


def pool_first(fused: GraphModule) -> bool:
    """Changes a fused layer's graph to that for first tokens, (1, N, H) instead of (1, T, H).

    False where its attention has no such form; the graph is then as it was.
    """
    graph = fused.graph
    calls = [
        node for node in graph.nodes if node.op == "call_function" and node.target is postnorm_ops.projected_attention
    ]
    if len(calls) != 1:
        return False
    (call,) = calls
    x, weights, biases, offsets, num_heads, settings, extras = call.args
    _, _, scale, causal, window, softcap, dropout = settings
    if causal is not False or window != 0 or softcap != 0.0 or extras:
        return False
    if not is_symbol(x.meta["example_value"].shape[-2]):
        return False  # the number of tokens stands in the graph as a constant
    after = _after(call)
    with graph.inserting_before(call):
        arguments = (x, weights, biases, offsets, num_heads, scale, dropout)
        replacement = graph.call_function(projected_first_attention, arguments)
        num_rows = graph.call_method("size", (replacement, 1))
    tokens = {node for node in graph.nodes if _is_token_count(node, x)}
    chosen: dict[Node, Node] = {}
    for node in after:
        for given in list(node.all_input_nodes):
            if given in after or given is call:
                continue
            if given in tokens:
                node.replace_input_with(given, num_rows)
            elif _has_tokens(given, x):
                if given not in chosen:
                    with graph.inserting_before(node):
                        chosen[given] = graph.call_function(first_rows, (given, offsets))
                node.replace_input_with(given, chosen[given])
    call.replace_all_uses_with(replacement)
    graph.erase_node(call)
    graph.eliminate_dead_code()
    graph.lint()
    fused.recompile()
    return True


def _shared_parameters(short: GraphModule) -> int:
    """Of the matrices that all tokens are multiplied with even so: those of keys and values."""
    (call,) = (node for node in short.graph.nodes if node.target is projected_first_attention)
    _, keys, values = (weight.meta["example_value"] for weight in call.args[1])
    return int(keys.numel() + values.numel())


def _after(call: Node) -> dict[Node, None]:
    """Everything that depends on a node, in the graph's order."""
    found: dict[Node, None] = {}
    for node in call.graph.nodes:
        if node is not call and node.op != "output" and any(i is call or i in found for i in node.all_input_nodes):
            found[node] = None
    return found


def _has_tokens(node: Node, x: Any) -> bool:
    """True if a node's result has a row a token, as `x` has: (1, T, ...). Symbols are compared as they are written:
    asking whether they are equal would make the compiler see to it."""
    made, like = node.meta.get("example_value"), x.meta["example_value"]
    return isinstance(made, torch.Tensor) and made.ndim == like.ndim and str(made.shape[:-1]) == str(like.shape[:-1])


def _is_token_count(node: Node, x: Any) -> bool:
    made, count = node.meta.get("example_value"), x.meta["example_value"].shape[-2]
    return is_symbol(made) and str(made) == str(count)

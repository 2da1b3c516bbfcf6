"""Statistics of a model, read from its modules, not from its name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import nn

#: Names under which a layer's modules keep its number.
LAYER_NUMBERS = frozenset({"layer_idx", "layer_id", "layer_index", "layer_number", "block_idx"})


def layers_of(model: Any) -> nn.ModuleList | None:
    """The list of a model's transformer layers, those for text; None where layers are shared or nested (ALBERT)."""
    count, base = getattr(model.config.get_text_config(), "num_hidden_layers", None), model.base_model
    text = getattr(base, "language_model", None) or getattr(base, "text_model", None) or base
    lists = (module for module in text.modules() if isinstance(module, nn.ModuleList))
    return next((found for found in lists if len(found) == count), None)


def layer_lists(model: nn.Module) -> list[nn.ModuleList]:
    """Every list of two or more layers of one class, the outermost ones: an encoder's and a decoder's. Lists of lists
    are looked into."""
    if isinstance(model, nn.ModuleList) and len(model) > 1 and not isinstance(model[0], nn.ModuleList):
        return [model] if len({type(layer) for layer in model}) == 1 else []
    return [found for child in model.children() for found in layer_lists(child)]


def matmul_parameters(model: nn.Module) -> int:
    """Parameters that every token is multiplied with: matrices outside embeddings.

    A forward pass takes two operations for each and token, a backward pass four (Kaplan et al. 2020, arXiv 2001.08361).
    """
    return sum(count * rows * columns for (rows, columns), count in matrices(model).items())


def matrices(model: nn.Module) -> Counter[tuple[int, int]]:
    """Number of matrices outside embeddings, by shape."""
    return Counter(
        (parameter.shape[0], parameter.shape[1])
        for module in model.modules()
        if not isinstance(module, nn.Embedding)
        for parameter in module.parameters(recurse=False)
        if parameter.ndim == 2
    )


def token_matrices(model: Any) -> Counter[tuple[int, int]] | None:
    """`matrices` of the base model without its pooler, which sees one token of a sequence, as the head does: what every
    token is multiplied with once. None where layers are shared or nested: they are used more often than they are there.
    """
    if layers_of(model) is None:
        return None
    found = matrices(model.base_model)
    pooler = getattr(model.base_model, "pooler", None)
    return found - matrices(pooler) if isinstance(pooler, nn.Module) else found


def token_operations(model: Any) -> int | None:
    """Operations of a forward and a backward pass that each token costs in `token_matrices`; None where those are.

    A number of a matrix costs two forward, two for its own gradient where it is trained, and two for that of what it is
    multiplied with, where something before it is trained: in the order of the modules, which is right but within the
    first layer that has something trained.
    """
    if layers_of(model) is None:
        return None
    pooler, found, is_reached = getattr(model.base_model, "pooler", None), 0, False
    others = set(pooler.modules()) if isinstance(pooler, nn.Module) else set()
    for module in model.base_model.modules():
        for parameter in module.parameters(recurse=False):
            if parameter.ndim == 2 and not isinstance(module, nn.Embedding) and module not in others:
                found += 2 * parameter.numel() * (1 + is_reached + parameter.requires_grad)
            is_reached = is_reached or parameter.requires_grad
    return found


def useful_attention(model: Any, lengths_N: npt.NDArray[np.int64]) -> float | None:
    """Operations of `Attention.flops`, without the backward pass of layers that have nothing trained in or before them;
    None where they are unknown."""
    attention, layers = attention_of(model), layers_of(model)
    if attention is None or layers is None:
        return None
    of_layers = {id(parameter) for layer in layers for parameter in layer.parameters()}
    first = next((i for i, layer in enumerate(layers) if _is_trained(layer.parameters())), len(layers))
    before = (p for p in model.base_model.get_input_embeddings().parameters() if id(p) not in of_layers)
    share = 1.0 if _is_trained(before) else 1.0 - first / len(layers)
    return attention.flops(lengths_N) * (1.0 + 2.0 * share) / 3.0


def _is_trained(parameters: Iterable[nn.Parameter]) -> bool:
    return any(parameter.requires_grad for parameter in parameters)


@dataclass(frozen=True, kw_only=True)
class Attention:
    """Facts that determine the FLOPs of a model's attention.

    channels: of all heads. causal: whether a token sees none behind it. windows: how many layers have each, None where
    a token sees the whole sequence.
    """

    channels: int
    causal: bool
    windows: Counter[int | None]

    def flops(self, lengths_N: npt.NDArray[np.int64]) -> float:
        """Operations in one forward and backward pass over sequences of these lengths.

        A query and a key that it sees cost four operations forward for each channel (scores, and the sum of values) and
        twice as many backward, recomputation not counted (Dao 2023, arXiv 2307.08691). Softmax and dropout are not
        counted.
        """
        pairs = sum(layers * self._pairs(lengths_N, window) for window, layers in self.windows.items())
        return 12.0 * self.channels * pairs

    def _pairs(self, lengths_N: npt.NDArray[np.int64], window: int | None) -> int:
        """Queries and keys that see one another: those nearer than the window, on either side or before."""
        reach_N = np.minimum(lengths_N, window) if window else lengths_N
        before_N = reach_N * (reach_N + 1) // 2 + (lengths_N - reach_N) * reach_N  # keys up to the query itself
        return int((before_N if self.causal else 2 * before_N - lengths_N).sum())


def attention_of(model: Any) -> Attention | None:
    """None for a configuration that does not say what its heads are."""
    config = model.config
    num_layers = getattr(config, "num_hidden_layers", None)
    num_heads, width = getattr(config, "num_attention_heads", None), getattr(config, "hidden_size", None)
    if not (num_layers and num_heads and width):
        return None
    return Attention(
        channels=num_heads * (getattr(config, "head_dim", None) or width // num_heads),
        causal=any(getattr(module, "is_causal", False) for module in model.modules()),
        windows=Counter(_windows(config, num_layers)),
    )


def window_of(config: Any) -> int | None:
    """The window of attention in layers that have one; None where none has."""
    named = (getattr(config, name, None) for name in ("sliding_window", "local_attention"))
    return next((window for window in named if isinstance(window, int)), None)


def _windows(config: Any, num_layers: int) -> list[int | None]:
    """The window of each layer, None where it sees the whole sequence."""
    window = window_of(config)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * num_layers
    return [window if kind == "sliding_attention" else None for kind in kinds]


def embeddings_of(model: Any) -> nn.Module | None:
    """The module that adds a model's embeddings up and normalises them; None where the model does so itself."""
    for module in model.base_model.modules():
        children = [type(child) for child in module.children()]
        if any(isinstance(inner, nn.ModuleList) for inner in module.modules()):
            continue  # it has the layers too
        if nn.Embedding in children and nn.LayerNorm in children:
            found: nn.Module = module
            return found
    return None


def linear_parameters(model: nn.Module) -> set[int]:
    """Ids of parameters that only Linear layers have: autocast casts them whenever they are used.

    Not those of a layer with a forward of its own, as one that answers in fp32.
    """
    linear: set[int] = set()
    other: set[int] = set()
    for module in model.modules():
        found = linear if type(module) is nn.Linear and "forward" not in vars(module) else other
        found.update(id(p) for p in module.parameters(recurse=False))
    return linear - other

"""Inputs of the equivalence check: a copy of the model with few layers, and sequences that reach every case."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from brimful.kernels import float8
from brimful.kernels.layout import Inputs, PackedShape, packed_inputs, padded_inputs
from brimful.models.model_stats import LAYER_NUMBERS, layers_of
from brimful.models.packed.family_forms import farthest_bucket, full_attention_limit
from brimful.models.packed.packed_forward import padding_id_of
from brimful.models.packed.recompute import all_kept_in

#: Most positions of models that have a learned table of them; packed rows in the equivalence check are longer.
_SHORT_TABLE = 1026

#: Token ids of a model that has no vocabulary: code points.
_LETTERS = 128

#: Rows of a large batch in the check of independence, and of the small ones that it is held to.
MANY, FEW = 40, 5

#: What the attention kernel is chosen by: the typical length, and its name, where each is known.
Kernel = tuple[int | None, str | None]


def one_layer_of_each_kind(model: Any) -> Any:
    """A copy of the model with its own weights and its first layers: as many as have one of each kind, and one more.

    Of the last layer only pooled tokens are read: what attention makes of the others is seen by a layer above.
    Two layers are of one kind if they have the same modules with the same settings, their number left out, and the same
    entry in the configuration's `layer_types`. A model whose layers are shared or nested is copied whole. A copy keeps
    all activations, whatever the model does.
    """
    with all_kept_in(model):
        return _first_layers(model)


def _first_layers(model: Any) -> Any:
    layers, text = layers_of(model), model.config.get_text_config()
    field = text.attribute_map.get("num_hidden_layers", "num_hidden_layers")
    if layers is None or isinstance(getattr(type(text), field, None), property):
        return copy.deepcopy(model)
    everything = layers._modules
    types = getattr(text, "layer_types", None) or [None] * len(layers)
    kinds = [(types[index], str(layer), module_settings(layer)) for index, layer in enumerate(layers)]
    kept = min(2 + max(kinds.index(kind) for kind in set(kinds)), len(layers))
    layers._modules = {name: everything[name] for name in list(everything)[:kept]}
    try:
        small = copy.deepcopy(model)
    finally:
        layers._modules = everything
    config = small.config.get_text_config()
    object.__setattr__(config, field, kept)
    for module in small.modules():  # some models loop by a number of their own
        for name in _NUMBERS_OF_LAYERS & vars(module).keys():
            if getattr(module, name) == len(everything):
                setattr(module, name, kept)
    if types[0] is not None and "layer_types" in vars(config):
        object.__setattr__(config, "layer_types", types[:kept])
    copies: Any = layers_of(small)
    _take_weights(copies[-1], layers[-1])
    return small


def _take_weights(copied: nn.Module, last: nn.Module) -> None:
    """Give a copied layer the weights of the model's last one, of which what the head does not read is left out; not
    where they are of other shapes, or kept elsewhere, or not numbers as they are."""
    own, found = copied.state_dict(keep_vars=True), last.state_dict(keep_vars=True)
    shapes = [{name: (each.shape, each.dtype) for name, each in state.items()} for state in (own, found)]
    if shapes[0] == shapes[1] and all(each.is_floating_point() and not each.is_meta for each in found.values()):
        with torch.no_grad():
            for name, each in own.items():
                each.copy_(found[name])


def module_settings(layer: nn.Module) -> str:
    """Settings of a layer's modules: windows, scales, switches."""
    return str(
        [
            (name, key, value)
            for name, module in layer.named_modules()
            for key, value in sorted(vars(module).items())
            if isinstance(value, bool | int | float | str) and key not in LAYER_NUMBERS
        ]
    )


_NUMBERS_OF_LAYERS = frozenset({"num_hidden_layers", "n_layers", "n_layer", "num_layers"})


#: Tokens by which a sequence exceeds what it is to exceed.
BEYOND = 40

#: Names of the tokens that attention reaches, or keeps of those that it could: longer texts are computed otherwise.
_WINDOWS = ("sliding_window", "local_attention", "attention_window", "window_size", "keep_window_size", "index_topk")


def make_sequences(whole_config: Any, max_length: int) -> list[np.ndarray]:
    """Random token ids without padding and end tokens: short ones, and two longer than any window that can matter, or
    than the distances that a bias tells apart, of which one is padded beside the other. The last one has the other
    special tokens, such as the mask.

    Encoder-decoders get one end token each: it is what their heads read.
    """
    config = whole_config.get_text_config()
    windows = [getattr(config, name, None) for name in _WINDOWS]
    windows += [farthest_bucket(whole_config), full_attention_limit(whole_config)]
    longest = max([48, *(w + BEYOND for w in windows if isinstance(w, int))])
    sequences = random_sequences(whole_config, [min(n, max_length) for n in (5, 17, longest, 2, longest - 9)])
    inner, special = sequences[-1][1:-1], _special_ids(whole_config)
    inner[: len(special)] = special[: len(inner)]
    return sequences


def many_sequences(whole_config: Any, max_length: int) -> list[np.ndarray]:
    """Random token ids of as many short sequences as a batch may have: some models see how many rows there are."""
    return random_sequences(whole_config, [min(5, max_length), min(2, max_length)] * (MANY // 2))


def _special_ids(whole_config: Any) -> list[int]:
    """Ids that the configuration names and that may stand within a text: what a model makes of them is seen, too."""
    text = whole_config.get_text_config()
    named = {
        name: value
        for config in (whole_config, text)
        for name, value in vars(config).items()
        if name.endswith("_token_id") and type(value) is int
    }
    known = range(getattr(text, "vocab_size", None) or _LETTERS)
    return sorted({value for value in named.values() if value in known} - _avoided(text))


def _avoided(config: Any) -> set[int]:
    """Ids of padding, and of a text's ends."""
    found = {getattr(config, name, None) for name in ("pad_token_id", "bos_token_id")}
    ends = getattr(config, "eos_token_id", None)
    found |= set(ends) if isinstance(ends, list | tuple) else {ends}
    return {each for each in found if isinstance(each, int)}


def random_sequences(whole_config: Any, lengths: Iterable[int]) -> list[np.ndarray]:
    """Random token ids as `make_sequences` has them, of these lengths."""
    config = whole_config.get_text_config()
    ids = np.arange(getattr(config, "vocab_size", None) or _LETTERS)
    allowed = np.setdiff1d(ids, list(_avoided(config)))
    random = np.random.default_rng(0)
    sequences = [random.choice(allowed, size=length) for length in lengths]
    if whole_config.is_encoder_decoder and isinstance(config.eos_token_id, int):
        for sequence in sequences:
            sequence[-1] = config.eos_token_id
    return sequences


def packed_row(sequences: Sequence[np.ndarray], config: Any, max_length: int, kernel: Kernel = (None, None)) -> Inputs:
    """The sequences in one row whose unused tail is longer than one of them, so that the tail is tested too.

    The row is longer than any short table of positions, so that nothing that is made for one sequence has its length.
    """
    longest = max(len(s) for s in sequences)
    total = sum(len(s) for s in sequences) + longest + 9
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    if isinstance(positions, int) and positions <= _SHORT_TABLE:
        total = max(total, positions + 1)
    total += -total % float8.ALIGNMENT
    return _row(sequences, config, kernel, total, len(sequences) + 2, min(max_length, longest))


def filled_row(sequences: Sequence[np.ndarray], config: Any, kernel: Kernel = (None, None)) -> Inputs:
    """The sequences in one row that they fill."""
    lengths = [len(s) for s in sequences]
    return _row(sequences, config, kernel, sum(lengths), len(lengths), max(lengths))


def _row(
    sequences: Sequence[np.ndarray], config: Any, kernel: Kernel, num_tokens: int, num_slots: int, max_length: int
) -> Inputs:
    shape = PackedShape(
        num_tokens=num_tokens,
        num_slots=num_slots,
        max_length=max_length,
        typical_length=kernel[0],
        attention=kernel[1],
    )
    types = [_types(s) for s in sequences]
    return packed_inputs(sequences, shape, padding_id=padding_id_of(config), types=types, groups=True)


def padded_rows(sequences: Sequence[np.ndarray], config: Any) -> Inputs:
    """The sequences as rows of one length, as Hugging Face's forward takes them."""
    longest, types = max(len(s) for s in sequences), [_types(s) for s in sequences]
    return padded_inputs(sequences, len(sequences), longest, padding_id=padding_id_of(config), types=types)


def make_check_inputs(config: Any, max_length: int) -> Inputs:
    """The sequences of the equivalence check, as padded rows: any model of a family takes them."""
    return padded_rows(make_sequences(config, max_length), config)


def _types(sequence: np.ndarray) -> np.ndarray:
    """Token types of a text pair whose second text begins in the middle."""
    return (np.arange(len(sequence)) >= len(sequence) // 2).astype(np.int64)


def wake(small: nn.Module) -> None:
    """Random values for parameters that are all zero: behind a new head or a closed gate everything looks equal.

    Weights that are not finite are 0: they are for their rows to show, and say nothing of how rows are computed.
    """
    random = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in small.parameters():
            parameter.nan_to_num_(0.0, 0.0, 0.0)
            if not parameter.any():
                parameter.normal_(0, 0.02, generator=random)

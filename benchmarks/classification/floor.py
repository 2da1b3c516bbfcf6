"""Operations of a text, and the roofline: texts a second if the chip did nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from rates import attending_pairs, meta_model, product_s
from works import Pool, Work, lengths_file, model_folder, read_texts

from brimful.hardware.probe import probe
from brimful.models.model_stats import layers_of, matmul_parameters


def operations(model: Any, lengths: np.ndarray) -> np.ndarray:
    """(N,) operations of one forward pass over sequences of these lengths, as transformers computes it without padding.

    Two a matrix parameter and token (of the head: and sequence), and four a hidden unit and pair of tokens that attend
    to one another in each layer.
    """
    layers = layers_of(model)
    assert layers is not None
    body = matmul_parameters(layers)
    head = matmul_parameters(model) - body
    pairs_N = attending_pairs(model.config, lengths).sum(0)
    return 2.0 * (body * lengths + head) + 4.0 * model.config.hidden_size * pairs_N


def needed_operations(model: Any, lengths: np.ndarray) -> np.ndarray:
    """The same without what no answer depends on: a head that reads a sequence's first token needs, of the last layer,
    keys and values of all tokens, and everything else of that token alone."""
    layers = layers_of(model)
    assert layers is not None
    width = model.config.hidden_size
    spared = matmul_parameters(layers[-1]) - 2 * width**2
    last_pairs_N = attending_pairs(model.config, lengths)[-1]
    spared_pairs_N = last_pairs_N - np.minimum(lengths, last_pairs_N / lengths)
    return operations(model, lengths) - 2.0 * spared * (lengths - 1) - 4.0 * width * spared_pairs_N


def read_pool(inputs: Path, work: Work) -> Pool:
    """The texts of a work and what they ask for."""
    texts, pairs = read_texts(inputs, work)
    lengths_NL = np.load(lengths_file(inputs, work))
    model = meta_model(model_folder(inputs, work))
    operations_N, needed_N = (
        count(model, lengths_NL.ravel()).reshape(lengths_NL.shape).sum(1) for count in (operations, needed_operations)
    )
    return Pool(texts, pairs, tokens_N=lengths_NL.sum(1), operations_N=operations_N, needed_N=needed_N)


def limits(device: torch.device, *, smoke: bool) -> dict[str, Any]:
    """Describe this machine and its matmul rate."""
    side = 256 if smoke else 8192 if device.type == "cuda" else 2048
    dtypes = [torch.bfloat16] if device.type == "cuda" else [torch.bfloat16, torch.float32]
    rates = {dtype: 2 * side**3 / product_s(side, side, side, device, dtype=dtype) for dtype in dtypes}
    fastest = max(rates, key=lambda dtype: rates[dtype])
    machine = probe()
    return {
        "matmul_flops_per_s": rates[fastest],
        "matmul_shape": [side] * 3,
        "matmul_dtype": str(fastest).removeprefix("torch."),
        "cpu": machine.cpu,
        "num_cores": machine.num_cores,
    }

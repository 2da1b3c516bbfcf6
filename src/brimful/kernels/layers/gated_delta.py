"""The gated delta rule of Qwen3.5's and Qwen3-Next's layers, in chunks that are no longer than a row needs.

    state_l = exp(g_l) (I - beta_l k_l k_l^T) state_(l-1) + beta_l k_l v_l^T        y_l = q_l state_l

Within a chunk all positions are computed at once, by a triangular system of what each key finds of those before it;
from chunk to chunk a state is handed on. transformers pads each row to whole chunks of 64 positions, solves for what is
read of earlier chunks also where there are none, and takes and writes each chunk as a slice of tensors, whose gradients
are as large as the whole. Source: Yang et al. 2024, arXiv 2412.06464.

Letters: B rows, L positions, G heads of queries and keys, H heads of values, D and V their numbers, K chunks, Q
positions of one.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from brimful.kernels.layers.chunked_scan import chunks_of

#: Of the norm of queries and keys.
_EPSILON = 1e-6


def gated_delta_rule(
    q_BLGD: Tensor, k_BLGD: Tensor, v_BLHV: Tensor, g_BLH: Tensor, beta_BLH: Tensor, *, normed: bool = False
) -> Tensor:
    """(B, L, H, V) in the dtype of queries.

    g: logarithms of what is kept of a state. normed: whether queries and keys are made of length 1. Each head of
    queries and keys is for as many neighbours of values. Products are in the dtype that autocast has for them.
    """
    length, heads, dtype = v_BLHV.shape[1], v_BLHV.shape[2], q_BLGD.dtype
    chunks, size = chunks_of(length)

    def in_chunks(x_BL: Tensor) -> Tensor:
        """(B, H, K, Q, ...) in fp32 of (B, L, H, ...)."""
        x_BHL = x_BL.transpose(1, 2).float()
        missing = chunks * size - length
        x_BHL = F.pad(x_BHL, (0, 0) * (x_BHL.ndim - 3) + (0, missing)) if missing else x_BHL
        return x_BHL.reshape(*x_BHL.shape[:2], chunks, size, *x_BHL.shape[3:])

    q_BLHD, k_BLHD = (x.repeat_interleave(heads // x.shape[2], dim=2) for x in (q_BLGD, k_BLGD))
    q, k, v, g, beta = (in_chunks(x) for x in (q_BLHD, k_BLHD, v_BLHV, g_BLH, beta_BLH))
    if normed:
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _EPSILON) for x in (q, k))
    q, changes = q * q.shape[-1] ** -0.5, k * beta[..., None]
    powers = g.double().cumsum(-1)  # differences of large ones are small
    later_QQ = torch.ones(size, size, dtype=torch.bool, device=q.device).triu(1)
    kept = (powers[..., None] - powers[..., None, :]).float().masked_fill(later_QQ, -math.inf).exp()
    found = (changes @ k.mT) * kept  # of each position's key in those before it; ones on the diagonal are not read
    scores = (q @ k.mT) * kept
    v = v * beta[..., None]
    if chunks == 1:
        y = scores @ torch.linalg.solve_triangular(found, v, upper=False, unitriangular=True)
    else:
        y = _chunk_by_chunk(found, scores, q, k, v, changes, powers)
    y_BHLV: Tensor = y.flatten(2, 3)[:, :, :length]
    return y_BHLV.transpose(1, 2).to(dtype, memory_format=torch.contiguous_format)


def _chunk_by_chunk(
    found: Tensor, scores: Tensor, q: Tensor, k: Tensor, v: Tensor, changes: Tensor, powers: Tensor
) -> Tensor:
    """(B, H, K, Q, V), with what each chunk reads of the state that those before it left."""
    since_begin = powers.float().exp()[..., None]
    until_end = (powers[..., -1:] - powers).float().exp()[..., None]
    both = torch.cat([v, changes * since_begin], dim=-1)
    v, reads = torch.linalg.solve_triangular(found, both, upper=False, unitriangular=True).split(
        [v.shape[-1], k.shape[-1]], dim=-1
    )
    each = (x.unbind(2) for x in (v, reads, scores, q * since_begin, (k * until_end).mT, since_begin[..., -1:, :]))
    state, outputs = None, list[Tensor]()
    for new, read, score, query, key, left in zip(*each, strict=True):
        if state is None:
            outputs.append(score @ new)
            state = key @ new
            continue
        changed = new - read @ state
        outputs.append(query @ state + score @ changed)
        state = state * left + key @ changed
    return torch.stack(outputs, dim=2)

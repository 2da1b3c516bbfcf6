"""The scan of Mamba-2's layers, in chunks that are no longer than a row needs and by products of matrices.

    state_l = exp(dt_l A) state_(l-1) + dt_l B_l x_l        y_l = C_l state_l + D x_l

with one number `A` a head. Within a chunk each position is given what those before it have left of them, by one product
as in attention; from chunk to chunk a state is handed on. transformers pads each row to whole chunks, of 256 positions
as released, repeats keys and queries of a group (`B` and `C`) for each of its heads, and multiplies them by head. Here
chunks have at most 64 positions, scores are computed once a group, and products with states take all heads of a group
at once. Source: Dao and Gu 2024, arXiv 2405.21060.

Letters: B rows, L positions, H heads, P numbers of a head, G groups of heads, N numbers of a state a number of a head,
K chunks, Q positions of one.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

#: Positions of the longest chunk, and what a chunk is a multiple of.
_CHUNK, _MULTIPLE = 64, 8


def chunks_of(length: int) -> tuple[int, int]:
    """Number of chunks of a row, as few as may be, and their positions, as few as then may be."""
    count = -(-length // _CHUNK)
    return count, -(-length // (count * _MULTIPLE)) * _MULTIPLE


def chunked_scan(
    x_BLHP: Tensor,
    dt_BLH: Tensor,
    A_H: Tensor,
    B_BLGN: Tensor,
    C_BLGN: Tensor,
    *,
    D_H: Tensor | None = None,
    bias_H: Tensor | None = None,
    softplus: bool = False,
    limits: tuple[float, float] = (0.0, math.inf),
) -> Tensor:
    """(B, L, H, P) in fp32: what the states give out, `D_H * x` added.

    dt: steps; with `softplus` that of these and their bias, then held within `limits`. Products are in the dtype that
    autocast has for them, as transformers 5.23 has it, but not in fp16, in which states may be too large.
    """
    dt_BLH = (dt_BLH if bias_H is None else dt_BLH + bias_H.to(dt_BLH.dtype)).float()
    dt_BLH = (F.softplus(dt_BLH) if softplus else dt_BLH).clamp(*limits)
    with _no_fp16(x_BLHP.device.type):
        y_BLHP = _scan(x_BLHP.float(), dt_BLH, A_H, B_BLGN, C_BLGN)
    return y_BLHP.float() if D_H is None else y_BLHP + x_BLHP.float() * D_H[:, None]


def _no_fp16(device: str) -> AbstractContextManager[Any]:
    """Within, autocast to fp16 is left; one to bf16 is not."""
    is_on = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    if is_on and torch.get_autocast_dtype(device) == torch.float16:
        return torch.autocast(device, enabled=False)
    return nullcontext()


def _scan(x_BLHP: Tensor, dt_BLH: Tensor, A_H: Tensor, B_BLGN: Tensor, C_BLGN: Tensor) -> Tensor:
    """Outputs of the states, (B, L, H, P)."""
    rows, length, heads, _ = x_BLHP.shape
    chunks, size = chunks_of(length)

    def in_chunks(x: Tensor) -> Tensor:
        missing = chunks * size - length
        x = F.pad(x, (0, 0) * (x.ndim - 2) + (0, missing)) if missing else x
        return x.reshape(rows, chunks, size, *x.shape[2:])

    added_BKQHP = in_chunks(x_BLHP * dt_BLH[..., None])
    # Of what is left of a state from before the chunk. Differences of large ones are small.
    powers_BKQH = in_chunks(A_H * dt_BLH).double().cumsum(2)
    B_BKGQN, C_BKGQN = (in_chunks(x.float()).transpose(2, 3) for x in (B_BLGN, C_BLGN))
    y_BKQHP = _within(added_BKQHP, powers_BKQH, B_BKGQN, C_BKGQN)
    if chunks > 1:
        y_BKQHP = y_BKQHP + _from_before(added_BKQHP, powers_BKQH, B_BKGQN, C_BKGQN)
    y_BLHP: Tensor = y_BKQHP.reshape(rows, chunks * size, heads, -1)[:, :length]
    return y_BLHP


def _within(added_BKQHP: Tensor, powers_BKQH: Tensor, B_BKGQN: Tensor, C_BKGQN: Tensor) -> Tensor:
    """Outputs of each position, of those of its chunk up to itself, (B, K, Q, H, P)."""
    size, groups = added_BKQHP.shape[2], B_BKGQN.shape[2]
    powers_BKHQ = powers_BKQH.transpose(2, 3)
    later_QQ = torch.ones(size, size, dtype=torch.bool, device=added_BKQHP.device).triu(1)
    between_BKHQQ = (powers_BKHQ[..., None] - powers_BKHQ[..., None, :]).float()
    left_BKHQQ = between_BKHQQ.masked_fill(later_QQ, -math.inf).exp()
    scores_BKGQQ = C_BKGQN @ B_BKGQN.mT
    shares = left_BKHQQ.unflatten(2, (groups, -1)) * scores_BKGQQ[:, :, :, None]
    y_BKHQP: Tensor = shares.flatten(2, 3) @ added_BKQHP.transpose(2, 3)
    return y_BKHQP.transpose(2, 3)


def _from_before(added_BKQHP: Tensor, powers_BKQH: Tensor, B_BKGQN: Tensor, C_BKGQN: Tensor) -> Tensor:
    """Outputs of each position, of the chunks before its own, (B, K, Q, H, P)."""
    chunks, heads, groups = added_BKQHP.shape[1], added_BKQHP.shape[3], B_BKGQN.shape[2]
    each = (groups, heads // groups)
    at_end_BKQHP = added_BKQHP * (powers_BKQH[:, :, -1:] - powers_BKQH).float().exp()[..., None]
    made_BKGNX = B_BKGQN.mT @ at_end_BKQHP.unflatten(3, each).flatten(4).transpose(2, 3)
    left_BKG1H1 = powers_BKQH[:, :, -1].float().exp().unflatten(2, each)[:, :, :, None, :, None]
    made = made_BKGNX.float().unflatten(4, (heads // groups, -1)).unbind(1)
    before = [torch.zeros_like(made[0])]
    for chunk in range(chunks - 1):
        before.append(before[-1] * left_BKG1H1[:, chunk] + made[chunk])
    y_BKGQX = C_BKGQN @ torch.stack(before, dim=1).flatten(4)
    y_BKQHP: Tensor = y_BKGQX.unflatten(4, (heads // groups, -1)).permute(0, 1, 3, 2, 4, 5).flatten(3, 4)
    return y_BKQHP * powers_BKQH.float().exp()[..., None]

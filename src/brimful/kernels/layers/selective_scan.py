"""The selective scan of Mamba's layers, forward and backward, without a graph of its steps.

    state_l = exp(delta_l A) state_(l-1) + delta_l u_l B_l        y_l = state_l C_l

torch, given a loop over positions, keeps a node and several tensors for each of them, and its gradient of a slice is as
large as the whole tensor. Here a backward pass goes through the positions once more, from the last to the first. On a
GPU one kernel each computes all positions at once (`selective_scan_kernels`); elsewhere a loop goes from position to
position. Arithmetic is fp32. Source: Gu and Dao 2023, arXiv 2312.00752.

Letters: B rows, D channels, L positions, N numbers of a channel's state.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

#: Positions that the kernels take: each program holds all of them.
LONGEST = 4096


def selective_scan(
    u_BDL: Tensor,
    dt_BDL: Tensor,
    A_DN: Tensor,
    B_BNL: Tensor,
    C_BNL: Tensor,
    *,
    D_D: Tensor | None = None,
    z_BDL: Tensor | None = None,
    bias_D: Tensor | None = None,
    softplus: bool = False,
) -> Tensor:
    """(B, D, L): what the states give out, `D_D * u` added, times `silu(z)`.

    dt: steps; with `softplus` that of these and their bias. In the dtype that torch gives these operations. On a GPU
    at most `LONGEST` positions.
    """
    delta_BDL = dt_BDL if bias_D is None else dt_BDL + bias_D.to(dt_BDL.dtype)[:, None]
    delta_BDL = F.softplus(delta_BDL) if softplus else delta_BDL
    y_BDL: Tensor = _Scan.apply(u_BDL, delta_BDL, A_DN, B_BNL, C_BNL)  # type: ignore[no-untyped-call]
    y_BDL = y_BDL if D_D is None else y_BDL + u_BDL * D_D[:, None]
    return y_BDL if z_BDL is None else y_BDL * F.silu(z_BDL)


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor) -> Tensor:
        with _unrounded(u):
            if has_kernels(u):
                from brimful.kernels.layers.selective_scan_kernels import scan_forward

                ctx.save_for_backward(u, delta, A, B, C)
                return scan_forward(u, delta, A, B, C)
            states_LBDN = _states(u, delta, A, B)
            ctx.save_for_backward(u, delta, A, B, C, states_LBDN)
            y_LBD = (states_LBDN @ _by_position(C)[..., None]).squeeze(-1)
        return y_LBD.permute(1, 2, 0).to(u.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, ...]:
        given = ctx.saved_tensors
        with _unrounded(dy):
            if has_kernels(dy):
                from brimful.kernels.layers.selective_scan_kernels import scan_backward

                found = scan_backward(dy, *given)
            else:
                found = _backward(dy, *given)
        return tuple(each.to(like.dtype) for each, like in zip(found, given, strict=False))


def has_kernels(x: Tensor) -> bool:
    """True where the kernels compute such tensors."""
    return x.is_cuda and find_spec("triton") is not None


def _unrounded(x: Tensor) -> AbstractContextManager[Any]:
    """Within, products are those of their operands; tensors without numbers have no autocast to leave."""
    return nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False)


def _by_position(x: Tensor) -> Tensor:
    """(L, B, _) of (B, _, L), in fp32 or more: what one position reads lies together."""
    return x.permute(2, 0, 1).to(torch.promote_types(x.dtype, torch.float32)).contiguous()


def _states(u: Tensor, delta: Tensor, A: Tensor, B: Tensor) -> Tensor:
    """States after each position, (L, B, D, N)."""
    delta_LBD, B_LBN = _by_position(delta), _by_position(B)
    added_LBD = delta_LBD * _by_position(u)
    states = added_LBD.new_empty(*added_LBD.shape, A.shape[1])
    if u.is_meta:  # a trace counts one operator, not a loop's
        return states
    for place, state in enumerate(states.unbind()):
        torch.mul(added_LBD[place, ..., None], B_LBN[place, :, None], out=state)
        if place:
            state.addcmul_(states[place - 1], torch.exp(delta_LBD[place, ..., None] * A))
    return states


def _backward(
    dy: Tensor, u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, states_LBDN: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of u, delta, A, B and C."""
    dy_LBD, u_LBD, delta_LBD, B_LBN, C_LBN = (_by_position(x) for x in (dy, u, delta, B, C))
    dC_LBN = (dy_LBD[:, :, None] @ states_LBDN).squeeze(2)
    added_LBD, dB_LBN = delta_LBD * u_LBD, torch.empty_like(B_LBN)
    dadded_LBD, ddelta_LBD, dA_DN = torch.empty_like(u_LBD), torch.zeros_like(u_LBD), torch.zeros_like(A)
    if not dy.is_meta:
        dstate_BDN = torch.zeros_like(states_LBDN[0])
        for place in reversed(range(len(states_LBDN))):
            dstate_BDN.addcmul_(dy_LBD[place, ..., None], C_LBN[place, :, None])
            dadded_LBD[place] = (dstate_BDN @ B_LBN[place, ..., None]).squeeze(-1)
            dB_LBN[place] = (added_LBD[place, :, None] @ dstate_BDN).squeeze(1)
            if place:  # what the state before it was multiplied with, and the gradient that it gets
                dstate_BDN.mul_(torch.exp(delta_LBD[place, ..., None] * A))
                dpower_BDN = dstate_BDN * states_LBDN[place - 1]
                ddelta_LBD[place] = (dpower_BDN * A).sum(-1)
                dA_DN += (dpower_BDN * delta_LBD[place, ..., None]).sum(0)
    ddelta_LBD += dadded_LBD * u_LBD
    found = (dadded_LBD * delta_LBD, ddelta_LBD, dB_LBN, dC_LBN)
    du, ddelta, dB, dC = (x.permute(1, 2, 0) for x in found)
    return du, ddelta, dA_DN, dB, dC

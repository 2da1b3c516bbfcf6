"""Launches of the kernels that update rounded weights and moments, on a GPU."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from brimful.kernels.tiles import num_tiles
from brimful.step.updates.buckets import norms_of
from brimful.step.updates.moments import BLOCK, Moments, between, middles, shares_of

try:
    import triton

    from brimful.kernels.optimizers import rounded_adamw as kernels
except ImportError:  # Triton comes with torch for GPUs, and is missing beside torch for CPUs
    triton = kernels = None  # type: ignore[assignment]


def can_launch(device: torch.device, betas: tuple[float, float]) -> bool:
    """Return whether there are kernels for a device, and for these decays: their logarithms are taken."""
    return kernels is not None and device.type == "cuda" and min(betas) > 0


class RoundedKernels:
    """AdamW of single parameters, by numbers that are on the device: () each.

    rate: learning rate. skipped: not 0 where nothing is to be updated. applied: steps so far, which noise is drawn by.
    shares: (256,) each, that 8 bits of first and of second moments stand for, in order, and the nearest one is taken,
    be it 0; None as `moments` has them.
    """

    def __init__(
        self, device: torch.device, betas: tuple[float, float], epsilon: float, rate: Tensor, skipped: Tensor,
        applied: Tensor, *, shares: Sequence[Tensor] | None = None,
    ) -> None:  # fmt: skip
        self._betas, self._epsilon = betas, epsilon
        self._rate, self._skipped, self._applied = rate, skipped, applied
        # Made here: memory of a capture is written to at every replay.
        self._keeps = shares is None
        given = [shares_of(signed, device) for signed in (True, False)] if shares is None else shares
        cuts = [middles(signed, device) for signed in (True, False)] if self._keeps else list(map(between, given))
        self._shares, self._middles = torch.cat(list(given)).to(device), torch.cat(cuts).to(device)

    def update(
        self, number: int, weight: Tensor, gradient: Tensor | None, moments: Moments, step: Tensor, scale: Tensor,
        decay: float,
    ) -> None:  # fmt: skip
        """Update a parameter from its gradient divided by `scale`; None for one of zeros. step: this one counted."""
        numel = weight.numel()
        given = None if gradient is None else gradient.contiguous()
        eight_bits = moments.scales is not None
        scales = moments.scales or (self._shares, self._shares)  # not looked at
        kernels.rounded_adamw[(num_tiles(numel, kernels.SIZE),)](
            weight, weight if given is None else given, moments.first, moments.second,
            *scales, self._shares, self._middles, step, self._rate, self._skipped,
            scale, self._applied, numel, number, decay, *(1 - beta for beta in self._betas),
            self._epsilon,
            LOG_BETA1=math.log(self._betas[0]), LOG_BETA2=math.log(self._betas[1]),
            HAS_GRADIENT=given is not None, EIGHT_BITS=eight_bits, KEEPS=self._keeps, SIZE=kernels.SIZE, BLOCK=BLOCK,
        )  # fmt: skip

    def take(self, gradients: Sequence[Tensor], scale: Tensor, squares: Tensor, counts: Tensor | None) -> None:
        """Add the square of the norm of gradients, divided by `scale`, to `squares`; skip what is updated from now on
        if it is not finite, and count the step of what is not skipped.

        counts: (P) of the steps of these parameters; None to count none.
        """
        large = [gradient for gradient in gradients if gradient.numel() >= kernels.LARGE and gradient.is_contiguous()]
        taken = set(map(id, large))
        small = norms_of([gradient for gradient in gradients if id(gradient) not in taken])
        starts = [0]
        for gradient in large:
            starts.append(starts[-1] + num_tiles(gradient.numel(), kernels.LARGE))
        parts = torch.empty(starts[-1], dtype=torch.float32, device=scale.device)
        for gradient, start, end in zip(large, starts, starts[1:], strict=False):
            kernels.square_sums[(end - start,)](gradient, parts[start:], gradient.numel(), SIZE=kernels.LARGE)
        norms = torch.stack(small) if small else parts
        kernels.take_norms[(1,)](
            parts, norms, scale, squares, self._skipped, squares if counts is None else counts, len(parts), len(small),
            0 if counts is None else len(counts), SIZE=kernels.NORMS,
        )  # fmt: skip

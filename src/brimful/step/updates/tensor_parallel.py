"""Weights that several processes have together, each a part of every layer (tensor parallelism).

All processes of a group compute the same rows, and have the same activations between layers. Gradients are of

    weights that are cut     this process's part; summed over the processes with the same part, on other rows
    weights that are whole   the same in all of a group: those of its first process count
    norms of heads           whole weights, of whose gradient each process of a group has an addend: all count

so that whole weights get the same bits everywhere. Source: Shoeybi et al. 2019, arXiv 1909.08053.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from brimful.hardware.ranks import Ranks
from brimful.models.packed.cut_check import CutCheck
from brimful.models.tensor_plan import TensorPlan, Undo, cut_as, local, part_like
from brimful.step.updates.parts import PartsUpdate, sum_together
from brimful.step.updates.update import used_by_all


class TensorParallelUpdate(PartsUpdate):
    """AdamW, or SGD without momentum, of this process's parts. plan: by which they are cut. check: made as all meet."""

    def __init__(
        self, model: nn.Module, schedule: Tensor, *, plan: TensorPlan, check: CutCheck | None = None, **given: Any
    ) -> None:
        super().__init__(model, schedule, **given)
        self._plan, self._check = plan, check
        self._before: Undo | None = None
        self._sums: dict[int, Tensor] = {}
        self._is_cut: list[bool] = []
        self._is_partial: list[bool] = []

    def _cut(self, ranks: Ranks, *, half: bool) -> None:
        assert ranks.mesh is not None
        self._before = Undo(self.model)
        self._plan.carry_out(self.model, ranks.mesh["tensor"])
        for parameter in self.model.parameters():
            if not hasattr(parameter, "placements"):
                parameter.data = parameter.data.to(self.device)
        for module in self.model.modules():
            for name, buffer in module._buffers.items():
                module._buffers[name] = None if buffer is None else buffer.to(self.device)
        self._is_cut = [self._plan.is_cut(name) for name in self.named]
        self._is_partial = [self._plan.is_partial(name) for name in self.named]

    def meet(self) -> str:
        """Compare what cut layers compute with what whole ones do, once."""
        if self._check is not None:
            self._check(self._shared_ranks)
            self._check = None
        return ""

    def reduce(self) -> None:
        """As `Update` has it: each number once."""
        ranks = self._shared_ranks
        used = used_by_all(ranks, [parameter.grad is not None for parameter in self.parameters], self._used_so_far)
        self._sums = {index: self._gradient(index) for index, is_used in enumerate(used) if is_used}
        self._used |= set(self._sums)
        whole = [self.loss]
        for index, gradient in self._sums.items():
            if not self._is_cut[index]:
                whole.append(gradient)
        if ranks.tensor_rank:
            self.loss.zero_()
            for index, gradient in self._sums.items():
                if not (self._is_cut[index] or self._is_partial[index]):
                    gradient.zero_()
        sum_together(ranks, whole)
        ranks.sum_over_data([gradient for index, gradient in self._sums.items() if self._is_cut[index]])

    def _gradient(self, index: int) -> Tensor:
        """This process's part of a gradient, zeros where its rows gave none."""
        parameter = self.parameters[index]
        if parameter.grad is None:
            return torch.zeros_like(local(parameter))
        return cut_as(parameter.grad, parameter)

    def _gradients(self) -> dict[int, Tensor]:
        return self._sums

    def _counts(self, index: int) -> bool:
        ranks = self._shared_ranks
        return ranks.rank == 0 or (self._is_cut[index] and ranks.data_rank == 0)

    def apply(self, *, gathered: bool) -> Tensor:
        """As `Update` has it."""
        readings = super().apply(gathered=gathered)
        self._sums = {}
        return readings

    def abandon(self) -> None:
        """As `Update` has it."""
        super().abandon()
        self._sums = {}

    def _part(self, name: str, whole: Tensor) -> Tensor:
        return part_like(whole, self.named[name])

    def _undo(self) -> None:
        assert self._before is not None
        self._before.modules()

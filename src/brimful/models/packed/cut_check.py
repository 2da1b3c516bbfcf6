"""Compare what cut layers compute with what whole ones do: logits, and gradients of all parts.

On a copy with one layer of each kind and the model's own weights, in fp32 with the reference attention and without
dropout, laid out as the run's rows are. A plan that cuts what must be whole shows here, before the first step.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from brimful.core.errors import OptionError, first_line, printable
from brimful.core.tolerances import TOLERANCES
from brimful.hardware.memory import is_out_of_memory
from brimful.hardware.process_settings import matmul_precision
from brimful.hardware.ranks import Ranks
from brimful.kernels.layout import map_tensors
from brimful.models.packed.check_inputs import make_sequences, one_layer_of_each_kind, packed_row, padded_rows, wake
from brimful.models.packed.long_window import shorten_window
from brimful.models.packed.packed_forward import LayoutModel, PackedForm, PackedModel, PaddedModel
from brimful.models.packed.training_check import without_dropout
from brimful.models.tensor_plan import TensorPlan, cut_as, part_like


class CutCheck:
    """The comparison for one model, to be made when all processes meet. form: None for padded rows.

    The copy is made at once, of whole weights.
    """

    def __init__(self, model: Any, form: PackedForm | None, *, max_length: int, device: torch.device) -> None:
        self._small = one_layer_of_each_kind(model).to("cpu", torch.float32).eval().requires_grad_(True)
        wake(self._small)
        shorten_window(self._small, max_length)
        self._form, self._max_length, self._device = form, max_length, device

    def __call__(self, ranks: Ranks) -> None:
        """Compare, in all processes together. Raises: OptionError in all, where cut layers compute something else."""
        why_not = self._why_not(ranks)
        if any(ranks.any([why_not is not None])):
            kind = self._small.config.model_type
            said = f"cut by transformers' plan, {kind} {why_not or 'computes something else in another process'}"
            said = f"--tensor-parallel {ranks.tensor_count} does not work here: {said}"
            raise OptionError(said, hint="use --sharding parameters")

    def _why_not(self, ranks: Ranks) -> str | None:
        """Say what cut layers do that whole ones do not; None where they agree."""
        try:
            error = self.error(ranks)
        except Exception as failure:  # a model's own code on parts of what it expects
            if is_out_of_memory(failure):
                raise
            return f"does not run: {printable(first_line(failure.__cause__ or failure), 120)}"
        if error <= TOLERANCES["fp32"].gradient:
            return None
        return f"computes something else, by an error of {error:.1e}"

    def error(self, ranks: Ranks) -> float:
        """Return the largest relative difference of logits, and of all gradients together."""
        assert ranks.mesh is not None
        small, mesh = self._small.to(self._device), ranks.mesh["tensor"]
        plan = TensorPlan.of(small)
        assert plan is not None
        if self._form is None:
            execution: LayoutModel = PaddedModel(small, "eager")
        else:
            execution = PackedModel(small, self._form, plain=True)
        with matmul_precision("highest"), without_dropout(small):
            logits, expected = self._run(execution)
            plan.carry_out(small, mesh)
            cut_logits, found = self._run(execution)
        of_logits = _norm([cut_logits - logits]) / max(_norm([logits]), 1e-30)
        off, whole = list[Tensor](), list[Tensor]()
        for name, parameter in small.named_parameters():
            if name not in expected:
                continue
            gradient = cut_as(found[name], parameter)
            if plan.is_partial(name):
                dist.all_reduce(gradient, group=mesh.get_group())
            whole.append(part_like(expected[name], parameter))
            off.append(gradient - whole[-1])
        return max(of_logits, _norm(off) / max(_norm(whole), 1e-30))

    def _run(self, execution: LayoutModel) -> tuple[Tensor, dict[str, Tensor]]:
        """Logits of the sequences, and gradients of a sum of them by name."""
        config = self._small.config
        sequences = make_sequences(config, self._max_length)
        if self._form is None:
            inputs = padded_rows(sequences, config)
        else:
            inputs = packed_row(sequences, config, self._max_length)
        logits = execution(map_tensors(inputs, lambda tensor: tensor.to(self._device))).logits[: len(sequences)]
        weights = torch.linspace(-1, 2, logits.numel(), device=logits.device).view_as(logits)
        (logits * weights).sum().backward()  # type: ignore[no-untyped-call]
        gradients = {name: p.grad for name, p in self._small.named_parameters() if p.grad is not None}
        self._small.zero_grad(set_to_none=True)
        return logits.detach(), gradients


def _norm(tensors: list[Tensor]) -> float:
    squares = [torch.linalg.vector_norm(tensor, dtype=torch.float64).square() for tensor in tensors]
    return float(torch.stack(squares).sum().sqrt()) if squares else 0.0

"""Compare what fused layers compute with what the model's own code does: logits and gradients, in the run's precision.

On a copy with one layer of each kind, in train mode with dropout that keeps all, for runs of which no first batch can
be compared: weights in parts are whole layer by layer only.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.fx import GraphModule

from brimful.hardware.memory import release_unused
from brimful.hardware.process_settings import matmul_precision
from brimful.models.model_stats import layers_of
from brimful.models.packed.check_inputs import Kernel, make_sequences, one_layer_of_each_kind, packed_row, wake
from brimful.models.packed.long_window import shorten_window
from brimful.models.packed.packed_forward import PackedForm, PackedModel
from brimful.models.packed.training_check import without_dropout
from brimful.models.packed.tried_row import TriedRow, gradients_of, in_tolerances


def fused_error(
    model: Any, form: PackedForm, *, max_length: int, device: torch.device, precision: str, kernel: Kernel
) -> float | None:
    """Return the error of fused layers in units of its tolerance: at least three times what plain ones lose.

    None where layers do not run so: their code cannot be recorded, our kernels do not cover it, they fail, or memory
    does not suffice.
    """
    small = one_layer_of_each_kind(model).to("cpu", torch.float32).eval().requires_grad_(True)
    wake(small)
    shorten_window(small, max_length)
    fused = copy.deepcopy(small).train()
    sequences = make_sequences(small.config, max_length)
    row = packed_row(sequences, small.config, max_length, kernel)
    form = replace(form, short=False)  # fused layers run whole
    with matmul_precision("highest"), without_dropout(small, only_of_numbers=True):
        plain = PackedModel(small, form, plain=True)(row).logits[: len(sequences)]
        tried = TriedRow(
            form=form, row=row, num_tokens=sum(map(len, sequences)), plain=plain.detach(),
            gradient=gradients_of(small, plain), precision=precision,
        )  # fmt: skip
        try:
            return _tried(small.to(device), fused.to(device), tried)
        except Exception:  # a model's own code, or a kernel, that does not do: layers run as they are
            return None
        finally:
            release_unused(device)


def _tried(small: Any, fused: Any, row: TriedRow) -> float | None:
    from brimful.models.fusion import fuse  # it needs Triton, which is missing beside torch for CPUs
    from brimful.models.fusion.recording import record_calls

    layers, covered = layers_of(fused), list[bool]()

    def cover(graph: GraphModule) -> Callable[..., Any] | None:
        found = fuse(graph)
        covered.append(found is not None)
        return found

    if layers is None:
        return None
    record_calls(layers, cover)
    found = replace(row, keeps_all=True).errors(fused, reference=False)
    if not covered or not all(covered):
        return None
    return in_tolerances(found, row.errors(small, reference=True), row.precision)

"""Targets of a regression in units that a new head can reach, and the trained head in the user's units again.

Outputs of a new head start near 0, and steps move them by little: targets that average 193 are out of reach. Such a
head is trained on (target - center) / spread, one spread for all outputs: the loss is that of the user's targets over
spread^2, with the same minimum. When the model is saved, its last layer takes over both numbers, so that it answers
in the user's units wherever it is loaded.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from brimful.core.errors import ModelError, printable
from brimful.core.options.train import TrainOptions
from brimful.core.records import LabelSpace, Run, TargetScale
from brimful.core.units import target_text
from brimful.models.hub.inspection import ModelFacts
from brimful.models.hub.label_alignment import Alignment
from brimful.models.hub.last_linear import last_linear, last_linear_of
from brimful.tasks.label_rows import Targets, dense

#: Means and spreads that a head trains on as they are.
_MOST_MEAN, _LEAST_SPREAD, _MOST_SPREAD = 1.0, 0.1, 3.0
#: Spread of a column, as a multiple of another's, whose squares are then a hundredth of the loss.
_UNEQUAL = 10.0


def choose_scale(
    options: TrainOptions, alignment: Alignment, facts: ModelFacts, targets: Targets, before: Run | None
) -> TargetScale | None:
    """The scale of training targets; None where they are trained on as they are. before: the run that goes on, which
    keeps its own."""
    if before is not None:
        return before.target_scale
    space = alignment.space
    if space.task != "regression" or alignment.head != "new" or options.target_scaling == "off" or options.peft:
        return None
    by_row = dense(targets).reshape(len(targets), -1).astype(np.float64)
    means_C, spread = by_row.mean(0), math.sqrt(float(by_row.var(0).mean()))
    if not spread or (np.abs(means_C).max() <= _MOST_MEAN and _LEAST_SPREAD <= spread <= _MOST_SPREAD):
        return None
    last = last_linear_of(facts, space)
    if last is None:
        return None
    if last.bias is None:  # nothing to hold a centre
        return TargetScale(centers=(0.0,) * space.num_outputs, spread=math.sqrt(float(np.square(by_row).mean())))
    return TargetScale(centers=tuple(map(float, means_C)), spread=spread)


def scale_text(scale: TargetScale) -> str:
    """One line about a scale."""
    centers = ", ".join(map(target_text, scale.centers[:4])) + (", ..." if len(scale.centers) > 4 else "")
    shifted = f"(target - {centers})" if any(scale.centers) else "target"
    unit = f"{shifted} / {target_text(scale.spread)}"
    return (
        f"targets: trained on as {unit}, as the loss is; metrics and the saved model are in your units"
        " (--target-scaling off trains on them as they are)"
    )


def spread_doubt(space: LabelSpace, targets: Targets) -> str | None:
    """One line about columns of numbers of which one outweighs another in the loss, which has one unit for all."""
    if space.task != "regression" or space.num_outputs == 1 or not len(targets):
        return None
    spreads_C = dense(targets).reshape(len(targets), -1).astype(np.float64).std(0)
    least, most = int(spreads_C.argmin()), int(spreads_C.argmax())
    if spreads_C[most] < _UNEQUAL * spreads_C[least]:
        return None
    small, large = (f"'{printable(space.names[at], 60)}' ({target_text(spreads_C[at])})" for at in (least, most))
    return (
        f"numbers of {small} hardly count beside those of {large}, by their standard deviations: the loss is one mean"
        " of all squares; give columns of like spread, or train one model for each"
    )


def fold(model: Any, scale: TargetScale) -> None:
    """Have the last layer answer in the user's units, in place."""
    last = last_linear(model)
    assert last is not None
    with torch.no_grad():
        last.weight.mul_(scale.spread)
        if last.bias is not None:
            last.bias.mul_(scale.spread).add_(torch.tensor(scale.centers).to(last.bias))


def check_fold(model: Any, scale: TargetScale) -> None:
    """Check on a short sequence that the last layer's numbers are the model's outputs. model: in evaluation mode.

    Raises: ModelError where they are not.
    """
    last = last_linear(model)
    assert last is not None
    kept = {name: parameter.detach().clone() for name, parameter in last.named_parameters()}
    end = getattr(model.config.get_text_config(), "eos_token_id", None)  # BART's kind reads its answer there
    ids = torch.tensor([[5, 6, 7, end if isinstance(end, int) else 8]]) % model.get_input_embeddings().weight.shape[0]
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    with torch.no_grad():
        before = model(**given).logits * scale.spread + torch.tensor(scale.centers)
        fold(model, scale)
        after = model(**given).logits
        for name, parameter in last.named_parameters():
            parameter.copy_(kept[name])
    if not torch.allclose(before, after, rtol=1e-4, atol=1e-4 * scale.spread):
        raise ModelError(
            "targets cannot be scaled: the outputs of this model are not those of its last layer",
            hint="add --target-scaling off, and rescale the targets yourself",
        )

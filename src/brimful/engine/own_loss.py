"""The loss that a model's own code computes, beside the one that is trained."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from brimful.core.records import LabelSpace
from brimful.hardware.process_settings import unchanged_random_streams
from brimful.models.hub.quiet import quiet_transformers
from brimful.models.packed.check_inputs import make_sequences
from brimful.tasks.task import make_task

_TOKENS = 8
_NAMES = {"single_label": "cross entropy", "multi_label": "binary cross entropy", "regression": "the squared error"}


def own_loss_doubt(model: Any, space: LabelSpace) -> str | None:
    """Return a line where the loss that a model computes of labels is not the plain one of its logits, on one short row
    without dropout; None where it is, or where it computes none."""
    ids_BL = torch.as_tensor(make_sequences(model.config, _TOKENS)[0]).long()[None]
    training = model.training
    try:
        with torch.no_grad(), quiet_transformers(), unchanged_random_streams():
            found = model.eval()(input_ids=ids_BL, attention_mask=torch.ones_like(ids_BL), labels=_labels(space))
        own, logits = found.loss, found.logits
    except Exception:  # what it cannot do is said by what needs it
        return None
    finally:
        model.train(training)
    if own is None or torch.allclose(own.float(), plain := _plain_loss(logits.float(), space), rtol=1e-3, atol=1e-5):
        return None
    return (
        f"the model's own code computes another loss ({float(own):.4g}) than {_NAMES[space.task]} of its logits"
        f" ({float(plain):.4g}), which is what is trained; brimful.packed in a loop of your own keeps the model's"
    )


def _labels(space: LabelSpace) -> Tensor:
    """(1,) or (1, C): the first label, or ones to predict."""
    if space.task == "single_label":
        return torch.zeros(1, dtype=torch.long)
    labels_1C = torch.zeros(1, space.num_outputs)
    labels_1C[:, 0] = 1.0
    return labels_1C if space.task == "multi_label" else torch.ones(1, space.num_outputs)


def _plain_loss(logits_1C: Tensor, space: LabelSpace) -> Tensor:
    targets = _labels(space)
    task = make_task(space, targets.numpy())
    return task.loss_rows_S(logits_1C, targets).sum() / task.denominator(targets.numpy())

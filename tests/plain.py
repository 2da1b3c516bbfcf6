"""The plain way that everything is compared with: padded Hugging Face batches and torch's own losses."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from brimful.tasks.task import MultiLabel, SingleLabel, Task


def padded(ids: list[np.ndarray], types: list[np.ndarray] | None, padding_id: int) -> dict[str, Tensor]:
    """One batch as Hugging Face's collator makes it: padded at the end to its longest sequence."""
    longest = max(len(i) for i in ids)
    ids_BL = torch.full((len(ids), longest), padding_id)
    mask_BL = torch.zeros_like(ids_BL)
    types_BL = torch.zeros_like(ids_BL)
    for row, sequence in enumerate(ids):
        ids_BL[row, : len(sequence)] = torch.as_tensor(sequence.astype(np.int64))
        mask_BL[row, : len(sequence)] = 1
        if types is not None:
            types_BL[row, : len(sequence)] = torch.as_tensor(types[row].astype(np.int64))
    return {"input_ids": ids_BL, "attention_mask": mask_BL} | ({} if types is None else {"token_type_ids": types_BL})


def plain_loss(task: Task, logits_BC: Tensor, targets_B: np.ndarray, weights_B: np.ndarray | None = None) -> Tensor:
    """The mean loss of one batch by torch's own modules. weights_B: of its rows, by which each counts."""
    if weights_B is not None:
        return _weighted_loss(task, logits_BC, targets_B, torch.from_numpy(weights_B).to(logits_BC.dtype))
    targets = torch.from_numpy(np.asarray(targets_B))
    weights = getattr(task, "class_weights_C", None)
    weights_C = None if weights is None else torch.from_numpy(weights).to(logits_BC.dtype)
    if isinstance(task, SingleLabel):
        return F.cross_entropy(logits_BC, targets, weights_C, label_smoothing=task.smoothing)
    targets = targets.to(logits_BC.dtype)
    if isinstance(task, MultiLabel):
        smooth = targets * (1 - task.smoothing) + task.smoothing / 2
        return F.binary_cross_entropy_with_logits(logits_BC, smooth, pos_weight=weights_C)
    return F.mse_loss(logits_BC, targets)


def _weighted_loss(task: Task, logits_BC: Tensor, targets_B: np.ndarray, weights_B: Tensor) -> Tensor:
    """The mean of the losses of rows, each a batch of its own, by their weights.

    Of classes with weights, a row's own mean has lost the weight of its class: it counts beside the row's.
    """
    class_weights = getattr(task, "class_weights_C", None)
    if isinstance(task, SingleLabel) and class_weights is not None:
        weights_C, targets = torch.from_numpy(class_weights).to(logits_BC.dtype), torch.from_numpy(targets_B)
        smoothing = task.smoothing
        sums_B = F.cross_entropy(logits_BC, targets, weights_C, reduction="none", label_smoothing=smoothing)
        return (sums_B * weights_B).sum() / (weights_C[targets] * weights_B).sum()
    each = [plain_loss(task, logits_BC[i : i + 1], targets_B[i : i + 1]) for i in range(len(targets_B))]
    return (torch.stack(each) * weights_B).sum() / weights_B.sum()


def gradient(model: Any) -> Tensor:
    """Gradient of all parameters together, (P,), zero where a parameter has none; clears it."""
    parts = [torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in model.parameters()]
    model.zero_grad(set_to_none=True)
    return torch.cat(parts)

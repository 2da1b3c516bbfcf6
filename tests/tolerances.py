"""The one table of tolerances. All are relative, norm of the difference over the norm, unless their name differs."""

from __future__ import annotations

from typing import Final

import numpy as np
import torch
from torch import Tensor

#: A kernel against its plain reference, by dtype: outputs and gradients.
ATTENTION: Final = {torch.float64: 1e-10, torch.float32: 1e-5}
#: A packed, split step against the plain padded batch in fp64: gradient of all parameters together.
STEP_FP64: Final = 1e-10
#: The same for families that compute a part in fp32 whatever the dtype: rotary angles, softmax, norms.
STEP_PARTLY_FP32: Final = 2e-7
#: Gemma 2, whose soft cap only Hugging Face's eager attention has, with its softmax in fp32; ours keeps fp64.
STEP_GEMMA: Final = 1e-6
#: Families with weights as trained whose eager attention takes scores or softmax in fp32, where ours keeps fp64.
STEP_FP32_SOFTMAX: Final = 2e-6
#: A whole model, packed against plain, in fp32: logits and gradient.
MODEL_FP32: Final = 1e-5
#: A loss against torch's or Hugging Face's own, in fp64 and in fp32.
LOSS_FP64: Final = 1e-12
LOSS_FP32: Final = 1e-6
#: Ten optimizer steps against a plain loop in fp32: each loss, and all weights together.
RUN_LOSS_FP32: Final = 1e-6
RUN_WEIGHTS_FP32: Final = 1e-5
#: Three steps with two levers against the plain step, by what the less exact of them declares: each loss, and all
#: weights together.
PAIR_OF_LEVERS: Final = {"exact": (1e-5, 2e-5), "rounding": (2e-2, 2e-3), "training": (5e-2, 2e-2)}
#: Weights of 20 steps on a GPU, streamed against kept, each but biases of keys, whose gradient is rounding alone.
STREAMED: Final = 1e-5
#: The same, updated within the backward pass; and biases then in bf16, which start at 0 and have 20 steps of 1e-4.
STREAMED_IN_BACKWARD: Final = 1e-4
STREAMED_BIASES: Final = 1e-3
#: Numbers rounded to e4m3, and a layer with all its products of such operands against the exact one.
FLOAT8_ROUNDING: Final = 3e-2
FLOAT8_LAYER: Final = 8e-2
#: Our numbers against scikit-learn's.
METRIC: Final = 1e-12
#: A learning rate that is kept in fp32 against transformers' fp64.
LEARNING_RATE: Final = 1e-6


def difference(found: Tensor | np.ndarray, expected: Tensor | np.ndarray) -> float:
    """Norm of the difference over the norm of what was expected; infinite if anything is not finite."""
    found, expected = (torch.as_tensor(x).detach().double().flatten() for x in (found, expected))
    assert found.shape == expected.shape, f"{found.shape} is not {expected.shape}"
    off = float((found - expected).norm())
    if not np.isfinite(off):
        return float("inf")
    return off / max(float(expected.norm()), 1e-30) if off else 0.0

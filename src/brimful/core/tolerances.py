"""The one table of tolerances: how far a precision may take a model from its plain Hugging Face forward in fp32."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """Largest differences that count as equal.

    logits, gradient: norm of the difference over the norm, all rows or all parameters together.
    attention: the same of a kernel's output or of one of its gradients, scores spread as those of trained models.
    step: of a step's losses of rows and gradient, on a first batch, unless the plain model loses more.
    answers: difference of a probability; for regression, of an output over its root mean square,
    or over four times its spread.
    """

    logits: float
    gradient: float
    answers: float
    attention: float
    step: float


#: By precision of the matrix products. Answers: fp32 is what the order of sums leaves. bf16 and fp16 are three to four
#: times what Hugging Face's own model loses in them (MiniLM-L6 fine-tuned on BBC News, 256 texts of 8 words: 0.015 and
#: 0.0023), since deeper models lose more. tf32 has fp16's mantissa, in products only: half of it. fp8: twice bf16's.
TOLERANCES: Final = {
    "fp64": Tolerance(logits=1e-10, gradient=1e-10, answers=1e-10, attention=1e-10, step=1e-6),
    "fp32": Tolerance(logits=1e-5, gradient=2e-5, answers=1e-5, attention=2e-5, step=1e-4),
    "tf32": Tolerance(logits=5e-3, gradient=1e-2, answers=5e-3, attention=5e-3, step=1e-2),
    "fp16": Tolerance(logits=1e-2, gradient=3e-2, answers=1e-2, attention=3e-3, step=5e-3),
    "bf16": Tolerance(logits=5e-2, gradient=1e-1, answers=5e-2, attention=1.5e-2, step=1e-2),
    "fp8": Tolerance(logits=1e-1, gradient=2e-1, answers=1e-1, attention=1.5e-2, step=2e-1),
}

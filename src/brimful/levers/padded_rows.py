"""Shapes of padded rows: chosen by the lengths to come, and by what one more micro-batch costs beside padding."""

from __future__ import annotations

from typing import Any

from brimful.core.cores import num_cores
from brimful.data.batches.padding import PaddedShapes, choose_lengths
from brimful.levers.lever import Assembly
from brimful.models.model_stats import matmul_parameters

#: Seconds that a forward and backward pass spends on each module without parts, whatever the number of tokens: about
#: eight kernels of 3 us in a graph, of 10 us as the host launches them; on a CPU operators of 20 us: four passes over
#: 32 short texts took a small encoder-decoder 1.22 times as long as one, and two 0.97 times.
_MODULE_S = {"captured": 24e-6, "cuda": 80e-6, "cpu": 160e-6}
#: Operations per second that products reach: on a GPU, and of each core of a CPU.
_REACHED, _CORE_REACHED = 250e12, 50e9
#: Tokens that can be computed in the time in which a CPU adds the gradients of two micro-batches: both are in
#: proportion to the parameters, at 50e9 operations and 2.5e9 bytes a second.
_GRADIENT_TOKENS = 40
#: Batches looked at to choose row lengths.
_LOOKED_AT = 200


def padded_shapes(assembly: Assembly, num_tokens: int, num_rows: int) -> tuple[PaddedShapes, str]:
    """Return the shapes of an assembly's padded rows, and the reason for them.

    num_tokens: most of a micro-batch, padding counted. num_rows: sequences of a batch at most.
    """
    call = call_tokens(assembly.model, _launch(assembly))
    shapes = PaddedShapes(lengths=None, num_tokens=num_tokens, num_rows=num_rows, call_tokens=call)
    if assembly.device.type != "cuda" or not assembly.training:
        return shapes, "rows as long as the longest in them; batches are cut where that saves time"
    batches = assembly.batches(num_tokens)[:_LOOKED_AT]
    lengths, fill = choose_lengths(batches, assembly.max_length, shapes)
    reason = f"rows of {', '.join(map(str, lengths))} tokens, from the data's lengths; {100 * fill:.1f} % filled"
    return PaddedShapes(**vars(shapes) | {"lengths": lengths}), reason


def call_tokens(model: Any, launch: str) -> int:
    """Return how many tokens could be computed in the time that one more pass costs. launch: a key of `_MODULE_S`."""
    num_leaves = sum(1 for module in model.modules() if next(module.children(), None) is None)
    reached = _CORE_REACHED * (num_cores() or 1) if launch == "cpu" else _REACHED
    token_s = 6 * max(1, matmul_parameters(model)) / reached
    return round(num_leaves * _MODULE_S[launch] / token_s) + (_GRADIENT_TOKENS if launch == "cpu" else 0)


def _launch(assembly: Assembly) -> str:
    if assembly.device.type == "cuda" and assembly.options.execution != "eager":
        return "captured"
    return assembly.device.type

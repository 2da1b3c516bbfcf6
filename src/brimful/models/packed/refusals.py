"""Inputs that a model's own code refuses, as one error of ours with a hint."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from brimful.core.errors import ModelError, printable
from brimful.kernels.layout import PaddedInputs


@contextmanager
def refusals(model_type: str, inputs: PaddedInputs) -> Iterator[None]:
    """Within, errors of a model's own code on inputs that it cannot take are a ModelError.

    Where a device, its memory, a graph or a compiler fails, something else is done about it.
    """
    try:
        yield
    except (ValueError, LookupError, TypeError, AttributeError, AssertionError, RuntimeError) as error:
        device_or_graph = any(word in str(error) for word in ("CUDA", "memory", "captur"))
        if type(error).__module__ != "builtins" or (isinstance(error, RuntimeError) and device_or_graph):
            raise
        rows, length = inputs.ids_RL.shape
        raise ModelError(
            f"{model_type} of transformers cannot run {rows} rows of {length} tokens: "
            f"{printable(str(error).strip().partition(chr(10))[0], 200)}",
            hint="leave out texts of a few tokens, change --max-length, or use another model",
        ) from error

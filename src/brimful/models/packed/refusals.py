"""Inputs that a model's own code refuses, as one error of ours with a hint."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from brimful.core.errors import HalfPrecisionError, RowsRefusedError, printable
from brimful.kernels.layout import PaddedInputs

#: How torch says that an operation has no half precision, none for such sizes, or none beside fp32, as a model's own
#: backward pass meets it without autocast.
_NO_HALF = (
    *("Unsupported dtype BFloat16", "Unsupported dtype Half", "for 'BFloat16'", "for 'Half'"),
    "computing in half precision",
    "but found BFloat16",
    "but found Half",
    *("float != c10::BFloat16", "c10::BFloat16 != float", "float != c10::Half", "c10::Half != float"),
)


@contextmanager
def refusals(model_type: str, inputs: PaddedInputs) -> Iterator[None]:
    """Within, errors of a model's own code on inputs that it cannot take are a RowsRefusedError.

    Where a device, its memory, a graph or a compiler fails, something else is done about it. Raises: RowsRefusedError;
    HalfPrecisionError also where the compiler says so.
    """
    try:
        yield
    except RuntimeError as error:
        raise_without_half(model_type, error)
        _refuse(model_type, inputs, error)
    except (ValueError, LookupError, TypeError, AttributeError, AssertionError) as error:
        _refuse(model_type, inputs, error)


def raise_without_half(model_type: str, error: Exception) -> None:
    """Raise a HalfPrecisionError if an error says that some operation has no half precision."""
    for line in str(error).splitlines():
        if any(word in line for word in _NO_HALF):
            raise HalfPrecisionError(
                f"{model_type} of transformers cannot run in half precision: {printable(line.strip(), 200)}",
                hint="add --precision tf32, or fp32",
            ) from error


def _refuse(model_type: str, inputs: PaddedInputs, error: Exception) -> NoReturn:
    device_or_graph = any(word in str(error) for word in ("CUDA", "memory", "captur"))
    if type(error).__module__ != "builtins" or (isinstance(error, RuntimeError) and device_or_graph):
        raise error
    rows, length = inputs.ids_RL.shape
    raise RowsRefusedError(
        f"{model_type} of transformers cannot run {rows} rows of {length} tokens: "
        f"{printable(str(error).strip().partition(chr(10))[0], 200)}",
        hint="leave out texts of a few tokens, change --max-length, or use another model",
    ) from error

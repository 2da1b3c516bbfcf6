"""In what dtype the sums between post-norm layers are kept: fp32 as autocast has it, or half precision."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_half = False


@contextmanager
def half_residuals(half: bool = True) -> Iterator[None]:
    """Within, sums are kept in the dtype of products, as Hugging Face's models in half precision keep them; or not.

    Norms still compute in fp32, with gains in fp32. What it costs the gradient: docs/concepts/exactness.md.
    """
    global _half
    before, _half = _half, half
    try:
        yield
    finally:
        _half = before


def residuals_are_half() -> bool:
    """True if that is so here."""
    return _half

"""transformers' talk is silenced while any thread loads, and then as loud as it was."""

from __future__ import annotations

from transformers.utils import logging

from brimful.models.hub.quiet import quiet_transformers


def test_the_last_to_leave_restores_it() -> None:
    """Contexts of two threads overlap: neither one is within the other."""
    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    first, second = quiet_transformers(), quiet_transformers()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert logging.get_verbosity() == logging.CRITICAL
    assert not logging.is_progress_bar_enabled()
    second.__exit__(None, None, None)
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before

"""Errors of memory that ran out for good."""

from __future__ import annotations

import pytest
import torch

from brimful.core.errors import MemoryFullError
from brimful.step import recovery
from brimful.step.recovery import until_it_fits, whole_model_fits


class _Smallest:
    """A budget that nothing is smaller than."""

    most_tokens, captures, has_fitted = 112, False, False

    def abandon(self) -> bool:
        return True

    def halve(self, *, in_capture: bool) -> bool:
        return False


@pytest.mark.parametrize(
    ("allowed", "said"),
    [(None, "lower --max-length"), (3 << 30, "lower --max-length"),
     (0, "give --memory-limit more: it leaves torch 0 B"),
     (100 << 20, "give --memory-limit more: it leaves torch 100.0 MiB")],
)  # fmt: skip
def test_a_limit_that_leaves_nothing_is_named(monkeypatch: pytest.MonkeyPatch, allowed: int | None, said: str) -> None:
    """Smaller batches are of no help where libraries have taken what it leaves."""
    monkeypatch.setattr(recovery, "allowed_bytes", lambda device: allowed)

    def work() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(MemoryFullError, match="cannot be split any further") as raised:
        until_it_fits(work, _Smallest(), torch.device("cpu"), lambda found: None, where="step", batch=3)
    assert raised.value.hint is not None
    assert raised.value.hint.startswith(said)


@pytest.mark.parametrize(
    ("allowed", "known", "said"),
    [(None, "add --peft lora", "add --peft lora"), (None, None, "end what else is in this memory"),
     (0, "add --peft lora", "give --memory-limit more")],
)  # fmt: skip
def test_levers_are_named_where_a_model_does_not_fit(
    monkeypatch: pytest.MonkeyPatch, allowed: int | None, known: str | None, said: str
) -> None:
    monkeypatch.setattr(recovery, "allowed_bytes", lambda device: allowed)
    with (
        pytest.raises(MemoryFullError, match="what training keeps of it do not fit") as raised,
        whole_model_fits(torch.device("cpu"), lambda: known),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory")
    assert raised.value.hint is not None
    assert raised.value.hint.startswith(said)

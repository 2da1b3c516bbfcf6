"""Errors of memory that ran out for good."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from brimful.core.errors import MemoryFullError
from brimful.data.tokens.encoder import Tokens
from brimful.step import recovery
from brimful.step.forward import LayoutForward
from brimful.step.precision import Precision
from brimful.step.recovery import until_it_fits, whole_model_fits
from step.test_step import CPU, PACKED, execution_of
from tiny import FAMILIES


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


@pytest.mark.parametrize("is_shared", [False, True])
def test_a_window_that_others_take_part_in_is_not_computed_again(
    monkeypatch: pytest.MonkeyPatch, is_shared: bool
) -> None:
    """They would be at another pass."""
    precision, passes = Precision(value="fp32", device=CPU, reason="a test"), list[int]()
    forward = LayoutForward(execution_of(FAMILIES["bert"].model()), PACKED, precision, batch_tokens=64, most_rows=4)
    forward.is_shared, real = is_shared, forward._submit

    def submitted(tokens: Any) -> Any:
        passes.append(forward.most_tokens)
        if len(passes) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(tokens)

    monkeypatch.setattr(forward, "_submit", submitted)
    ids, cut = np.array([3, 5, 7], dtype=np.int32), np.zeros(1, dtype=bool)
    tokens = Tokens(ids=ids, offsets=np.array([0, 3]), types=None, truncated=cut)
    if is_shared:
        with pytest.raises(MemoryFullError, match="or other processes went on"):
            forward.submit(tokens)
    else:
        forward.submit(tokens).result()
    assert len(passes) == (1 if is_shared else 2)

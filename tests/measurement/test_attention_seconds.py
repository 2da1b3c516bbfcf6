"""Seconds of attention kernels: measured, kept, and not believed where they are something else. On the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from triton.errors import TritonError

from brimful.core.cache import read_cached, write_cached
from brimful.kernels.attention.dispatch import (
    LENGTH_CLASSES,
    length_class,
    reference_attention,
    triton_attention,
)
from brimful.kernels.attention.pattern import Heads, Pattern
from brimful.kernels.layout import Segments
from brimful.measurement import attention
from brimful.measurement.attention import attention_seconds

KERNELS = (triton_attention, reference_attention)
HEADS, PATTERN = Heads(queries=2, keys=1, size=16), Pattern(scale=0.25, dropout=0.1)


def seconds(kernels: Any = KERNELS, pattern: Pattern = PATTERN) -> dict[str, float]:
    return attention_seconds(kernels, torch.device("cpu"), torch.float16, pattern, HEADS, 0)


@pytest.fixture(autouse=True)
def _few_tokens_and_own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.setattr(attention, "_TIMED", 64 * 32)
    monkeypatch.setattr(attention, "_ROUNDS", 1)
    monkeypatch.setattr(attention, "_WITHIN_S", 1e-9)


def test_classes_of_lengths() -> None:
    assert [length_class(n) for n in (1, 64, 65, 512, 513, 4096, 4097)] == [0, 0, 1, 3, 4, 6, 7]
    assert list(LENGTH_CLASSES) == sorted(LENGTH_CLASSES)


def test_they_are_kept() -> None:
    state = torch.get_rng_state()
    first = seconds()
    assert list(first) == ["triton_attention", "reference_attention"]
    assert all(value > 0 for value in first.values())
    assert seconds() == first
    assert torch.equal(torch.get_rng_state(), state)


def test_what_they_are_kept_by() -> None:
    given = (["a", "b"], torch.device("cpu"), torch.float16, PATTERN, HEADS, 0)
    others: tuple[Any, ...] = (
        ["a"], None, torch.bfloat16, Pattern(scale=0.25, dropout=0.2), Heads(queries=2, keys=2, size=16), 1,
    )  # fmt: skip
    kept = {str(attention.asked(*given))}
    for place, other in enumerate(others):
        if other is not None:
            kept.add(str(attention.asked(*given[:place], other, *given[place + 1 :])))
    torch.use_deterministic_algorithms(True)
    try:
        kept.add(str(attention.asked(*given)))
    finally:
        torch.use_deterministic_algorithms(False)
    assert len(kept) == 7


@pytest.mark.parametrize(
    "failure", [torch.OutOfMemoryError("too much"), TritonError("too many registers"), RuntimeError("not on this GPU")]
)
def test_a_kernel_that_cannot_is_left_out_and_tried_again(failure: Exception) -> None:
    works: list[bool] = []

    def sometimes(q: Tensor, k: Tensor, v: Tensor, segments: Segments, pattern: Pattern) -> Tensor:
        if not works:
            raise failure
        return reference_attention(q, k, v, segments, pattern)

    assert list(seconds((sometimes, reference_attention))) == ["reference_attention"]
    works.append(True)
    assert list(seconds((sometimes, reference_attention))) == ["sometimes", "reference_attention"]


def test_a_failure_of_the_device_is_not_hidden() -> None:
    def broken(q: Tensor, k: Tensor, v: Tensor, segments: Segments, pattern: Pattern) -> Tensor:
        raise torch.AcceleratorError("an illegal memory access")

    with pytest.raises(torch.AcceleratorError, match="illegal"):
        seconds((broken, reference_attention))


@pytest.mark.sampled
@pytest.mark.parametrize(
    "kept", [{"triton_attention": 1.0}, {"triton_attention": 1.0, "reference_attention": "soon"}, {},
             {"triton_attention": float("nan"), "reference_attention": 1.0}]
)  # fmt: skip
def test_a_cache_that_holds_something_else_is_not_believed(kept: dict[str, Any]) -> None:
    asked = attention.asked([k.__name__ for k in KERNELS], torch.device("cpu"), torch.float16, PATTERN, HEADS, 0)
    path = attention.cache_path("attention", asked)
    assert path is not None
    write_cached(path, kept)
    found = seconds()
    assert read_cached(path) == found != kept

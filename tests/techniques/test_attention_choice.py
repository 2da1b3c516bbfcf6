"""Which attention kernel is taken: by timing where several can do it, else a rule. On the CPU, as far as it goes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from brimful.kernels import attention as kernels
from brimful.kernels.attention import (
    LENGTH_CLASSES,
    Attention,
    Pattern,
    choose_attention,
    flash_attention,
    grouped_attention,
    length_class,
    reference_attention,
    triton_attention,
)
from brimful.kernels.layout import Segments
from brimful.techniques import attention
from brimful.techniques.attention import MARGIN, Heads, choose_kernels, known_seconds, time_attention
from brimful.techniques.precision import Precision
from tiny import FAMILIES

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
FP16 = Precision(value="fp16", device=CPU, reason="asked for")
HEADS, PATTERN = Heads(number=2, size=16), Pattern(scale=0.25)


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.setattr(kernels, "_fastest", {})
    monkeypatch.setattr(attention, "_TIMED_TOKENS", 64)
    monkeypatch.setattr(attention, "_WITHIN_S", 1e-9)


def offer(monkeypatch: pytest.MonkeyPatch, *functions: Attention) -> None:
    """Lets these be the kernels that can do it, on the CPU too."""
    for module in (kernels, attention):
        monkeypatch.setattr(module, "candidates", lambda *_: functions)


def keep_seconds(monkeypatch: pytest.MonkeyPatch, **seconds: float) -> None:
    """Leaves these in the cache, whatever is asked for."""
    monkeypatch.setattr(attention, "read_cached", lambda _: dict(seconds))


def test_classes_of_lengths() -> None:
    assert [length_class(n) for n in (1, 64, 65, 512, 513, 4096, 4097)] == [0, 0, 1, 3, 4, 6, 7]
    assert list(LENGTH_CLASSES) == sorted(LENGTH_CLASSES)


@pytest.mark.parametrize("training", [False, True])
def test_kernels_are_timed(training: bool) -> None:
    pattern = Pattern(scale=0.25, dropout=0.1 if training else 0.0)
    for each in (triton_attention, reference_attention):
        assert time_attention(each, FP16, pattern, HEADS, 0, training=training) > 0


def test_timings_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    offer(monkeypatch, triton_attention, reference_attention)
    first = known_seconds(FP16, PATTERN, HEADS, 0, training=False)
    assert list(first) == ["triton_attention", "reference_attention"]
    assert known_seconds(FP16, PATTERN, HEADS, 0, training=False) == first
    assert known_seconds(FP16, PATTERN, HEADS, 0, training=True) != first


def test_a_kernel_that_fails_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(q: Tensor, k: Tensor, v: Tensor, segments: Segments, pattern: Pattern) -> Tensor:
        raise torch.OutOfMemoryError("too much")

    offer(monkeypatch, failing, triton_attention)
    assert list(known_seconds(FP16, PATTERN, HEADS, 0, training=False)) == ["triton_attention"]
    config = FAMILIES["bert"].model(hidden_size=32, num_attention_heads=2).config
    found = choose_kernels(config, FP16, 30, training=False)
    assert found.functions == ("triton_attention",)
    assert "ms by" in found.lever().reason


@pytest.mark.parametrize(
    ("ours_s", "other_s", "name"),
    [(1.0, 2.0, "triton_attention"), (MARGIN, 1.01, "triton_attention"), (MARGIN, 0.99, "flash_attention")],
)
def test_another_must_win_by_the_margin(
    monkeypatch: pytest.MonkeyPatch, ours_s: float, other_s: float, name: str
) -> None:
    """At any length; fused layers are ours alone."""
    offer(monkeypatch, triton_attention, flash_attention)
    keep_seconds(monkeypatch, triton_attention=ours_s, flash_attention=other_s)
    config = FAMILIES["bert"].model(hidden_size=32, num_attention_heads=2).config
    for typical_length in (30, 3000):
        assert choose_kernels(config, FP16, typical_length, training=True).functions == (name,)
        assert choose_attention(CUDA, torch.float16, PATTERN, 16, typical_length).__name__ == name


def test_what_was_measured_holds_for_its_case_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    offer(monkeypatch, triton_attention, flash_attention)
    keep_seconds(monkeypatch, triton_attention=2.0, flash_attention=1.0)
    config = FAMILIES["bert"].model(hidden_size=32, num_attention_heads=2).config
    assert choose_kernels(config, FP16, 30, training=True).functions == ("flash_attention",)

    def chosen(dtype: torch.dtype, head_dim: int, length: int | None, window: int | None = None) -> Attention:
        return choose_attention(CUDA, dtype, Pattern(scale=1.0, window=window), head_dim, length)

    assert chosen(torch.float16, 16, 60) is flash_attention
    assert chosen(torch.float16, 16, 65) is triton_attention  # by the rule
    assert chosen(torch.float16, 16, 60, window=5) is triton_attention
    assert chosen(torch.bfloat16, 16, 60) is triton_attention
    assert chosen(torch.float16, 32, 60) is triton_attention
    assert chosen(torch.float16, 16, None) is flash_attention


def test_a_cache_that_holds_something_else_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    offer(monkeypatch, reference_attention)
    first = known_seconds(FP16, PATTERN, HEADS, 0, training=False)
    keep_seconds(monkeypatch, reference_attention="soon")  # type: ignore[arg-type]
    assert known_seconds(FP16, PATTERN, HEADS, 0, training=False) != first


def test_one_kernel_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "time_attention", lambda *_, **__: pytest.fail("timed"))
    found = choose_kernels(FAMILIES["bert"].model().config, FP16, 30, training=True)
    assert found.functions == (grouped_attention.__name__,)
    assert found.lever().reason == "for sequences of 30 tokens in the mean"


def test_the_choice_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled layers make it while they are traced, of lengths that may be symbols then."""
    kernels.prefer(kernels.Case(torch.float16, 16, False, 0), flash_attention)
    names: list[str] = []

    def layer(x: Tensor, length: int) -> Tensor:
        chosen = choose_attention(CUDA, torch.float16, PATTERN, 16, length)
        return x + 1 if chosen is flash_attention else x - 1

    compiled = torch.compile(layer, backend="eager", fullgraph=True, dynamic=True)
    names = [str(float(compiled(torch.zeros(()), length))) for length in (30, 50, 200, 700)]
    assert names == ["1.0", "1.0", "-1.0", "1.0"]

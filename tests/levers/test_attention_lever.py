"""The choice of an attention kernel: for training by timing where several can do it, else by a rule."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    GPT2Config,
    GPT2ForSequenceClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
)

pytest.importorskip("triton")

from brimful.data.batches.batch import PackedLayout
from brimful.data.batches.packing import Budgets
from brimful.kernels.attention.dispatch import (
    choose_attention,
    flash_attention,
    grouped_attention,
    triton_attention,
)
from brimful.kernels.attention.pattern import Heads, Pattern
from brimful.levers import facts
from brimful.levers.facts import MARGIN, choose_kernels, kernels_of, measure_attention
from brimful.step.precision import Precision
from levers.assemblies import assembly_of
from tiny import FAMILIES, sequences

CUDA = torch.device("cuda")
FP16 = Precision(value="fp16", device=CUDA, reason="asked for")
WIDE = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 48}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The kernels that are timed: none here, ours is half as fast as the other."""
    found: list[tuple[Any, ...]] = []

    def seconds(*given: Any) -> dict[str, float]:
        found.append(given)
        return {"triton_attention": 2.0, "flash_attention": 1.0}

    monkeypatch.setattr(facts, "attention_seconds", seconds)
    return found


@pytest.mark.parametrize(
    ("seconds", "name"),
    [
        ({"triton_attention": 1.0, "flash_attention": 2.0}, "triton_attention"),
        ({"triton_attention": MARGIN, "flash_attention": 1.01}, "triton_attention"),
        ({"triton_attention": MARGIN, "flash_attention": 0.99}, "flash_attention"),
        ({"flash_attention": 9.0}, "flash_attention"),
    ],
)
def test_another_must_win_by_the_margin(monkeypatch: pytest.MonkeyPatch, seconds: dict[str, float], name: str) -> None:
    """At any length; fused layers are ours alone."""
    monkeypatch.setattr(facts, "attention_seconds", lambda *_: seconds)
    model = FAMILIES["bert"].model(**WIDE)
    for typical_length in (30, 3000):
        measured = measure_attention(model, FP16, typical_length)
        found = choose_kernels(model.config, FP16, typical_length, measured)
        assert (found.functions, found.fastest) == ((name,), name)
        assert "ms by" in measured.said


def test_what_is_timed_is_what_the_model_computes(asked: list[tuple[Any, ...]]) -> None:
    measure_attention(FAMILIES["bert"].model(dropout=0.3, **WIDE), FP16, 300)
    config = LlamaConfig(
        vocab_size=50, num_key_value_heads=2, pad_token_id=0, num_hidden_layers=1,
        **WIDE | {"hidden_size": 64, "num_attention_heads": 4},
    )  # fmt: skip
    measure_attention(LlamaForSequenceClassification(config), FP16, 30)
    gpt2 = GPT2Config(vocab_size=50, n_embd=32, n_head=2, n_layer=1, attn_pdrop=0.2, pad_token_id=0)
    measure_attention(GPT2ForSequenceClassification(gpt2), FP16, 30)
    measure_attention(FAMILIES["modernbert"].model(**WIDE), FP16, 30)
    (_, _, dtype, pattern, heads, length), (_, _, _, causal, grouped, short), decoder, full, windowed = asked
    assert (decoder[3].causal, decoder[3].dropout) == (True, 0.2)
    assert (full[3].window, full[3].causal) == (None, False)
    assert (windowed[3].window, windowed[3].causal) == (FAMILIES["modernbert"].model().config.sliding_window, False)
    assert (dtype, pattern.dropout, pattern.causal, length) == (torch.float16, 0.3, False, 3)
    assert heads == Heads(queries=2, keys=2, size=16)
    assert (causal.causal, causal.dropout, grouped, short) == (True, 0.0, Heads(queries=4, keys=2, size=16), 0)


def test_where_there_is_no_choice_nothing_is_timed(asked: list[tuple[Any, ...]]) -> None:
    bert = FAMILIES["bert"].model(**WIDE)
    for precision in (
        Precision(value="fp16", device=torch.device("cpu"), reason="asked for"),
        Precision(value="fp32", device=CUDA, reason="asked for"),
    ):
        assert measure_attention(bert, precision, 30) is None
    assert measure_attention(FAMILIES["deberta"].model(**WIDE), FP16, 30) is None
    assert not asked
    cpu = choose_kernels(bert.config, Precision(value="fp32", device=torch.device("cpu"), reason="asked for"), 30)
    assert cpu.functions == (grouped_attention.__name__,)
    assert not cpu.variable_length.ok


@pytest.mark.parametrize(
    ("more", "name"),
    [({}, "flash_attention"), ({"execution": "fused"}, "triton_attention"),
     ({"gradient_checkpointing": "full"}, "triton_attention")],
)  # fmt: skip
def test_ours_is_taken_where_nothing_else_will_do(
    asked: list[tuple[Any, ...]], more: dict[str, Any], name: str
) -> None:
    """Our kernel, where layers are to be fused around it, or computed again, however fast another one is."""
    assembly = assembly_of(FAMILIES["bert"].model(**WIDE), precision="fp16", lengths=(600,), **more)
    assembly.precision = FP16
    found = kernels_of(assembly)
    assert found.functions == (name,)
    assert found.fused == bool(more)
    assert bool(asked) == (not more)


def test_a_kernel_that_cannot_do_it_is_not_taken() -> None:
    """Soft caps and fp32 windows are for ours alone, whatever is wanted."""
    for dtype, pattern in (
        (torch.float16, Pattern(scale=1.0, softcap=5.0)),
        (torch.float32, Pattern(scale=1.0, window=5)),
    ):
        assert choose_attention(CUDA, dtype, pattern, 64, 30, "flash_attention") is triton_attention


def test_the_choice_is_traced() -> None:
    """Compiled layers make it while they are traced, of lengths that may be symbols then."""

    def layer(x: Tensor, length: int, wanted: str | None) -> Tensor:
        chosen = choose_attention(CUDA, torch.float16, Pattern(scale=0.25), 16, length, wanted)
        return x + 1 if chosen is flash_attention else x - 1

    compiled = torch.compile(layer, backend="eager", fullgraph=True, dynamic=True)
    given = [(30, "flash_attention"), (50, None), (700, None), (700, "triton_attention")]
    assert [float(compiled(torch.zeros(()), *each)) for each in given] == [1.0, -1.0, 1.0, -1.0]


def test_it_goes_with_the_segments() -> None:
    layout = PackedLayout(
        budgets=Budgets(tokens=(32,), fill=1.0), num_slots=4, max_length=32, padding_id=0, groups=False,
        typical_length=9, attention="flash_attention",
    )  # fmt: skip
    [(inputs, *_)] = layout.arrange(sequences([5, 7]), None)
    assert inputs.segments.attention == "flash_attention"  # type: ignore[union-attr]

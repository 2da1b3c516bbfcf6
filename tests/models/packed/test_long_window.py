"""Windows too long to try in full are short in the check's copy, where that stands for the real one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from brimful.kernels.attention.dispatch import Attention
from brimful.kernels.attention.pattern import Pattern
from brimful.kernels.layout import Segments
from brimful.models.packed import long_window, packed_forward
from brimful.models.packed.check_inputs import one_layer_of_each_kind
from brimful.models.packed.equivalence import Equivalence, check_equivalence
from brimful.models.packed.host_reads import how_recorded
from brimful.models.packed.long_window import SHORT, LongWindow, shorten_window
from brimful.models.packed.packed_forward import PackedModel, PaddedModel
from heads.tiny_heads import tiny_config
from tiny import FAMILIES, Family
from wrong_attention import Change, changed_pattern

CPU = torch.device("cpu")
#: A window that a check in full takes seconds for, and one that it takes far longer for.
LONG, LONGER = 400, 2048
ONE_HEAD = {"num_attention_heads": 1, "num_key_value_heads": 1}


def windowed(name: str, window: int = LONG, **settings: Any) -> Any:
    """As trained: scores of weights that never were are all alike."""
    settings = (
        ONE_HEAD | {"sliding_window": window, "max_position_embeddings": 8192, "initializer_range": 0.3} | settings
    )
    return FAMILIES[name].model(**settings)


def check_here(model: Any, max_length: int = 8192) -> Equivalence:
    return check_equivalence(model, max_length=max_length, device=CPU, precision="fp32", cache=False)


@pytest.fixture
def long_passes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes of all passes with rows of more than 300 tokens."""
    shapes = list[tuple[int, ...]]()
    padded, packed = PaddedModel.__call__, PackedModel.__call__

    def counted(call: Any, name: str) -> Any:
        def run(self: Any, inputs: Any, *given: Any) -> Any:
            shape = tuple(getattr(inputs, name).shape)
            if shape[-1] > 300:
                shapes.append(shape)
            return call(self, inputs, *given)

        return run

    monkeypatch.setattr(PaddedModel, "__call__", counted(padded, "ids_RL"))
    monkeypatch.setattr(PackedModel, "__call__", counted(packed, "ids_T"))
    return shapes


def make_wrong(monkeypatch: pytest.MonkeyPatch, change: Change, *, kernel_only: bool) -> None:
    choose, reference = packed_forward.choose_attention, packed_forward.reference_attention
    monkeypatch.setattr(packed_forward, "choose_attention", lambda *given: change(choose(*given)))
    if not kernel_only:
        monkeypatch.setattr(packed_forward, "reference_attention", change(reference))


# --- admitted ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize("name", ["mistral", "gemma2"])
def test_one_text_exceeds_the_real_window(name: str, long_passes: list[tuple[int, ...]]) -> None:
    """Beside a short one: once padded, once packed behind one of a quarter of the window."""
    found = check_here(windowed(name, LONGER))
    assert found.packed, found.reason
    assert found.form == FAMILIES[name].form
    assert long_passes == [(2, LONGER + 40), (1, LONGER // 4), (LONGER + 40 + 17 + LONGER // 4,)]


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize("name", ["mistral", "gemma2", "gemma3"])
def test_both_checks_find_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = windowed(name)
    found = check_here(model)
    monkeypatch.setattr(LongWindow, "of", lambda *_: None)
    in_full = check_here(model)
    assert found.packed
    assert in_full.packed
    assert (found.form, found.independent) == (in_full.form, in_full.independent)


def _qwen2(**settings: Any) -> Any:
    family = Family(config="Qwen2Config", settings=FAMILIES["mistral"].settings, pooling="last")
    return family.model(**ONE_HEAD, sliding_window=LONG, max_position_embeddings=8192, **settings)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "passes"),
    [
        ({"use_sliding_window": False}, []),
        ({"use_sliding_window": True, "max_window_layers": 2}, [(2, LONG + 40), (LONG + 357,)]),  # no layer has it
        ({"use_sliding_window": True, "max_window_layers": 1}, [(2, LONG + 40), (LONG + 357,)]),
    ],
)
def test_a_window_that_some_or_no_layers_use(
    settings: dict[str, Any], passes: list[Any], long_passes: list[tuple[int, ...]]
) -> None:
    found = check_here(_qwen2(**settings))
    assert found.packed, found.reason
    assert long_passes == passes


def test_the_real_window_is_set_again() -> None:
    small = one_layer_of_each_kind(windowed("gemma2")).eval()
    attention = [layer.self_attn for layer in small.model.layers]
    kept = [module.sliding_window for module in attention]
    window = LongWindow.of(small, 8192)
    assert window is not None
    assert LONG in kept
    assert None in kept
    with window.short():
        assert small.config.sliding_window == SHORT
        assert [module.sliding_window for module in attention] == [each and SHORT for each in kept]
    assert small.config.sliding_window == LONG
    assert [module.sliding_window for module in attention] == kept


@pytest.mark.parametrize(("window", "max_length"), [(128, 8192), (LONGER, 300)])
def test_what_is_tried_quickly_is_tried_in_full(window: int, max_length: int) -> None:
    assert LongWindow.of(one_layer_of_each_kind(windowed("mistral", window)).eval(), max_length) is None


# --- refused ----------------------------------------------------------------------------------------------------------


def _only_long(by: int) -> Change:
    """A window that is another one where it is long."""
    return changed_pattern(window=lambda window: window - by if window and window > 100 else window)


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize("kernel_only", [False, True], ids=["everywhere", "in the kernel"])
@pytest.mark.parametrize("name", ["mistral", "gemma2"])
@pytest.mark.parametrize(
    "change",
    [
        changed_pattern(window=None),
        changed_pattern(window=LONGER),
        changed_pattern(window=lambda window: window and window - 1),
        changed_pattern(window=lambda window: window and window + 1),
    ],
    ids=["ignored", "a constant", "one less", "one more"],
)
def test_another_window_is_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, change: Change, kernel_only: bool
) -> None:
    make_wrong(monkeypatch, change, kernel_only=kernel_only)
    found = check_here(windowed(name, LONGER))
    assert not found.packed
    assert found.independent
    assert ("kernel in fp32 is" if kernel_only else "packed logits differ from the plain ones by") in found.reason


@pytest.mark.sampled
@pytest.mark.parametrize("kernel_only", [False, True], ids=["everywhere", "in the kernel"])
@pytest.mark.parametrize("by", [1, 100])
@pytest.mark.parametrize("name", ["mistral", "gemma2"])
def test_another_window_at_the_real_size_alone_is_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, by: int, kernel_only: bool
) -> None:
    make_wrong(monkeypatch, _only_long(by), kernel_only=kernel_only)
    found = check_here(windowed(name))
    assert not found.packed
    assert not found.half_weights
    assert ("kernel in fp32 is" if kernel_only else "at a window of 400 tokens") in found.reason


def _only_deep(attend: Attention) -> Attention:
    """Attention with a shorter window, where it is long, in sequences that begin deep in a row."""

    def run(q: Tensor, k: Tensor, v: Tensor, segments: Segments, pattern: Pattern) -> Tensor:
        right = attend(q, k, v, segments, pattern)
        if pattern.window is None or pattern.window <= 100:
            return right
        wrong = attend(q, k, v, segments, replace(pattern, window=pattern.window - 100))
        deep_T = segments.cu_seqlens_N.long()[segments.segment_T] >= 256
        return torch.where(deep_T[None, :, None], wrong, right)

    return run


def _only_other_heads(attend: Attention) -> Attention:
    """Attention that is wrong on rows with a long window in all heads but the first."""

    def run(q: Tensor, k: Tensor, v: Tensor, segments: Segments, pattern: Pattern) -> Tensor:
        found = attend(q, k, v, segments, pattern)
        is_long = pattern.window is not None and pattern.window > 100
        return torch.cat([found[:1], 0.7 * found[1:]]) if is_long else found

    return run


@pytest.mark.slow
@pytest.mark.parametrize("change", [_only_deep, _only_other_heads])
def test_what_is_wrong_deep_in_a_row_or_in_other_heads_is_refused(
    monkeypatch: pytest.MonkeyPatch, change: Change
) -> None:
    make_wrong(monkeypatch, change, kernel_only=True)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    found = check_here(windowed("mistral", **heads))
    assert not found.packed
    assert "kernel in fp32 is" in found.reason


# --- in full, where a short window does not stand for the real one ----------------------------------------------------


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize("other", [LONG + 1, LONG - 1, None])
def test_modules_with_another_window_than_the_configuration(
    other: int | None, long_passes: list[tuple[int, ...]]
) -> None:
    model = windowed("gemma2")
    for layer in model.model.layers:
        if layer.self_attn.sliding_window is not None:
            layer.self_attn.sliding_window = other
    found = check_here(model)
    assert not found.packed
    assert "packed logits differ" in found.reason
    assert len(long_passes) > 2
    assert check_here(model, max_length=380).packed  # no text reaches it


@pytest.mark.slow
def test_modules_that_take_the_window_from_elsewhere(long_passes: list[tuple[int, ...]]) -> None:
    model = windowed("gemma2")
    attention = model.model.layers[0].self_attn
    del attention.sliding_window
    attention.__class__ = type("Attention", (type(attention),), {"sliding_window": LONG})
    found = check_here(model)
    assert found.packed, found.reason
    assert len(long_passes) > 2


@pytest.mark.slow
def test_a_window_that_the_plain_model_ignores(monkeypatch: pytest.MonkeyPatch) -> None:
    gemma2 = transformers.models.gemma2.modeling_gemma2
    monkeypatch.setattr(gemma2, "create_sliding_window_causal_mask", gemma2.create_causal_mask)
    assert not check_here(windowed("gemma2")).packed
    assert check_here(windowed("gemma2"), max_length=380).packed  # no text reaches it


def _by_length(_: Any, given: Any, output: Any) -> None:
    """States that change with the longest text, as some rotary embeddings do."""
    if output.last_hidden_state.shape[1] > 300:
        output.last_hidden_state = output.last_hidden_state.roll(1, -1)


def test_rows_that_depend_on_a_long_one(long_passes: list[tuple[int, ...]]) -> None:
    model = windowed("mistral")
    model.model.register_forward_hook(_by_length)
    found = check_here(model)
    assert not found.packed
    assert not found.independent
    assert "depends on the other rows" in found.reason
    assert len(long_passes) > 2


def _by_number(_: Any, given: Any, output: Any) -> None:
    """Centre rows where they are many."""
    states = output.last_hidden_state
    if states.shape[0] > 4:
        output.last_hidden_state = states - states.mean(0, keepdim=True)


def test_rows_that_depend_on_any(long_passes: list[tuple[int, ...]]) -> None:
    """Short rows show it: of the long ones, only the window's own look at rows of two lengths is computed."""
    model = windowed("mistral")
    model.model.register_forward_hook(_by_number)
    found = check_here(model)
    assert not found.independent
    assert not found.alike_independent
    assert len(long_passes) <= 2


def _under_short(module: Any, _: Any, output: Any) -> None:
    """States of a batch that change one another where the window is short."""
    states = output.last_hidden_state
    if module.config.sliding_window == SHORT and states.shape[0] > 1:
        output.last_hidden_state = states - states.mean(0, keepdim=True)


def test_rows_that_depend_under_the_short_window_alone() -> None:
    model = windowed("mistral")
    model.model.register_forward_hook(_under_short)
    assert check_here(model, max_length=320).packed


def test_code_that_fails_on_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError("no")

    monkeypatch.setattr(long_window, "_calls", fail)
    assert check_here(windowed("mistral"), max_length=320).packed


def t5gemma(window: int, layer: int = 0) -> Any:
    """It reads its padding."""
    config = tiny_config("t5gemma")
    for each in (config, config.encoder, config.decoder):
        each.sliding_window, each.max_position_embeddings = window, 8192
    return transformers.AutoModelForSequenceClassification.from_config(config)


@pytest.mark.slow
def test_rows_that_depend_on_their_padding_are_refused_by_short_ones(long_passes: list[tuple[int, ...]]) -> None:
    found = check_here(t5gemma(LONGER))
    assert long_passes == []
    assert not found.packed
    assert not found.independent
    assert found.alike_independent
    assert replace(found, reason="") == replace(check_here(t5gemma(48)), reason="")


def _rolled(layer: Any, given: Any, output: Tensor) -> Tensor:
    """Rows beyond the window change one another."""
    return output.roll(1, 0) if output.shape[1] > layer.config.sliding_window else output


def test_rows_of_one_length_that_depend_on_one_another_beyond_the_window(long_passes: list[tuple[int, ...]]) -> None:
    model = t5gemma(LONGER)
    model.model.encoder.layers[0].register_forward_hook(_rolled)
    found = check_here(model)
    assert long_passes == []
    assert not found.alike_independent


# --- copies for something else ----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize("half", [None, torch.bfloat16])
def test_what_the_host_reads_is_looked_for_in_short_rows(
    half: torch.dtype | None, long_passes: list[tuple[int, ...]]
) -> None:
    model = windowed("mistral", LONGER)
    assert how_recorded(model, 8192, training=True, half=half).why_not is None
    assert long_passes == []
    assert model.config.sliding_window == LONGER


def test_what_the_host_reads_beyond_the_window_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    attention = transformers.models.mistral.modeling_mistral.MistralAttention
    forward = attention.forward

    def reading(self: Any, hidden_states: Tensor, *given: Any, **more: Any) -> Any:
        if hidden_states.shape[1] > self.config.sliding_window:
            float(hidden_states.sum())
        return forward(self, hidden_states, *given, **more)

    monkeypatch.setattr(attention, "forward", reading)
    assert how_recorded(windowed("mistral", LONGER), 8192, training=True).why_not is not None
    assert how_recorded(windowed("mistral", LONGER), 64, training=True).why_not is None  # no text reaches it


def test_a_copy_keeps_a_window_that_it_ignores(monkeypatch: pytest.MonkeyPatch) -> None:
    gemma2 = transformers.models.gemma2.modeling_gemma2
    small = windowed("gemma2").eval()
    monkeypatch.setattr(gemma2, "create_sliding_window_causal_mask", gemma2.create_causal_mask)
    shorten_window(small, 8192)
    assert small.config.sliding_window == LONG
    monkeypatch.undo()
    shorten_window(small, 8192)
    kept = {vars(module)["sliding_window"] for module in small.modules() if "sliding_window" in vars(module)}
    assert kept == {SHORT, None}
    assert small.config.sliding_window == SHORT

"""Kernels that a compiler can fuse: those of layers that run are counted, at the rows that they have, and no others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from brimful.models.packed import fusible, own_scans
from brimful.models.packed.fusible import Fusible, fusible_of_pass
from brimful.models.packed.host_reads import Recording, how_recorded
from heads.tiny_heads import tiny_model
from models.packed.test_host_reads import t5
from tiny import FAMILIES


def bert(layers: int = 2) -> Any:
    return FAMILIES["bert"].model(num_hidden_layers=layers)


def qwen() -> Any:
    """A head of images and text."""
    model = tiny_model("qwen3_5")
    model.config.get_text_config().pad_token_id = 0
    return model


def of(model: Any, num_rows: int = 8, length: int = 32) -> Fusible:
    found = fusible_of_pass(model, num_rows, length, Recording())
    assert found is not None
    return found


def test_bytes_of_a_pass_grow_with_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fusible, "_KERNEL_S", 0.0)
    once, twice = of(bert(), 64), of(bert(), 128)
    assert twice.operators == once.operators
    assert twice.seconds == pytest.approx(2 * once.seconds, rel=0.01)


@pytest.mark.slow
def test_one_layer_stands_for_all_of_its_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight layers, of which two are traced, are what eight traced ones are; embeddings and head are of no layer."""
    found = of(bert(8))
    monkeypatch.setattr(fusible, "one_layer_of_each_kind", lambda model: bert(8))
    whole = of(bert(8))
    assert found.seconds == pytest.approx(whole.seconds, rel=0.01)
    assert found.operators == whole.operators


@pytest.mark.slow
def test_layers_that_do_not_run_are_not_counted() -> None:
    """As those of images, where there is text alone."""
    model = qwen()
    before, blocks = of(model), model.model.visual.blocks
    blocks.extend([nn.Linear(4, 4) for _ in range(5)])
    assert of(model) == before


def test_a_small_kernel_takes_its_time() -> None:
    found = of(bert(), 1, 8)
    assert found.seconds == pytest.approx(2e-6 * found.operators * 2, rel=0.02)


@pytest.mark.slow
def test_each_operator_is_counted_and_no_product(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fusible, "_KERNEL_S", 0.0)
    before, model = of(bert()), bert()
    num_rows, length, width = 8, 32, model.config.hidden_size

    def scale(_: Any, __: Any, states: Tensor) -> Tensor:
        return states * 0.5

    def multiply(_: Any, __: Any, states: Tensor) -> Tensor:
        return states @ torch.eye(width, device=states.device)

    for layer in model.bert.encoder.layer:
        layer.output.register_forward_hook(scale)
    scaled = of(model)
    assert scaled.operators == before.operators + 2  # forward and backward
    moved = 2 * 2 * 2 * num_rows * length * width * 4  # of two layers, in two passes, read and written
    assert scaled.seconds - before.seconds == pytest.approx(moved / 4.2e12, rel=0.01)
    for layer in model.bert.encoder.layer:
        layer.output.register_forward_hook(multiply)
    assert of(model).operators <= scaled.operators + 1  # the matrix of ones is made


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize("make", [t5, qwen, lambda: tiny_model("qwen3_next"), lambda: tiny_model("mvp")])
def test_models_are_as_before(make: Any) -> None:
    """Those whose code asks the host, and draws there; with attention of their parts that is not the model's."""
    model = make()
    model.config.pad_token_id = 0
    configs = [model.config, *(getattr(model.config, name) for name in type(model.config).sub_configs)]
    configs[-1]._attn_implementation = "eager"
    attention = [config._attn_implementation for config in configs]
    before, random = {name: value.clone() for name, value in model.state_dict().items()}, torch.get_rng_state()
    recording = how_recorded(model, 32, training=True, half=torch.bfloat16)
    found = fusible_of_pass(model, 8, 32, recording, half=torch.bfloat16)
    assert (found is None) == (recording.why_not is not None)
    assert [config._attn_implementation for config in configs] == attention
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_operators_are_those_that_a_compiler_meets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds are of steps as they run without it, with our scans; it compiles transformers', of more operators."""
    found = of(qwen())
    monkeypatch.setattr(own_scans, "find_spec", lambda _: object())  # as though packages had them: none is ours
    theirs = of(qwen())
    assert found.operators == theirs.operators
    assert found.seconds < theirs.seconds


@pytest.mark.slow
def test_the_seeds_of_gpus_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda _: pytest.fail("they are the process's"))
    assert how_recorded(t5(), 32, training=True).decisions is not None


def test_nodes_are_numbered_where_a_layer_makes_none() -> None:
    with torch.no_grad():
        first, second = fusible._next_node(), fusible._next_node()
    assert first < second


def test_what_cannot_be_traced_is_not_counted() -> None:
    model = bert()
    model.bert.embeddings.register_forward_hook(lambda _, __, states: states * float(states.sum() > 0))
    assert fusible_of_pass(model, 8, 32, Recording()) is None


def test_a_loop_over_tokens_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fusible, "_MOST", 20)
    assert fusible_of_pass(bert(), 8, 32, Recording()) is None

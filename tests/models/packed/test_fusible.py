"""What a compiler can fuse in a padded step is counted at the shape of the step, and nothing else is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from brimful.models.packed import fusible
from brimful.models.packed.fusible import Fusible, fusible_of_step
from brimful.models.packed.host_reads import Recording, how_recorded
from heads.tiny_heads import tiny_model
from models.packed.test_host_reads import t5
from tiny import FAMILIES


def bert(layers: int = 2, **sizes: Any) -> Any:
    return FAMILIES["bert"].model(num_hidden_layers=layers, **sizes)


def of(model: Any, num_rows: int = 8, length: int = 32) -> Fusible:
    found = fusible_of_step(model, num_rows, length, how_recorded(model, length, training=True))
    assert found is not None
    return found


def test_bytes_of_a_step_grow_with_its_rows_and_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fusible, "_KERNEL_S", 0.0)
    once, twice = of(bert(), 64), of(bert(), 128)
    assert twice.operators == once.operators
    assert twice.seconds == pytest.approx(2 * once.seconds, rel=0.1)
    deep = of(bert(8), 64)  # of which fewer are traced
    assert deep.seconds == pytest.approx(4 * once.seconds, rel=0.1)


def test_a_small_kernel_takes_its_time() -> None:
    found, layers = of(bert(), 1, 8), 2
    assert found.seconds == pytest.approx(2e-6 * found.operators * layers, rel=0.1)


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


@pytest.mark.parametrize("make", [t5, lambda: tiny_model("qwen3_next")])
def test_models_whose_code_asks_the_host_are_counted(make: Any) -> None:
    model = make()
    model.config.pad_token_id = 0
    before = {name: value.clone() for name, value in model.state_dict().items()}
    attention = model.config._attn_implementation
    recording = how_recorded(model, 32, training=True, half=torch.bfloat16)
    found = fusible_of_step(model, 8, 32, recording, half=torch.bfloat16)
    assert found is not None
    assert found.operators > 40
    assert model.config._attn_implementation == attention
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_what_cannot_be_traced_is_not_counted() -> None:
    model = bert()
    model.bert.embeddings.register_forward_hook(lambda _, __, states: states * float(states.sum() > 0))
    assert fusible_of_step(model, 8, 32, Recording()) is None


def test_a_loop_over_tokens_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fusible, "_MOST", 20)
    assert fusible_of_step(bert(), 8, 32, Recording()) is None

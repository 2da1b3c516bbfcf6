"""Weights streamed to a GPU layer by layer: the same logits, less memory, and a model that is larger than the limit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, BertConfig

import brimful
from brimful.models.model_stats import layers_of
from brimful.models.packed.streamed_layers import StreamedLayers, move_all_but
from runs import events, single_label_rows, tiny_tokenizer, write_rows
from tiny import VOCABULARY
from tolerances import STREAMED, STREAMED_BIASES, STREAMED_IN_BACKWARD, difference

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda")


def model_of(depth: int, width: int) -> Any:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=VOCABULARY, hidden_size=width, num_hidden_layers=depth, num_attention_heads=width // 64,
        intermediate_size=4 * width, num_labels=3,
    )  # fmt: skip
    return AutoModelForSequenceClassification.from_config(config).eval().requires_grad_(False)


@pytest.mark.parametrize("stored", ["host", "disk"])
@pytest.mark.parametrize("depth", [5, 6])
def test_logits_are_the_same_pass_after_pass(stored: str, depth: int, tmp_path: Path) -> None:
    """Of an odd and an even number of layers: what comes for the next pass goes to another piece."""
    ids = torch.randint(5, VOCABULARY, (64, 128), device=GPU)
    model = model_of(depth, 512).to(GPU)
    with torch.inference_mode():
        expected = model(input_ids=ids).logits
        several = [model(input_ids=ids.roll(number, 0)).logits for number in range(8)]
    model = model_of(depth, 512)
    layers = layers_of(model)
    assert layers is not None
    move_all_but(model, layers, GPU)
    model.streamed_layers = StreamedLayers(layers, GPU, tmp_path if stored == "disk" else None)
    with torch.inference_mode():
        assert torch.equal(model(input_ids=ids).logits, expected)
        found = [model(input_ids=ids.roll(number, 0)).logits for number in range(8)]  # nothing waits in between
        assert all(torch.equal(one, other) for one, other in zip(found, several, strict=True))


@pytest.mark.parametrize("stored", ["host", "disk"])
def test_a_model_larger_than_the_limit_classifies(stored: Any, tmp_path: Path) -> None:
    """Weights of 2.4 GB in bf16, 2 GB of memory; the comparison with the plain fp32 model is streamed, too."""
    model_of(96, 1024).save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    draw = np.random.default_rng(0)
    rows = [{"text": " ".join(f"w{n}" for n in draw.integers(5, 90, draw.integers(4, 60)))} for _ in range(300)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = brimful.classify(
        tmp_path / "model", tmp_path / "rows.jsonl", output=tmp_path / "out.jsonl", device="cuda", precision="bf16",
        stream_weights=stored, memory_limit="2GB",
    )  # fmt: skip
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 300
    assert done.equivalence is not None
    assert done.equivalence.passed
    assert torch.cuda.max_memory_allocated() < 2_000_000_000


IN_BACKWARD = {"optimizer_in_backward": True, "max_grad_norm": 0.0}


@pytest.mark.parametrize(
    ("more", "close", "biases_close"),
    [
        ({}, STREAMED, STREAMED),
        (IN_BACKWARD, STREAMED_IN_BACKWARD, STREAMED_BIASES),
        (IN_BACKWARD | {"precision": "fp32"}, STREAMED_IN_BACKWARD, STREAMED_IN_BACKWARD),
    ],
    ids=["", "in backward", "in backward, fp32"],
)
@pytest.mark.parametrize("stored", ["host", "disk"])
def test_training_learns_the_same(
    stored: Any, more: dict[str, Any], close: float, biases_close: float, tmp_path: Path
) -> None:
    """As with states in host memory and layers computed again, to the last bit of a number. From host memory steps are
    graphs, between which evaluation reads weights.

    Within the backward pass the norm is summed up bucket by bucket, and buckets of streamed layers are others; in bf16
    a last bit turns others over.
    """
    model_of(5, 256).save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    data, found = write_rows(tmp_path / "rows.jsonl", single_label_rows(400)), []
    for asked in (
        {"optimizer_offload": True, "gradient_checkpointing": "full", "execution": "eager"},
        {"stream_weights": stored},
    ):
        output = tmp_path / str(len(found))
        run = brimful.train(
            data, model=tmp_path / "model", output=output, device="cuda", batch_size=32, max_steps=20, eval_steps=10,
            learning_rate=1e-4, deterministic=True, baselines=False, logging_steps=1, **asked | more,
        )  # fmt: skip
        assert run.first_batch is not None
        assert run.first_batch.passed
        execution = next(lever.value for lever in run.recipe.levers if lever.name == "execution")
        assert execution == ("captured" if "host" in asked.values() else "eager")
        told = [(each["loss"], each["grad_norm"]) for each in events(output, "step")]
        found.append((told, load_file(output / "model" / "model.safetensors")))
    (expected, kept), (losses, streamed) = found
    for (loss, norm), (other_loss, other_norm) in zip(losses[:10], expected[:10], strict=True):
        assert loss == (pytest.approx(other_loss, rel=1e-6) if "precision" in more else other_loss)
        assert norm == (pytest.approx(other_norm, rel=1e-6) if more else other_norm)
    for name in (name for name in kept if not name.endswith("key.bias")):
        bound = biases_close if name.endswith("bias") else close
        assert difference(streamed[name], kept[name]) < bound, name


@pytest.mark.parametrize("stored", ["host", "disk"])
def test_a_model_larger_than_the_limit_is_trained(stored: Any, tmp_path: Path) -> None:
    """Weights of 3.2 GB in fp32, 13 GB with gradients and states, 3 GB of memory; its first batch is the plain
    model's."""
    model_of(64, 1024).save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    data = write_rows(tmp_path / "rows.jsonl", single_label_rows(100))
    run = brimful.train(
        data, model=tmp_path / "model", output=tmp_path / "run", device="cuda", precision="bf16", batch_size=16,
        max_steps=3, eval_split=0.1, learning_rate=1e-5, stream_weights=stored, memory_limit="3GB", baselines=False,
        save_steps=1000, save_total_limit=1,
    )  # fmt: skip
    assert run.first_batch is not None
    assert run.first_batch.passed
    assert run.steps == 3
    assert torch.cuda.max_memory_allocated() < 3_000_000_000

"""--per-device-batch-size and --gradient-accumulation-steps: transformers' names of an effective batch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from brimful.cli.flags import parse_options
from brimful.core.errors import OptionError
from brimful.core.options.train import TrainOptions
from brimful.data.batches.packing import choose_budgets, pack
from commands import Brimful, Files
from tiny_files import save_classifier


def options(*words: str) -> TrainOptions:
    return parse_options("train", ["rows.csv", "--model", "m", "--output", "o", *words])  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "rows", ["--per-device-batch-size", "--per-device-train-batch-size", "--per_device_batch_size"]
)
def test_the_product_is_the_effective_batch(rows: str) -> None:
    asked = options(rows, "8", "--gradient-accumulation-steps", "6")
    assert (asked.batch_size, asked.per_device_batch_size, asked.gradient_accumulation_steps) == (48, 8, 6)
    assert options(rows, "8").batch_size == 8
    assert options(f"{rows}=8", "--gradient-accumulation-steps", "4", "--batch-size", "32").batch_size == 32


@pytest.mark.parametrize("batch", ["32", "64"])
def test_another_batch_size_is_refused(batch: str) -> None:
    with pytest.raises(OptionError, match=f"--batch-size is {batch}, and --per-device-batch-size x .* is 48"):
        options("--per-device-batch-size", "8", "--gradient-accumulation-steps", "6", "--batch-size", batch)


def test_accumulation_alone_is_refused() -> None:
    with pytest.raises(OptionError, match="without --per-device-batch-size"):
        options("--gradient-accumulation-steps", "4")


@given(st.lists(st.integers(1, 40), min_size=1, max_size=40), st.integers(1, 12), st.integers(40, 200))
def test_no_micro_batch_has_more_rows(lengths: list[int], most: int, largest: int) -> None:
    budgets = choose_budgets([np.array(lengths)], largest, 40, most_rows=most)
    packed = pack(lengths, budgets)
    assert sorted(index for _, members in packed for index in members) == list(range(len(lengths)))
    for budget, members in packed:
        assert len(members) <= most
        assert sum(lengths[index] for index in members) <= budget
        assert budget % 16 == 0


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize("packing", ["auto", "off"])
def test_what_is_learned_is_the_same(brimful: Brimful, files: Files, tmp_path: Path, packing: str) -> None:
    """Without dropout, whose masks are drawn by micro-batch on a CPU."""
    model = save_classifier(
        tmp_path / "model", ["bad", "good"], hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    )
    words = (files.reviews, "--model", model, "--num-train-epochs", 1, "--packing", packing, "--no-baselines")
    words += ("--learning-rate", 5e-5)
    split = ("--per-device-train-batch-size", 3, "--gradient-accumulation-steps", 3)
    for name, batch in (("whole", ("--batch-size", 9)), ("split", split)):
        said = brimful("train", *words, "--device", "cpu", "--output", tmp_path / name, *batch)
        assert said.code == 0, said.err
    assert "at most 3 rows each" in said.err
    whole = load_file(tmp_path / "whole" / "model" / "model.safetensors")
    for name, tensor in load_file(tmp_path / "split" / "model" / "model.safetensors").items():
        torch.testing.assert_close(tensor, whole[name], rtol=1e-4, atol=1e-5)


def test_a_token_budget_is_said_to_be_asked_for(brimful: Brimful, files: Files, tmp_path: Path) -> None:
    words = (
        "train",
        files.reviews,
        "--model",
        files.base,
        "--output",
        tmp_path / "run",
        "--device",
        "cpu",
        "--dry-run",
    )
    assert "at most 1,000 tokens, as asked" in brimful(*words, "--token-budget", 1000).err
    assert "as asked" not in brimful(*words).err

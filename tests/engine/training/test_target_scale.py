"""Numbers far from 0: trained on in other units, answered in the user's, by every way of saving."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import brimful
from brimful.core.callbacks import Callbacks
from brimful.core.records import LabelSpace, TargetScale
from brimful.engine.target_scale import check_fold, fold, spread_doubt
from brimful.models.hub.last_linear import last_linear
from brimful.tasks.task import make_task
from commands import call
from tiny import FAMILIES
from tiny_files import save_base, write_csv

pytestmark = pytest.mark.xdist_group("target scale")  # one process makes what they share

SPACE = LabelSpace(task="regression", names=("price",))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prices of about 200, lower for bad films."""
    draw, rows = random.Random(0), []
    for number in range(60):
        bad = number % 2
        rows.append(
            (f"a {'bad' if bad else 'good'} film number {number}", round(draw.gauss(150 if bad else 250, 5), 1))
        )
    return write_csv(tmp_path_factory.mktemp("prices") / "rows.csv", ("text", "price"), rows)


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory, data: Path) -> list[object]:
    base = save_base(tmp_path_factory.mktemp("base"))
    return [
        *("train", data, "--model", base, "--label-column", "price", "--batch-size", 8, "--max-length", 16),
        *("--learning-rate", 5e-3, "--no-baselines", "--save-steps", 10),
    ]


@pytest.fixture(scope="module")
def run(words: list[object], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "run"
    said = call(*words, "--output", folder, "--num-train-epochs", 6)
    assert said.code == 0, said.err
    assert "  targets: trained on as (target - " in said.err
    return folder


def answers(model: Path, texts: list[str]) -> np.ndarray:
    """Outputs of the plain model of transformers."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    batch = tokenizer(texts, padding=True, truncation=True, return_tensors="pt")
    with torch.no_grad():
        return AutoModelForSequenceClassification.from_pretrained(model)(**batch).logits.numpy()


@pytest.mark.slow
def test_the_saved_model_answers_in_the_users_units(run: Path, data: Path) -> None:
    record = json.loads((run / "run.json").read_text())
    assert record["metrics"]["r2"] > 0.8, record["metrics"]
    assert record["metrics"]["rmse"] < 25
    (center,), spread = record["target_scale"]["centers"], record["target_scale"]["spread"]
    assert 180 < center < 220
    assert 40 < spread < 60
    bad, good = answers(run / "model", ["a bad film", "a good film"])[:, 0]
    assert 120 < bad < 190 < 210 < good < 280
    again = brimful.evaluate(run / "model", data, callbacks=Callbacks(), precision="fp32")
    assert again.metrics["r2"].value is not None
    assert again.metrics["r2"].value > 0.8


def test_the_same_from_a_checkpoint(run: Path, tmp_path: Path) -> None:
    exported = brimful.export(run, tmp_path / "model", callbacks=Callbacks())
    saved, again = (load_file(folder / "model.safetensors") for folder in (run / "model", exported))
    assert all(torch.equal(saved[name], again[name]) for name in saved)


@pytest.mark.thorough
def test_a_resumed_run_keeps_its_scale(words: list[object], run: Path, tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    fixed = [*words, "--lr-scheduler-type", "constant"]
    assert call(*fixed, "--output", whole, "--num-train-epochs", 2).code == 0
    assert call(*fixed, "--output", parts, "--num-train-epochs", 1).code == 0
    assert call(*fixed, "--output", parts, "--num-train-epochs", 2, "--resume").code == 0
    saved, again = (load_file(folder / "model" / "model.safetensors") for folder in (whole, parts))
    assert all(torch.equal(saved[name], again[name]) for name in saved)


def test_off_and_where_nothing_is_to_scale(words: list[object], tmp_path: Path) -> None:
    said = call(*words, "--output", tmp_path / "run", "--max-steps", 1, "--target-scaling", "off")
    assert "targets: trained on" not in said.err
    assert json.loads((tmp_path / "run" / "run.json").read_text())["target_scale"] is None
    near = write_csv(tmp_path / "near.csv", ("text", "price"), [(f"a film {n}", n / 30 - 1) for n in range(60)])
    said = call("train", near, *words[2:], "--output", tmp_path / "near", "--dry-run")
    assert (said.code, "targets: trained on" in said.err) == (0, False)


@pytest.mark.parametrize("frozen", ["all-but-head", "embeddings"])
def test_frozen_parts(words: list[object], tmp_path: Path, frozen: str) -> None:
    said = call(*words, "--output", tmp_path / "run", "--num-train-epochs", 1, "--freeze", frozen)
    assert said.code == 0, said.err
    assert 100 < answers(tmp_path / "run" / "model", ["a film"])[0, 0] < 300


@pytest.mark.parametrize("family", ["bert", "roberta", "distilbert", "electra", "llama", "gpt2", "deberta-v2", "bart"])
def test_the_last_layer_is_what_answers(family: str) -> None:
    if family not in FAMILIES:
        pytest.skip(f"there is no tiny {family}")
    model: Any = FAMILIES[family].model(num_labels=2).eval()
    last = last_linear(model)
    assert last is not None
    scale = TargetScale(centers=(200.0, -3.0) if last.bias is not None else (0.0, 0.0), spread=50.0)
    check_fold(model, scale)
    ids = torch.tensor([[5, 6, 7, getattr(model.config, "eos_token_id", None) or 8]])
    with torch.no_grad():
        before = model(input_ids=ids).logits
        fold(model, scale)
        after = model(input_ids=ids).logits
    torch.testing.assert_close(after, before * 50 + torch.tensor(scale.centers), rtol=1e-5, atol=1e-3)


def test_the_loss_is_the_plain_one_in_other_units() -> None:
    """And so is its gradient: by the chain rule that of the outputs in the user's units, times the spread."""
    draw = np.random.default_rng(0)
    targets_NC, scale = (
        draw.normal(200, 50, (6, 2)).astype(np.float32),
        TargetScale(centers=(210.0, 180.0), spread=40.0),
    )
    space = LabelSpace(task="regression", names=("a", "b"))
    scaled, plain = make_task(space, targets_NC, scale=scale), make_task(space, targets_NC)
    logits = torch.randn(6, 2, dtype=torch.float64)
    in_units = logits * scale.spread + torch.tensor(scale.centers)
    found = scaled.loss_rows_S(logits, torch.from_numpy(targets_NC))
    wanted = plain.loss_rows_S(in_units, torch.from_numpy(targets_NC)) / scale.spread**2
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)
    assert scaled.answers(logits.float().numpy()) == pytest.approx(in_units.numpy(), rel=1e-5)


@pytest.mark.parametrize(("unit", "doubted"), [(1.0, False), (9.0, False), (30_000.0, True)])
def test_numbers_that_hardly_count(unit: float, doubted: bool) -> None:
    targets = np.stack([np.linspace(0, 5, 50), np.linspace(0, 5, 50) * unit], axis=1)
    said = spread_doubt(LabelSpace(task="regression", names=("stars", "price")), targets)
    assert (said is not None) == doubted
    if doubted:
        assert str(said).startswith("numbers of 'stars' (1.473) hardly count beside those of 'price' (44,176)")
    assert spread_doubt(LabelSpace(task="regression", names=("price",)), targets[:, 1]) is None

"""Evaluation on a GPU: that of the CPU in fp32, and of a training the pass that it made anyway."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import brimful
from brimful.core.callbacks import Callbacks
from brimful.core.evaluation import Evaluation
from brimful.core.records import from_json
from tiny_files import save_base, save_classifier, write_reviews

pytestmark = pytest.mark.gpu


def values(record: Evaluation) -> dict[str, float | None]:
    return {name: metric.value for name, metric in record.metrics.items()}


def test_a_gpu_gives_the_metrics_of_the_cpu(tmp_path: Path) -> None:
    model, data = save_classifier(tmp_path / "model", ["bad", "good"]), write_reviews(tmp_path / "rows.csv", 400)
    asked: dict[str, Any] = {"precision": "fp32", "callbacks": Callbacks()}
    on_gpu = brimful.evaluate(model, data, device="cuda", **asked)
    on_cpu = brimful.evaluate(model, data, device="cpu", **asked)
    assert values(on_gpu) == pytest.approx(values(on_cpu), abs=1e-4)


def test_a_training_ends_with_the_evaluation_of_its_saved_model(tmp_path: Path) -> None:
    model, data = save_base(tmp_path / "base"), write_reviews(tmp_path / "rows.csv", 400)
    held_out = write_reviews(tmp_path / "held-out.csv", 120)
    run = brimful.train(
        data, model=model, output=tmp_path / "run", eval_data=held_out, precision="fp32", num_train_epochs=3,
        callbacks=Callbacks(),
    )  # fmt: skip
    record = from_json(Evaluation, (tmp_path / "run" / "evaluation.json").read_text("utf-8"))
    again = brimful.evaluate(tmp_path / "run" / "model", held_out, precision="fp32", callbacks=Callbacks())
    assert values(record) == pytest.approx(values(again), abs=1e-3)
    assert record.metrics["accuracy"].value == pytest.approx(run.metrics["accuracy"])

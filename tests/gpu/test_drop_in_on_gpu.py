"""The pipeline and the estimator on a GPU: transformers' answers, weights that count, and a process left as it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from sklearn.model_selection import cross_val_score

import brimful
from drop_in.test_untouched_process import state
from tiny_files import review, save_base, save_classifier

pytestmark = pytest.mark.gpu

TEXTS = [review(bool(i % 2), i) for i in range(200)]
LABELS = np.array(["bad", "good"])[np.arange(200) % 2]


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("bfloat16", 2e-2)])
def test_a_pipeline_answers_as_transformers(tmp_path: Path, dtype: str, tolerance: float) -> None:
    model = str(save_classifier(tmp_path / "model", ["a", "b", "c"]))
    ours = brimful.pipeline("text-classification", model=model, device=0, dtype=dtype)
    theirs = transformers.pipeline("text-classification", model=model, device=0, dtype="float32")
    assert ours.device.type == "cuda"
    for found, expected in zip(ours(TEXTS, top_k=None), theirs(TEXTS, top_k=None, batch_size=50), strict=True):
        by_label = {each["label"]: each["score"] for each in expected}
        assert {each["label"]: each["score"] for each in found} == pytest.approx(by_label, abs=tolerance)
    streamed = [each["score"] for each in ours(text for text in TEXTS)]
    assert streamed == pytest.approx([each["score"] for each in ours(TEXTS)], abs=tolerance)


def test_the_estimator_learns_and_leaves_the_process_as_it_was(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base")
    torch.zeros(1, device="cuda")
    made = brimful.TextClassifier(base, num_train_epochs=6, learning_rate=1e-2, max_length=32, device="cuda")
    before = state()
    fitted = made.fit(TEXTS, LABELS, sample_weight=np.where(LABELS == "good", 2.0, 1.0))
    assert fitted.score(TEXTS, LABELS) > 0.9
    after = state()
    assert {name for name in before if before[name] != after[name]} == set()
    assert cross_val_score(made.set_params(max_steps=20), TEXTS, LABELS, cv=2, error_score="raise").shape == (2,)


def test_captured_weights_of_0_are_rows_that_are_not_there(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base")
    fixed: dict[str, Any] = {"max_steps": 30, "learning_rate": 1e-3, "max_length": 32, "device": "cuda"}
    kept = np.arange(200) % 3 > 0
    one = brimful.TextClassifier(base, precision="fp32", **fixed).fit(TEXTS, LABELS, sample_weight=kept * 1.5)
    other = brimful.TextClassifier(base, precision="fp32", **fixed).fit(np.array(TEXTS)[kept], LABELS[kept])
    assert one.run_.recipe.value("execution") in ("captured", "compiled")
    assert one.predict_proba(TEXTS) == pytest.approx(other.predict_proba(TEXTS), abs=1e-4)

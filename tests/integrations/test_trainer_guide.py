"""The guide to Trainer: its code runs as it is written, by our step."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import brimful
from tiny_files import review, save_classifier

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "trainer.md"


@pytest.mark.filterwarnings("ignore:'pin_memory' argument:UserWarning")  # on a machine without GPU
def test_its_code_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"^```python\n(.*?)^```", GUIDE.read_text("utf-8"), re.DOTALL | re.MULTILINE)
    folder = save_classifier(tmp_path / "model", ["bad", "good"])
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = [tokenizer(review(bool(i % 2), i)) | {"labels": i % 2} for i in range(32)]
    names: dict[str, Any] = {
        "model": AutoModelForSequenceClassification.from_pretrained(folder),
        "tokenizer": tokenizer,
        "output": str(tmp_path / "output"),
        "train_dataset": Dataset.from_list(rows),
        "eval_dataset": Dataset.from_list(rows[:8]),
        "compute_metrics": lambda found: {"accuracy": float((found.predictions.argmax(-1) == found.label_ids).mean())},
    }
    exec(compile(code, str(GUIDE), "exec"), names)
    assert isinstance(names["trainer"], brimful.Trainer)
    assert names["trainer"].stock_reason is None
    assert "eval_accuracy" in capsys.readouterr().out

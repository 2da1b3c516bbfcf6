"""Our Trainer on a GPU: captured steps under Trainer's own updates, evaluations in between, and losses of the stock."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from datasets import Dataset
from transformers import TrainingArguments

import brimful
from plain import padded
from tiny import FAMILIES, sequences

pytestmark = pytest.mark.gpu

SIZES: dict[str, Any] = {
    "hidden_size": 128, "num_attention_heads": 2, "intermediate_size": 256, "initializer_range": 0.02,
}  # fmt: skip


def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    made = padded([np.array(row["input_ids"]) for row in rows], None, 0)
    return made | {"labels": torch.tensor([row["labels"] for row in rows])}


class _Graphs(transformers.TrainerCallback):  # type: ignore[misc]
    def __init__(self) -> None:
        self.trainer: Any = None
        self.most = 0

    def on_step_end(self, args: Any, *_: Any, **__: Any) -> None:
        assert args.logging_nan_inf_filter
        self.most = max(self.most, self.trainer.gradient_step._built.step.num_graphs)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_it_logs_what_transformers_trainer_does(precision: str, tmp_path: Path) -> None:
    model = FAMILIES["bert"].model(**SIZES)
    ids = sequences(np.random.default_rng(0).integers(3, 60, size=96).tolist())
    rows = Dataset.from_list([{"input_ids": each.tolist(), "labels": int(each[0]) % 3} for each in ids])
    losses, watch = [], _Graphs()
    for kind in (transformers.Trainer, brimful.Trainer):
        args = TrainingArguments(
            output_dir=str(tmp_path), per_device_train_batch_size=16, num_train_epochs=4, logging_steps=1,
            learning_rate=1e-3, eval_strategy="epoch", save_strategy="no", report_to="none", disable_tqdm=True,
            bf16=precision == "bf16",
        )  # fmt: skip
        trainer = kind(
            model=copy.deepcopy(model), args=args, train_dataset=rows, eval_dataset=rows, data_collator=collate,
            callbacks=[watch] if kind is brimful.Trainer else None,
        )  # fmt: skip
        watch.trainer = trainer
        trainer.train()
        losses.append([line.get("loss", line.get("eval_loss")) for line in trainer.state.log_history[:-1]])
    assert watch.trainer.stock_reason is None
    assert watch.most > 0
    assert losses[1] == pytest.approx(losses[0], rel=2e-3 if precision == "fp32" else 5e-2)

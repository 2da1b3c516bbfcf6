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
        self.within = False

    def on_step_end(self, args: Any, *_: Any, **__: Any) -> None:
        assert args.logging_nan_inf_filter
        step = self.trainer.gradient_step
        self.most = max(self.most, step._built.step.num_graphs)
        self.within = step.update is not None


class _Looking(_Graphs):
    """Sees gradients, so that Trainer clips and updates."""

    def on_pre_optimizer_step(self, args: Any, *_: Any, model: Any = None, **__: Any) -> None:
        assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize("kind_of_watch", [_Graphs, _Looking])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_it_logs_what_transformers_trainer_does(precision: str, kind_of_watch: type[_Graphs], tmp_path: Path) -> None:
    model = FAMILIES["bert"].model(**SIZES)
    ids = sequences(np.random.default_rng(0).integers(3, 60, size=96).tolist())
    rows = Dataset.from_list([{"input_ids": each.tolist(), "labels": int(each[0]) % 3} for each in ids])
    losses, norms, watch = [], [], kind_of_watch()
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
        norms.append([line["grad_norm"] for line in trainer.state.log_history if "grad_norm" in line])
    assert watch.trainer.stock_reason is None
    assert watch.most > 0
    assert watch.within == (kind_of_watch is _Graphs)
    assert losses[1] == pytest.approx(losses[0], rel=2e-3 if precision == "fp32" else 5e-2)
    assert norms[1] == pytest.approx(norms[0], rel=5e-3 if precision == "fp32" else 1e-1)


def test_it_resumes_from_the_states_of_its_own_update(tmp_path: Path) -> None:
    """By either class, with the optimizer's states as torch has them."""
    model = FAMILIES["bert"].model(**SIZES)
    ids = sequences(np.random.default_rng(0).integers(3, 60, size=96).tolist())
    rows = Dataset.from_list([{"input_ids": each.tolist(), "labels": int(each[0]) % 3} for each in ids])
    losses = []
    for kind, start in ((brimful.Trainer, None), (brimful.Trainer, 12), (transformers.Trainer, 12)):
        args = TrainingArguments(
            output_dir=str(tmp_path), per_device_train_batch_size=16, max_steps=24, logging_steps=1, save_steps=12,
            learning_rate=1e-3, report_to="none", disable_tqdm=True, optim="adamw_torch_fused", weight_decay=0.1,
        )  # fmt: skip
        trainer = kind(model=copy.deepcopy(model), args=args, train_dataset=rows, data_collator=collate)
        trainer.train(resume_from_checkpoint=None if start is None else str(tmp_path / f"checkpoint-{start}"))
        losses.append([line["loss"] for line in trainer.state.log_history if "loss" in line])
        states = trainer.optimizer.state_dict()["state"]
        assert {float(state["step"]) for state in states.values()} == {24.0}
        assert len(states) == len(list(model.parameters()))
    assert losses[1] == pytest.approx(losses[0], rel=2e-3)
    assert losses[2] == pytest.approx(losses[0], rel=2e-3)

"""The exactness test applied to transformers' Trainer: under accumulation its classifier gradient grows by the factor.

Not a test of ours, and not one that must stay true: when it fails, transformers has mended it, and docs/concepts/
exactness.md is to be changed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

pytest.importorskip("accelerate")


class Rows(torch.utils.data.Dataset[dict[str, Any]]):
    """32 random sequences of 16 tokens."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.ids = torch.randint(5, 99, (32, 16), generator=generator)
        self.labels = torch.randint(0, 3, (32,), generator=generator)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": self.ids[index], "labels": self.labels[index]}


def gradient_norm(folder: Path, accumulation: int) -> float:
    """Of the first step of Trainer on an effective batch of 8, split into `accumulation` micro-batches."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=100,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        num_labels=3,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=8 // accumulation,
        gradient_accumulation_steps=accumulation,
        max_steps=1,
        learning_rate=0.0,
        max_grad_norm=1e9,
        optim="sgd",
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        train_sampling_strategy="sequential",
        use_cpu=True,
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    trainer = Trainer(model=BertForSequenceClassification(config), args=arguments, train_dataset=Rows())
    trainer.train()
    return float(next(line["grad_norm"] for line in trainer.state.log_history if "grad_norm" in line))


def test_trainer_multiplies_the_gradient(tmp_path: Path) -> None:
    whole = gradient_norm(tmp_path, 1)
    factors = {n: gradient_norm(tmp_path, n) / whole for n in (2, 4, 8)}
    print(f"\nTrainer, effective batch 8: gradient norm {whole:.4f} whole, times {factors}")
    for accumulation, factor in factors.items():
        assert factor == pytest.approx(accumulation, rel=1e-4)

"""sentence-transformers' CrossEncoderTrainer on a packed model: it learns and answers as without, and pads nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset

import brimful
from tiny_files import review, save_classifier

sentence_transformers = pytest.importorskip("sentence_transformers")


def trained(folder: Path, output: Path, *, packed: bool) -> tuple[list[float], Any, Any]:
    from sentence_transformers.cross_encoder import CrossEncoderTrainer, CrossEncoderTrainingArguments
    from sentence_transformers.cross_encoder.losses import CrossEntropyLoss

    torch.manual_seed(0)
    pairs = [(review(bool(i % 2), i), review(bool(i % 3), i + 1)) for i in range(24)]
    columns = {"a": [a for a, _ in pairs], "b": [b for _, b in pairs], "label": [i % 2 for i in range(24)]}
    encoder = sentence_transformers.CrossEncoder(str(folder), device="cpu")
    for module in encoder.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    if packed:
        brimful.packed(encoder.model)
    arguments = CrossEncoderTrainingArguments(
        str(output), num_train_epochs=1, per_device_train_batch_size=8, logging_steps=1, report_to="none",
        use_cpu=True, disable_tqdm=True, save_strategy="no", learning_rate=1e-3, seed=3,
    )  # fmt: skip
    trainer = CrossEncoderTrainer(
        model=encoder, args=arguments, train_dataset=Dataset.from_dict(columns), loss=CrossEntropyLoss(encoder)
    )
    trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    return losses, encoder.predict(pairs[:5]), encoder.model


def test_a_packed_cross_encoder_learns_the_same(tmp_path: Path) -> None:
    folder = save_classifier(tmp_path / "model", ["bad", "good"])
    plain, packed = (trained(folder, tmp_path / "output", packed=packed) for packed in (False, True))
    assert packed[0] == pytest.approx(plain[0], rel=1e-4)
    assert packed[1] == pytest.approx(plain[1], rel=1e-4)
    behind = vars(packed[2])["_brimful_packed"]
    assert (behind.num_packed, behind.num_plain) == (4, 0)  # three steps, one batch of answers

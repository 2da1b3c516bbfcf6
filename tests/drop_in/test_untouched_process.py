"""Random streams, warning filters, environment, signals, flags of torch, logging of the process are the user's."""

from __future__ import annotations

import gc
import logging
import os
import random
import signal
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sklearn.linear_model  # noqa: F401  (importing it sets variables of the environment)
import torch
import transformers
from transformers import TrainingArguments

import brimful
from tiny import FAMILIES
from tiny_files import review, save_base

LOGGERS = (None, "transformers", "datasets", "accelerate", "torch", "huggingface_hub", "sklearn", "brimful")
IDS = torch.tensor([[5, 6, 7], [8, 9, 0]])
BATCH = {"input_ids": IDS, "attention_mask": (IDS != 0).long(), "labels": torch.tensor([0, 2])}


def state() -> dict[str, Any]:
    """Everything in the process that a library could change and its user would miss."""
    backends = torch.backends
    return {
        "random": random.getstate(),
        "numpy": [str(part) for part in np.random.get_state()],
        "torch": torch.get_rng_state().tolist(),
        "cuda": [found.tolist() for found in torch.cuda.get_rng_state_all()] if torch.cuda.is_available() else [],
        "filters": list(warnings.filters),
        "environment": dict(os.environ),
        "dtype": torch.get_default_dtype(),
        "device": torch.get_default_device(),
        "threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "modes": (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")),
        "matmul": (torch.get_float32_matmul_precision(), backends.cuda.matmul.allow_tf32, backends.cudnn.allow_tf32),
        "reduced": (
            backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
            backends.cuda.matmul.allow_fp16_reduced_precision_reduction,
        ),
        "cudnn": (backends.cudnn.benchmark, backends.cudnn.deterministic, backends.cudnn.enabled),
        "kernels": (
            backends.cuda.flash_sdp_enabled(),
            backends.cuda.mem_efficient_sdp_enabled(),
            backends.cuda.math_sdp_enabled(),
            backends.mkldnn.enabled,
        ),
        "deterministic": (torch.get_deterministic_debug_mode(), torch.utils.deterministic.fill_uninitialized_memory),
        "anomalies": torch.is_anomaly_enabled(),
        "errors": (np.geterr(), sys.excepthook, sys.unraisablehook, threading.excepthook),
        "collector": (gc.isenabled(), gc.get_threshold()),
        "signals": [signal.getsignal(number) for number in signal.valid_signals()],
        "logging": [(logging.getLogger(n).level, list(logging.getLogger(n).handlers)) for n in LOGGERS],
        "warnings to logs": (warnings.showwarning, logging.root.manager.disable),
        "verbosity": transformers.logging.get_verbosity(),
        "bars": transformers.utils.logging.is_progress_bar_enabled(),
        "folder": (Path.cwd(), list(sys.path)),
    }


def changed(before: dict[str, Any], after: dict[str, Any]) -> set[str]:
    return {name for name in before if before[name] != after[name]}


def seed() -> None:
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)


@pytest.mark.slow
def test_training_and_answering_leave_the_process_as_it_was(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base")
    texts, labels = [review(bool(i % 2), i) for i in range(20)], [i % 2 for i in range(20)]
    seed()
    before = state()
    fitted = brimful.TextClassifier(base, max_steps=2, device="cpu", max_length=32, output=tmp_path).fit(texts, labels)
    fitted.predict(texts)
    brimful.evaluate(fitted.model_.path, texts, labels=labels, device="cpu")
    brimful.pipeline(model=str(fitted.model_.path), device="cpu")(texts)
    assert changed(before, state()) == set()


@pytest.mark.parametrize("flags", ["as they are", "deterministic, full products"])
def test_steps_leave_the_process_as_it_was(flags: str) -> None:
    """With dropout on, whose masks are not the user's stream."""
    model = FAMILIES["bert"].model(dropout=0.2).train()
    seed()
    precision = torch.get_float32_matmul_precision()
    try:
        if flags != "as they are":
            torch.use_deterministic_algorithms(True, warn_only=True)
            torch.set_float32_matmul_precision("medium")
        before = state()
        step = brimful.Step(model, torch.optim.SGD(model.parameters(), lr=0.1), max_length=16, device="cpu")
        step(BATCH).read()
        step.predict(BATCH)
        step.release()
        assert changed(before, state()) == set()
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_float32_matmul_precision(precision)


def test_a_packed_model_leaves_the_process_as_it_was() -> None:
    """Dropout is off: its masks are drawn from torch's own stream, as the plain model draws them."""
    model = FAMILIES["bert"].model().train()
    seed()
    before = state()
    packed = brimful.packed(model)
    packed(**BATCH).loss.backward()
    packed.unpacked()
    assert changed(before, state()) == set()


def test_trainer_leaves_the_process_as_transformers_trainer_does(tmp_path: Path) -> None:
    """It seeds all streams, and draws the order of rows from them."""
    rows = [{"input_ids": [5, 6 + i], "attention_mask": [1, 1], "labels": i % 3} for i in range(6)]
    left = []
    for kind in (transformers.Trainer, brimful.Trainer, transformers.Trainer, brimful.Trainer):
        seed()
        arguments = TrainingArguments(
            str(tmp_path), report_to="none", use_cpu=True, disable_tqdm=True, save_strategy="no", num_train_epochs=1,
            per_device_train_batch_size=2, eval_strategy="epoch", gradient_accumulation_steps=2,
        )  # fmt: skip
        trainer = kind(model=FAMILIES["bert"].model(), args=arguments, train_dataset=rows, eval_dataset=rows)
        trainer.train()
        trainer.evaluate()
        left.append(state())
        assert getattr(trainer, "stock_reason", None) is None
    assert changed(left[2], left[1]) == set()
    assert changed(left[3], left[2]) == set()


def test_a_name_is_imported_without_a_draw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules may draw as they are imported: rich does."""
    (tmp_path / "draws_on_import.py").write_text("import random\n\nvalue = random.random()\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(brimful._PUBLIC, "value", "draws_on_import")
    before = random.getstate()
    assert 0 <= brimful.__getattr__("value") < 1
    assert random.getstate() == before

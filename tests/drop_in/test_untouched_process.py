"""Random streams, warning filters, environment, signals, default dtype and device of the process are the user's."""

from __future__ import annotations

import logging
import os
import random
import signal
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

import brimful
from tiny_files import review, save_base


def state() -> dict[str, Any]:
    """All of the process that a library could change and its user would miss."""
    return {
        "random": random.getstate(),
        "numpy": [str(part) for part in np.random.get_state()],
        "torch": torch.get_rng_state().tolist(),
        "cuda": [found.tolist() for found in torch.cuda.get_rng_state_all()] if torch.cuda.is_available() else [],
        "filters": list(warnings.filters),
        "environment": dict(os.environ),
        "dtype": torch.get_default_dtype(),
        "device": torch.get_default_device(),
        "threads": (torch.get_num_threads(), torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "matmul": (torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark),
        "deterministic": torch.get_deterministic_debug_mode(),
        "errors": np.geterr(),
        "signals": [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)],
        "logging": (logging.getLogger().level, list(logging.getLogger().handlers), logging.root.manager.disable),
        "verbosity": transformers.logging.get_verbosity(),
        "bars": transformers.utils.logging.is_progress_bar_enabled(),
        "folder": Path.cwd(),
    }


def test_training_and_answering_leave_the_process_as_it_was(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base")
    texts, labels = [review(bool(i % 2), i) for i in range(20)], [i % 2 for i in range(20)]
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)
    before = state()
    fitted = brimful.TextClassifier(base, max_steps=2, device="cpu", max_length=32, output=tmp_path).fit(texts, labels)
    fitted.predict(texts)
    brimful.evaluate(fitted.model_.path, texts, labels=labels, device="cpu")
    brimful.pipeline(model=str(fitted.model_.path), device="cpu")(texts)
    after = state()
    assert {name for name in before if before[name] != after[name]} == set()

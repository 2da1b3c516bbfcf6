"""The batches that a run has a thread make ahead of its step, as many as it needs."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from brimful.core.callbacks import Callbacks
from brimful.core.options.train import TrainOptions
from brimful.data.batches.prefetch import AHEAD
from brimful.engine.assemble import build
from brimful.engine.prepare import prepare
from brimful.levers.precision import choose_precision
from tiny_files import review, save_classifier, write_csv


@pytest.mark.parametrize(
    ("asked", "replayed"), [({}, 0), ({"prefetch": 5}, 5), ({"transform": "same.py:same", "num_workers": 1}, AHEAD)]
)
def test_replayed_steps_of_one_process_have_none_ahead(tmp_path: Path, asked: dict[str, Any], replayed: int) -> None:
    """Unless a thread is asked for, or a transform takes its time."""
    model = save_classifier(tmp_path / "model", ["bad", "good"])
    data = write_csv(
        tmp_path / "rows.csv", ("text", "label"), ([review(bool(i % 2), i), str(i % 2)] for i in range(16))
    )
    if "transform" in asked:
        file = tmp_path / "same.py"
        file.write_text("def same(texts, random):\n    return texts\n", "utf-8")
        asked = asked | {"transform": f"{file}:same"}
    options = TrainOptions(
        model=str(model), data=str(data), output=str(tmp_path / "run"), new_head=True, eval_split=0.0, **asked
    )
    precision = choose_precision("fp32", torch.device("cpu"))
    built = build(options, prepare(options, Callbacks()), precision, Callbacks())

    def of(captures: bool, count: int) -> int:
        step: Any = SimpleNamespace(captures=captures, ranks=SimpleNamespace(count=count))
        return replace(built, step=step).ahead

    with closing(built.source):
        launched = asked.get("prefetch", AHEAD)
        assert built.ahead == of(False, 1) == of(True, 2) == launched
        assert of(True, 1) == replayed

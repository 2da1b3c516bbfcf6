"""Runs that go on with other levers of memory than they began with: what a run out of memory is told to add."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

import brimful
from brimful.core.callbacks import Callbacks
from runs import save_tiny_model, single_label_rows, write_rows
from tolerances import difference

ASK: dict[str, Any] = {
    "batch_size": 8, "max_steps": 6, "save_steps": 3, "learning_rate": 1e-3, "lr_scheduler_type": "constant",
    "eval_split": 0.0, "max_grad_norm": 0.0, "device": "cpu",
}  # fmt: skip
LEVERS: list[dict[str, Any]] = [
    {"optimizer_offload": True}, {"stream_weights": "disk"}, {"optimizer_in_backward": True}
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("levers", LEVERS, ids=lambda levers: next(iter(levers)))
@pytest.mark.sampled
def test_levers_of_memory_may_differ(levers: dict[str, Any], tmp_path: Path) -> None:
    """Begun with and gone on without, and the other way round: weights of a run that was left alone."""
    rows = write_rows(tmp_path / "rows.jsonl", single_label_rows(40))
    model = save_tiny_model(tmp_path / "model", num_hidden_layers=3)

    def train(output: Path, **more: Any) -> Any:
        brimful.train(rows, model=model, output=output, callbacks=Callbacks(), **ASK, **more)
        return load_file(output / "model" / "model.safetensors")

    alone = train(tmp_path / "plain")
    train(tmp_path / "with", **levers)
    for begun, more in (("plain", levers), ("with", {})):
        output = Path(shutil.copytree(tmp_path / begun, tmp_path / f"{begun} and on"))
        shutil.rmtree(output / "model")
        shutil.rmtree(max((output / "checkpoints").glob("step-*")))
        found = train(output, resume=True, **more)
        assert all(difference(found[name], weight) < 1e-6 for name, weight in alone.items())

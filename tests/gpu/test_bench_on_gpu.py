"""A bench's row of a compiled Trainer on a GPU: CUDA graphs over a few lengths, each met before the timed steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from brimful.benchmarking.trainer_side import measure_trainers
from brimful.benchmarking.workload import make_work
from brimful.core.bench import Steps
from brimful.core.callbacks import Callbacks
from brimful.core.options.bench import BenchOptions
from brimful.hardware.process_settings import matmul_precision
from tiny_files import save_classifier, write_csv

pytestmark = pytest.mark.gpu


class Heard(Callbacks):
    def __init__(self) -> None:
        self.warnings: list[str] = []

    def warning(self, text: str) -> None:
        self.warnings.append(text)


def test_a_trainer_of_cuda_graphs_learns_as_the_plain_one(tmp_path: Path) -> None:
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    save_classifier(tmp_path / "model", ("bad", "good"), **no_dropout)
    rows = [("long " * (1 + i // 2), ("bad", "good")[i % 2]) for i in range(48)]
    write_csv(tmp_path / "rows.csv", ("text", "label"), rows)
    asked = BenchOptions(
        model=str(tmp_path / "model"), data=str(tmp_path / "rows.csv"), batch_size=8, learning_rate=1e-3
    )
    steps, heard, losses = Steps(warm_up=2, repeats=3, block=4), Heard(), list[float]()
    graphs = {"torch_compile": True, "torch_compile_mode": "reduce-overhead", "padded_lengths": 2}
    for settings in ({}, graphs):
        with matmul_precision("highest"):  # Trainer allows TF32 to compile, in the whole process
            found = measure_trainers(make_work(asked, Callbacks(), steps), settings, steps, heard, lambda _: None)
        assert found.loss is not None
        losses.append(found.loss)
    assert losses[1] == pytest.approx(losses[0], rel=1e-2)
    [said] = heard.warnings
    assert said.startswith("compiled for 2 lengths in ")

"""A loss or gradient that is not finite: never applied, named with its rows, and the end of the run after five."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import brimful
from brimful.core.callbacks import Callbacks
from brimful.core.errors import NonFiniteError
from brimful.data.batches.batch import Sampler
from brimful.engine.training.checkpoint import load_checkpoint
from runs import POISON, Runner, checkpoints, events, texts, write_rows

pytestmark = pytest.mark.xdist_group("runs")  # one process makes what they share

SIZES = {"max_length": 48, "batch_size": 8, "learning_rate": 1e-3, "lr_scheduler_type": "constant"}
#: A target whose squared error is infinite in fp32; one whose squared error is finite and whose gradient's norm is not.
NO_LOSS, NO_GRADIENT = 1e30, 1.5e19


class Warnings(Callbacks):
    def __init__(self) -> None:
        self.said: list[str] = []

    def warning(self, text: str) -> None:
        self.said.append(text)


def regression_rows(path: Path, number: int, bad: dict[int, float]) -> Path:
    """Rows with targets between -1 and 1, but for those in `bad`."""
    rows = [{"text": text, "label": math.sin(index)} for index, text in enumerate(texts(number))]
    for index, target in bad.items():
        rows[index]["label"] = target
    return write_rows(path, rows)


def train(rows: Path, model: Path, output: Path, **more: Any) -> tuple[brimful.Run, Warnings]:
    """All rows are trained on, so that sample i is row i + 1."""
    heard = Warnings()
    options = SIZES | {"eval_split": 0.0, "num_train_epochs": 1.0} | more
    return brimful.train(rows, model=model, output=output, callbacks=heard, **options), heard


def order(number: int) -> Sampler:
    return Sampler(num_samples=number, batch_size=8, seed=42)


def test_the_row_is_named_on_the_terminal_and_in_the_record(
    poisoned: tuple[Path, Path], runner: Runner, tmp_path: Path
) -> None:
    """Its logits are NaN; packed with others, it spoils the gradient of all and the loss of none but itself."""
    model, rows = poisoned
    words = ["train", str(rows), "--model", str(model), "--output", str(tmp_path / "run"), "--num-train-epochs", "2"]
    ended = runner([*words, "--max-length", "48", "--batch-size", "8", "--json"])
    assert ended.code == 0, ended.said
    assert "packed                                    exact" in " ".join([ended.said])
    skipped = events(tmp_path / "run", "skipped")
    assert [event["rows"] for event in skipped] == [[[str(rows), 32]]] * 2
    for event in skipped:
        said = f"batch {event['batch'] + 1} skipped: its loss is not finite; samples: "
        assert said in ended.said
    assert f"{rows.name} row 32" in ended.said
    assert json.loads(ended.said.splitlines()[-1])["skipped_steps"] == 2
    weights = load_file(tmp_path / "run" / "model" / "model.safetensors")
    words_EH = weights.pop("bert.embeddings.word_embeddings.weight")
    assert POISON not in ended.said
    assert torch.isfinite(words_EH[:-1]).all()
    assert all(torch.isfinite(weight).all() for weight in weights.values())


@pytest.mark.slow
@pytest.mark.parametrize("optim", ["adamw_torch_fused", "sgd"])
def test_it_is_never_applied(optim: str, poisoned: tuple[Path, Path], tmp_path: Path) -> None:
    """A run that ends with the bad batch has the weights and optimizer states of one that ends just before it."""
    model, rows = poisoned
    samples = order(60)
    bad = next(number for number in range(8) if 31 in samples.samples(number))
    assert bad > 0
    more = {"optim": optim, "weight_decay": 0.1}
    train(rows, model, tmp_path / "before", max_steps=bad, **more)
    run, _ = train(rows, model, tmp_path / "with", num_train_epochs=(bad + 1) / samples.batches_per_epoch, **more)
    assert (run.steps, run.skipped_steps) == (bad, 1)
    before, after = (
        load_checkpoint(tmp_path / name / "checkpoints" / f"step-{bad:08d}").state for name in ("before", "with")
    )
    assert after.counters == before.counters
    assert after.optimizer.keys() == before.optimizer.keys()
    groups = [(before.weights, after.weights), (before.buffers, after.buffers)]
    groups += [(kept.tensors, after.optimizer[name].tensors) for name, kept in before.optimizer.items()]
    for group, found in groups:
        assert found.keys() == group.keys()
        for name, tensor in group.items():
            assert torch.equal(found[name].nan_to_num(7.0), tensor.nan_to_num(7.0)), name


def test_an_infinite_loss_and_an_infinite_gradient(model: Path, tmp_path: Path) -> None:
    samples = order(40)
    loss_row, gradient_row = int(samples.samples(1)[3]), int(samples.samples(3)[0])
    rows = regression_rows(tmp_path / "rows.jsonl", 40, {loss_row: NO_LOSS, gradient_row: NO_GRADIENT})
    run, heard = train(rows, model, tmp_path / "run", task="regression", target_scaling="off")
    assert (run.steps, run.skipped_steps) == (3, 2)
    first, second = events(tmp_path / "run", "skipped")
    assert (first["batch"], first["what"]) == (1, "loss")
    assert first["rows"] == [[str(rows), loss_row + 1]]
    assert (second["batch"], second["what"]) == (3, "gradient")
    # No row's own loss tells which one it was: all of the batch are named.
    assert sorted(row for _, row in second["rows"]) == sorted(int(i) + 1 for i in samples.samples(3))
    assert heard.said[1].endswith("and 3 more")


@pytest.mark.sampled
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_five_in_a_row_end_the_run(precision: str, model: Path, runner: Runner, tmp_path: Path) -> None:
    samples = order(80)
    bad = {int(i): NO_LOSS for number in range(3, 8) for i in samples.samples(number)}
    rows = regression_rows(tmp_path / "rows.jsonl", 80, bad)
    words = [
        *("train", str(rows), "--model", str(model), "--output", str(tmp_path / "run"), "--eval-split", "0"),
        *(
            "--task",
            "regression",
            "--target-scaling",
            "off",
            "--max-length",
            "48",
            "--batch-size",
            "8",
            "--save-steps",
            "2",
        ),
        *("--precision", precision),
    ]
    ended = runner(words)
    assert ended.code == 3, ended.said
    assert "error: 5 steps in a row were not finite, after 3 applied ones; batch 8 skipped" in ended.said
    assert "hint: lower --learning-rate" in ended.said
    assert [event["batch"] for event in events(tmp_path / "run", "skipped")] == [3, 4, 5, 6, 7]
    (stopped,) = events(tmp_path / "run", "stopped")
    assert (stopped["step"], stopped["why"]) == (3, "5 steps in a row were not finite")
    assert checkpoints(tmp_path / "run") == [2]
    assert not (tmp_path / "run" / "model").exists()
    assert runner([*words, "--resume"]).code == 3


def test_four_in_a_row_do_not(model: Path, tmp_path: Path) -> None:
    samples = order(80)
    bad = {int(i): NO_LOSS for number in (1, 2, 3, 4, 6, 7, 8, 9) for i in samples.samples(number)}
    rows = regression_rows(tmp_path / "rows.jsonl", 80, bad)
    run, heard = train(rows, model, tmp_path / "run", task="regression", target_scaling="off")
    assert (run.steps, run.skipped_steps, len(heard.said)) == (2, 8, 8)


def test_five_in_a_row_across_a_stop(model: Path, runner: Runner, tmp_path: Path) -> None:
    """The count of those in a row comes back with the checkpoint, or they come back themselves."""
    samples = order(80)
    bad = {int(i): NO_LOSS for number in range(3, 8) for i in samples.samples(number)}
    words = [
        *("train", str(regression_rows(tmp_path / "rows.jsonl", 80, bad)), "--model", str(model)),
        *("--output", str(tmp_path / "run"), "--eval-split", "0"),
        *("--task", "regression", "--target-scaling", "off", "--max-length", "48", "--batch-size", "8"),
    ]
    assert runner(words, "term:event:skipped:2").code == 143  # those in flight are waited for
    ended = runner([*words, "--resume"])
    assert ended.code == 3, ended.said
    assert [event["batch"] for event in events(tmp_path / "run", "skipped")] == [3, 4, 5, 6, 7]


def test_the_error_of_the_python_call(model: Path, tmp_path: Path) -> None:
    rows = regression_rows(tmp_path / "rows.jsonl", 48, dict.fromkeys(range(48), NO_LOSS))
    with pytest.raises(NonFiniteError, match="5 steps in a row were not finite, after 0 applied ones") as caught:
        train(rows, model, tmp_path / "run", task="regression", target_scaling="off")
    assert caught.value.exit_code == 3

"""Runs of the command line whose processes have one model's weights together: what they learn, say and leave."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification

from brimful.cli.commands import run
from brimful.core.errors import OptionError
from brimful.core.options.train import TrainOptions
from brimful.engine.training.checkpoint import checkpoint_path, load_checkpoint
from brimful.hardware import meeting
from engine.training.test_several_processes import start, told, words
from engine.training.test_sharded_training import same
from runs import events, save_tiny_model, single_label_rows, write_rows

TOGETHER = ("--tensor-parallel", "2")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tensor-parallel")
    save_tiny_model(folder / "model", family="qwen3", dropout=0.0)
    write_rows(folder / "rows.jsonl", single_label_rows(75))
    return folder


@pytest.mark.thorough
def test_two_with_weights_together_learn_what_one_does(files: Path, tmp_path: Path) -> None:
    """Losses, metrics, the best model; gone on with by two groups, and by one process."""
    ask = ("--lr-scheduler-type", "constant", "--class-weights", "balanced", "--save-steps", "2", "--eval-steps", "2")
    ask += ("--save-total-limit", "9", "--metric-for-best-model", "loss")
    assert run(words(files, tmp_path / "one", *ask, "--max-steps", "6")) == 0
    parts = [(2, TOGETHER), (4, TOGETHER), (1, ())]
    for number, (count, more) in enumerate(parts):
        steps = str(2 * number + 2)
        arguments = words(files, tmp_path / "two", *ask, "--max-steps", steps, "--resume", *more)
        all_of_them = start(tmp_path / f"logs-{number}", *arguments, count=count)
        assert all_of_them.results() == [0] * count
        levers = json.loads((tmp_path / "two" / "run.json").read_text())["recipe"]["levers"]
        chosen = {lever["name"]: lever["value"] for lever in levers}
        assert chosen.get("tensor_parallel") == ("2" if more == TOGETHER else None)
        assert chosen["packing"] == "packed"
        if number == 0:
            assert "weights are in parts of several processes" in all_of_them.said(0)
            assert "cut layers beside whole ones" in all_of_them.said(0)
            assert all_of_them.said(1).strip() == ""
            work = json.loads((tmp_path / "two" / "run.json").read_text())["processes"]
            assert [each["samples"] for each in work["each"]] == [16, 16]  # the same rows
    same(told(tmp_path / "one"), told(tmp_path / "two"))
    for one, two in zip(*(events(tmp_path / name, "evaluated") for name in ("one", "two")), strict=True):
        assert two["metrics"] == pytest.approx(one["metrics"], rel=1e-3)
    for step in (2, 4):
        folders = (tmp_path / name / "checkpoints" for name in ("one", "two"))
        alone, together = (load_checkpoint(checkpoint_path(folder, step)).state for folder in folders)
        assert alone.optimizer.keys() == together.optimizer.keys()
        for name, kept in alone.optimizer.items():
            for key, tensor in kept.tensors.items():
                torch.testing.assert_close(together.optimizer[name].tensors[key], tensor, rtol=2e-2, atol=1e-5)


@pytest.mark.thorough
def test_the_saved_model_is_a_plain_one(files: Path, tmp_path: Path) -> None:
    """The best of the run, in padded rows and several micro-batches, with layers computed again and weights frozen."""
    ask = words(files, tmp_path / "run", *TOGETHER, "--metric-for-best-model", "loss", "--eval-steps", "1")
    ask += ["--warmup-steps", "4"]
    ask += ["--max-steps", "3", "--packing", "off", "--token-budget", "64", "--gradient-checkpointing", "full"]
    ask[ask.index("1e-3")] = "10"  # worse and worse
    both = start(tmp_path / "logs", *ask, "--freeze", "embeddings")
    assert both.results() == [0, 0]
    assert "was best, and is kept" in both.said(0)
    (step,) = [int(words.split()[0]) for words in both.said(0).split("the model after step ")[1:]]
    saved = load_checkpoint(checkpoint_path(tmp_path / "run" / "checkpoints", step)).state.weights
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "run" / "model")
    for name, weight in saved.items():
        assert torch.equal(model.get_parameter(name), weight)
    before = load_file(files / "model" / "model.safetensors")["embed_tokens.weight"]
    assert torch.equal(model.model.embed_tokens.weight, before)


@pytest.mark.slow
def test_what_processes_cannot_have_together_is_refused(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meeting, "_WORD_S", 0.1)
    save_tiny_model(tmp_path / "bert" / "model")
    write_rows(tmp_path / "bert" / "rows.jsonl", single_label_rows(20))
    for folder, count, more, said in (
        (tmp_path / "bert", 2, (), "transformers has no plan for bert"),
        (files, 3, (), "needs a multiple of 2 processes, and there are 3"),
        (files, 2, ("--optim", "adafactor"), "adafactor may look at whole weights"),
        (files, 2, ("--gradient-checkpointing", "offload"), "is not the same in all processes"),
    ):
        name = f"{folder.name}-{count}-{len(more)}"
        refused = start(tmp_path / name, *words(folder, tmp_path / "run", *TOGETHER, *more), count=count)
        assert refused.exit_codes()[0] == 2
        assert said in refused.said(0)
        assert "hint: " in refused.said(0)
        assert "Traceback" not in refused.said(0)
    assert run(words(files, tmp_path / "run", *TOGETHER)) == 2  # one process


@pytest.mark.parametrize(
    "other",
    [
        {"sharding": "states"},
        {"peft": "lora"},
        {"stream_weights": "host"},
        {"optimizer_offload": True},
        {"optimizer_state_dtype": "8bit"},
        {"reduce_dtype": "bf16"},
        {"gpus": "3"},
        {"tensor_parallel": 0},
    ],
)
def test_options_that_do_not_go_together_are_refused(other: dict[str, object]) -> None:
    with pytest.raises(OptionError) as error:
        TrainOptions(**{"data": "rows.csv", "model": "model", "output": "run", "tensor_parallel": 2, **other})
    assert error.value.hint

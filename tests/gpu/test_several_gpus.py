"""Training on two GPUs beside one, captured beside eager: the same losses and gradient norms, and a clean end."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from gpu.word_models import save_word_model
from runs import checkpoints, events, save_tiny_model, single_label_rows, write_rows

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

WORDS = [f"word{i}" for i in range(200)]
ASK = ["--max-steps", "40", "--logging-steps", "1", "--learning-rate", "1e-3", "--max-length", "128", "--no-baselines"]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder, draw = tmp_path_factory.mktemp("several"), random.Random(0)
    with (folder / "data.jsonl").open("w") as file:
        for _ in range(700):
            words = draw.choices(WORDS[10:], k=draw.randrange(3, 100))
            label = draw.randrange(4)
            words.insert(draw.randrange(len(words)), WORDS[label])
            file.write(json.dumps({"text": " ".join(words), "label": f"class {label}"}) + "\n")
    sizes = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 256}
    save_word_model(
        folder / "model", WORDS, **sizes, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    )  # fmt: skip
    return folder / "data.jsonl", folder / "model"


def train(inputs: tuple[Path, Path], output: Path, gpus: int, *more: str) -> list[dict[str, Any]]:
    """Steps of a run in processes of its own."""
    data, model = map(str, inputs)
    words = [sys.executable, "-m", "brimful", "train", data, "--model", model, "--output", str(output)]
    ended = subprocess.run(
        [*words, "--gpus", str(gpus), *ASK, *more], capture_output=True, text=True, timeout=300, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert "weights of processes" not in ended.stderr
    return events(output, "step")


def start(inputs: tuple[Path, Path], output: Path, *more: str) -> subprocess.Popen[str]:
    """A run on two GPUs, under way."""
    data, model = map(str, inputs)
    words = [sys.executable, "-m", "brimful", "train", data, "--model", model, "--output", str(output), "--gpus", "2"]
    return subprocess.Popen([*words, *ASK, *more], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def process_of(parent: int, rank: int) -> int:
    """The number of the process that a launcher started as a rank."""
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            started_by = int(folder.joinpath("stat").read_text().rpartition(")")[2].split()[1])
            if started_by == parent and f"RANK={rank}" in folder.joinpath("environ").read_text().split("\0"):
                return int(folder.name)
    raise AssertionError(f"process {rank} is not there")


def execution(output: Path) -> str:
    recipe = json.loads((output / "run.json").read_text())["recipe"]["levers"]
    return next(str(lever["value"]) for lever in recipe if lever["name"] == "execution")


@pytest.mark.parametrize("budget", ["32768", "512"], ids=["one micro-batch", "several"])
@pytest.mark.parametrize("reduce_dtype", ["fp32", "bf16"])
def test_captured_on_two_is_one(inputs: tuple[Path, Path], tmp_path: Path, budget: str, reduce_dtype: str) -> None:
    """Every step in fp32: the sums are in another order, and nothing else differs."""
    ask = ["--precision", "fp32", "--token-budget", budget]
    one = train(inputs, tmp_path / "one", 1, *ask)
    wire = ["--reduce-dtype", reduce_dtype]
    two = train(inputs, tmp_path / "two", 2, *ask, "--execution", "captured", *wire)
    eager = train(inputs, tmp_path / "eager", 2, *ask, "--execution", "eager", *wire)
    assert execution(tmp_path / "two") == "captured"
    tolerance = 1e-2 if reduce_dtype == "bf16" else 1e-3
    for alone, captured, launched in zip(one, two, eager, strict=True):
        assert captured["loss"] == pytest.approx(alone["loss"], rel=tolerance)
        assert captured["grad_norm"] == pytest.approx(alone["grad_norm"], rel=5 * tolerance)
        assert captured["loss"] == pytest.approx(launched["loss"], rel=tolerance)


@pytest.mark.parametrize("more", [("--no-peer-copies",), ()], ids=["sent", "copied"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_parts_are_whole_in_checkpoints(
    inputs: tuple[Path, Path], tmp_path: Path, precision: str, more: tuple[str, ...]
) -> None:
    """Two GPUs, each with the states of its part, and then one, or the other way round: as one alone."""
    ask = ["--precision", precision, "--execution", "captured", "--lr-scheduler-type", "constant", "--resume", *more]
    expected = train(inputs, tmp_path / "whole", 1, *ask)
    for first, second in ((2, 1), (1, 2)):
        output = tmp_path / f"{first}, {second}"
        for gpus, steps in ((first, "20"), (second, "40")):
            train(inputs, output, gpus, *ask, "--max-steps", steps)
            levers = {each["name"]: each for each in json.loads((output / "run.json").read_text())["recipe"]["levers"]}
            if gpus == 2:
                assert levers["sharding"]["value"] == "states"
                assert ("by copies between" in levers["processes"]["reason"]) == (not more)
            else:
                assert "sharding" not in levers
        tolerance = 1e-3 if precision == "fp32" else 5e-2
        for alone, together in zip(expected, events(output, "step"), strict=True):
            assert together["loss"] == pytest.approx(alone["loss"], rel=tolerance)
        saved = [load_file(tmp_path / name / "model" / "model.safetensors") for name in ("whole", output.name)]
        names = [name for name in saved[0] if not name.endswith("key.bias")]
        one, two = (torch.cat([each[name].flatten() for name in names]) for each in saved)
        assert float((one - two).norm() / one.norm()) < tolerance


@pytest.mark.parametrize("sharding", ["none", "states"])
def test_compiled_in_bf16_learns_what_one_does(inputs: tuple[Path, Path], tmp_path: Path, sharding: str) -> None:
    ask = ["--precision", "bf16", "--execution", "compiled", "--sharding", sharding]
    one, two = (train(inputs, tmp_path / str(gpus), gpus, *ask) for gpus in (1, 2))
    assert execution(tmp_path / "2") == "compiled"
    for alone, together in zip(one, two, strict=True):
        assert together["loss"] == pytest.approx(alone["loss"], rel=5e-2)


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-3), ("bf16", 5e-2)])
def test_weights_together_learn_what_one_does(tmp_path: Path, precision: str, tolerance: float) -> None:
    """A model with a plan of transformers', every layer cut; what is saved is whole."""
    sizes = {"hidden_size": 256, "head_dim": 64, "intermediate_size": 512, "max_position_embeddings": 256}
    model = save_tiny_model(tmp_path / "model", family="qwen3", dropout=0.0, **sizes)
    inputs = (write_rows(tmp_path / "rows.jsonl", single_label_rows(700)), model)
    ask = ["--precision", precision, "--execution", "eager"]
    one = train(inputs, tmp_path / "one", 1, *ask)
    two = train(inputs, tmp_path / "two", 2, *ask, "--tensor-parallel", "2")
    for alone, together in zip(one, two, strict=True):
        assert together["loss"] == pytest.approx(alone["loss"], rel=tolerance)
    saved = [load_file(tmp_path / name / "model" / "model.safetensors") for name in ("one", "two")]
    assert {name: w.shape for name, w in saved[0].items()} == {name: w.shape for name, w in saved[1].items()}


def test_memory_that_does_not_suffice_is_met_by_both(inputs: tuple[Path, Path], tmp_path: Path) -> None:
    """Under a limit that no graph of the first budget fits, or no batch: the run goes on smaller, and ends."""
    told = train(inputs, tmp_path / "run", 2, "--precision", "fp32", "--memory-limit", "1.5GB", "--batch-size", "512")
    assert len(told) == 40


@pytest.mark.parametrize("signal_sent", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_one_that_is_gone_ends_the_other(inputs: tuple[Path, Path], tmp_path: Path, signal_sent: int) -> None:
    """In the midst of replayed graphs, whose barriers wait on the GPU; one process goes on from the last checkpoint."""
    output = tmp_path / "run"
    same = ["--precision", "bf16", "--lr-scheduler-type", "constant", "--save-steps", "20"]
    ask = [*same, "--execution", "captured", "--max-steps", "100000"]
    running = start(inputs, output, *ask)
    try:
        until = time.monotonic() + 200  # against hanging
        while not checkpoints(output):
            assert running.poll() is None, running.stderr.read()  # type: ignore[union-attr]
            assert time.monotonic() < until
            time.sleep(0.05)
        gone = process_of(running.pid, 1)
        os.kill(gone, signal_sent)
        said = running.communicate(timeout=120)[1]
        with suppress(ProcessLookupError):
            os.kill(gone, signal.SIGKILL)
    finally:
        running.kill()
    assert running.returncode == 7
    assert "error: process 1 of 2 (" in said
    last = checkpoints(output)[-1]
    train(inputs, output, 1, *same, "--execution", "captured", "--max-steps", str(last + 5), "--resume")
    assert events(output, "step")[-1]["step"] == last + 5

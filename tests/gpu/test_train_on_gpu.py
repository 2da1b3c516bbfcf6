"""Whole runs on a GPU: precisions, determinism, resume, peak memory, the saved model."""

from __future__ import annotations

import hashlib
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification

import brimful
from brimful.engine.training.checkpoint import checkpoint_path, load_checkpoint
from brimful.engine.training.checkpoint_writer import CheckpointWriter
from brimful.hardware.memory import MemoryWatch
from brimful.step.state import Counters, StepState
from gpu.word_models import save_word_model

pytestmark = pytest.mark.gpu

WORDS = [f"word{i}" for i in range(200)]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(data, model): 600 texts whose label is a word in them, and a small BERT that never saw any."""
    folder = tmp_path_factory.mktemp("inputs")
    draw = random.Random(0)
    with (folder / "data.jsonl").open("w") as file:
        for _ in range(600):
            words = draw.choices(WORDS[10:], k=draw.randrange(3, 100))
            label = draw.randrange(4)
            words.insert(draw.randrange(len(words)), WORDS[label])
            file.write(json.dumps({"text": " ".join(words), "label": f"class {label}"}) + "\n")
    sizes = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 256}
    save_word_model(folder / "model", WORDS, **sizes)
    return folder / "data.jsonl", folder / "model"


def train(inputs: tuple[Path, Path], output: Path, **options: Any) -> brimful.Run:
    asked = {"num_train_epochs": 6, "learning_rate": 1e-3, "device": "cuda", "max_length": 128} | options
    return brimful.train(inputs[0], model=inputs[1], output=output, **asked)


@pytest.mark.parametrize("execution", ["captured", "compiled"])
def test_a_whole_command_says_where_its_time_went(
    inputs: tuple[Path, Path], tmp_path: Path, execution: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cold, with the GPU started beside the imports, and warm; the process ends by itself."""
    for name in ("XDG_CACHE_HOME", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    weights = []
    for output in (tmp_path / "cold", tmp_path / "warm"):
        words = ["train", str(inputs[0]), "--model", str(inputs[1]), "--output", str(output), "--device", "cuda"]
        words += ["--num-train-epochs", "2", "--execution", execution, "--max-length", "128"]
        done = subprocess.run([sys.executable, "-m", "brimful", *words], capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        run = json.loads((output / "run.json").read_text("utf-8"))
        print(output.name, execution, run["phases_s"])
        names = {"start", "data", "tokens", "model", "setup", "capture", "steps", "evaluation", "saving", "export"}
        assert run["phases_s"].keys() == names
        assert run["train_s"] == pytest.approx(run["phases_s"]["capture"] + run["phases_s"]["steps"], abs=0.5)
        weights.append(run["steps"])
    assert weights[0] == weights[1]


def test_a_checkpoint_holds_what_was_there_when_it_was_begun(tmp_path: Path) -> None:
    """A large state of the device, written over as soon as it may be."""
    counters = Counters(applied=1, scale=1.0, growth=0, used=())
    writer = CheckpointWriter(tmp_path, "run", keep=2)
    for step in (1, 2):
        weights = {f"w{i}": torch.randn(1 << 22, device="cuda") for i in range(16)}
        expected = {name: tensor.cpu() for name, tensor in weights.items()}
        state = StepState(weights=weights, buffers={}, optimizer={}, counters=counters)
        writer.begin(step, state=state, loop={}, protect=(), passed_over=())
        for tensor in weights.values():
            tensor.zero_()
        saved = writer.settle()
        assert saved is not None
        assert saved.failure is None
        found = load_checkpoint(checkpoint_path(tmp_path, step)).state.weights
        assert all(found[name].equal(expected[name]) for name in expected)
    writer.close()


def weights_hash(folder: Path) -> str:
    return hashlib.sha256((folder / "model" / "model.safetensors").read_bytes()).hexdigest()


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", "fp16"])
@pytest.mark.parametrize("execution", ["eager", "captured", "compiled"])
def test_learns(inputs: tuple[Path, Path], tmp_path: Path, precision: str, execution: str) -> None:
    run = train(inputs, tmp_path / "run", precision=precision, execution=execution)
    assert run.packed, run.packed_reason
    assert run.recipe.value("execution") == execution
    accuracy = run.metrics["accuracy"]
    assert accuracy is not None
    assert accuracy > 0.9
    assert run.peak_bytes.allocated is not None
    assert run.peak_bytes.nvml is not None
    assert run.peak_bytes.allocated <= (run.peak_bytes.reserved or 0) < run.peak_bytes.nvml


def test_peaks_are_not_of_what_came_before() -> None:
    torch.cuda.empty_cache()
    torch.empty(1 << 30, dtype=torch.uint8, device="cuda")  # freed, and kept by torch's allocator
    before = torch.cuda.memory_reserved()
    found = MemoryWatch(torch.device("cuda")).peak()
    assert found.reserved is not None
    assert found.reserved <= before - (1 << 30)


def test_padded_and_split_learn_the_same(inputs: tuple[Path, Path], tmp_path: Path) -> None:
    whole = train(inputs, tmp_path / "whole", precision="fp32", max_steps=20)
    split = train(inputs, tmp_path / "split", precision="fp32", max_steps=20, token_budget=300)
    padded = train(inputs, tmp_path / "padded", precision="fp32", max_steps=20, packing="off")
    assert not padded.packed
    norms = [_first_gradient_norm(tmp_path / name) for name in ("whole", "split", "padded")]
    assert norms == pytest.approx([norms[0]] * 3, rel=0.5)  # dropout differs; its exactness is tested without
    assert split.recipe.value("token_budget") != whole.recipe.value("token_budget")


def _first_gradient_norm(folder: Path) -> float:
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return float(next(event["grad_norm"] for event in events if event["kind"] == "step"))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_deterministic_runs_are_equal_bit_for_bit(inputs: tuple[Path, Path], tmp_path: Path, precision: str) -> None:
    options = {"precision": precision, "deterministic": True, "max_steps": 60}
    train(inputs, tmp_path / "one", **options)
    train(inputs, tmp_path / "two", **options)
    assert weights_hash(tmp_path / "one") == weights_hash(tmp_path / "two")


def test_resume_continues(inputs: tuple[Path, Path], tmp_path: Path) -> None:
    options = {"precision": "bf16", "deterministic": True, "max_steps": 60, "save_steps": 20, "execution": "eager"}
    train(inputs, tmp_path / "whole", **options)
    train(inputs, tmp_path / "again", **options)
    again = tmp_path / "again"
    run = json.loads((again / "run.json").read_text())
    (again / "run.json").write_text(json.dumps(run | {"status": "running"}))
    newest = max((again / "checkpoints").iterdir())
    (newest / "manifest.json").unlink()
    train(inputs, again, **options, resume=True)
    assert weights_hash(again) == weights_hash(tmp_path / "whole")


def test_saved_model_is_fp32_and_loads(inputs: tuple[Path, Path], tmp_path: Path) -> None:
    train(inputs, tmp_path / "run", precision="bf16", max_steps=5)
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "run" / "model")
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    texts = [" ".join(WORDS[10:30]), WORDS[1]]
    with brimful.Classifier(tmp_path / "run" / "model") as classifier:
        answers = classifier(texts)
    assert [set(answer) for answer in answers] == [{"label", "score"}] * 2

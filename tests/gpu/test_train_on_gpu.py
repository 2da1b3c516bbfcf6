"""Whole runs on a GPU: precisions, determinism, resume, peak memory, the saved model."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
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
from brimful.measurement.memory import Kept, MemoryWatch, PhaseMemory
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
    found = MemoryWatch(torch.device("cuda"), PhaseMemory(Kept)).peak()
    assert found.reserved is not None
    assert found.reserved <= before - (1 << 30)


@pytest.fixture(scope="module")
def without_dropout(inputs: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The same, with a model that draws nothing."""
    folder = tmp_path_factory.mktemp("plain") / "model"
    shutil.copytree(inputs[1], folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    (folder / "config.json").write_text(json.dumps(config))
    return inputs[0], folder


def test_padded_and_split_learn_the_same(without_dropout: tuple[Path, Path], tmp_path: Path) -> None:
    """Loss and gradient norm of each of the first steps, in fp32; `test_parity_on_gpu` has the whole gradient."""
    options: dict[str, Any] = {"precision": "fp32", "max_steps": 10, "logging_steps": 1, "learning_rate": 1e-4}
    ways: dict[str, dict[str, Any]] = {"whole": {}, "split": {"token_budget": 300}, "padded": {"packing": "off"}}
    runs = {name: train(without_dropout, tmp_path / name, **options, **how) for name, how in ways.items()}
    assert not runs["padded"].packed
    assert runs["split"].recipe.value("token_budget") != runs["whole"].recipe.value("token_budget")
    expected = _steps(tmp_path / "whole")
    assert len(expected) == 10
    for name in ("split", "padded"):
        found = _steps(tmp_path / name)
        assert found[0] == pytest.approx(expected[0], rel=1e-5)
        for one, other in zip(found, expected, strict=True):
            assert one == pytest.approx(other, rel=1e-3)


def _steps(folder: Path) -> list[tuple[float, float]]:
    """Loss and norm of the gradient of each step."""
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return [(event["loss"], event["grad_norm"]) for event in events if event["kind"] == "step"]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_deterministic_runs_are_equal_bit_for_bit(inputs: tuple[Path, Path], tmp_path: Path, precision: str) -> None:
    options = {"precision": precision, "deterministic": True, "max_steps": 60}
    train(inputs, tmp_path / "one", **options)
    train(inputs, tmp_path / "two", **options)
    assert weights_hash(tmp_path / "one") == weights_hash(tmp_path / "two")


def test_resume_continues(inputs: tuple[Path, Path], tmp_path: Path) -> None:
    options = {"precision": "bf16", "deterministic": True, "max_steps": 60, "save_steps": 20, "execution": "eager"}
    train(inputs, tmp_path / "whole", **options)
    _stop_before_the_last_checkpoint(inputs, tmp_path / "again", **options)
    train(inputs, tmp_path / "again", **options, resume=True)
    assert weights_hash(tmp_path / "again") == weights_hash(tmp_path / "whole")


def _stop_before_the_last_checkpoint(inputs: tuple[Path, Path], folder: Path, **options: Any) -> None:
    """Train, and leave what a run that was killed then would have left."""
    train(inputs, folder, **options)
    run = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps(run | {"status": "running"}))
    newest = max((folder / "checkpoints").iterdir())
    (newest / "manifest.json").unlink()


@pytest.mark.parametrize("execution", ["captured", "compiled"])
def test_resume_captured(inputs: tuple[Path, Path], tmp_path: Path, execution: str) -> None:
    """With dropout, whose masks are those of the steps that the first run had captured, and AdamW's states. Shapes are
    captured when they are met again, so that other steps run eagerly than in the first run: equal up to rounding."""
    options: dict[str, Any] = {
        "precision": "fp32", "max_steps": 60, "save_steps": 20, "execution": execution, "logging_steps": 1,
        "learning_rate": 2e-4,
    }  # fmt: skip
    whole = train(inputs, tmp_path / "whole", **options)
    _stop_before_the_last_checkpoint(inputs, tmp_path / "again", **options)
    again = train(inputs, tmp_path / "again", **options, resume=True)
    assert whole.compilations.captured > 0
    assert again.compilations.captured > 0
    found, expected = (_steps(tmp_path / name) for name in ("again", "whole"))
    assert len(found) == len(expected) == 60
    for one, other in zip(found[40:], expected[40:], strict=True):
        assert one == pytest.approx(other, rel=2e-3)


def test_saved_model_is_fp32_and_loads(inputs: tuple[Path, Path], tmp_path: Path) -> None:
    train(inputs, tmp_path / "run", precision="bf16", max_steps=5)
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "run" / "model")
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    texts = [" ".join(WORDS[10:30]), WORDS[1]]
    with brimful.Classifier(tmp_path / "run" / "model") as classifier:
        answers = classifier(texts)
    assert [set(answer) for answer in answers] == [{"label", "score"}] * 2

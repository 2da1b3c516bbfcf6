"""`brimful profile` and `brimful.profile` on the CPU: the step that training would run, in parts that add up."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

import brimful as package
from brimful.core.errors import DataError, OptionError
from brimful.core.profile import PartName, Profile
from brimful.core.records import from_json, to_json
from brimful.measurement import peaks
from commands import Brimful, Files

STEPS = 3


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits are measured, on little."""
    monkeypatch.setattr(peaks, "_SECONDS", 0.005)
    monkeypatch.setitem(peaks._SIDE, "cpu", 64)
    monkeypatch.setitem(peaks._COPIED_BYTES, "cpu", 1 << 16)


def profile(files: Files, **options: Any) -> Profile:
    asked = {"batch_size": 8, "steps": STEPS, "device": "cpu"} | options
    return package.profile(files.reviews, model=files.classifier, **asked)


def test_a_step_in_parts(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process's random numbers and environment are left as they were."""
    monkeypatch.delenv("KINETO_LOG_LEVEL", raising=False)
    random = torch.get_rng_state()
    found = profile(files)
    assert torch.equal(torch.get_rng_state(), random)
    assert "KINETO_LOG_LEVEL" not in os.environ
    assert found.packed
    assert [part.name for part in found.parts] == list(get_args(PartName))
    assert sum(part.seconds for part in found.parts) == pytest.approx(found.time.mean_s)
    assert sum(part.share for part in found.parts) == pytest.approx(1)
    for name in ("contractions", "attention", "normalisation", "element-wise", "optimizer", "embedding"):
        assert found.part(name).seconds > 0, name
    assert found.part("optimizer").count >= 1
    assert found.time.fastest_s <= found.time.median_s <= found.time.slowest_s
    assert found.reading


def test_what_the_step_works_on(files: Files) -> None:
    found = profile(files)
    assert found.work.samples == 8
    assert 8 < found.work.tokens <= found.work.computed_tokens
    assert found.rates.fill == pytest.approx(found.work.tokens / found.work.computed_tokens)
    assert found.rates.samples_per_s == pytest.approx(8 / found.time.mean_s)
    left_out = (16 * 16 + 2 * 16 * 24) * (found.work.computed_tokens - 8)  # in the last layer, behind attention
    assert found.work.product_flops == 6 * (found.work.computed_tokens * (8 * 16 * 16 + 4 * 16 * 24) - left_out)
    assert found.rates.mfu is not None
    assert found.rates.mfu > 0
    assert found.rates.datasheet_mfu is None
    assert found.peak_bytes.allocated is None
    assert found.num_launches is None


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize("options", [{"packing": "off"}, {"token_budget": 32}, {"optim": "sgd"}, {"precision": "bf16"}])
def test_other_ways_to_run(options: dict[str, Any], files: Files) -> None:
    found = profile(files, **options)
    assert sum(part.seconds for part in found.parts) == pytest.approx(found.time.mean_s)
    packing = next(lever for lever in found.recipe.levers if lever.name == "packing")
    assert packing.value == ("padded" if "packing" in options else "packed"), packing.reason
    assert (found.work.micro_batches > 1) == ("token_budget" in options)


def test_it_is_json_both_ways(files: Files) -> None:
    found = profile(files)
    assert from_json(Profile, to_json(found)) == found
    assert "output" not in found.options


@pytest.mark.slow
@pytest.mark.parametrize("name", ["trace.json", "deep/trace.json.gz"])
def test_the_trace_holds_the_steps(name: str, files: Files, tmp_path: Path) -> None:
    profile(files, trace=tmp_path / name)
    content = (tmp_path / name).read_bytes()
    document = json.loads(gzip.decompress(content) if name.endswith(".gz") else content)
    updates = [event for event in document["traceEvents"] if event["name"] == "aten::_fused_adamw_"]
    assert len(updates) % STEPS == 0
    assert updates
    assert [path.name for path in (tmp_path / name).parent.iterdir()] == [Path(name).name]


@pytest.mark.thorough
def test_the_command_prints_one_document(files: Files, tmp_path: Path) -> None:
    words = ["profile", files.reviews, "--model", files.classifier, "--steps", "2", "--batch-size", "8", "--json"]
    process = subprocess.run(
        [sys.executable, "-m", "brimful", *map(str, words)],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        timeout=300,
    )
    assert process.returncode == 0, process.stderr
    assert from_json(Profile, process.stdout).steps == 2
    assert json.loads(process.stdout)["schema"] == 1
    assert "recording 2 steps" in process.stderr
    assert "USDT" not in process.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_table_is_on_stdout(brimful: Brimful, files: Files) -> None:
    said = brimful("profile", files.reviews, "--model", files.classifier, "--steps", 2, "--device", "cpu")
    assert said.code == 0, said.err
    assert said.out.startswith("One step  ")
    assert "Where it goes" in said.out
    assert "\nBottleneck  " in said.out


def test_the_configuration_of_a_training_is_taken(brimful: Brimful, files: Files, tmp_path: Path) -> None:
    config = tmp_path / "run.toml"
    config.write_text(f'model = "{files.classifier}"\noutput = "run"\nsave_steps = 5\nbatch_size = 4\n', "utf-8")
    said = brimful("profile", files.reviews, "--config", config, "--steps", 1, "--device", "cpu", "--json")
    assert said.code == 0, said.err
    assert json.loads(said.out)["options"]["batch_size"] == 4


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--output", "run"], "brimful profile has no option --output"),
        (["--steps", "0"], "--steps is 0"),
        (["--steps", "some"], "--steps is 'some': it must be a whole number"),
        (["--trace", "."], "--trace . is a folder"),
        (["--trace", "/proc/none/t.json"], "cannot write /proc/none"),
        (["--execution", "captured", "--device", "cpu"], "--execution captured does not work here"),
    ],
)
def test_mistakes_are_one_line(words: list[str], error: str, brimful: Brimful, files: Files) -> None:
    said = brimful("profile", files.reviews, "--model", files.classifier, *words)
    assert (said.code, said.out) == (2, "")
    lines = said.err.splitlines()
    assert lines[-2].startswith(f"error: {error}")
    assert lines[-1].startswith("hint: ")


def test_mistakes_in_python(files: Files, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="profile has no option 'output'"):
        profile(files, output="run")
    with pytest.raises(OptionError, match="is the file that is read"):
        profile(files, trace=files.reviews)
    with pytest.raises(DataError):
        package.profile(tmp_path / "none.csv", model=files.classifier)

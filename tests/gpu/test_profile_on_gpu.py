"""Profiles on a GPU: the parts add up, nearly every kernel is known by its name, limits are where they can be."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

import brimful
from brimful.core.profile import Profile
from gpu.word_models import save_word_model

pytestmark = pytest.mark.gpu

WORDS = [f"word{i}" for i in range(2000)]
#: Largest share of busy time that kernels may take which no rule knows.
MOST_UNKNOWN = 0.05


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(data, model): 2,000 texts of a few hundred words at most, and BERT-base's shape with 4 layers."""
    folder = tmp_path_factory.mktemp("inputs")
    draw = random.Random(0)
    with (folder / "data.jsonl").open("w") as file:
        for number in range(2000):
            words = draw.choices(WORDS, k=draw.randrange(5, 300))
            file.write(json.dumps({"text": " ".join(words), "label": f"class {number % 4}"}) + "\n")
    save_word_model(folder / "model", WORDS, num_hidden_layers=4)
    return folder / "data.jsonl", folder / "model"


def profile(inputs: tuple[Path, Path], **options: Any) -> Profile:
    return brimful.profile(inputs[0], model=inputs[1], device="cuda", **options)


@pytest.mark.parametrize("precision", ["bf16", "tf32"])
@pytest.mark.parametrize("execution", ["eager", "captured", "compiled"])
def test_a_step_in_parts(inputs: tuple[Path, Path], execution: str, precision: str) -> None:
    found = profile(inputs, execution=execution, precision=precision)
    assert found.packed, found.packed_reason
    assert found.recipe.value("execution") == execution
    assert sum(part.seconds for part in found.parts) == pytest.approx(found.time.mean_s, rel=1e-6)
    busy_s = found.time.mean_s - found.part("idle").seconds
    unknown = [kernel for kernel in found.kernels if kernel.part == "other"]
    assert found.part("other").seconds < MOST_UNKNOWN * busy_s, unknown[:10]
    for name in ("contractions", "attention", "normalisation", "element-wise", "optimizer", "embedding"):
        assert found.part(name).seconds > 0, name
    assert found.num_launches is not None
    assert found.num_launches < found.num_kernels or execution == "eager"


@pytest.mark.alone
def test_rates_stay_below_limits(inputs: tuple[Path, Path]) -> None:
    found = profile(inputs, execution="captured", precision="bf16")
    rates, limits = found.rates, found.limits
    assert limits.model_matmul_flops_per_s is not None
    assert rates.contraction_flops_per_s is not None
    assert rates.optimizer_bytes_per_s is not None
    assert rates.mfu is not None
    assert found.stretch < 1.25
    if limits.datasheet_flops_per_s is not None:
        assert 0.4 * limits.datasheet_flops_per_s < limits.matmul_flops_per_s < 1.05 * limits.datasheet_flops_per_s
    assert 0 < rates.contraction_flops_per_s < 1.2 * limits.model_matmul_flops_per_s
    assert 0 < rates.optimizer_bytes_per_s < 1.5 * limits.copy_bytes_per_s
    assert 0 < rates.mfu < 1
    assert found.peak_bytes.allocated is not None


def test_a_trace_of_graphs_has_kernels(inputs: tuple[Path, Path], tmp_path: Path) -> None:
    found = profile(inputs, execution="captured", steps=5, trace=tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    kernels = [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    assert len(kernels) == round(5 * found.num_kernels)


def test_padded_steps_are_told_apart_too(inputs: tuple[Path, Path]) -> None:
    found = profile(inputs, packing="off", precision="bf16", steps=5)
    assert not found.packed
    assert found.part("attention").seconds > 0
    assert found.rates.fill < 1

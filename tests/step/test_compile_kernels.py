"""Kernels of a first step, compiled together: all that it launches, and nothing else comes of it."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from brimful.levers.optimizer import Optimizer
from step.test_step import FAMILIES, ROWS, make_step, same, snapshot

TESTS = Path(__file__).parents[1]


@pytest.mark.thorough
def test_a_first_step_compiles_nothing_more(tmp_path: Path) -> None:
    """Of two processes one at least: on a busy machine one of many kernels compiled at once fails now and then."""
    found = first_step(tmp_path / "one")
    if found["compiled"]:
        print(found["failed"])
        found = first_step(tmp_path / "two")
    assert (found["before"], found["failed"], found["compiled"]) == ([], [], [])
    assert found["recorded"][0] == found["recorded"][1] > 0
    assert {"varlen_attention_backward", "norm_backward", "adamw_update", "gather_gradients"} <= set(found["launched"])


def first_step(cache: Path) -> dict[str, Any]:
    """In a process whose kernels are compiled, not interpreted, for a GPU that it does not have."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    path = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment |= {"PYTHONPATH": path, "TRITON_CACHE_DIR": str(cache), "CUDA_VISIBLE_DEVICES": ""}
    ran = subprocess.run(
        [sys.executable, "-m", "step.first_step"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return found


@pytest.mark.slow
@pytest.mark.parametrize("fused", [False, True])
def test_training_is_the_same_with_and_without(fused: bool) -> None:
    optimizer = Optimizer(value="adamw_torch", weight_decay=0.1, fused=fused)
    model = FAMILIES["bert"].model(3, hidden_dropout_prob=0.1).train()
    first, second = (make_step(each, optimizer=optimizer) for each in (copy.deepcopy(model), model))
    second.compile_kernels(ROWS.batch(0))
    for number in range(3):
        assert first.run(ROWS.batch(number)).read() == second.run(ROWS.batch(number)).read()
        if number == 1:
            second.compile_kernels(ROWS.batch(number))
    assert same(snapshot(first), snapshot(second))


def test_statistics_of_batches_are_as_they_were() -> None:
    """They change in place, and their version does not say so."""
    model = FAMILIES["bert"].model(3).train()
    model.classifier = torch.nn.Sequential(torch.nn.BatchNorm1d(model.config.hidden_size), model.classifier)
    step, statistics = make_step(model), model.classifier[0]
    step.compile_kernels(ROWS.batch(0))
    assert torch.equal(statistics.running_mean, torch.zeros(model.config.hidden_size))
    assert int(statistics.num_batches_tracked) == 0
    step.run(ROWS.batch(0))
    assert int(statistics.num_batches_tracked) > 0

"""Models on one GPU leave one another alone, captured and compiled, and the process's random streams."""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from brimful.data.batches.prefetch import Feed, Source
from brimful.kernels.float8 import Plan
from brimful.step.graphs.captured_step import CapturedStep
from brimful.step.step import Outcome, Step
from gpu.test_captured_on_gpu import GPU, make_step, source

pytestmark = pytest.mark.gpu
#: A shape is met, captured and replayed twice.
_STEPS = 4


@pytest.fixture(autouse=True)
def _equal_bits() -> Any:
    """Sums of embeddings' gradients in one order."""
    before = torch.get_deterministic_debug_mode()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.set_deterministic_debug_mode(before)


def short_texts() -> Source:
    """Batches of a length that our attention is chosen for, inside of fused layers."""
    batches = source(8192)
    batches.layout = dataclasses.replace(batches.layout, typical_length=60)  # type: ignore[type-var]
    return batches


def pair() -> list[Step]:
    """Two that differ in precision, dropout, the dtype of residuals and products in fp8."""
    one = make_step(CapturedStep, dropout=0.3, compiled=True, precision="fp32")
    other = make_step(CapturedStep, dropout=0.1, compiled=True, precision="bf16")
    if torch.cuda.get_device_capability()[0] >= 9:
        other.precision = dataclasses.replace(other.precision, plan=Plan())
    return [one, other]


def alone() -> list[list[Outcome]]:
    found = []
    for step in pair():
        with Feed(short_texts(), GPU, stop=_STEPS) as feed:
            found.append([step.run(batch).read() for batch in feed])
    return found


def test_models_in_turns_do_what_each_does_alone() -> None:
    expected = alone()
    steps = pair()
    found: list[list[Outcome]] = [[], []]
    with Feed(short_texts(), GPU, stop=_STEPS) as first, Feed(short_texts(), GPU, stop=_STEPS) as second:
        for batches in zip(first, second, strict=True):
            for step, batch, kept in zip(steps, batches, found, strict=True):
                kept.append(step.run(batch).read())
    assert found == expected
    assert found[0] != found[1]


def test_the_users_random_streams_are_untouched() -> None:
    def drawn() -> list[Any]:
        return [torch.rand(3).tolist(), torch.rand(3, device=GPU).tolist()]

    steps = pair()
    torch.manual_seed(5)
    torch.rand(2, device=GPU)
    expected = drawn()
    torch.manual_seed(5)
    torch.rand(2, device=GPU)
    for step in steps:
        with Feed(short_texts(), GPU, stop=_STEPS) as feed:
            assert all(step.run(batch).read().applied for batch in feed)
    assert drawn() == expected


def test_eager_models_in_threads_do_what_each_does_alone() -> None:
    def eager() -> list[Step]:
        return [make_step(Step, dropout=p, precision=name) for p, name in ((0.3, "fp32"), (0.1, "bf16"))]

    def run(step: Step, kept: list[Outcome]) -> None:
        with Feed(short_texts(), GPU, stop=_STEPS) as feed:
            kept += [step.run(batch).read() for batch in feed]

    expected: list[list[Outcome]] = [[], []]
    for step, kept in zip(eager(), expected, strict=True):
        run(step, kept)
    found: list[list[Outcome]] = [[], []]
    threads = [threading.Thread(target=run, args=each) for each in zip(eager(), found, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == expected

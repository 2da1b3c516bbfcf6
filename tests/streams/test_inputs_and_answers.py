"""Batches on their way to a GPU's streams ahead of the step, and answers on their way back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from brimful.data.batches.batch import Batch
from brimful.data.batches.prefetch import Feed
from brimful.engine.classification.stages import Stages, run_stages
from brimful.hardware.read_back import ReadBack, host_room
from brimful.models.model_stats import layers_of
from brimful.models.packed.packed_forward import PackedModel, PaddedModel
from brimful.models.packed.streamed_layers import StreamedLayers, move_all_but
from brimful.step.forward import Forward
from brimful.step.graphs.captured_forward import PackedForward, PaddedForward
from brimful.step.precision import Precision
from pretend_gpu import GPU, PretendGpu
from step.graphs.test_captured_forward import LENGTHS, tokens_of
from step.test_step import ROWS, STEPS
from tiny import FAMILIES

PRECISION = Precision(value="fp32", device=GPU, reason="a test")


class Growing:
    """Batches of several sizes."""

    def batches(self, start: int, stop: int | None) -> Iterator[Batch]:
        assert stop is not None
        for number in range(start, stop):
            yield ROWS.batch((number * 4) % STEPS, packed=number % 2 == 0)


@pytest.mark.parametrize("ahead", [2, 0])
def test_batches_come_ahead(gpu: PretendGpu, ahead: int) -> None:
    """Each is read on the current stream. A run that ends early is followed by another, which is given its memory."""

    def run(last: int) -> None:
        total = torch.zeros((), dtype=torch.int64, device=GPU)
        with Feed(Growing(), GPU, stop=12, ahead=ahead) as feed:
            for number, batch in enumerate(feed):
                for index in range(len(batch.micro_batches)):
                    micro = batch.arrived(index)
                    assert micro.targets_S.is_cuda
                    total += micro.targets_S.sum() + micro.valid_S.sum()
                if number == last:
                    break

    run(9)
    run(12)


def test_a_batch_that_is_asked_for_waits_for_no_place(gpu: PretendGpu) -> None:
    with Feed(Growing(), GPU, stop=6, ahead=0) as feed:
        held = [iter(feed) for _ in range(5)]
        assert [next(each).number for each in held] == [batch.number for batch in Growing().batches(0, 5)]
        assert all(next(each).memories for each in held[:1])


def test_numbers_are_read_when_they_are_there(gpu: PretendGpu) -> None:
    rooms = [host_room((4,), torch.float32, GPU) for _ in range(2)]
    waiting: Any = None
    for number in range(6):
        back = ReadBack(torch.full((4,), float(number), device=GPU), room=rooms[number % 2])
        if waiting is not None:
            assert waiting.wait().tolist() == [number - 1] * 4
        waiting = back
    assert waiting.wait().tolist() == [5.0] * 4


def forward_of(kind: str, model: Any) -> Forward:
    given: dict[str, Any] = {"budget": 64, "longest": 32, "padding_id": 0, "recorder": None, "note": pytest.fail}
    if kind == "packed":
        execution = PackedModel(model, FAMILIES["bert"].form, plain=True)
        return PackedForward(
            execution, PRECISION, typical_length=10, attention="grouped_attention", fused=False, **given
        )
    return PaddedForward(PaddedModel(model), PRECISION, **given)


@pytest.mark.slow
@pytest.mark.parametrize("streams", [False, True], ids=["all there", "streamed"])
@pytest.mark.parametrize("kind", ["packed", "padded"])
def test_windows(gpu: PretendGpu, kind: str, streams: bool) -> None:
    """Windows through the stages, several under way: written when their logits are on the host."""
    model = FAMILIES["bert"].model(num_hidden_layers=3).eval().requires_grad_(False)
    layers: Any = layers_of(model)
    if streams:
        move_all_but(model, layers, GPU)
        model.streamed_layers = StreamedLayers(layers, GPU)
    else:
        model.to(GPU)
    forward, written = forward_of(kind, model), list[np.ndarray]()
    run_stages(
        range(5),
        tokenise=lambda seed: lambda: tokens_of(LENGTHS, seed, with_types=False),
        compute=forward.submit,
        write=lambda _, __, logits: written.append(logits.copy()),
        stages=Stages(),
        stop=lambda: False,
    )
    assert [each.shape for each in written] == [(len(LENGTHS), 3)] * 5

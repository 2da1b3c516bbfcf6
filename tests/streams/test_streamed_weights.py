"""Turns of streamed layers on a GPU's streams, with weights in host memory and in a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from brimful.models.model_stats import layers_of
from brimful.models.packed.streamed_layers import TRAINED, StreamedLayers
from pretend_gpu import GPU, PretendGpu
from tiny import FAMILIES


@pytest.fixture(params=["host", "disk"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path | None:
    return tmp_path if request.param == "disk" else None


@pytest.mark.slow
@pytest.mark.parametrize("changed_in", ["forward", "backward"])
@pytest.mark.parametrize("depth", [3, 5])
def test_turns(gpu: PretendGpu, depth: int, changed_in: str, folder: Path | None) -> None:
    """Weights that are changed in the forward pass are on their way back while the backward pass uses them again.

    In between all copies come together, as where a graph begins.
    """
    layers = layers_of(FAMILIES["bert"].model(num_hidden_layers=depth))
    assert layers is not None
    streamed = StreamedLayers(layers, GPU, folder, TRAINED)

    def change(number: int) -> None:
        for parameter in streamed.parameters[number]:
            parameter.data.add_(1)

    def use(number: int) -> None:
        for parameter in streamed.parameters[number]:
            parameter.detach() + 1

    for time in range(4):
        if time == 2:
            streamed.come_together()
        for number in range(depth):
            if changed_in == "forward":
                streamed.change_later(number, lambda number=number: change(number))
            with streamed.turn(number, toward=1):
                use(number)
        for number in reversed(range(depth)):
            with streamed.turn(number, changes=changed_in == "backward"):
                use(number)
                if changed_in == "backward":
                    change(number)
    streamed.remove()

"""The order of copies of streamed weights on a GPU's streams: none writes where another one, or a layer, yet reads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from brimful.models.model_stats import layers_of
from brimful.models.packed import streamed_layers, weight_stores
from brimful.models.packed.streamed_layers import TRAINED, StreamedLayers
from tiny import FAMILIES

Clock = dict[str, int]


class Stream:
    """A stream as a vector clock: what of itself and of others is sure to be done before what it is given next."""

    def __init__(self, name: str) -> None:
        self.name, self.clock = name, Clock()

    def record_event(self) -> Clock:
        self.clock[self.name] = self.clock.get(self.name, 0) + 1
        return dict(self.clock)

    def wait_event(self, event: Clock) -> None:
        self.clock = {name: max(self.clock.get(name, 0), event.get(name, 0)) for name in {*self.clock, *event}}

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def is_after(self, event: Clock) -> bool:
        return all(self.clock.get(name, 0) >= count for name, count in event.items())


class Watched(StreamedLayers):
    """Layers on a CPU that take streams for a GPU's. reads: of each piece, what it is read by."""

    def watch(self, main: Stream) -> None:
        self.main, self._on_gpu = main, True
        self._inward, self._outward = Stream("inward"), Stream("outward")
        self.reads: dict[int, list[Clock]] = {}
        self.num_copies = 0

    def _end(self, number: int) -> None:
        self.reads.setdefault(number % len(self.pieces), []).append(self.main.record_event())
        super()._end(number)

    def _keep(self, number: int, piece: torch.Tensor) -> Any:
        event = super()._keep(number, piece)
        self.reads.setdefault(number % len(self.pieces), []).append(event)
        return event

    def _fetch(self, number: int, toward: int) -> None:
        place, before = number % len(self.pieces), self.fetched_bytes
        super()._fetch(number, toward)
        if self.fetched_bytes > before:
            assert all(self._inward.is_after(read) for read in self.reads.pop(place, ())), f"layer {number}"
            self.num_copies += 1


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch) -> Stream:
    stream = Stream("main")

    @contextmanager
    def on(_: Any) -> Iterator[None]:
        yield

    for module in (streamed_layers, weight_stores):
        monkeypatch.setattr(module.torch.cuda, "current_stream", lambda *_: stream)
        monkeypatch.setattr(module.torch.cuda, "stream", on)
    return stream


@pytest.mark.parametrize("changed_in", ["forward", "backward"])
@pytest.mark.parametrize("depth", [3, 5, 6])
def test_a_piece_is_filled_when_nothing_reads_it(main: Stream, depth: int, changed_in: str) -> None:
    """Weights that are changed in the forward pass are on their way back while the backward pass uses them again."""
    layers = layers_of(FAMILIES["bert"].model(num_hidden_layers=depth))
    assert layers is not None
    streamed = Watched(layers, torch.device("cpu"), None, TRAINED)
    streamed.watch(main)
    for _ in range(3):
        for number in range(depth):
            if changed_in == "forward":
                streamed.change_later(number, lambda: None)
            with streamed.turn(number, toward=1):
                pass
        for number in reversed(range(depth)):
            with streamed.turn(number, changes=changed_in == "backward"):
                pass
    assert streamed.num_copies >= depth

"""Graphs by key: eager first, captured second, replayed from then on; and what follows a refusal."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from brimful.step.graphs.cache import Graph, GraphCache
from recorder import CpuRecorder


def make_cache(recorder: CpuRecorder | None, **options: Any) -> tuple[GraphCache, list[str]]:
    notes: list[str] = []
    return GraphCache(recorder, what="steps", note=notes.append, **options), notes


def run(cache: GraphCache, x: Tensor, compute: Callable[[Tensor], Tensor]) -> str:
    """Computes it as a step does; how it was launched."""
    graph: Graph[Tensor] | None = cache.find(tuple(x.shape), compute, x) if cache.meet([tuple(x.shape)]) else None
    found = compute(x) if graph is None else graph.replay(x).clone()
    assert torch.equal(found, x + 1)
    return "eager" if graph is None else "replayed"


def add_one(x: Tensor) -> Tensor:
    return x + 1


def test_a_shape_is_captured_when_it_comes_again() -> None:
    recorder = CpuRecorder()
    cache, notes = make_cache(recorder)
    sizes = [3, 3, 5, 3, 5, 5]
    launched = [run(cache, torch.arange(float(size)) + turn, add_one) for turn, size in enumerate(sizes)]
    assert launched == ["eager", "replayed", "eager", "replayed", "replayed", "replayed"]
    assert (len(cache), recorder.num_recorded, notes) == (2, 2, [])


def test_all_shapes_must_have_been_met() -> None:
    cache, _ = make_cache(CpuRecorder())
    assert [cache.meet(shapes) for shapes in (["a"], ["a", "b"], ["b", "a"], [])] == [False, False, True, True]


def test_inputs_are_copied_to_where_the_graph_reads() -> None:
    cache, _ = make_cache(CpuRecorder())
    x = torch.ones(2)
    graph = cache.find("key", add_one, x)
    assert graph is not None
    assert graph.replay(x).tolist() == [2, 2]
    x.zero_()
    assert graph.replay().tolist() == [2, 2]
    assert graph.replay(x).tolist() == [1, 1]
    assert cache.find("key", add_one, x) is graph


def test_a_refusal_is_noted_once_and_drops_all_graphs() -> None:
    recorder = CpuRecorder()
    cache, notes = make_cache(recorder)
    for _ in range(2):
        run(cache, torch.ones(2), add_one)
    assert len(cache) == 1
    recorder.refusal = "an item was read\nand more"
    launched = [run(cache, torch.ones(size), add_one) for size in (3, 3, 3, 2)]
    assert launched == ["eager"] * 4
    assert (len(cache), cache.enabled) == (0, False)
    assert notes == ["steps run eagerly: an item was read"]


def test_a_graph_of_a_pass_that_python_has_not_collected_refuses_nothing() -> None:
    """One in a cycle of references is collected, and the shape captured when it comes again; one that is held refuses
    that, too."""

    class Held:
        itself: Any = None

    class Recorder(CpuRecorder):
        def record(self, compute: Callable[[], Any]) -> Any:
            if alive() is not None:
                raise RuntimeError("operation would make the legacy stream depend on a capturing blocking stream")
            return super().record(compute)

    gc.disable()
    try:
        for kept in (False, True):
            held = Held()
            held.itself, alive = held, weakref.ref(held)
            holds = held if kept else None
            del held
            cache, notes = make_cache(Recorder())
            launched = [run(cache, torch.ones(2), add_one) for _ in range(3)]
            assert launched == ["eager", "eager", "eager" if kept else "replayed"]
            assert cache.enabled == (holds is None)
            assert ["detach() what is kept" in note for note in notes] == [True] * kept
    finally:
        gc.enable()


def test_an_error_that_is_no_refusal_is_raised() -> None:
    def wrong(_: Tensor) -> Tensor:
        raise ValueError("a fault of the model")

    cache, notes = make_cache(CpuRecorder())
    with pytest.raises(ValueError, match="a fault"):
        cache.find("key", wrong, torch.ones(1))
    assert notes == []


def test_further_shapes_than_the_limit_run_eagerly() -> None:
    cache, notes = make_cache(CpuRecorder(), most=2)
    launched = [[run(cache, torch.ones(size), add_one) for size in (1, 2, 3, 4)] for _ in range(3)]
    assert launched[1] == launched[2] == ["replayed", "replayed", "eager", "eager"]
    assert notes == ["steps of some shapes run eagerly: there are more than 2"]


def test_nothing_is_captured_without_a_recorder() -> None:
    cache, notes = make_cache(None)
    assert [run(cache, torch.ones(2), add_one) for _ in range(3)] == ["eager"] * 3
    assert (cache.enabled, notes) == (False, [])


def test_cleared_graphs_are_captured_anew() -> None:
    recorder = CpuRecorder()
    cache, _ = make_cache(recorder)
    launched = [run(cache, torch.ones(2), add_one) for _ in range(2)]
    cache.clear()
    assert len(cache) == 0
    launched += [run(cache, torch.ones(2), add_one) for _ in range(2)]
    assert launched == ["eager", "replayed"] * 2
    assert recorder.num_recorded == 2


def test_what_a_capture_needs_lives_as_long_as_its_graph() -> None:
    kept: list[int] = []
    cache, _ = make_cache(CpuRecorder(), keep=lambda: kept.append(len(kept)))
    for _ in range(3):
        run(cache, torch.ones(2), add_one)
    assert kept == [0]

"""Captured steps of several processes: the same graphs in all, or none. What is recorded is computed at each replay."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from weakref import WeakSet

import pytest
import torch

from brimful.core.place import Place
from brimful.hardware.memory import CaptureMemoryError
from brimful.hardware.ranks import Ranks, joined
from brimful.step.graphs import cache, captured_step
from brimful.step.graphs.cache import Graph, GraphCache
from brimful.step.graphs.captured_step import CapturedStep
from brimful.step.step import Step
from brimful.step.updates import update
from forked_ranks import Forked
from step.test_ranks import CPU, Case, trained

SINGLE, SEVERAL = Case(), Case(tokens=48)
PARTS, PARTS_OF_SEVERAL = (Case(sharding="parameters", adamw=True, tokens=tokens) for tokens in (None, 48))


class Later:
    """A recorded computation."""

    def __init__(self, compute: Callable[[], Any]) -> None:
        self.replay = compute


class Replayed(Graph[Any]):
    """A graph whose outputs are those of its last replay: nothing was computed when it was recorded."""

    def replay(self, inputs: Any = None) -> Any:
        if self._static_inputs is not None and inputs is not None:
            self._static_inputs.copy_(inputs)
        return self._recorded.replay()  # type: ignore[func-returns-value]


class Pool:
    """Records nothing at first. refusals: what captures of this process fail with, by their number; those that are
    `midway` fail in their forward pass."""

    refusals: dict[int, Exception] = {}
    midway = False
    num_recorded, is_full = 0, False

    def __init__(self, device: torch.device, most_tokens: int) -> None:
        self.device, self.caches = device, WeakSet[GraphCache]()

    @contextmanager
    def measured(self, num_tokens: int) -> Iterator[None]:
        yield

    def record(self, compute: Callable[[], Any]) -> tuple[Any, Any]:
        number, Pool.num_recorded = Pool.num_recorded, Pool.num_recorded + 1
        if number in self.refusals:
            if not self.midway:
                raise self.refusals[number]
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(CapturedStep, "loss_rows_S", _raiser(self.refusals[number]))
                compute()
        return Later(compute), None

    def renew(self) -> None:
        pass

    def remember_pass(self, num_tokens: int) -> None:
        pass

    def lacks_room(self, num_tokens: int) -> bool:
        return Pool.is_full


def _raiser(error: Exception) -> Callable[..., None]:
    def fail(*_: Any) -> None:
        raise error

    return fail


class Recording(Pool):
    """Runs what it records, as captures do: what is sent is recorded, and what hosts ask of one another is not."""

    def record(self, compute: Callable[[], Any]) -> tuple[Any, Any]:
        number, Pool.num_recorded = Pool.num_recorded, Pool.num_recorded + 1
        with pytest.MonkeyPatch.context() as patch:
            for name in ("begin_sum", "begin_exchange", "begin_scattered_sum", "begin_gather"):
                patch.setattr(Ranks, name, lambda *_: lambda: None)
            patch.setattr(Ranks, "sum", lambda *_: None)
            patch.setattr(update, "is_capturing", lambda: True)
            if number in self.refusals:
                patch.setattr(CapturedStep, "backward", _after(CapturedStep.backward, self.refusals[number]))
            compute()
        return Later(compute), None


def _after(work: Callable[..., Any], error: Exception) -> Callable[..., None]:
    def fail(*given: Any) -> None:
        work(*given)
        raise error

    return fail


def run(ranks: Any, case: Case, refusals: dict[int, Exception], *, refused: bool = False) -> dict[str, Any]:
    """As `trained`, twice over the batches, captured from the second time on. refused: before processes meet."""
    Pool.refusals, Pool.num_recorded, notes = refusals, 0, list[str]()

    def make(*arguments: Any, **options: Any) -> Step:
        step = CapturedStep(*arguments, **options, most_tokens=96, precompile=False, note=notes.append)
        if refused:
            step._graphs.stop("not permitted for the first batch")
        return step

    found = trained(ranks, case, make=make, rounds=2)
    return found | {"notes": notes, "recorded": Pool.num_recorded}


def work(place: Place) -> list[Any]:
    with pytest.MonkeyPatch.context() as patch, joined(place, CPU) as ranks:
        patch.setattr(captured_step, "GraphPool", Pool)
        patch.setattr(cache, "Graph", Replayed)
        found: list[Any] = [trained(ranks, SINGLE, rounds=2), trained(ranks, SEVERAL, rounds=2)]
        found += [run(ranks, case, {}) for case in (SINGLE, SEVERAL)]
        here = place.rank == 1
        found.append(run(ranks, SEVERAL, {1: RuntimeError("not permitted")} if here else {}))
        try:
            run(ranks, SINGLE, {1: CaptureMemoryError("no room")} if here else {})
        except CaptureMemoryError as error:
            found.append(str(error))
        found.append(run(ranks, SINGLE, {}, refused=place.rank == 0))
        Pool.midway = True
        return [*found, run(ranks, SEVERAL, {2: RuntimeError("not permitted")} if here else {})]


def work_recorded(place: Place) -> list[Any]:
    """One runs out of memory in a capture that the other comes to the end of; all are refused one."""
    with pytest.MonkeyPatch.context() as patch, joined(place, CPU) as ranks:
        patch.setattr(captured_step, "GraphPool", Recording)
        patch.setattr(cache, "Graph", Replayed)
        found: list[Any] = []
        try:
            run(ranks, SEVERAL, {2: CaptureMemoryError("no room")} if place.rank == 1 else {})
        except CaptureMemoryError as error:
            found.append(str(error))
        for case in (Case(sharding="states"), Case(sharding="gradients", adamw=True)):
            found += [trained(ranks, case, rounds=2), run(ranks, case, {0: RuntimeError("not permitted")})]
        return found


@pytest.mark.slow
def test_a_capture_that_fails_keeps_nobody_waiting_and_leaves_no_gradient(tmp_path: Path) -> None:
    for full, *courses in Forked(tmp_path, 2, work_recorded).results():
        assert full == "no room" or full.endswith("out of memory")
        for eager, refused in (courses[:2], courses[2:]):
            assert torch.equal(torch.from_numpy(eager["weights"]), torch.from_numpy(refused["weights"]))
            assert eager["told"] == refused["told"]
            assert len(refused["notes"]) == 1


def work_in_parts(place: Place) -> list[Any]:
    with pytest.MonkeyPatch.context() as patch, joined(place, CPU) as ranks:
        patch.setattr(captured_step, "GraphPool", Pool)
        patch.setattr(cache, "Graph", Replayed)
        patch.setattr(CapturedStep, "_pieces", lambda *_: pytest.fail("pieces are captured"))
        refused = {1: RuntimeError("not permitted")} if place.rank == 1 else {}
        eager = [trained(ranks, case, rounds=2) for case in (PARTS, PARTS_OF_SEVERAL)]
        found = [*eager, run(ranks, PARTS, {}), run(ranks, PARTS_OF_SEVERAL, {}), run(ranks, PARTS, refused)]
        Pool.is_full = place.rank == 1
        patch.setattr(CapturedStep, "begin_compiling", lambda step, _: step.keep_room())  # before each step
        return [*found, run(ranks, PARTS, {})]


@pytest.mark.thorough
def test_weights_in_parts_are_captured_where_a_batch_is_one_micro_batch(tmp_path: Path) -> None:
    """Of several, gradients are put in the place of none or added, which the host decides."""
    for single, several, captured, launched, refused, full in Forked(tmp_path, 2, work_in_parts).results():
        for eager, other in ((single, captured), (several, launched), (single, refused), (single, full)):
            assert torch.equal(torch.from_numpy(eager["weights"]), torch.from_numpy(other["weights"]))
            assert eager["told"] == other["told"]
        assert captured["recorded"] > 1
        assert captured["notes"] == launched["notes"] == []
        assert len(refused["notes"]) == 1
        assert full["recorded"] == 1
        assert full["notes"] == ["steps run eagerly: there is no memory for other passes beside graphs"]


@pytest.mark.slow
def test_graphs_are_those_of_all_or_of_none(tmp_path: Path) -> None:
    both = Forked(tmp_path, 2, work).results()
    for single, several, captured, in_pieces, refused, full, before, midway in both:
        others = ((single, captured), (several, in_pieces), (several, refused), (single, before), (several, midway))
        for eager, other in others:
            assert torch.equal(torch.from_numpy(eager["weights"]), torch.from_numpy(other["weights"]))
            assert eager["told"] == other["told"]
        assert captured["recorded"] > 1
        assert in_pieces["recorded"] > captured["recorded"]
        assert captured["notes"] == in_pieces["notes"] == []
        assert len(refused["notes"]) == len(midway["notes"]) == 1
        assert full == "no room" or (full.startswith("process 1 of 2") and full.endswith("out of memory"))
    assert "refused in another process" in both[0][4]["notes"][0]
    assert "not permitted" in both[1][4]["notes"][0]
    assert "not permitted for the first batch" in both[0][6]["notes"][0]
    assert "refused in another process" in both[1][6]["notes"][0]
    assert both[0][6]["recorded"] == both[1][6]["recorded"] == 0

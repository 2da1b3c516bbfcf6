"""Peak memory by component: counters of an allocator that is written by hand, tensors whose bytes are known."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from brimful.core.records import PeakMemory
from brimful.measurement import host_memory
from brimful.measurement.host_memory import peak_resident_bytes, resident_bytes
from brimful.measurement.memory import (
    Kept,
    MemoryWatch,
    PhaseMemory,
    split,
    workspace_bytes,
    workspace_sizes,
)
from brimful.reports.memory_text import limit_text, memory_text

CPU = torch.device("cpu")


class Written:
    """An allocator's records whose counters a test writes: `take` and `give` are allocations."""

    def __init__(self) -> None:
        self.now = self.most = self.most_reserved = 0
        self.of_libraries, self.of_process = 0, 0

    def take(self, num_bytes: int) -> None:
        self.now += num_bytes
        self.most, self.most_reserved = max(self.most, self.now), max(self.most_reserved, self.now)

    def give(self, num_bytes: int) -> None:
        self.now -= num_bytes

    @contextmanager
    def lent(self, num_bytes: int) -> Iterator[None]:
        self.take(num_bytes)
        yield
        self.give(num_bytes)

    def allocated(self) -> int:
        return self.now

    def peak(self) -> int:
        return self.most

    def reset(self) -> None:
        self.most = self.now

    def reserved(self) -> int:
        return self.most_reserved

    def reserved_peak(self) -> int:
        return self.most_reserved

    def workspaces(self, known: set[int]) -> int:
        return self.of_libraries

    def process(self) -> int | None:
        return self.of_process or None


class Run:
    """Steps of a model of 400 bytes on a device whose allocator is `Written`."""

    def __init__(self) -> None:
        self.records, self.states = Written(), torch.zeros(0)
        self.weight = torch.nn.Parameter(torch.ones(100))
        self.records.take(400)
        self.phases = PhaseMemory(self.kept, [self.weight])
        self.watch = MemoryWatch(CPU, self.phases, records=self.records)

    def kept(self) -> Kept:
        return Kept.of(CPU, [self.weight], [] if self.weight.grad is None else [self.weight.grad], [self.states])

    def step(
        self,
        *,
        activations: int,
        in_forward: int = 0,
        in_backward: int = 0,
        in_update: int = 0,
    ) -> None:
        with self.phases.forward((activations,)):
            with self.records.lent(in_forward):
                pass
            self.records.take(activations)
        with self.phases.backward():
            self.records.take(400 if self.weight.grad is None else 0)
            with self.records.lent(in_backward):
                self.weight.sum().backward()  # type: ignore[no-untyped-call]
            self.records.give(activations)
        with self.phases.update():
            self.records.take(800 - self.states.nbytes)
            self.states = torch.zeros(200)
            with self.records.lent(in_update):
                pass

    def parts(self) -> dict[str, int]:
        """Components that are not 0, after a check that they sum up."""
        peak = self.watch.peak()
        assert peak.total == sum(peak.components.values())
        in_torch = {name: size for name, size in peak.components.items() if name not in ("unused", "outside_torch")}
        assert peak.allocated == sum(in_torch.values())
        assert peak.reserved == peak.allocated + peak.components["unused"]
        return {name: size for name, size in peak.components.items() if size}


def test_a_peak_in_the_backward_pass() -> None:
    run = Run()
    run.step(activations=5000, in_backward=70)
    assert run.parts() == {"weights": 400, "gradients": 400, "activations": 5000, "temporaries": 70}
    assert run.watch.peak().moment == "backward pass"


def test_gradients_are_counted_as_they_come() -> None:
    """A peak after the hook of a parameter has its gradient; hooks are gone afterwards."""
    run = Run()
    with run.phases.forward("first"):
        run.records.take(300)
    with run.phases.backward(), run.records.lent(9000):
        run.weight.sum().backward()  # type: ignore[no-untyped-call]
    assert run.parts() == {"weights": 400, "gradients": 400, "activations": 300, "temporaries": 8600}
    assert not run.weight._post_accumulate_grad_hooks  # type: ignore[attr-defined]


def test_a_later_step_has_gradients_and_states_besides() -> None:
    run = Run()
    for _ in range(2):
        run.step(activations=5000, in_backward=70)
    expected = {"weights": 400, "gradients": 400, "optimizer_states": 800, "activations": 5000, "temporaries": 70}
    assert run.parts() == expected


def test_a_peak_in_the_forward_pass_and_one_in_the_update() -> None:
    run = Run()
    run.step(activations=10, in_forward=9000)
    assert run.parts() == {"weights": 400, "activations": 10, "temporaries": 8990}
    assert run.watch.peak().moment == "forward pass"
    run = Run()
    run.step(activations=10, in_update=9000)
    assert run.parts() == {"weights": 400, "gradients": 400, "optimizer_states": 800, "temporaries": 9000}
    assert run.watch.peak().moment == "update"


def test_steps_that_are_not_watched_count_by_their_peak() -> None:
    """A shape is watched twice; a buffer that grew since is among what comes and goes."""
    run = Run()
    for in_backward in (70, 70, 95):
        run.step(activations=5000, in_backward=in_backward)
    assert run.parts()["temporaries"] == 95


def test_an_evaluation_needs_more_than_steps() -> None:
    run = Run()
    run.step(activations=100)
    with run.phases.phase("evaluation"), run.records.lent(7000):
        pass
    assert run.watch.peak().moment == "evaluation"
    assert run.parts()["temporaries"] == 7000


def test_workspaces_what_is_kept_unused_and_the_process() -> None:
    run = Run()
    run.records.take(64)  # and stays, as a workspace does
    run.step(activations=5000, in_backward=70)
    run.records.of_libraries, run.records.of_process = 64, 9000
    run.records.most_reserved += 1000
    assert run.parts() == {
        "weights": 400, "gradients": 400, "activations": 5000, "temporaries": 70, "workspaces": 64, "unused": 1000,
        "outside_torch": 9000 - 800 - 5000 - 70 - 64 - 1000,
    }  # fmt: skip
    assert run.watch.peak().total == run.watch.peak().nvml == 9000


def test_parts_never_exceed_the_peak() -> None:
    moment = split(1000, "update", Kept(weights=900, gradients=900, optimizer_states=900), activations=900)
    assert sum(moment.parts.values()) == moment.allocated == 1000


def test_storages_are_counted_once() -> None:
    arena = torch.zeros(1000)
    weights = [arena[:600], arena[600:], torch.zeros(10, device="meta")]
    kept = Kept.of(CPU, weights, gradients=[torch.zeros(500), arena], optimizer_states=[torch.zeros(7)])
    assert (kept.weights, kept.gradients, kept.optimizer_states) == (4000, 2000, 28)
    assert arena.data_ptr() in kept.addresses


@pytest.mark.parametrize(
    ("capability", "environment", "expected"),
    [
        ((9, 0), {}, {32 << 20}),
        ((8, 0), {}, {8320 << 10}),
        ((9, 0), {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}, {32 << 20}),
        ((9, 0), {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "CUBLASLT_WORKSPACE_SIZE": "64"}, {128 << 10, 64 << 10}),
        ((8, 0), {"CUBLAS_WORKSPACE_CONFIG": "much"}, {8320 << 10}),
    ],
)
def test_workspaces_are_known_by_their_size(
    capability: tuple[int, int], environment: dict[str, str], expected: set[int]
) -> None:
    assert workspace_sizes(capability, environment) == expected
    (size, *_) = expected
    block = {"size": size, "requested_size": size, "state": "active_allocated", "address": 1}
    blocks = [block, block | {"address": 2}, block | {"state": "inactive"}, block | {"requested_size": size - 1}]
    segments = [{"device": 0, "blocks": blocks}, {"device": 1, "blocks": blocks}]
    assert workspace_bytes(segments, 0, expected, known={2}) == size


def test_on_a_cpu_the_resident_memory_of_the_process() -> None:
    weight = torch.zeros(1 << 20)
    memory = MemoryWatch(CPU, PhaseMemory(lambda: Kept.of(CPU, [weight])))
    peak = memory.peak()
    resident = peak_resident_bytes()
    assert resident is not None
    assert peak.resident == peak.total == sum(peak.components.values())
    assert peak.total <= resident
    held = np.ones(max(0, resident - (resident_bytes() or 0)) + (64 << 20), np.uint8)  # a model that is saved, say
    later = memory.with_what_came(peak)
    assert later.resident == later.total == sum(later.components.values())
    assert later.total >= peak.total + (32 << 20)
    del held
    assert later.components["weights"] == peak.components["weights"]
    on_gpu = PeakMemory(allocated=1 << 20, total=1 << 21, components={"weights": 1 << 20, "unused": 1 << 20})
    assert memory.with_what_came(on_gpu) == on_gpu
    assert peak.components["weights"] == 4 << 20


class Resident:
    """Steps of a model on a CPU whose peak of resident memory a test writes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.most = 100_000
        monkeypatch.setattr(host_memory, "peak_resident_bytes", lambda: self.most)
        self.weights = [torch.nn.Parameter(torch.ones(100)) for _ in range(2)]
        self.phases = PhaseMemory(self.kept, self.weights)
        self.watch = MemoryWatch(CPU, self.phases)

    def kept(self) -> Kept:
        return Kept.of(CPU, self.weights, [each.grad for each in self.weights if each.grad is not None])

    def step(self, *, grows_in: str, freed: bool = False) -> None:
        """freed: each gradient goes as soon as it has come."""

        def free(weight: torch.Tensor) -> None:
            weight.grad = None

        hooks = [each.register_post_accumulate_grad_hook(free) for each in self.weights if freed]
        with self.phases.forward("shape"):
            self.most += 1000 * (grows_in == "forward")
        with self.phases.backward():
            self.most += 1000 * (grows_in == "first gradient")
            (self.weights[0].sum() + self.weights[1].sum()).backward()  # type: ignore[no-untyped-call]
            self.most += 1000 * (grows_in == "backward")
        with self.phases.update():
            self.most += 1000 * (grows_in == "update")
            for each in self.weights:
                each.grad = None
        for hook in hooks:
            hook.remove()

    def gradients(self) -> int | None:
        """Gradients of the peak, after a check that it is whole."""
        peak = self.watch.peak()
        assert peak.resident == peak.total == sum(peak.components.values()) == self.most
        return peak.components.get("gradients")


def test_on_a_cpu_the_gradients_that_there_were_at_the_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are gone when a step ends. Unknown where the peak came before the first step."""
    expected = {"forward": 0, "first gradient": 400, "backward": 800, "update": 800, "nowhere": None}
    for grows_in, gradients in expected.items():
        run = Resident(monkeypatch)
        run.step(grows_in=grows_in)
        assert run.gradients() == gradients
        assert run.kept().gradients == 0
    run = Resident(monkeypatch)
    for _ in range(3):  # the third step is not watched
        run.step(grows_in="backward")
    assert run.gradients() == 800
    with run.phases.phase("evaluation"):
        run.most += 1
    assert run.gradients() == 0
    run = Resident(monkeypatch)
    run.step(grows_in="backward", freed=True)
    assert run.gradients() == 0


def test_on_a_cpu_gradients_that_outlive_steps_are_known_from_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Resident(monkeypatch)
    for each in run.weights:
        each.grad = torch.zeros_like(each)
    assert run.gradients() == 800


def test_in_one_line() -> None:
    parts = {"weights": 1 << 30, "gradients": 0, "outside_torch": 1 << 29}
    peak = PeakMemory(allocated=1 << 30, reserved=1 << 30, nvml=3 << 29, total=3 << 29, components=parts)
    readings = "1.0 GiB allocated, 1.0 GiB reserved, 1.5 GiB by the driver"
    assert memory_text(peak) == f"1.5 GiB ({readings}): weights 1.0 GiB, outside torch 512.0 MiB"
    on_cpu = PeakMemory(resident=1 << 30, total=1 << 30, components={"weights": 1 << 29, "all_else": 1 << 29})
    assert memory_text(on_cpu) == "1.0 GiB resident: weights 512.0 MiB, all else 512.0 MiB"
    assert memory_text(PeakMemory()) is None


def test_a_reading_beside_a_run_counts() -> None:
    run = Run()
    run.step(activations=50)
    run.records.of_process = 9000
    run.watch.look_beside()
    assert run.watch._reading is not None
    run.watch._reading.join()
    run.records.of_process = 3000
    assert run.watch.peak().nvml == 9000


def test_a_limit_is_held_against_the_driver() -> None:
    peak = PeakMemory(reserved=1 << 30, nvml=3 << 29)
    assert limit_text(peak, None) is None
    assert limit_text(peak, "2GiB") == "1.5 GiB by the driver at most, within --memory-limit 2GiB"
    assert limit_text(peak, "1GiB") == "1.5 GiB by the driver at most, MORE THAN --memory-limit 1GiB"
    assert limit_text(PeakMemory(reserved=1 << 30), "1GiB") == (
        "--memory-limit 1GiB: the driver cannot be read, torch reserved 1.0 GiB at most"
    )

"""Several runners, a process each: on the CPU, where each process stands for a GPU."""

from __future__ import annotations

import dataclasses
import itertools
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, Self, cast

import numpy as np
import pytest
import torch

from brimful.cli import commands
from brimful.core.callbacks import Callbacks
from brimful.core.errors import DeviceError, MemoryFullError
from brimful.core.options.classify import ClassifyOptions
from brimful.data.tokens.encoder import Tokens
from brimful.engine.classification import gpu_process
from brimful.engine.classification.gpu_process import GpuProcess, other_gpus
from brimful.engine.classification.gpu_worker import _serve
from brimful.engine.classification.gpu_workers import READY, GpuWorkers, Job, _Member, job_of
from brimful.engine.classification.ready import begun_processes
from brimful.engine.classification.runner import Runner, check_model, make_runner
from brimful.engine.inference import Done
from brimful.hardware import driver
from brimful.levers.precision import choose_precision
from tiny_files import review, save_classifier

pytestmark = pytest.mark.xdist_group("gpu workers")  # one process makes what they share


class _Process:
    """Stands for a `GpuProcess` whose end of the connection is a thread of this one."""

    def __init__(self, connection: Any, kill: Callable[[], object] = lambda: None) -> None:
        self.connection, self.kill = connection, kill


def job_for(options: ClassifyOptions, windows: list[Tokens]) -> Job:
    return Job(options=options, precision="fp32", sample=windows[0], num_tokens=0)


#: So many that the logits of a few thousand texts are more than a socket holds.
LABELS = [f"label {number}" for number in range(60)]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Runner, ClassifyOptions, list[Tokens]]:
    model = save_classifier(tmp_path_factory.mktemp("gpu_workers") / "m", LABELS)
    options = ClassifyOptions(model=str(model), data="", device="cpu", precision="fp32")
    checked = check_model(options)
    windows = [checked.encoder.encode([review(i % 2 == 0, i + j) * (1 + i % 3) for i in range(20)]) for j in range(6)]
    runner = make_runner(
        checked,
        options,
        choose_precision("fp32", torch.device("cpu")),
        sample=windows[0],
        num_tokens=0,
        callbacks=Callbacks(),
    )
    return runner, options, windows


@pytest.mark.thorough
def test_windows_keep_their_order(made: tuple[Runner, ClassifyOptions, list[Tokens]]) -> None:
    """Those before the other process is ready are computed here; then each takes what the other has no hands for.

    Windows and logits that are larger than what a socket holds keep theirs, too.
    """
    runner, options, windows = made
    with GpuWorkers(
        runner, job_of(runner, options, windows[0], 0), [GpuProcess({"OMP_NUM_THREADS": "1"})]
    ) as gpu_workers:
        assert len(gpu_workers) == 2
        assert gpu_workers.num_ready == 1
        assert np.array_equal(gpu_workers.submit(windows[1]).result(), runner.submit(windows[1]).result())
        assert gpu_workers._others[0].ready.wait(240)
        results = [gpu_workers.submit(window) for window in windows]
        assert all(member.num_under_way <= 3 for member in gpu_workers._work.values())
        assert (gpu_workers.num_ready, gpu_workers.num_used) == (2, 2)
        for window, result in zip(windows, results, strict=True):
            assert np.allclose(result.result(), runner.submit(window).result(), atol=1e-6)
            assert result.busy_s > 0
        assert _soon(lambda: not any(member.num_under_way for member in gpu_workers._work.values()))
        large, member = Tokens.join([windows[0]] * 150), gpu_workers._others[0]
        for submitted in [member.submit(large) for _ in range(4)]:
            assert submitted.result(timeout=240).logits_NC.shape == (3000, len(LABELS))


def _soon(is_so: Callable[[], bool]) -> bool:
    """Wait until something is so; return whether it came to be."""
    end = time.monotonic() + 60
    while not is_so() and time.monotonic() < end:
        time.sleep(0.01)
    return is_so()


class _Held:
    """Logits that are there when the next window has been launched."""

    def __init__(self, launched: threading.Event) -> None:
        self._launched, self.busy_s = launched, 0.5

    def result(self) -> np.ndarray:
        assert self._launched.wait(60)
        return np.zeros((1, 2), np.float32)


def test_a_window_is_launched_while_the_one_before_is_computed(
    made: tuple[Runner, ClassifyOptions, list[Tokens]],
) -> None:
    """Though it comes when that one is all there is to do: the device never waits for a window to be sent."""
    _, options, windows = made
    ours, theirs = Pipe()
    member = _Member(job_for(options, windows), cast(GpuProcess, _Process(ours)))
    launched = [threading.Event() for _ in windows]
    coming = iter(launched)

    def submit(tokens: Tokens) -> _Held:
        """Its logits are there once the next one but the last is launched."""
        number = next(numbers)
        launched[number].set()
        return _Held(launched[min(number + 1, len(launched) - 1)])

    numbers = itertools.count()
    assert isinstance(theirs.recv(), Job)
    theirs.send(READY)
    runner = cast(Runner, SimpleNamespace(submit=submit))
    threading.Thread(target=_serve, args=(theirs, runner, []), daemon=True).start()
    assert member.ready.wait(60)
    results = []
    for window in windows:
        results.append(member.submit(window))
        assert next(coming).wait(60)
    assert [each.result(60).logits_NC.shape for each in results] == [(1, 2)] * len(windows)
    member.close()


def test_others_have_windows_while_one_is_launched(made: tuple[Runner, ClassifyOptions, list[Tokens]]) -> None:
    """Launching waits where a device has enough to do, and so does sending where a process does not read."""
    _, options, windows = made
    ours, theirs = Pipe()
    arrived = threading.Event()

    def launch(tokens: Tokens) -> Done:
        """Ends when another window has come to the other process."""
        assert arrived.wait(60)
        return Done(np.zeros((len(tokens), 2), np.float32), 0.1)

    first = SimpleNamespace(submit=launch, precision=SimpleNamespace(device=torch.device("cpu")))
    with GpuWorkers(cast(Runner, first), job_for(options, windows), [cast(GpuProcess, _Process(ours))]) as workers:
        assert isinstance(theirs.recv(), Job)
        theirs.send(READY)
        assert workers._others[0].ready.wait(60)
        large = Tokens.join([windows[1]] * 1000)  # more than a socket holds
        results = [workers.submit(window) for window in (windows[0], large, windows[2], windows[3])]
        assert len(theirs.recv()) == len(large)
        arrived.set()
        assert len(theirs.recv()) == len(windows[3])
        for number in (len(large), len(windows[3])):
            theirs.send(Done(np.ones((number, 2), np.float32), 0.1))
        assert [each.result().mean() for each in results] == [0.0, 1.0, 0.0, 1.0]
        assert [(each.num_windows, each.busy_s) for each in workers.shares(0.0)] == [(2, 0.2), (2, 0.2)]
        assert all(each.joined_s > 0 for each in workers.shares(0.0))
        workers.begin_pass()
        assert not workers.shares(0.0)


def test_windows_go_where_logits_are_there_not_where_they_were_asked_for(
    made: tuple[Runner, ClassifyOptions, list[Tokens]],
) -> None:
    """Results are asked for in order: a member that is done with what lies behind a slow window has nothing to do."""
    _, options, windows = made
    ours, theirs = Pipe()
    slow = threading.Event()
    first = SimpleNamespace(submit=lambda tokens: _Held(slow), precision=SimpleNamespace(device=torch.device("cpu")))
    with GpuWorkers(cast(Runner, first), job_for(options, windows), [cast(GpuProcess, _Process(ours))]) as workers:
        theirs.recv()
        theirs.send(READY)
        assert workers._others[0].ready.wait(60)
        results = [workers.submit(windows[0])]
        for window in windows[1:]:
            results.append(workers.submit(window))
            assert len(theirs.recv()) == len(window)
            theirs.send(Done(np.ones((1, 2), np.float32), 0.1))
            assert _soon(lambda: workers._work[1].num_under_way == 0)
        slow.set()
        assert [each.result().mean() for each in results] == [0.0] + [1.0] * len(windows[1:])


class _Unsendable(Tokens):
    def __reduce__(self) -> Any:
        raise MemoryError("no memory to send it")


def test_a_window_that_cannot_be_sent_is_not_waited_for(
    made: tuple[Runner, ClassifyOptions, list[Tokens]],
) -> None:
    _, options, windows = made
    ours, theirs = Pipe()
    member = _Member(job_for(options, windows), cast(GpuProcess, _Process(ours, theirs.close)))
    theirs.recv()
    theirs.send(READY)
    assert member.ready.wait(60)
    each = windows[0]
    unsendable = _Unsendable(ids=each.ids, offsets=each.offsets, types=each.types, truncated=each.truncated)
    with pytest.raises(MemoryError, match="no memory to send it"):
        member.submit(unsendable).result(60)


def test_a_window_that_fails_ends_the_process_with_its_error(
    made: tuple[Runner, ClassifyOptions, list[Tokens]],
) -> None:
    _, _, windows = made
    ours, theirs = Pipe()

    class _Failing:
        busy_s = 0.0

        def result(self) -> np.ndarray:
            raise MemoryFullError("nothing is left", hint="less")

    ours.send(windows[0])
    with pytest.raises(MemoryFullError, match="nothing is left"):
        _serve(theirs, cast(Runner, SimpleNamespace(submit=lambda tokens: _Failing())), [])


def test_logits_of_earlier_windows_come_before_an_error(
    made: tuple[Runner, ClassifyOptions, list[Tokens]],
) -> None:
    """Though they are not there yet when the next window cannot be launched."""
    _, _, windows = made
    ours, theirs = Pipe()
    tried, calls = threading.Event(), itertools.count()

    def submit(tokens: Tokens) -> _Held:
        if next(calls):
            threading.Timer(0.2, tried.set).start()
            raise MemoryFullError("nothing is left", hint="less")
        return _Held(tried)

    for window in windows[:2]:
        ours.send(window)
    with pytest.raises(MemoryFullError, match="nothing is left"):
        _serve(theirs, cast(Runner, SimpleNamespace(submit=submit)), [])
    assert ours.poll(0)
    assert ours.recv().logits_NC.shape == (1, 2)


def test_a_process_that_ended_is_told(made: tuple[Runner, ClassifyOptions, list[Tokens]], tmp_path: Path) -> None:
    runner, options, windows = made
    with GpuWorkers(
        runner, job_of(runner, options, windows[0], 0), [GpuProcess({"PYTHONPATH": str(tmp_path), "PATH": ""})]
    ) as gpu_workers:
        gpu_workers._others[0]._process.kill()
        assert gpu_workers._others[0].ready.wait(60)
        results = [gpu_workers.submit(window) for window in windows[:2]]
        assert results[0].result().shape == (20, len(LABELS))
        with pytest.raises(DeviceError, match="ended before its work was done"):
            results[1].result()


@pytest.mark.thorough
def test_why_a_process_did_not_start_is_told(
    made: tuple[Runner, ClassifyOptions, list[Tokens]], tmp_path: Path
) -> None:
    runner, options, windows = made
    job = job_of(runner, dataclasses.replace(options, model=str(tmp_path / "nowhere")), windows[0], 0)
    with GpuWorkers(runner, job, [GpuProcess({"OMP_NUM_THREADS": "1"})]) as gpu_workers:
        assert gpu_workers._others[0].ready.wait(240)
        results = [gpu_workers.submit(window) for window in windows[:2]]
        assert results[0].result().shape == (20, len(LABELS))
        with pytest.raises(DeviceError, match="there is no folder"):
            results[1].result()


def test_what_shows_each_process_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert other_gpus(1) == []
    assert other_gpus(3) == [{"CUDA_VISIBLE_DEVICES": "1"}, {"CUDA_VISIBLE_DEVICES": "2"}]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6,7")
    assert other_gpus(2) == [{"CUDA_VISIBLE_DEVICES": "6"}]


class _Begun:
    """Stands for a process of a GPU: which it is shown, and whether it was ended."""

    all: ClassVar[list[Self]] = []

    def __init__(self, place: dict[str, str]) -> None:
        self.place, self.ended = place, False
        self.all.append(self)

    def kill(self) -> None:
        self.ended = True


@pytest.mark.parametrize(("asked", "number"), [("3", 2), ("all", 3), ("5", 0), ("1", 0)])
def test_a_command_begins_them_before_it_loads_torch(monkeypatch: pytest.MonkeyPatch, asked: str, number: int) -> None:
    """As many as there are on a machine of four, and none where there are too few; they end with the command."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(driver, "count_gpus", lambda: 4)
    monkeypatch.setattr(gpu_process, "GpuProcess", _Begun)
    monkeypatch.setattr(_Begun, "all", [])
    with ExitStack() as stack:
        found = commands._gpu_processes(ClassifyOptions(model="m", data="d", gpus=asked), stack)
        assert [each.place for each in found] == other_gpus(number + 1)
        if found:
            assert begun_processes(asked, torch.device("cpu"), stack, found) == found
        assert not any(each.ended for each in found)
    assert all(each.ended for each in _Begun.all)
    code = "import sys, brimful.engine.classification.gpu_process; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

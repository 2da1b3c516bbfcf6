"""Rules by which a process is found gone or stuck: the right one, and none that is only slow."""

from __future__ import annotations

import _thread
import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from brimful.core.phases import Phases
from brimful.hardware.pulse import Beat, Lost, Pulse, lost
from brimful.hardware.watch import Watch

BEAT = Pulse(device="GPU 0").beat()
WAITS = {"waiting": True, "idle_s": 20.0}


def beats(*of_each: dict[str, Any]) -> dict[int, Beat]:
    """Beats of processes in step 7, that differ by what is given."""
    common = {"host": "elsewhere", "phase": "steps", "step": 7, "idle_s": 0.1, "limit_s": 8.0}
    return {rank: dataclasses.replace(BEAT, rank=rank, **common | more) for rank, more in enumerate(of_each)}


def found(of: dict[int, Beat], silent_s: dict[int, float] | None = None, **more: Any) -> Lost | None:
    return lost(of, dict.fromkeys(of, 0.2) | (silent_s or {}), len(of), **more)


@pytest.mark.parametrize(
    "healthy",
    [
        pytest.param([{}, {}, WAITS], id="one waits for the others"),
        pytest.param([{"phase": "evaluation", "limit_s": 600.0, "idle_s": 90.0}, WAITS], id="a long evaluation"),
        pytest.param([{"phase": "saving", "limit_s": 1800.0, "idle_s": 300.0}, WAITS], id="a long save"),
        pytest.param([{"limit_s": 900.0, "idle_s": 100.0}, WAITS], id="one compiles"),
        pytest.param([{"ended": True, "idle_s": 99.0}, {}], id="one is done"),
        pytest.param([{"ended": True}, WAITS], id="only one is left"),
    ],
)
def test_nobody_is_lost(healthy: list[dict[str, Any]]) -> None:
    assert found(beats(*healthy)) is None


def test_one_that_is_silent() -> None:
    three = beats(WAITS, {}, WAITS)
    assert found(three, {1: 4.5}) is None
    gone = found(three, {1: 5.0})
    assert gone is not None
    assert str(gone) == "process 1 of 3 (elsewhere, GPU 0), at step 7, in phase steps: no sign of life for 5.0 s"
    assert Lost.from_json(json.dumps(dataclasses.asdict(gone))) == gone
    tokens = beats(WAITS, {"phase": "tokens"}, WAITS)
    assert found(tokens, {1: 20.0}) is None  # a call may hold Python's lock
    assert found(tokens, {1: 5.0}, broken=True) is not None  # but somebody is gone


def test_one_that_does_not_get_on() -> None:
    stuck = found(beats(WAITS, {"phase": "input", "idle_s": 8.5, "where": "ahead.py:80, take"}, WAITS))
    assert stuck is not None
    assert (stuck.rank, stuck.step, stuck.phase) == (1, 7, "input")
    assert "has not got on for 8.5 s, at ahead.py:80, take" in str(stuck)
    both = found(beats({"idle_s": 9.0}, {"idle_s": 9.0, "step": 6}))
    assert both is not None
    assert both.rank == 1  # the one behind


def test_all_wait_for_one_another() -> None:
    behind = found(beats(WAITS | {"calls": 9}, WAITS | {"calls": 8}, WAITS | {"calls": 9}))
    assert behind is not None
    assert behind.rank == 1
    level = found(beats(WAITS, WAITS))
    assert level is not None
    assert level.rank is None
    assert "all processes have waited for one another" in str(level)
    one, other = {"where": "reduction.py:7, sum"}, {"where": "loop.py:9, read"}
    assert "for 20.0 s, at reduction.py:7, sum, in step 7" in str(found(beats(WAITS | one, WAITS | one)))
    both = str(found(beats(WAITS | one, WAITS | other)))
    assert "for 20.0 s, process 0 at reduction.py:7, sum; process 1 at loop.py:9, read, in step 7" in both


@pytest.mark.parametrize(("sent", "said"), [(signal.SIGKILL, "has ended"), (signal.SIGSTOP, "it is stopped")])
def test_the_system_is_asked_about_a_process_of_this_host(sent: signal.Signals, said: str) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        process = BEAT.process.replace(str(os.getpid()), str(child.pid), 1)
        here = beats({}, {"host": BEAT.host, "process": process, "limit_s": 9.0})
        assert found(here, {1: 6.0}) is None  # it runs: it may be starved
        child.send_signal(sent)
        until = time.monotonic() + 30
        while (gone := found(here, {1: 6.0})) is None and time.monotonic() < until:
            time.sleep(0.01)
        assert gone is not None
        assert said in str(gone)
        assert (found(here, {1: 2.0}) is None) == (sent == signal.SIGSTOP)  # a short stop may be meant
    finally:
        child.kill()
        child.wait()


def test_one_that_has_compiled_has_time_for_the_rest_of_its_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until it next waits for others, nothing says that it got on."""
    now = [100.0]
    monkeypatch.setattr("brimful.hardware.pulse.time", SimpleNamespace(monotonic=lambda: now[0]))
    pulse = Pulse(1)
    for step in (1, 2):
        pulse.begin(step)
        now[0] += 0.1
    compiler: dict[str, Any] = {"__name__": "torch._inductor.graph", "beat": pulse.beat}
    exec("def compile():\n    return beat()", compiler)

    def judged(beat: Beat) -> Lost | None:
        return found({**beats(WAITS), 1: beat})

    now[0] += 60.0
    assert judged(compiler["compile"]()) is None
    now[0] += 7.0
    assert judged(pulse.beat()) is None
    pulse.pardon(5.0)
    now[0] += 5.0
    assert judged(pulse.beat()) is None
    now[0] += 2.0
    assert "has not got on for 9.0 s" in str(judged(pulse.beat()))


def test_seconds_of_steps_are_none_where_more_was_pardoned() -> None:
    pulse = Pulse()
    pulse.begin(1)
    pulse.begin(2)
    pulse.pardon(100.0)
    pulse.move()
    beat = pulse.beat()
    assert 0 <= beat.steps_s < 50


def test_a_pulse_knows_where_it_is() -> None:
    pulse = Pulse(device="GPU 3")
    pulse.hang_s = 0.02
    assert pulse.beat().limit_s > 1000
    pulse.begin(1)
    assert pulse.beat().phase == "capture"
    pulse.begin(2, tokens=30, rows=2)
    time.sleep(0.03)
    beat = pulse.beat()
    assert (beat.phase, beat.tokens, beat.rows, beat.count) == ("steps", 30, 2, 3)
    assert "pulse.py" in str(beat.where)
    assert beat.idle_s > beat.limit_s
    with pulse.waiting():
        time.sleep(0.03)
        step: dict[str, Any] = {"__name__": "brimful.step.made_up", "beat": pulse.beat}
        exec("def send():\n    return beat()", step)
        waits = step["send"]()
        assert waits.waiting
        assert "send" in str(waits.where)  # what waits, and not how
    pulse.begin(3)
    assert pulse.beat().limit_s > 0.2  # ten times the slowest step
    pulse.pardon(100.0)
    assert pulse.beat().idle_s < 0
    assert Beat.from_json(beat.to_json()) == beat


def test_work_in_pieces_has_the_time_of_its_longest_one(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("brimful.hardware.pulse.time", SimpleNamespace(monotonic=lambda: now[0]))
    pulse, phases = Pulse(1), Phases()
    pulse.follow(phases)

    def judged(idle_s: float) -> str | None:
        now[0] += idle_s
        lost = found({**beats(WAITS), 1: pulse.beat()})
        now[0] -= idle_s
        return None if lost is None else lost.why

    phases.enter("evaluation")
    assert judged(500.0) is None
    with pulse.pieces(first_s=60.0):
        assert judged(59.0) is None
        assert "has not got on for 61.0 s" in str(judged(61.0))
        now[0] += 0.1
        pulse.end_piece()
        assert "has not got on for 9.0 s" in str(judged(9.0))
        now[0] += 2.0
        pulse.end_piece()
        assert judged(19.0) is None
        assert judged(21.0) is not None
    assert judged(500.0) is None  # metrics
    phases.enter("tokens")
    with phases.pieces():
        assert judged(299.0) is None
        assert judged(301.0) is not None
        phases.end_piece()
        assert judged(59.0) is None
        assert judged(61.0) is not None


def test_a_window_is_as_soon_missed_as_a_step() -> None:
    windows = beats(WAITS, {"phase": "evaluation", "in_pieces": True}, WAITS)
    assert found(windows, {1: 4.5}) is None
    assert found(windows, {1: 5.0}) is not None
    assert found(beats(WAITS, {"phase": "evaluation"}, WAITS), {1: 5.0}) is None  # metrics may hold Python's lock


def test_a_file_that_does_not_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that writes it is stuck, whatever the main one does."""
    now = [100.0]
    monkeypatch.setattr("brimful.hardware.pulse.time", SimpleNamespace(monotonic=lambda: now[0]))
    pulse = Pulse(1)
    with pulse.waiting(), pulse.writing() as progress:
        now[0] += 119.0
        assert found({**beats({}), 1: pulse.beat()}) is None
        progress()
        now[0] += 119.0
        assert found({**beats({}), 1: pulse.beat()}) is None
        now[0] += 2.0
        stuck = found({**beats({}), 1: pulse.beat()})
        assert "has not got on for 121.0 s, at writing a checkpoint" in str(stuck)
        pulse.pardon(100.0)
        assert found({**beats({}), 1: pulse.beat()}) is None
    now[0] += 300.0
    with pulse.waiting():
        assert not found({**beats({}), 1: pulse.beat()})


def test_a_main_thread_gets_on_with_the_file_it_waits_for() -> None:
    pulse = Pulse()
    pulse.enter("saving")
    for phase, moves in (("saving", True), ("steps", False)):
        pulse.phase = phase
        with pulse.writing() as progress:
            pulse.pardon(-50.0)
            progress()
            assert (pulse.beat().idle_s < 25) == moves


def test_who_compiles_takes_its_time() -> None:
    pulse = Pulse()
    pulse.hang_s = 0.0
    pulse.begin(1)
    pulse.begin(2)
    space: dict[str, Any] = {"__name__": "torch._inductor.graph", "pulse": pulse}
    exec("def compile():\n    return pulse.beat()", space)
    time.sleep(0.01)
    assert space["compile"]().limit_s > 600
    assert pulse.beat().limit_s < 600


@pytest.mark.parametrize("own", [True, False], ids=["torch's", "Python's"])
def test_a_thread_that_torch_made_compiles_for_the_main_one(own: bool) -> None:
    """A GPU's backward pass is in such a thread, and compiles the kernels that it is the first to launch. Threads that
    were begun from Python may be pools that only wait."""
    pulse, there, done = Pulse(), threading.Event(), threading.Event()
    pulse.hang_s = 0.0
    pulse.begin(1)
    pulse.begin(2)
    space: dict[str, Any] = {"__name__": "triton.compiler.compiler", "there": there, "done": done}
    exec("def compile():\n    there.set()\n    done.wait()", space)
    if own:
        _thread.start_new_thread(space["compile"], ())  # Python's list of threads does not have it
    else:
        threading.Thread(target=space["compile"]).start()
    there.wait()
    time.sleep(0.01)
    assert (pulse.beat().limit_s > 600) == own
    done.set()


@pytest.mark.parametrize(("rank", "own_store", "lost"), [(1, True, 0), (0, True, None), (1, False, None)])
def test_a_leader_that_stops_before_its_first_sign_of_life(rank: int, own_store: bool, lost: int | None) -> None:
    """With it the store, so that nothing is read of any process."""

    class Store:
        def clone(self) -> Store:
            return self

    pulse = Pulse(rank)
    watch = Watch(pulse, Store(), 2, own_store=own_store)
    assert watch._judge() is None
    watch._answered -= pulse.hang_s + 1
    found = watch._judge()
    assert (None if found is None else found.rank) == lost


def test_word_of_a_loss_is_not_waited_for_where_all_others_live(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until each has given several signs of life since; one that is done gives none."""
    watch, signs = Watch(Pulse(0), SimpleNamespace(clone=lambda: None), 3), [0]

    def seen() -> tuple[Beat, ...]:
        signs[0] += 1
        return tuple(beats({}, {"count": signs[0]}, {"ended": True}).values())

    monkeypatch.setattr(watch, "beats", seen)
    monkeypatch.setattr(watch, "_every_s", 0.0)
    assert watch.verdict(3600) is None
    assert signs[0] == 1 + 3
    monkeypatch.setattr(watch, "beats", lambda: tuple(beats({}, {}, {"ended": True}).values()))
    began = time.monotonic()
    assert watch.verdict(0.2) is None
    assert time.monotonic() - began >= 0.2

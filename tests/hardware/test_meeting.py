"""Processes that do not all come to where they meet are named, and two of one number are refused."""

from __future__ import annotations

import itertools
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from brimful.core.errors import DeviceError, MeetingError, OptionError
from brimful.core.options.train import TrainOptions
from brimful.core.place import Place, find_address, find_place
from brimful.hardware import meeting
from brimful.hardware.asked import asked_of, check_same
from brimful.hardware.meeting import coming, entered, meet, next_meeting, open_store
from brimful.hardware.pulse import Pulse
from brimful.hardware.ranks import joined
from brimful.hardware.watch import Watch
from forked_ranks import Forked, free_port

FIRST = Place(rank=0, count=3)


@pytest.fixture(autouse=True)
def address(monkeypatch: pytest.MonkeyPatch) -> str:
    port = str(free_port())
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    return f"127.0.0.1:{port}"


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "MEETING", timedelta(seconds=0.3))
    monkeypatch.setattr(meeting, "_PATIENCE_S", 0.1)


def test_those_that_have_not_come_are_named(request: pytest.FixtureRequest) -> None:
    store, said = open_store(FIRST), []
    for rank in (0, 2):
        Watch(Pulse(rank), store, 3).announce()
    watch = Watch(Pulse(), store, 3)
    request.getfixturevalue("soon")  # once all are connected, however long that takes
    with pytest.raises(DeviceError, match=r"^process 1 of 3 did not come in") as caught:
        meet(store, watch, FIRST, said.append)
    assert caught.value.hint is not None
    assert "that all were started" in caught.value.hint
    assert said == ["waiting for process 1 of 3, at 127.0.0.1, for up to 10 min"]


def test_all_have_come() -> None:
    store = open_store(FIRST)
    for rank in (1, 2):
        store.set(f"asked/{rank}", "{}")
        Watch(Pulse(rank), store, 3).announce()
    meet(store, Watch(Pulse(), store, 3), FIRST, pytest.fail)


def test_two_of_one_number() -> None:
    store = open_store(FIRST)
    store.set("number/0", "other-host, process 12")
    with pytest.raises(DeviceError, match="another process is number 0 of 3: other-host, process 12") as caught:
        meet(store, Watch(Pulse(), store, 3), FIRST, pytest.fail)
    assert caught.value.hint == "give each process a RANK of its own, as torchrun does"


@pytest.mark.parametrize("before", [0, 2])
def test_two_first_processes(tmp_path: Path, before: int) -> None:
    """The one that comes later has no store of its own, and says so where the other one waits, which may be of another
    training and have met others before. They may be started at once."""

    def work(place: Place) -> str:
        first = Place(rank=0, count=2)
        meeting._MEETINGS = itertools.count(before * place.rank)

        def note(said: str) -> None:
            if "RANK 0" in said:
                raise DeviceError(said, hint="")  # it would wait on

        with pytest.raises(DeviceError) as caught, joined(first, torch.device("cpu"), note=note):
            pass
        return str(caught.value)

    with pytest.MonkeyPatch.context() as patch:
        for name in ("_ANSWER_S", "_CALL_S"):
            patch.setattr(meeting, name, 60.0)  # of a busy machine
        patch.setattr(meeting, "MEETING", timedelta(seconds=120))
        later, former = sorted(Forked(tmp_path / "logs", 2, work).results())
    assert later.startswith("another process is number 0 of 2 at port "), (later, former)
    assert former.startswith("another process of RANK 0 was here: ")


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("host", ["127.0.0.1", "nowhere.invalid"])
def test_where_nobody_is(
    host: str, address: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A process that waits says so: no other one knows of it."""
    monkeypatch.setenv("MASTER_ADDR", host)
    where = address.replace("127.0.0.1", host)
    with pytest.raises(MeetingError, match=f"^process 0, or its launcher, is not reached at {where}: "):
        open_store(Place(rank=1, count=2))
    assert (
        f"warning: process 1 of 2 waits for process 0, or its launcher, at {where}, for up to 10 min: "
        in capsys.readouterr().err
    )


def test_a_port_that_is_taken(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "_ANSWER_S", 0.2)
    with socket.socket() as other:
        other.bind(("127.0.0.1", int(address.rpartition(":")[2])))
        other.listen()
        with pytest.raises(DeviceError, match=r"^the store of the processes at ") as caught:
            open_store(FIRST)
    assert caught.value.hint == "see that MASTER_ADDR is this host, and give a MASTER_PORT that nothing uses"


@pytest.mark.parametrize("port", ["", "99999", "many"])
def test_no_port(port: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_PORT", port)
    with pytest.raises(MeetingError, match=f"MASTER_PORT={port} do not say where the processes meet"):
        open_store(FIRST)


def test_an_address_that_can_be_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not waited for: it will never be known."""
    monkeypatch.setenv("MASTER_ADDR", "a..b")
    with pytest.raises(MeetingError, match=r"process 0, or its launcher, is not reached at a\.\.b:"):
        open_store(Place(rank=1, count=2))


def test_what_a_process_cannot_enter_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those who wait for it hear of it, and not of what goes wrong within."""
    told: list[str] = []
    monkeypatch.setattr(meeting, "tell_failure", lambda place, error: told.append(str(error)))

    @contextmanager
    def limited(limit: str) -> Iterator[None]:
        if limit == "low":
            raise OptionError("too low")
        yield

    with pytest.raises(OptionError), entered(FIRST, limited("low")):
        pass
    with pytest.raises(OptionError), entered(FIRST, limited("high")):
        raise OptionError("later")
    assert told == ["too low"]


def test_tasks_of_srun_meet_without_an_address(tmp_path: Path) -> None:
    """At the first host of their step, as SLURM writes it, and at a port that each works out."""
    step = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "127.0.0.[1-2]"}
    step |= {"SLURM_JOB_ID": _job_with_a_free_port(step)}

    def work(place: Place) -> tuple[Place, int]:
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            del os.environ[name]
        os.environ |= step | {"SLURM_PROCID": str(place.rank), "SLURM_LOCALID": str(place.local_rank)}
        with joined(find_place(), torch.device("cpu")) as ranks:
            value = torch.tensor(place.rank + 1)
            ranks.sum([value])
        return find_place(), int(value)

    places = [Place(rank=rank, count=2, local_rank=rank) for rank in range(2)]
    assert Forked(tmp_path, 2, work).results() == [(place, 3) for place in places]


def _job_with_a_free_port(step: dict[str, str]) -> str:
    for job in map(str, range(os.getpid(), os.getpid() + 99)):
        with socket.socket() as probe:
            port = find_address(step | {"SLURM_PROCID": "0", "SLURM_JOB_ID": job})[1]
            if probe.connect_ex(("127.0.0.1", int(port))):
                return job
    pytest.skip("no port of 99 is free")


def test_a_step_whose_hosts_make_no_sense(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_ADDR")
    for name, value in {"PROCID": "1", "STEP_NUM_TASKS": "2", "STEP_NODELIST": "node[1-"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    with pytest.raises(OptionError, match=r"SLURM_STEP_NODELIST=node\[1- is not a list of hosts"):
        open_store(Place(rank=1, count=2))


def test_one_script_meets_several_times(tmp_path: Path) -> None:
    """Whoever comes first to the next meeting is neither at the last one's end nor among what it has left."""

    def work(place: Place) -> list[int]:
        sums = []
        for number in range(4):
            if place.rank == number % 3:
                time.sleep(0.2)
            with joined(place, torch.device("cpu")) as ranks:
                value = torch.tensor(number)
                ranks.sum([value])
                sums.append(int(value))
        return sums

    assert Forked(tmp_path, 3, work).results() == [[0, 3, 6, 9]] * 3


def test_meetings_have_names_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun keeps its store where it starts all processes again."""
    monkeypatch.setattr(meeting, "_MEETINGS", itertools.count())
    names = [next_meeting(), next_meeting()]
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    monkeypatch.setattr(meeting, "_MEETINGS", itertools.count())
    assert len({*names, next_meeting()}) == 3


def test_a_script_goes_on_after_a_mistake_of_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them counts the meeting that it has not come to, so that they come to the same one next."""
    monkeypatch.setattr(meeting, "_WORD_S", 0.1)

    def work(place: Place) -> int:
        with pytest.raises(DeviceError), coming(place):
            raise DeviceError("no GPU here")
        with joined(place, torch.device("cpu")) as ranks:
            value = torch.tensor(1)
            ranks.sum([value])
        return int(value)

    assert Forked(tmp_path, 2, work).results() == [2, 2]


def test_one_that_fails_on_its_way_leaves_word(tmp_path: Path) -> None:
    """The first process does not wait ten minutes for it."""

    def work(place: Place) -> str:
        with pytest.raises(DeviceError) as caught, joined(place, torch.device("cpu")) if place.leads else coming(place):
            raise DeviceError("no GPU here", hint="buy one")
        return str(caught.value)

    said = f"process 1 of 2 ({socket.gethostname()}) has failed: no GPU here"
    assert Forked(tmp_path, 2, work).results() == [said, "no GPU here"]


def test_processes_that_were_asked_other_things(tmp_path: Path) -> None:
    """All of them say so, instead of adding up what belongs to different requests."""

    def work(place: Place) -> str:
        asked = {"--batch-size": "8" if place.rank == 1 else "32", "torch": "2.13", "--seed": "1"}
        with pytest.raises((OptionError, DeviceError)) as caught, joined(place, torch.device("cpu"), asked=asked):
            pass
        return str(caught.value)

    said = Forked(tmp_path, 3, work).results()
    assert said[0] == "process 1 was not given the same as process 0: --batch-size is 8, and 32 there"
    assert all(each == said[0] or "is gone before all had met" in each for each in said)


def test_what_each_process_may_have_of_its_own() -> None:
    """Names of files, and what only the first one does or each machine has, may differ."""
    ask = TrainOptions(data="rows.csv", model="a", output="run", quiet=True, memory_limit="8GB", eval_data="e.csv")
    one, other = (
        asked_of(options, torch.device("cpu")) for options in (ask, TrainOptions(data="x", model="b", output="c"))
    )
    check_same([one, other, one])
    changed = asked_of(replace(ask, reduce_dtype="bf16", device="cpu"), torch.device("cuda"))
    said = r"process 1 .*: --reduce-dtype is bf16, and fp32 there, --device is cuda, and cpu there\n"
    with pytest.raises(OptionError, match=said):
        check_same([one, changed])
    with pytest.raises(OptionError, match=r"process 2 .*: torch is 2\.0, and .* there\n"):
        check_same([one, one, other | {"torch": "2.0"}])

"""Processes that do not all come to where they meet are named, and two of one number are refused."""

from __future__ import annotations

import itertools
import socket
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from brimful.core.errors import DeviceError
from brimful.core.place import Place
from brimful.hardware import meeting
from brimful.hardware.meeting import meet, next_meeting, open_store
from brimful.hardware.pulse import Pulse
from brimful.hardware.ranks import joined
from brimful.hardware.watch import Watch
from forked_ranks import Forked

FIRST = Place(rank=0, count=3)


@pytest.fixture(autouse=True)
def address(monkeypatch: pytest.MonkeyPatch) -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    return f"127.0.0.1:{port}"


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "MEETING", timedelta(seconds=0.3))
    monkeypatch.setattr(meeting, "_PATIENCE_S", 0.1)


@pytest.mark.usefixtures("soon")
def test_those_that_have_not_come_are_named() -> None:
    store, said = open_store(FIRST), []
    for rank in (0, 2):
        Watch(Pulse(rank), store, 3).announce()
    with pytest.raises(DeviceError, match=r"^process 1 of 3 did not come in") as caught:
        meet(store, Watch(Pulse(), store, 3), FIRST, said.append)
    assert caught.value.hint is not None
    assert "that all were started" in caught.value.hint
    assert said == ["waiting for process 1 of 3, at 127.0.0.1, for up to 10 min"]


def test_all_have_come() -> None:
    store = open_store(FIRST)
    for rank in (1, 2):
        Watch(Pulse(rank), store, 3).announce()
    meet(store, Watch(Pulse(), store, 3), FIRST, pytest.fail)


def test_two_of_one_number() -> None:
    store = open_store(FIRST)
    store.set("number/0", "other-host, process 12")
    with pytest.raises(DeviceError, match="another process is number 0 of 3: other-host, process 12") as caught:
        meet(store, Watch(Pulse(), store, 3), FIRST, pytest.fail)
    assert caught.value.hint == "give each process a RANK of its own, as torchrun does"


@pytest.mark.usefixtures("soon")
def test_where_nobody_is(address: str) -> None:
    with pytest.raises(DeviceError, match=f"^process 0, or its launcher, is not reached at {address}: "):
        open_store(Place(rank=1, count=2))


def test_no_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_PORT")
    with pytest.raises(DeviceError, match="MASTER_PORT= do not say where the processes meet"):
        open_store(FIRST)


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
    (first, second) = (next_meeting(), next_meeting())
    assert first != second
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    monkeypatch.setattr(meeting, "_MEETINGS", itertools.count(int(first.rpartition("/")[2])))
    assert next_meeting() not in (first, second)

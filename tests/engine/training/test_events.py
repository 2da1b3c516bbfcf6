"""The log of a run: strict lines, cut and repaired, and a full disk that stops nothing."""

from __future__ import annotations

import errno
import json
import math
import os
import resource
import signal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from brimful.core.errors import OutputError
from brimful.engine.training.events import EventLog


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "events.jsonl"


def read_events(path: Path) -> list[dict[str, Any]]:
    """Events of a log in order. A torn last line, left by a kill, is not an event yet."""
    lines = path.read_bytes().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith(b"\n")]


def strict(line: bytes) -> Any:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(line, parse_constant=refuse)


def test_lines_are_read_back_in_order(path: Path) -> None:
    with EventLog(path, report=pytest.fail) as log:
        log.write("start", run="r")
        log.write("step", step=1, loss=0.1 + 0.2, skipped=None, ids=(1, 2))
        assert read_events(path) == [
            {"kind": "start", "run": "r"},
            {"kind": "step", "step": 1, "loss": 0.1 + 0.2, "skipped": None, "ids": [1, 2]},
        ]
    with EventLog(path, report=pytest.fail) as log:
        log.write("resume")
    assert [event["kind"] for event in read_events(path)] == ["start", "step", "resume"]
    assert log.lost == 0


def test_numbers_that_json_does_not_have_become_their_names(path: Path) -> None:
    with EventLog(path, report=pytest.fail) as log:
        log.write("step", loss=math.nan, metrics={"f1": math.inf, "all": [-math.inf, 1.5]})
    line = strict(path.read_bytes())
    assert line == {"kind": "step", "loss": "nan", "metrics": {"f1": "inf", "all": ["-inf", 1.5]}}
    assert math.isnan(float(line["loss"]))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(exclude_categories=())),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(st.lists(st.dictionaries(st.text(), JSON, max_size=3), max_size=4))
def test_any_event_is_one_strict_line(tmp_path_factory: pytest.TempPathFactory, events: list[dict[str, Any]]) -> None:
    path = tmp_path_factory.mktemp("log") / "events.jsonl"
    with EventLog(path, report=pytest.fail) as log:
        for fields in events:
            log.write("any", fields=fields)
    text = path.read_bytes().decode("ascii")
    assert len(text.splitlines()) == len(events)
    for event, fields in zip(read_events(path), events, strict=True):
        assert strict(json.dumps(event).encode()) == event
        assert list(event["fields"]) == list(fields)


@pytest.mark.parametrize("value", [object(), {1, 2}, b"bytes"])
def test_what_is_not_json_is_a_mistake_of_the_caller(path: Path, value: object) -> None:
    with EventLog(path, report=pytest.fail) as log:
        with pytest.raises(TypeError):
            log.write("step", value=value)
        log.write("step", value=1)
    assert len(read_events(path)) == 1


def test_cut_at_a_position(path: Path) -> None:
    with EventLog(path, report=pytest.fail) as log:
        assert log.position() == 0
        log.write("step", step=1)
        position = log.position()
        assert position == path.stat().st_size
        log.write("step", step=2)
    with EventLog(path, report=pytest.fail) as log:
        log.cut(position)
        assert path.stat().st_size == position
        log.write("step", step=3)
        assert log.position() == path.stat().st_size
    assert [event["step"] for event in read_events(path)] == [1, 3]


def test_cut_that_is_not_at_the_end_of_a_line(path: Path) -> None:
    said: list[str] = []
    with EventLog(path, report=said.append) as log:
        for step in range(3):
            log.write("step", step=step)
        line_bytes = log.position() // 3
        log.cut(2 * line_bytes + 5)
        assert log.position() == 2 * line_bytes
        assert said == []
        log.cut(2 * line_bytes + 7)
        assert log.position() == 2 * line_bytes
        assert said == [f"{path} has lost 7 bytes; they are not in the log"]
        log.cut(line_bytes - 1)
        assert log.position() == 0
    assert path.read_bytes() == b""


@pytest.mark.parametrize("text_bytes", [10, 200_000])
def test_a_line_torn_anywhere_is_ignored_by_readers_and_repaired_by_the_writer(path: Path, text_bytes: int) -> None:
    with EventLog(path, report=pytest.fail) as log:
        log.write("first")
        position = log.position()
        log.write("second", text="x" * text_bytes)
    whole = path.read_bytes()
    for end in (*range(position, position + 30), len(whole) - 2, len(whole) - 1):
        for tail in (b"", b"\x00" * 20):  # a power cut may leave zeros
            path.write_bytes(whole[:end] + tail)
            assert [event["kind"] for event in read_events(path)] == ["first"]
            with EventLog(path, report=pytest.fail) as log:
                assert log.position() == position
                log.write("third")
            assert [event["kind"] for event in read_events(path)] == ["first", "third"]


def test_a_log_that_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=r"events\.jsonl"):
        EventLog(tmp_path / "not there" / "events.jsonl", report=pytest.fail)
    with pytest.raises(OutputError):
        EventLog(tmp_path, report=pytest.fail)


def test_a_full_disk_loses_events_and_nothing_else(path: Path) -> None:
    said: list[str] = []
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with EventLog(path, report=said.append) as log:
        log.write("step", step=1)
        room = log.position() + 8  # in the middle of the next line
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
        try:
            for step in (2, 3, 4):
                log.write("step", step=step)
            assert [event["step"] for event in read_events(path)] == [1]
            assert log.position() == room - 8
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert log.lost == 3
        log.write("step", step=5)
        log.write("step", step=6)
        assert log.position() == path.stat().st_size
    assert read_events(path) == [
        {"kind": "step", "step": 1},
        {"kind": "events_lost", "count": 3},
        {"kind": "step", "step": 5},
        {"kind": "step", "step": 6},
    ]
    assert said == [f"cannot write {path}: File too large; going on without the log"]
    assert log.lost == 3


def test_a_disk_too_sick_to_repair_the_line_at_once(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    real = os.write

    def fail(*args: Any) -> int:
        raise OSError(errno.EIO, "Input/output error")

    def tear(descriptor: int, data: bytes) -> int:
        real(descriptor, data[: len(data) // 2])
        return fail()

    with EventLog(path, report=said.append) as log:
        log.write("step", step=1)
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", tear)
            patch.setattr(os, "ftruncate", fail)
            patch.setattr(os, "fsync", fail)
            for step in (2, 3):
                log.write("step", step=step)
            position = log.position()
        assert [event["step"] for event in read_events(path)] == [1]
        log.write("step", step=4)
    assert [event.get("step") for event in read_events(path)] == [1, None, 4]
    assert len(said) == 1
    with EventLog(path, report=pytest.fail) as log:
        log.cut(position)
    assert [event["step"] for event in read_events(path)] == [1]


def test_what_is_lost_is_reported_once(path: Path) -> None:
    said: list[str] = []
    log = EventLog(path, report=said.append)
    log.close()
    log.write("late")
    log.write("later")
    assert said == [f"cannot write {path}: Bad file descriptor; going on without the log"]
    assert log.lost == 2


def test_a_disk_that_fails_at_the_end_stops_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    real = os.close

    def close(descriptor: int) -> None:
        real(descriptor)
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    log = EventLog(path, report=said.append)
    log.write("step")
    monkeypatch.setattr(os, "close", close)
    log.close()
    log.close()
    assert len(said) == 1
    assert "Disk quota exceeded" in said[0]


def test_a_closed_log_never_writes_into_another_file(path: Path) -> None:
    log = EventLog(path, report=lambda message: None)
    log.close()
    with path.with_name("other").open("wb") as other:  # gets the descriptor that the log had
        log.write("late")
        other.flush()
    assert path.with_name("other").read_bytes() == b""


def test_position_is_on_the_disk(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with EventLog(path, report=pytest.fail) as log:
        log.write("step")
        synced: list[int] = []
        real = os.fsync
        monkeypatch.setattr(
            os, "fsync", lambda descriptor: (synced.append(os.fstat(descriptor).st_size), real(descriptor))
        )
        position = log.position()
        assert synced == [position]
        log.cut(0)
        assert synced == [position, 0]
        log.write("last")
        log.close()
        assert synced == [position, 0, position]


def test_opening_syncs_the_name(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda descriptor: (synced.append(os.fstat(descriptor).st_ino), real(descriptor)))
    EventLog(path, report=pytest.fail).close()
    assert path.parent.stat().st_ino in synced


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("num_seen", [1, 2, 50, 500])
def test_a_killed_writer_loses_nothing_it_wrote(path: Path, num_seen: int) -> None:
    receive, send = os.pipe()
    child = os.fork()
    if not child:
        try:
            log = EventLog(path, report=pytest.fail)
            for step in range(1_000_000):
                log.write("step", step=step)
                if step == num_seen:
                    os.write(send, b"!")
        finally:
            os._exit(1)
    os.close(send)
    assert os.read(receive, 1) == b"!"
    os.close(receive)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    steps = [event["step"] for event in read_events(path)]
    assert steps == list(range(len(steps)))
    assert len(steps) > num_seen
    with EventLog(path, report=pytest.fail) as log:
        log.write("step", step=-1)
    assert len(read_events(path)) == len(steps) + 1

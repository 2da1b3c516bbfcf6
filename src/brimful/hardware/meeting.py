"""The meeting of processes that a launcher has started, at a store in the first of them or in the launcher."""

from __future__ import annotations

import itertools
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # not in its __all__

from brimful.core.errors import DeviceError, MeetingError, first_line, listed
from brimful.core.place import Place, find_address
from brimful.hardware.asked import check_same
from brimful.hardware.watch import Watch

T = TypeVar("T")

#: Time for all processes to come.
MEETING = timedelta(minutes=10)
#: Seconds until the first process says who has not come, or another that it waits for the first, and between two looks.
_PATIENCE_S, _LOOK_S = 30.0, 0.05
#: Most seconds to leave word that this process does not come: the first one may be slow to start, or end as this does.
_WORD_S = 30.0
_FAILED, _SECOND = "failed", "second 0"
#: Seconds that whatever has the port of the store may take to answer as one.
_ANSWER_S = 10.0
#: Seconds in which a first process that has just opened its store calls its meeting.
_CALL_S = 2.0
#: Stores by process, address and place. One that this process opened stays for its next meeting: others may be there
#: first, and would be at a store that ends.
_STORES: dict[tuple[int, str, Place], Any] = {}
#: Numbers of the meetings of this process, which are the same in all.
_MEETINGS = itertools.count()
#: Key of the name of the meeting that the first process has called last.
_CALLED = "brimful/called"


def store_is_launchers() -> bool:
    """True if the store lives in torchrun's own process, and not in the first of those it has started."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def open_store(place: Place) -> Any:
    """Return a connection to the store at `find_address`.

    Waits for whoever has the store, and for nobody else. Raises: DeviceError; MeetingError where nobody has it.
    """
    host, port = find_address()
    if not (port.isascii() and port.isdigit() and int(port) < 1 << 16) or not host:
        hint = "export MASTER_ADDR (the first host) and MASTER_PORT, or start them with torchrun"
        raise MeetingError(f"MASTER_ADDR={host} and MASTER_PORT={port} do not say where the processes meet", hint=hint)
    key = (os.getpid(), f"{host}:{port}", place)
    if key in _STORES:
        return _STORES[key]
    is_first = place.leads and not store_is_launchers()
    if not is_first:
        _wait_for_store(place, host, int(port))
    try:
        store = TCPStore(
            host, int(port), place.count, is_first, timeout=MEETING, wait_for_workers=False, multi_tenant=is_first
        )
    except (RuntimeError, ValueError) as error:
        if is_first:
            _check_first(place, host, int(port))
            hint = "see that MASTER_ADDR is this host, and give a MASTER_PORT that nothing uses"
            raise DeviceError(f"the store of the processes at {host}:{port}: {first_line(error)}", hint=hint) from error
        raise _not_reached(host, port, first_line(error)) from error
    _STORES[key] = store
    return store


def _wait_for_store(place: Place, host: str, port: int) -> None:
    """Wait until somebody listens where the processes meet, and say so if it takes long: no other process can.

    Raises: MeetingError.
    """
    began, told = time.monotonic(), False
    while True:
        try:
            socket.create_connection((host, port), 2.0).close()
            return
        except OSError as error:  # also a name that is not known: that of a host that is about to start
            why = error.strerror or str(error)
        except ValueError as error:
            raise _not_reached(host, str(port), first_line(error)) from error
        waited_s = time.monotonic() - began
        if waited_s > _PATIENCE_S and not told and place.local_rank == 0:
            told, own = True, f"process {place.rank} of {place.count}"
            said = f"warning: {own} waits for process 0, or its launcher, at {host}:{port}, for up to 10 min: {why}"
            print(said, file=sys.stderr, flush=True)
        if waited_s > MEETING.total_seconds():
            raise _not_reached(host, str(port), why)
        time.sleep(10 * _LOOK_S)


def _not_reached(host: str, port: str, why: str) -> MeetingError:
    return MeetingError(f"process 0, or its launcher, is not reached at {host}:{port}: {why}", hint=_HINT)


def _check_first(place: Place, host: str, port: int) -> None:
    """Look whether another process has the store as number 0, and leave word there: it may be of this training.

    Raises: DeviceError.
    """
    found: list[str] = []

    def look() -> None:
        with suppress(Exception):
            briefly = timedelta(seconds=_ANSWER_S)
            store = TCPStore(host, port, place.count, False, timeout=briefly, wait_for_workers=False)
            until = time.monotonic() + _CALL_S
            while not found and time.monotonic() < until:
                if store.check([_CALLED]):
                    _, pulses = parts_of(store, store.get(_CALLED).decode())
                    if pulses.check(["number/0"]):
                        # Unlike `set`, this waits for an answer: the process may end at once.
                        pulses.compare_set(_SECOND, "", f"{socket.gethostname()}, process {os.getpid()}")
                        found.append(pulses.get("number/0").decode())
                time.sleep(_LOOK_S)  # both may have been started at once

    looking = threading.Thread(target=look, daemon=True)  # what has the port may be no store, and never answer
    looking.start()
    looking.join(_ANSWER_S)
    if found:
        hint = "give each process a RANK of its own, as torchrun does, or MASTER_PORT, if they are of two trainings"
        raise DeviceError(f"another process is number 0 of {place.count} at port {port}: {found[0]}", hint=hint)


def next_meeting() -> str:
    """Return a name for what one meeting has in the store: a script may call for several, and torchrun restart all."""
    return f"brimful/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{next(_MEETINGS)}"


def call(place: Place) -> tuple[Any, Any]:
    """Return `parts_of` the store for the next meeting. Raises: DeviceError, of `open_store`."""
    meeting = next_meeting()  # also where the store cannot be opened: others count it
    store = open_store(place)
    if place.leads:
        store.set(_CALLED, meeting)
    return parts_of(store, meeting)


def parts_of(store: Any, meeting: str) -> tuple[Any, Any]:
    """Return the part of a store that is for one meeting, and the part of it for signs of life."""
    own = PrefixStore(meeting, store)
    return own, PrefixStore("pulses", own)


@contextmanager
def coming(place: Place) -> Iterator[None]:
    """Within, this process is on its way to the others. If it fails, those who wait for it are told."""
    try:
        yield
    except Exception as error:
        tell_failure(place, error)
        raise


@contextmanager
def entered(place: Place, context: AbstractContextManager[T]) -> Iterator[T]:
    """Within `context`. If it cannot be entered, those who wait for this process are told."""
    with ExitStack() as stack:
        with coming(place):
            found = stack.enter_context(context)
        yield found


def tell_failure(place: Place, error: Exception) -> None:
    """Leave word that this process does not come. The first one has nowhere to, unless the store is the launcher's.

    A script may go on to its next meeting: each process counts the one that it has not come to.
    """
    meeting = next_meeting()
    if place.count > 1 and (not place.leads or store_is_launchers()) and _store_is_there():
        with suppress(Exception):
            _, pulses = parts_of(open_store(place), meeting)
            own = f"process {place.rank} of {place.count} ({socket.gethostname()})"
            pulses.set(_FAILED, f"{own} has failed: {first_line(error)}")


def _store_is_there() -> bool:
    """Wait for the store, but not for long. torch would print stacks of its own where nobody comes."""
    (host, port), until = find_address(), time.monotonic() + _WORD_S
    while time.monotonic() < until:
        with suppress(OSError, ValueError):
            socket.create_connection((host, int(port)), 1.0).close()
            return True
        time.sleep(_LOOK_S)
    return False


def meet(
    store: Any, watch: Watch, place: Place, note: Callable[[str], None], asked: Mapping[str, str] | None = None
) -> None:
    """Give a first sign of life, and wait until all processes have.

    note: takes word of those that are not there yet, in the first process. asked: of `asked_of`.
    Raises: DeviceError where one does not come, or two have the same number; OptionError where one was asked something
    else.
    """
    own = f"{socket.gethostname()}, process {os.getpid()}"
    try:
        if (first := store.compare_set(f"number/{place.rank}", "", own).decode()) != own:
            hint = "give each process a RANK of its own, as torchrun does"
            raise MeetingError(f"another process is number {place.rank} of {place.count}: {first}", hint=hint)
        store.set(f"asked/{place.rank}", json.dumps(dict(asked or {})))
        watch.announce()
        _wait_for_all(store, watch, place, note)
        texts = store.multi_get([f"asked/{rank}" for rank in range(place.count)])
    except RuntimeError as error:
        hint = "see what process 0 said"
        raise DeviceError(f"process 0 is gone before all had met: {first_line(error)}", hint=hint) from error
    check_same([json.loads(text) for text in texts])


def _wait_for_all(store: Any, watch: Watch, place: Place, note: Callable[[str], None]) -> None:
    missing, began, told, told_of_second = list(range(place.count)), time.monotonic(), False, False
    while missing := [rank for rank in missing if not watch.has_come(rank)]:
        if store.check([_FAILED]):
            raise DeviceError(store.get(_FAILED).decode(), hint="mend it there, and start all again")
        waited_s = time.monotonic() - began
        if waited_s > MEETING.total_seconds():
            raise DeviceError(f"{_numbers(missing, place.count)} did not come in {waited_s / 60:.0f} min", hint=_HINT)
        if place.leads and not told_of_second and store.check([_SECOND]):
            told_of_second = True
            note(f"another process of RANK 0 was here: {store.get(_SECOND).decode()}; two of one training cannot be")
        if place.leads and waited_s > _PATIENCE_S and not told:
            told = True
            note(f"waiting for {_numbers(missing, place.count)}, at {find_address()[0]}, for up to 10 min")
        time.sleep(_LOOK_S)


def _numbers(ranks: Sequence[int], count: int) -> str:
    return f"process{'es' * (len(ranks) > 1)} {listed([str(rank) for rank in ranks], 8)} of {count}"


_HINT = "see that MASTER_ADDR and MASTER_PORT are the same in all, and that all were started"

"""Start a command once for each GPU of this machine, and end as the first of these processes does.

Each finds its place in the environment, as torchrun has it. The first one leads: it alone prints, and hears signals.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from brimful.core.cores import num_cores
from brimful.core.errors import OptionError, RanksError

#: Variable with the number of a pipe that is open for as long as whoever started this process is there.
LIFELINE = "BRIMFUL_LIFELINE"
#: Seconds that others have to notice that one of them is gone, and to end by themselves.
_GRACE_S = 10.0
_POLL_S = 0.1
#: Signals that end a leader before it can say anything: a process is gone, as where it is another one.
_ABRUPT = (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT)
#: Multicast over NVLink, which a GPU shared by others may not have; stacks of torch's for each connection that ends.
_ENVIRONMENT = {"NCCL_NVLS_ENABLE": "0", "TORCH_CPP_LOG_LEVEL": "ERROR"}


def number_of(gpus: str) -> int:
    """Return how many GPUs `--gpus` asks for. Raises: OptionError."""
    if gpus == "all":
        import torch

        if not (found := torch.cuda.device_count()):
            raise OptionError("--gpus all was asked for, and torch sees no GPU", hint="leave it out, or see nvidia-smi")
        return found
    return int(gpus)


def launch(command: Sequence[str], count: int, environment: Mapping[str, str] = os.environ) -> int:
    """Run `count` processes of a command to their end; return the exit code of the first one.

    Where another one ends first, it is named, and the rest is ended if it does not end by itself.
    """
    port, (lifeline, kept) = _free_port(), os.pipe()
    threads = environment.get("OMP_NUM_THREADS") or str(max(1, (num_cores() or 1) // count))
    common = {**_ENVIRONMENT, **environment, "OMP_NUM_THREADS": threads, LIFELINE: str(lifeline)}
    common |= {
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    processes: list[subprocess.Popen[bytes]] = []
    with _forwarded(processes):
        try:
            for rank in range(count):
                own = common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                # In sessions of their own: what a terminal sends to all would end followers in the midst of a step.
                processes.append(
                    subprocess.Popen(
                        command,
                        env=own,
                        stdin=None if rank == 0 else subprocess.DEVNULL,
                        stdout=None if rank == 0 else sys.stderr,
                        pass_fds=(lifeline,),
                        start_new_session=True,
                    )
                )
            return _wait(processes)
        finally:
            for process in processes:
                with suppress(OSError):
                    process.kill()
                process.wait()
            os.close(lifeline)
            os.close(kept)


def watch_launcher() -> None:
    """End this process as SIGTERM does once the one that started it is gone."""
    number = os.environ.get(LIFELINE, "")
    if not number.isdigit():
        return

    def watch() -> None:
        with suppress(OSError):
            os.read(int(number), 1)
            os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="lifeline", daemon=True).start()


def _wait(processes: Sequence[subprocess.Popen[bytes]]) -> int:
    """Wait for the leader, and for a while for the others; name the first that ends badly before it."""
    leader, named, until = processes[0], False, float("inf")
    while leader.poll() is None and time.monotonic() < until:
        # Those that end with RanksError's code have found another one gone, and say so.
        gone = [(rank, each.returncode) for rank, each in enumerate(processes) if each.poll() not in (None, 0)]
        gone.sort(key=lambda found: found[1] == RanksError.exit_code)
        if gone and not named and leader.poll() is None:
            (rank, code), named, until = gone[0], True, time.monotonic() + _GRACE_S
            how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
            if code != RanksError.exit_code:
                print(f"process {rank} of {len(processes)} {how}", file=sys.stderr)
        time.sleep(_POLL_S)
    until = time.monotonic() + _GRACE_S
    while any(each.poll() is None for each in processes[1:]) and time.monotonic() < until:
        time.sleep(_POLL_S)
    code = leader.poll()
    if code is None or -code in _ABRUPT:
        return RanksError.exit_code
    return code if code >= 0 else 128 - code


@contextmanager
def _forwarded(processes: Sequence[subprocess.Popen[bytes]]) -> Iterator[None]:
    """Within, signals to stop go to the leader."""

    def forward(number: int, _: Any) -> None:
        if processes:
            with suppress(OSError):
                processes[0].send_signal(number)

    before = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])

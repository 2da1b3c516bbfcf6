"""The process of a row, watched from outside: how far it is, the driver's memory, and an end when its time is over."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from brimful.core.atomic_files import TEMPORARY, file_errors
from brimful.core.errors import printable

_POLL_S = 0.05
#: Beginning of the reason of a process that the kernel killed.
KILLED = "the process was killed"
#: Settings of the process: messages of libraries stay in the log, and cuBLAS is as torch would have it.
_QUIET = {"TRANSFORMERS_VERBOSITY": "error", "TOKENIZERS_PARALLELISM": "false", "PYTHONWARNINGS": "ignore"}


@dataclass(frozen=True, kw_only=True)
class Ended:
    """The end of a process. found: what it wrote, None if it did not come to that; reason says why then.

    nvml_bytes: most that the driver counted, less what was used before. timed_out: ended at its time limit. killed:
    by the kernel, most likely, for want of memory.
    """

    found: Mapping[str, Any] | None
    reason: str | None = None
    wall_s: float = 0.0
    nvml_bytes: int | None = None
    timed_out: bool = False
    killed: bool = False


@dataclass
class Watch:
    """Calls beside a process. told: with the steps that it has done. idle: about twenty times a second."""

    told: Callable[[int], None] = field(default=lambda _: None)
    idle: Callable[[], None] = field(default=lambda: None)


def run_plan(plan: Mapping[str, Any], watch: Watch, *, limit_s: float | None, folder: Path) -> Ended:
    """Run a plan in a process of its own, in a group that ends with it, at the latest after `limit_s`.

    folder: where it has one of its own, named as what is being written, so that `clean_temporaries` removes what a kill
    leaves.
    """
    nvml = Nvml()
    with ExitStack() as stack:
        with file_errors(folder):
            made = tempfile.TemporaryDirectory(prefix=f"{TEMPORARY}process-", dir=folder, ignore_cleanup_errors=True)
            own = stack.enter_context(made)
            given, result = Path(own).absolute() / "plan.json", Path(own).absolute() / "result.json"
            given.write_text(json.dumps(plan), "utf-8")
        command = [sys.executable, "-m", "brimful.benchmarking.worker", str(given), str(result)]
        before, kills = nvml.used_bytes(), memory_kills()
        peak = before
        began, timed_out = time.monotonic(), False
        with (Path(own) / "stderr").open("w+b") as errors:
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, env=_environment(),
                start_new_session=True, text=True, errors="replace",
            )  # fmt: skip
            try:
                steps = _reader(process)
                while process.poll() is None:
                    time.sleep(_POLL_S)
                    _hear(steps, watch)
                    if peak is not None:
                        peak = max(peak, nvml.used_bytes() or 0)
                    if limit_s is not None and time.monotonic() - began > limit_s:
                        timed_out = True
                        break
            finally:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                assert process.stdin is not None
                process.stdin.close()
            errors.seek(0)
            said = errors.read().decode("utf-8", "replace")
        wall_s = time.monotonic() - began
        found = json.loads(result.read_text("utf-8")) if result.exists() else None
    used = None if peak is None or before is None else max(0, peak - before)
    reason = None
    if found is None:
        reason = f"not done after {wall_s:.0f} s" if timed_out else _why(process.returncode, said)
    killed = found is None and not timed_out and process.returncode == -signal.SIGKILL
    killed = killed and kills is not None and (memory_kills() or 0) > kills
    if killed:
        reason = f"{KILLED}, most likely by the kernel for want of memory"
    return Ended(
        found=found, reason=reason, wall_s=wall_s, nvml_bytes=used, timed_out=timed_out and found is None, killed=killed
    )


def _environment() -> dict[str, str]:
    """This process's, for one GPU, the first."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    first = "0" if visible is None else visible.split(",")[0]
    return {**_QUIET, **os.environ, "CUDA_VISIBLE_DEVICES": first}


def _reader(process: subprocess.Popen[str]) -> queue.Queue[int]:
    """Steps that the process says it has done, read in a thread; all else on its stdout is let go."""
    steps: queue.Queue[int] = queue.Queue()

    def read() -> None:
        assert process.stdout is not None
        with process.stdout as lines:
            for line in lines:
                word, _, number = line.partition(" ")
                if word == "STEP" and number.strip().isdecimal():
                    steps.put(int(number))

    threading.Thread(target=read, name="bench-steps", daemon=True).start()
    return steps


def _hear(steps: queue.Queue[int], watch: Watch) -> None:
    done: int | None = None
    while not steps.empty():
        done = steps.get()
    if done is not None:
        watch.told(done)
    watch.idle()


def _why(code: int, said: str) -> str:
    """The reason of an end without a result."""
    if code < 0:
        with suppress(ValueError):
            return f"the process was ended by signal {-code} ({signal.Signals(-code).name})"
    last = next((line for line in reversed(said.splitlines()) if line.strip()), "")
    return printable(f"the process ended with code {code}: {last}" if last else f"exit code {code}", 500)


def memory_kills(group: Path = Path("/sys/fs/cgroup"), system: Path = Path("/proc/vmstat")) -> int | None:
    """Processes that the kernel has killed for want of memory: of the control group (v2), or of the system where the
    group does not say; None where neither does."""
    for file in (group / "memory.events", system):
        with suppress(OSError, ValueError, StopIteration):
            lines = (line.split() for line in file.read_text("ascii").splitlines())
            return next(int(words[1]) for words in lines if words[0] == "oom_kill")
    return None


class Nvml:
    """The first GPU that may be used, as the driver sees it: read from here, it disturbs nothing that is measured."""

    def __init__(self) -> None:
        self._handle: Any = None
        with suppress(Exception):  # no driver, or none that answers: unknown
            import pynvml

            pynvml.nvmlInit()
            first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
            by = pynvml.nvmlDeviceGetHandleByIndex if first.isdigit() else pynvml.nvmlDeviceGetHandleByUUID
            self._handle = by(int(first) if first.isdigit() else first)

    def used_bytes(self) -> int | None:
        """All that is used on the GPU; None where the driver cannot be read."""
        if self._handle is None:
            return None
        with suppress(Exception):
            import pynvml

            return int(pynvml.nvmlDeviceGetMemoryInfo(self._handle).used)
        return None

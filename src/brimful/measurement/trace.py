"""Steps under torch's profiler: its Chrome trace, and the kernels and operators that stand in it."""

from __future__ import annotations

import json
import re
import tempfile
import threading
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from brimful.hardware.process_settings import environment_default
from brimful.measurement.kernels import Span

#: Categories of what runs on a GPU. Ranges that are annotated on it are others: they only lie around kernels.
_ON_GPU = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
#: Calls of the host that give the GPU work.
_LAUNCH = re.compile(r"^cu(da)?(LaunchKernel|GraphLaunch|Memcpy\w*Async|Memset\w*Async)")


@dataclass(frozen=True, kw_only=True)
class Trace:
    """A recorded trace.

    document: the Chrome trace as torch wrote it, JSON. kernels: on the GPU, copies and fills included. operators: of
    the thread that ran the steps, nested; recorded on a CPU only. num_launches: calls of the host that gave the GPU
    work; None on a CPU, and where the profiler did not see them.
    """

    document: bytes
    kernels: tuple[Span, ...]
    operators: tuple[Span, ...]
    num_launches: int | None


def record(device: torch.device, *, warm_up: Callable[[], object], steps: Callable[[], object]) -> Trace:
    """Runs `warm_up`, in which the profiler sets itself up, and then records `steps`. Both wait for the device's end.

    On a GPU only the GPU and calls to it are recorded: operators too would keep the host from feeding it.
    """
    activity = ProfilerActivity.CUDA if device.type == "cuda" else ProfilerActivity.CPU
    quiet = environment_default("KINETO_LOG_LEVEL", "99")  # the profiler's own notes, on stderr
    with quiet, tempfile.TemporaryDirectory(prefix="brimful-trace-") as folder:
        path = Path(folder) / "trace.json"
        phases = schedule(wait=0, warmup=1, active=1, repeat=1)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Warning: Profiler clears events")  # of cycles; here is one
            with profile(
                activities=[activity],
                schedule=phases,
                on_trace_ready=lambda recorded: recorded.export_chrome_trace(str(path)),
            ) as profiler:
                warm_up()
                profiler.step()
                steps()
        return read_trace(path.read_bytes(), thread=threading.get_native_id(), gpu=device.type == "cuda")


def read_trace(document: bytes, *, thread: int, gpu: bool) -> Trace:
    """A Chrome trace as torch writes it. thread: the system's number of the one that ran the steps."""
    events = json.loads(document, strict=False)["traceEvents"]
    whole = [event for event in events if event.get("ph") == "X"]
    return Trace(
        document=document,
        kernels=tuple(_span(event) for event in whole if event.get("cat") in _ON_GPU),
        operators=tuple(_span(event) for event in whole if event.get("cat") == "cpu_op" and event.get("tid") == thread),
        num_launches=(sum(1 for event in whole if _LAUNCH.match(event["name"])) or None) if gpu else None,
    )


def _span(event: Mapping[str, Any]) -> Span:
    """Times of a Chrome trace are in microseconds."""
    start, length = float(event["ts"]), float(event["dur"])
    return Span(name=event["name"], start_s=start * 1e-6, end_s=(start + length) * 1e-6)

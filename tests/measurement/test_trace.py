"""Chrome traces: a GPU's as torch writes it, and one recorded here."""

from __future__ import annotations

import json

import torch

from brimful.measurement.kernels import Span
from brimful.measurement.trace import read_trace, record

GPU = {
    "traceEvents": [
        {"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "ts": 0, "args": {"name": "python"}},
        {"ph": "X", "cat": "cuda_runtime", "name": "cudaGraphLaunch", "pid": 1, "tid": 9, "ts": 1.0, "dur": 2.0},
        {"ph": "X", "cat": "cuda_runtime", "name": "cudaEventRecord", "pid": 1, "tid": 9, "ts": 4.0, "dur": 1.0},
        {"ph": "X", "cat": "cuda_driver", "name": "cuLaunchKernelEx", "pid": 1, "tid": 9, "ts": 5.0, "dur": 1.0},
        {"ph": "X", "cat": "kernel", "name": "nvjet", "pid": 0, "tid": 7, "ts": 10.5, "dur": 2.25},
        {"ph": "X", "cat": "gpu_memset", "name": "Memset (Device)", "pid": 0, "tid": 7, "ts": 13, "dur": 1},
        {"ph": "X", "cat": "gpu_user_annotation", "name": "ProfilerStep#1", "pid": 0, "tid": 7, "ts": 10, "dur": 99},
        {"ph": "s", "cat": "ac2g", "name": "ac2g", "pid": 1, "tid": 9, "ts": 1.0, "id": 1},
        {"ph": "X", "cat": "cpu_op", "name": "aten::empty", "pid": 1, "tid": 9, "ts": 20, "dur": 1},
        {"ph": "X", "cat": "cpu_op", "name": "aten::sort", "pid": 1, "tid": 10, "ts": 20, "dur": 1},
    ]
}


def test_kernels_launches_and_operators_of_one_thread() -> None:
    trace = read_trace(json.dumps(GPU).encode(), thread=9, gpu=True)
    assert [(span.name, round(span.start_s * 1e6, 3), round(span.end_s * 1e6, 3)) for span in trace.kernels] == [
        ("nvjet", 10.5, 12.75),
        ("Memset (Device)", 13, 14),
    ]
    assert trace.num_launches == 2
    assert [span.name for span in trace.operators] == ["aten::empty"]


def test_only_the_steps_are_recorded() -> None:
    x = torch.randn(8, 8)
    trace = record(torch.device("cpu"), warm_up=lambda: x.tanh(), steps=lambda: [x @ x for _ in range(3)])
    names = [span.name for span in trace.operators]
    assert names.count("aten::mm") == 3
    assert "aten::tanh" not in names
    assert all(isinstance(span, Span) and span.end_s >= span.start_s for span in trace.operators)
    assert trace.num_launches is None
    assert json.loads(trace.document)["traceEvents"]

"""Memory that a CPU's step frees is there for the next one: no page comes anew from the system."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import brimful
from brimful.core.callbacks import Callbacks
from brimful.engine.training import train
from runs import save_tiny_model, single_label_rows, write_rows

SCRIPT = """
import resource, sys, torch
from brimful.hardware.process_settings import freed_memory_kept

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):  # as many as a step of a small model, of other sizes in turns
        held = [torch.ones(size << 18) for size in (3, 12, 31, 7, 20)]
        del held
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def held_bytes():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()

with freed_memory_kept(torch.device("cpu")):
    faults()
    kept = min(faults() for _ in range(4))  # a block may be split for good, once in a while
    within = held_bytes()
print(kept, within - held_bytes())
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="glibc's allocator alone has the switch")
def test_what_is_freed_is_kept_within_and_given_back_afterwards() -> None:
    """73 MiB a step, 18,688 pages: none is a fault once they are there, and they go back to the system at the end."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    kept, given_back = map(int, done.stdout.split())
    assert kept < 2000
    assert given_back > 40 << 20


def test_training_on_a_cpu_keeps_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.device] = []

    @contextmanager
    def kept(device: torch.device) -> Iterator[None]:
        seen.append(device)
        yield

    monkeypatch.setattr(train, "freed_memory_kept", kept)
    rows, model = write_rows(tmp_path / "rows.jsonl", single_label_rows(8)), save_tiny_model(tmp_path / "model")
    brimful.train(rows, model=model, output=tmp_path / "run", max_steps=1, device="cpu", callbacks=Callbacks())
    assert seen == [torch.device("cpu")]

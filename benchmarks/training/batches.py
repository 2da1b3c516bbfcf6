"""Host time to put together a batch of 32 tweets, as `brimful train` does on a CPU and as it does for a GPU.

    OMP_NUM_THREADS=1 python benchmarks/training/batches.py

Needs no GPU and no network. Of seven times 400 batches the fastest counts: in one process, by the clock.
"""

from __future__ import annotations

import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))

import brimful_side
import torch
from works import Work, make_inputs

_REPEATS, _BATCHES = 7, 400


def _tell(built: Any, *_: Any) -> None:
    """Print the times of a built step's source of batches, and end: no step is made."""
    for name, groups in (("on a CPU, rows in groups", True), ("for a GPU", False)):
        built.source.layout = replace(built.source.layout, groups=groups)
        batches, times = built.source.batches(0, None), []
        for _ in range(_REPEATS):
            began = time.perf_counter()
            for _ in range(_BATCHES):
                next(batches)
            times.append((time.perf_counter() - began) / _BATCHES * 1e3)
        print(f"{name:26} {min(times):.2f} ms (to {max(times):.2f})")
    sys.exit()


def main() -> None:
    torch.set_num_threads(1)
    work = Work.parse("tweets/minilm")
    with tempfile.TemporaryDirectory() as folder:
        make_inputs(Path(folder), [work], None, smoke=False)
        brimful_side._run = _tell
        settings = {"batch_size": 32, "precision": "fp32", "execution": "eager"}
        plan = {"work": work.name, "settings": [settings], "smoke": False, "warm_up": 1, "steps": 1, "rounds": 1}
        list(brimful_side.measure(plan, Path(folder)))


if __name__ == "__main__":
    main()

"""Host time to put a batch of tweets together, for a step on a CPU and for one on a GPU, and to send it.

    OMP_NUM_THREADS=1 python benchmarks/training/batches.py [tweets/minilm-b16]

Needs no GPU and no network. Of 25 times 400 batches the fastest counts: in one process, by its CPU time.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))

import brimful_side
import torch
from works import Work, make_inputs

_REPEATS, _BATCHES = 25, 400


def _tell(built: Any, *_: Any) -> None:
    """Print the times of a built step's source of batches, and end: no step is made."""
    source, host = built.source, torch.device("cpu")
    for name, groups in (("on a CPU, rows in groups", True), ("for a GPU", False)):
        source.layout = replace(source.layout, groups=groups)
        batches = source.batches(0, None)
        _say(name, lambda number, batches=batches: next(batches))
    made = list(source.batches(0, _BATCHES))
    _say("sent", lambda number: made[number].sent(host))
    sent = [batch.sent(host) for batch in made]
    _say("arrived", lambda number: [sent[number].arrived(i) for i in range(len(sent[number].micro_batches))])
    sys.exit()


def _say(name: str, act: Callable[[int], Any]) -> None:
    times = []
    for _ in range(_REPEATS):
        began = time.process_time()
        for number in range(_BATCHES):
            act(number)
        times.append((time.process_time() - began) / _BATCHES * 1e3)
    print(f"{name:26} {min(times):.3f} ms (to {max(times):.3f})")


def main() -> None:
    torch.set_num_threads(1)
    work = Work.parse(sys.argv[1] if len(sys.argv) > 1 else "tweets/minilm")
    with tempfile.TemporaryDirectory() as folder:
        make_inputs(Path(folder), [work], None, smoke=False)
        brimful_side._run = _tell
        settings = {"batch_size": work.batch_size, "precision": "fp32", "execution": "eager"}
        plan = {"work": work.name, "settings": [settings], "smoke": False, "warm_up": 1, "steps": 1, "rounds": 1}
        list(brimful_side.measure(plan, Path(folder)))


if __name__ == "__main__":
    main()

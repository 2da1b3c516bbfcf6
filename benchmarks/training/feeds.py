"""Steps whose batches a thread makes ahead, and steps whose batches are made between two launches, in turns.

    python benchmarks/training/feeds.py tweets/minilm-b16 tweets/base --tokenizer FOLDER > LOG

One process a row: the run that `run.py` measures, its batches fed in either way, round by round; milliseconds of wall
time, of the process's CPU time and of waiting for input, a step. Needs one NVIDIA GPU; --smoke: a tiny model on a CPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))

import torch
from resumable import default_inputs
from shapes import max_length
from works import Work, data_file, make_inputs, model_folder

from brimful.core.callbacks import Callbacks
from brimful.core.options.train import TrainOptions
from brimful.data.batches.prefetch import AHEAD, Feed
from brimful.engine.assemble import Built, build
from brimful.engine.prepare import prepare
from brimful.hardware.probe import choose_device
from brimful.hardware.process_settings import freed_memory_kept
from brimful.levers.precision import choose_precision

_IN_FLIGHT, _FIRST = 2, 5


def timed(built: Built, source: Any, ahead: int, start: int, count: int) -> dict[str, float]:
    """Milliseconds a step of `count` steps from batch `start` on, after a few that are not counted."""
    step, flying = built.step, deque[Any]()

    def land(most: int) -> None:
        while len(flying) > most:
            flying.popleft().read()
        if most == 0 and step.device.type == "cuda":
            torch.cuda.synchronize()

    clocks: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}
    with Feed(source, step.device, start=start, stop=start + _FIRST + count, ahead=ahead) as feed:
        clocks["input_wait"] = lambda: feed.wait_s
        began = {}
        for number, batch in enumerate(feed):
            if number == _FIRST:
                land(0)
                began = {name: clock() for name, clock in clocks.items()}
            flying.append(step.run(batch))
            land(_IN_FLIGHT)
        land(0)
        return {name: round((clock() - began[name]) / count * 1e3, 3) for name, clock in clocks.items()}


def measure(name: str, inputs: Path, tokenizer: str | None, *, execution: str, smoke: bool) -> dict[str, Any]:
    """Both ways in turns, of one row."""
    work = Work.parse(name)
    make_inputs(inputs, [work], tokenizer, smoke=smoke)
    options = TrainOptions(
        data=str(data_file(inputs, work)), model=str(model_folder(inputs, work)), output="", eval_split=0.0,
        max_length=max_length(smoke), batch_size=work.batch_size, learning_rate=1e-5, max_steps=10_000, seed=1,
        precision="auto" if smoke else "bf16", execution="auto" if smoke else execution,
    )  # fmt: skip
    callbacks = Callbacks()
    precision = choose_precision(options.precision, choose_device(options.device))
    prepared = prepare(options, callbacks)
    warm_up, count, rounds = (4, 4, 2) if smoke else (150, 200 if work.texts == "tweets" else 60, 5)
    found: dict[int, list[dict[str, float]]] = {AHEAD: [], 0: []}
    with precision.apply(), freed_memory_kept(precision.device):
        built = build(options, prepared, precision, callbacks)
        with closing(built.source) as source:
            timed(built, source, AHEAD, 0, warm_up)
            at = warm_up
            for _ in range(rounds):
                for ahead, of_way in found.items():
                    of_way.append(timed(built, source, ahead, at, count))
                    at += count
    return {
        "work": name,
        "execution": execution,
        "ms": {f"{ahead} ahead": statistics.median(each["wall"] for each in of_way) for ahead, of_way in found.items()},
        "rounds": {f"{ahead} ahead": of_way for ahead, of_way in found.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("works", nargs="+", help="rows of run.py")
    parser.add_argument("--tokenizer", help="folder of a BERT tokenizer; default: that of the packaged MiniLM-L6")
    parser.add_argument("--execution", default="compiled", help="brimful's own option")
    parser.add_argument("--inputs", type=Path, help="folder for models and texts; default: in the temporary folder")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes, short runs: to test this script on a CPU")
    asked = parser.parse_args()
    if len(asked.works) > 1:  # a process each
        options = [word for word in sys.argv[1:] if word not in asked.works]
        for name in asked.works:
            subprocess.run([sys.executable, __file__, name, *options], check=True)
        return
    inputs = asked.inputs or default_inputs("training", smoke=asked.smoke)
    print(json.dumps(measure(asked.works[0], inputs, asked.tokenizer, execution=asked.execution, smoke=asked.smoke)))


if __name__ == "__main__":
    main()

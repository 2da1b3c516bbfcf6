"""Sides on a CPU in turns: what disturbs one disturbs the others. brimful with several token budgets, too.

    python benchmarks/classification/in_turns.py tweets/minilm --inputs FOLDER --sides pipeline:fp32 fp32:8192 fp32

A side is `pipeline` or `crossencoder`, a dtype and a batch (`pipeline:bf16:32`; 8 unless one is named), of the pipeline
in order of length; or a precision of brimful's with or without a token budget, `+plain` without reordered weights. Wall
time and CPU time of the process are taken: on a machine with other work, the second says more.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from statistics import median
from unittest.mock import patch

import torch

sys.path.append(str(Path(__file__).parents[1]))

from floor import read_pool
from settings import BASE
from sides import Answered, BrimfulSide, CrossEncoderSide, PipelineSide, Run
from works import Sample, Work, make_inputs

from brimful.engine.classification import runner

_WARM_TEXTS = 64


def side_of(name: str, work: Work, inputs: Path) -> Run:
    whole, _, plain = name.partition("+")
    kind, _, detail = whole.partition(":")
    if other := {"pipeline": PipelineSide, "crossencoder": CrossEncoderSide}.get(kind):
        dtype, _, batch = detail.partition(":")
        settings = BASE | {"dtype": dtype, "batch_size": int(batch or 8), "sorted": True}
        return other(work, inputs, "cpu", smoke=False).prepare(settings)
    settings = {"precision": kind, "returns": "objects"} | ({"token_budget": int(detail)} if detail else {})
    run = BrimfulSide(work, inputs, "cpu", smoke=False).prepare(settings)
    if not plain:
        return run

    def with_plain_weights(sample: Sample) -> Answered:
        with patch.object(runner, "can_reorder", lambda _: False):  # asked by the first call
            return run(sample)

    return with_plain_weights


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work")
    parser.add_argument("--texts", type=int, default=600)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--inputs", type=Path, required=True, help="folder for models and texts")
    parser.add_argument("--sides", nargs="+", default=["pipeline:fp32", "pipeline:bf16", "fp32", "auto"])
    options = parser.parse_args()
    work = Work.parse(options.work)
    make_inputs(options.inputs, work, None, smoke=False)
    pool = read_pool(options.inputs, work)
    sample = pool.sample(options.texts)
    sides = {name: side_of(name, work, options.inputs) for name in options.sides}
    for run in sides.values():
        run(pool.sample(_WARM_TEXTS))
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    for _ in range(options.rounds):
        for name, run in sides.items():
            began_s = time.process_time()
            taken[name].append((run(sample).seconds, time.process_time() - began_s))
    print(f"{work.name}: {options.texts} texts, {options.rounds} rounds, {torch.get_num_threads()} threads")
    for name, seconds in taken.items():
        wall_s, cpu_s = zip(*seconds, strict=True)
        fastest, usual = (options.texts / of(wall_s) for of in (min, median))
        cpu_ms = 1e3 * median(cpu_s) / options.texts
        print(f"{name:17} texts/s: best {fastest:6.1f}, median {usual:6.1f}; CPU ms a text: median {cpu_ms:7.2f}")


if __name__ == "__main__":
    main()

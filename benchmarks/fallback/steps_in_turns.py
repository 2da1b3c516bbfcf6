"""Steps on a CPU in turns: brimful's and those of a plain loop, each side in a process of its own.

    python benchmarks/fallback/steps_in_turns.py gemma2 modernbert --inputs FOLDER > LOG
    python benchmarks/fallback/steps_in_turns.py gemma2 modernbert --inputs FOLDER --traffic > LOG

Rows of 96 tokens, so that nothing is left to pack, or with `--shape short` of 8 to 32. A plain loop does what Trainer
does and no more: forward, backward, clipping, torch's fused AdamW. Ours keeps freed memory, as `brimful train` does;
each process has a heap of its own, as users' runs have. One works while the other waits, and which goes first changes:
sides that follow one another within seconds share what else the machine does, where `run.py`, a side at a time for a
minute, finds differences of a tenth on the same code. CPU seconds of a step, medians; ratios of neighbours, their
median, its 95 % interval by order, which is of these two processes and takes steps for independent, and quarters. Makes
the models and texts of `run.py --cpu --size small` where they are not there.
With --traffic: operators of one step, and the bytes of what they are given and return (not what happens inside them),
which no other work disturbs.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))

import torch
from architectures import Work, make_inputs
from provenance import commit_here, host_here
from shapes import load_tokenizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import brimful
from brimful.hardware.process_settings import freed_memory_kept

_ROWS, _TOKENS, _WARM_UP = 32, 96, 2
#: Operators that touch no numbers, beside views.
_OF_NO_NUMBERS = {"empty", "empty_like", "empty_strided", "new_empty", "_unsafe_view", "detach"}


def encoded(folder: Path, shape: str) -> list[dict[str, Any]]:
    """One effective batch of the texts beside the model."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    lines = (folder.parent / f"{shape}-small.jsonl").read_text("utf-8").splitlines()[:_ROWS]
    rows = [dict(tokenizer(json.loads(line)["text"], truncation=True, max_length=_TOKENS)) for line in lines]
    return [row | {"labels": number % 2} for number, row in enumerate(rows)]


def load(folder: Path) -> Any:
    """The model to train."""
    return AutoModelForSequenceClassification.from_pretrained(folder).train()


def ours(folder: Path, rows: list[dict[str, Any]]) -> tuple[Callable[[], None], str]:
    """Return a step of brimful, and whether it runs packed."""
    lengths = [len(row["input_ids"]) for row in rows]
    step = brimful.Step(load(folder), num_steps=1000, batch_size=len(rows), lengths=lengths)

    def run() -> None:
        step.run(step.batch(rows)).read()

    return run, "packed" if step.packed else "padded"


def plain(folder: Path, rows: list[dict[str, Any]]) -> tuple[Callable[[], None], str]:
    """Return a step of a plain loop, and how it runs."""
    model = load(folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5, fused=True)
    longest = -(-max(len(row["input_ids"]) for row in rows) // 8) * 8  # as Trainer pads in these benchmarks

    def padded(key: str, filling: int) -> torch.Tensor:
        return torch.tensor([row[key] + [filling] * (longest - len(row[key])) for row in rows])

    def run() -> None:
        batch = {"input_ids": padded("input_ids", model.config.pad_token_id or 0)}
        batch |= {
            "attention_mask": padded("attention_mask", 0),
            "labels": torch.tensor([row["labels"] for row in rows]),
        }
        model(**batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return run, "plain"


_SIDES = {"brimful": ours, "plain": plain}


class _Traffic(TorchDispatchMode):
    """Counts operators that are called within, and the bytes of what they are given and return."""

    operators, num_bytes = 0, 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        if not function.is_view and function._overloadpacket.__name__ not in _OF_NO_NUMBERS:
            tensors = [leaf for leaf in tree_leaves((args, kwargs, out)) if isinstance(leaf, torch.Tensor)]
            self.operators += 1
            self.num_bytes += sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        return out


def traffic(folder: Path, shape: str) -> dict[str, Any]:
    """Operators and megabytes of a step, of each side."""
    rows, found = encoded(folder, shape), dict[str, Any]()
    for name, begin in _SIDES.items():
        run, how = begin(folder, rows)
        for _ in range(_WARM_UP):
            run()
        with _Traffic() as seen:
            run()
        found[name] = {"runs": how, "operators": seen.operators, "megabytes": round(seen.num_bytes / 1e6, 1)}
    return found


def _steps_when_told(side: str, folder: Path, shape: str, threads: int, told: Connection) -> None:
    """One side's process: a step for each True that comes, whose CPU seconds go back; how it runs goes first."""
    torch.set_num_threads(threads)
    with ExitStack() as stack:
        if side == "brimful":
            stack.enter_context(freed_memory_kept(torch.device("cpu")))
        run, how = _SIDES[side](folder, encoded(folder, shape))
        for _ in range(_WARM_UP):
            run()
        told.send(how)
        while told.recv():
            began = time.process_time()
            run()
            told.send(time.process_time() - began)


def measure(folder: Path, shape: str, count: int, threads: int) -> dict[str, Any]:
    """CPU seconds of `count` steps a side, in turns."""
    context = multiprocessing.get_context("spawn")
    talks, seconds, how = dict[str, Connection](), dict[str, list[float]](), dict[str, str]()
    processes = []
    for side in _SIDES:
        talks[side], other = context.Pipe()
        processes.append(
            context.Process(target=_steps_when_told, args=(side, folder, shape, threads, other), daemon=True)
        )
        processes[-1].start()
        other.close()  # so that the end of a process that fails is seen
        how[side] = talks[side].recv()
    for number in range(count):
        for side in sorted(_SIDES, reverse=number % 2 == 1):
            talks[side].send(True)
            seconds.setdefault(side, []).append(talks[side].recv())
    for talk, process in zip(talks.values(), processes, strict=True):
        talk.send(False)
        process.join()
    ratios = [theirs / own for own, theirs in zip(seconds["brimful"], seconds["plain"], strict=True)]
    medians = {side: round(statistics.median(each), 4) for side, each in seconds.items()}
    low, middle, high = (round(each, 3) for each in statistics.quantiles(ratios, n=4))
    about = {"ratio": middle, "interval": interval(ratios), "quarters": [low, high]}
    return {"runs": how["brimful"], "cpu_s": medians, **about, "ratios": [round(each, 3) for each in ratios]}


def interval(values: Sequence[float]) -> list[float] | None:
    """Return the 95 % interval of the median, None of fewer than six values: the innermost two of which fewer values
    than tosses of as many fair coins lie outside in at most 2.5 % of all cases on either side."""
    ordered, count, outside, chance = sorted(values), len(values), 0, 0.5 ** len(values)
    while chance <= 0.025:
        outside += 1
        chance += math.comb(count, outside) * 0.5**count
    return [round(ordered[outside - 1], 3), round(ordered[count - outside], 3)] if outside else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="+", help="model types")
    parser.add_argument("--inputs", type=Path, required=True, help="folder of models and texts of run.py")
    parser.add_argument("--tokenizer", help="folder of the texts' tokenizer; default: that of the demo's model")
    parser.add_argument("--shape", choices=("dense", "short"), default="dense", help="of the texts; default: dense")
    parser.add_argument("--steps", type=int, default=100, help="of each side")
    parser.add_argument("--threads", type=int, default=1, help="of torch")
    parser.add_argument("--traffic", action="store_true", help="count operators and bytes of one step instead")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    about = {"commit": commit_here(), "host": host_here()}
    for kind in arguments.models:
        work = Work(model=kind, shape=arguments.shape, scale="small")
        make_inputs(arguments.inputs, work, load_tokenizer(arguments.tokenizer, smoke=False))
        folder = arguments.inputs / work.size
        steps = {} if arguments.traffic else {"steps": arguments.steps, "threads": arguments.threads}
        if arguments.traffic:
            found = traffic(folder, work.shape)
        else:
            found = measure(folder, work.shape, arguments.steps, arguments.threads)
        print(json.dumps({"model": kind, "shape": work.shape, **steps, **found, **about}), flush=True)


if __name__ == "__main__":
    main()

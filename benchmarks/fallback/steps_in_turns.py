"""Steps on a CPU in turns: brimful's and those of a plain loop, one after the other in one process.

    python benchmarks/fallback/steps_in_turns.py gemma2 modernbert --inputs FOLDER > LOG
    python benchmarks/fallback/steps_in_turns.py gemma2 modernbert --inputs FOLDER --traffic > LOG

Rows of 96 tokens, so that nothing is left to pack. A plain loop does what Trainer does and no more: forward, backward,
clipping, torch's fused AdamW. Sides that follow one another within seconds share what else the machine does; `run.py`,
a side at a time for a minute, finds differences of a tenth on the same code. CPU seconds of a step, medians, and the
median and quarters of the ratio of neighbours. Reads the models and texts that `run.py --cpu --size small` has made.
With --traffic: operators of one step, and the bytes of what they are given and return (not what happens inside them),
which no other work disturbs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import brimful

_ROWS, _TOKENS, _WARM_UP = 32, 96, 2
#: Operators that touch no numbers, beside views.
_OF_NO_NUMBERS = {"empty", "empty_like", "empty_strided", "new_empty", "_unsafe_view", "detach"}


def encoded(folder: Path) -> list[dict[str, Any]]:
    """One effective batch of the texts beside the model."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    lines = (folder.parent / "dense-small.jsonl").read_text("utf-8").splitlines()[:_ROWS]
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


def plain(folder: Path, rows: list[dict[str, Any]]) -> Callable[[], None]:
    """Return a step of a plain loop."""
    model = load(folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5, fused=True)

    def run() -> None:
        batch = {key: torch.tensor([row[key] for row in rows]) for key in ("input_ids", "attention_mask", "labels")}
        model(**batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return run


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


def traffic(folder: Path) -> dict[str, Any]:
    """Operators and megabytes of a step, of each side."""
    rows = encoded(folder)
    run, packing = ours(folder, rows)
    found: dict[str, Any] = {"runs": packing}
    for name, each in {"brimful": run, "plain": plain(folder, rows)}.items():
        for _ in range(_WARM_UP):
            each()
        with _Traffic() as seen:
            each()
        found[name] = {"operators": seen.operators, "megabytes": round(seen.num_bytes / 1e6, 1)}
    return found


def measure(folder: Path, count: int) -> dict[str, Any]:
    """CPU seconds of `count` steps a side, in turns."""
    rows = encoded(folder)
    run, packing = ours(folder, rows)
    sides, seconds = {"brimful": run, "plain": plain(folder, rows)}, dict[str, list[float]]()
    for number in range(_WARM_UP + count):
        for name, each in sides.items():
            began = time.process_time()
            each()
            if number >= _WARM_UP:
                seconds.setdefault(name, []).append(time.process_time() - began)
    ratios = [theirs / own for own, theirs in zip(seconds["brimful"], seconds["plain"], strict=True)]
    medians = {name: round(statistics.median(each), 4) for name, each in seconds.items()}
    quarters = [round(each, 3) for each in statistics.quantiles(ratios, n=4)]
    return {"runs": packing, "cpu_s": medians, "ratio": quarters[1], "ratio_quarters": [quarters[0], quarters[2]]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="+", help="model types")
    parser.add_argument("--inputs", type=Path, required=True, help="folder of models and texts of run.py")
    parser.add_argument("--steps", type=int, default=16, help="of each side")
    parser.add_argument("--threads", type=int, default=1, help="of torch")
    parser.add_argument("--traffic", action="store_true", help="count operators and bytes of one step instead")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    for kind in arguments.models:
        folder = arguments.inputs / f"{kind}-small"
        steps = {} if arguments.traffic else {"steps": arguments.steps}
        found = traffic(folder) if arguments.traffic else measure(folder, arguments.steps)
        print(json.dumps({"model": kind, **steps, **found}), flush=True)


if __name__ == "__main__":
    main()

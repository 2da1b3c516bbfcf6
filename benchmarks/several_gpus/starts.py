"""Start a training on two GPUs again and again: whether each comes to its tenth step, and after how long.

    python benchmarks/several_gpus/starts.py --output benchmarks/several_gpus/DATE-GPU-starts --budget-s 580

BERT-base with random weights on the packaged tweets, for each way to cut what is kept 20 starts of `brimful train`.
What is in the raw log is not done again; wall_s of a row is the whole start. Needs two NVIDIA GPUs, the extra demo and
nothing from a network; --smoke is a tiny model on a CPU.
"""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))

from resumable import default_inputs, parser_of, print_rows, script_of, write_texts
from sides import Blocks, Row, command_steps, run_rows, with_peaks

_CUTS = ("states", "parameters", "none")
_STARTS = 20
ROWS = tuple(
    Row(side="brimful", name=f"{cut}, start {number}", settings={"sharding": cut})
    for number in range(1, _STARTS + 1)
    for cut in _CUTS
)
_STEPS = Blocks(warm_up=5, count=1, steps=5, rows=32)
_SMOKE = Blocks(warm_up=2, count=1, steps=2, rows=4)


def measure(plan: dict[str, Any], folder: Path) -> dict[str, Any]:
    """One start."""
    blocks = _SMOKE if plan["smoke"] else _STEPS
    return with_peaks(command_steps(folder, blocks, plan["smoke"], gpus=2, **plan["settings"]), True)


def table(results: list[dict[str, Any]]) -> str:
    """A line for each way to cut: starts, those that did not come so far, and seconds of the others."""
    lines = ["| cut | starts | failed | seconds, least | median | most |", "|---|---|---|---|---|---|"]
    for cut in _CUTS:
        found = [each for each in results if each["settings"]["sharding"] == cut]
        seconds = sorted(each["wall_s"] for each in found if each["ok"])
        if seconds:
            spread = f"{seconds[0]:.1f} | {seconds[len(seconds) // 2]:.1f} | {seconds[-1]:.1f}"
            lines.append(f"| {cut} | {len(found)} | {len(found) - len(seconds)} | {spread} |")
    return "\n".join(lines)


def main(arguments: Namespace) -> None:
    """Start what is left, and write the table."""
    arguments.inputs = arguments.inputs or default_inputs("transforms", smoke=arguments.smoke)
    if arguments.one:
        print_rows([measure(json.loads(arguments.one), arguments.inputs)])
        return
    if not (arguments.inputs / "rows.jsonl").exists():
        script_of("transforms").make(arguments.inputs, arguments.smoke)
    text = table(run_rows(arguments, __file__, ROWS, lambda row: 30.0))
    write_texts(arguments.output, {"table.md": text})
    print(text)


if __name__ == "__main__":
    main(parser_of(__doc__ or "", [row.key for row in ROWS], timeout_s=90.0).parse_args())

"""Loss curves of BBC News with MiniLM-L6 on one GPU and on two, over seeds: what differs by more than seeds do.

    python benchmarks/several_gpus/curves.py --output benchmarks/several_gpus/DATE-GPU-curves

`brimful train` with its defaults but for the seed, by which rows, masks and the new head are drawn: seeds 1 to 5, each
on one GPU, on two by NCCL, and on two by copies. Each row of the table is a process, or one of two, with all seeds.
Needs two NVIDIA GPUs and nothing from a network; --smoke takes 200 rows and two seeds on a CPU.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from argparse import Namespace
from pathlib import Path
from statistics import mean, stdev
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))

from resumable import default_inputs, parser_of, print_rows, write_texts
from sides import Row, run_rows

ROWS = (
    Row(side="brimful", name="one GPU", settings={"gpus": 1}),
    Row(side="brimful", name="two", settings={"gpus": 2}),
    Row(side="brimful", name="two, by NCCL", settings={"gpus": 2, "peer_copies": False}),
)
SEEDS = (1, 2, 3, 4, 5)
#: Steps whose losses are averaged for a point of a curve.
_POINT = 20


def measure(settings: dict[str, Any], inputs: Path, *, smoke: bool) -> list[dict[str, Any]]:
    """Losses by step and the final accuracy of each seed, in this process, or with another one."""
    import brimful
    from brimful.data.readers.packaged import minilm

    asked = {name: value for name, value in settings.items() if name != "gpus"}
    asked |= {"baselines": False, "quiet": True, "logging_steps": 1}
    asked |= {"device": "cpu", "limit": 200, "max_length": 32, "max_steps": 6} if smoke else {"device": "cuda"}
    found = []
    for seed in SEEDS[: 2 if smoke else None]:
        output = inputs / f"{settings['gpus']}{'-nccl' * ('peer_copies' in asked)}-{seed}"
        run = brimful.train(inputs / "bbc.jsonl", model=minilm(), output=output, seed=seed, **asked)
        events = [json.loads(line) for line in (output / "events.jsonl").read_text().splitlines()]
        losses = [event["loss"] for event in events if event["kind"] == "step"]
        found.append({"seed": seed, "losses": losses, "accuracy": (run.metrics or {}).get("accuracy")})
    return found


def one(arguments: Namespace) -> int:
    """Measure one row; the first of its processes prints it."""
    from brimful.cli.launch import launch, watch_launcher

    plan = json.loads(arguments.one)
    settings, smoke = plan["settings"], plan["smoke"]
    if settings["gpus"] > 1 and "RANK" not in os.environ:
        with tempfile.TemporaryDirectory() as folder:
            os.environ["BRIMFUL_CURVES"] = folder
            _write_rows(Path(folder))
            return launch([sys.executable, *sys.argv], settings["gpus"])
    watch_launcher()
    with tempfile.TemporaryDirectory() as own:
        folder = Path(os.environ.get("BRIMFUL_CURVES", own))
        if "RANK" not in os.environ:
            _write_rows(folder)
        found = measure(settings, folder, smoke=smoke)
    if os.environ.get("RANK", "0") == "0":
        print_rows([{"seeds": found, "samples_per_s": 0.0, "rates": [0.0]}])
    return 0


def _write_rows(folder: Path) -> None:
    from brimful.data.readers.packaged import bbc_news

    (folder / "bbc.jsonl").write_text("".join(json.dumps(row) + "\n" for row in bbc_news()))


def curves_of(found: dict[str, Any]) -> list[list[float]]:
    """Points of the curve of each seed."""
    return [
        [mean(seed["losses"][start : start + _POINT]) for start in range(0, len(seed["losses"]), _POINT)]
        for seed in found["seeds"]
    ]


def table(results: list[dict[str, Any]]) -> str:
    """Mean and range over seeds of each point, accuracy, and how far means are from one GPU's, in its spread."""
    done = [found for found in results if found["ok"]]
    curves = {found["row"]: curves_of(found) for found in done}
    alone = curves.get("one GPU")
    lines = ["| | " + " | ".join(curves) + " |", "|---" * (len(curves) + 1) + "|"]
    for point in range(min((len(curve) for each in curves.values() for curve in each), default=0)):
        cells = []
        for each in curves.values():
            values = [curve[point] for curve in each]
            cells.append(f"{mean(values):.4f} ({min(values):.4f} to {max(values):.4f})")
        lines.append(f"| steps {point * _POINT + 1} to {(point + 1) * _POINT} | " + " | ".join(cells) + " |")
    accuracies = [[100 * seed["accuracy"] for seed in found["seeds"]] for found in done]
    cells = [f"{mean(each):.2f} ({min(each):.2f} to {max(each):.2f})" for each in accuracies]
    lines.append("| accuracy | " + " | ".join(cells) + " |")
    if alone is not None:
        apart = []
        for each in curves.values():
            points = zip(zip(*each, strict=True), zip(*alone, strict=True), strict=False)
            apart.append(max(abs(mean(two) - mean(one)) / (stdev(one) or 1e-12) for two, one in points))
        said = " | ".join(f"{each:.2f}" for each in apart)
        lines.append(f"| farthest mean, in standard deviations of one GPU | {said} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Measure what is left, and write the table."""
    arguments = parser_of((__doc__ or "").splitlines()[0], [row.key for row in ROWS], timeout_s=240.0).parse_args()
    arguments.inputs = arguments.inputs or default_inputs("curves", smoke=arguments.smoke)
    if arguments.one:
        return one(arguments)
    rows = [row for row in ROWS if not (arguments.smoke and "peer_copies" in row.settings)]
    text = table(run_rows(arguments, __file__, rows, lambda row: 60.0))
    write_texts(arguments.output, {"table.md": text})
    print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())

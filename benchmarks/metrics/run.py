"""Memory and seconds of an evaluation's metrics, by rows: no logits are kept, so memory does not grow with them.

    python benchmarks/metrics/run.py --output benchmarks/metrics/DATE-cpu [--rows 20000 200000 1000000] [--labels 1000]

Needs no GPU. Each number of rows is a process of its own; random logits come in windows, as from a model.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))

from provenance import commit_here, host_here

#: Rows of a window of logits.
_WINDOW = 2000


def measured(task: str, num_rows: int, num_labels: int) -> dict[str, Any]:
    """Bytes that the process grew by beyond its first window, and seconds."""
    import numpy as np

    from brimful.core.records import LabelSpace
    from brimful.tasks.evaluation import Evaluation
    from brimful.tasks.task import make_task

    names = tuple(f"l{i}" for i in range(num_labels))
    space = LabelSpace(task=task, names=names, values={name: i for i, name in enumerate(names)})  # type: ignore[arg-type]
    random = np.random.default_rng(0)
    logits = random.normal(0, 1, (_WINDOW, num_labels)).astype(np.float32)
    targets = random.integers(0, num_labels, _WINDOW) if task == "single_label" else (logits > 2).astype(np.float32)
    evaluation, first, began = Evaluation(make_task(space, targets)), 0, time.process_time()
    for number in range(num_rows // _WINDOW):
        order = np.roll(np.arange(num_labels), number)  # other logits in each window, quickly
        evaluation.add(logits[:, order], targets)
        first = first or _peak_bytes()
    found = evaluation.result()
    return {
        "task": task,
        "rows": num_rows,
        "labels": num_labels,
        "cpu_s": round(time.process_time() - began, 1),
        "grown_bytes": _peak_bytes() - first,
        "logits_bytes": 4 * num_rows * num_labels,
        "metrics": len(found),
    }


def _peak_bytes() -> int:
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="folder of raw.jsonl and table.md")
    parser.add_argument("--rows", nargs="+", type=int, default=[20_000, 200_000, 1_000_000], help="numbers of rows")
    parser.add_argument("--labels", type=int, default=1000, help="outputs of the model")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measured(*json.loads(arguments.one))))
        return
    arguments.output.mkdir(parents=True, exist_ok=True)
    for task in ("single_label", "multi_label"):
        for num_rows in arguments.rows:
            one = json.dumps([task, num_rows, arguments.labels])
            command = [sys.executable, __file__, "--output", str(arguments.output), "--one", one]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            found = json.loads(done.stdout.splitlines()[-1]) | {"commit": commit_here(), "host": host_here()}
            with (arguments.output / "raw.jsonl").open("a", encoding="utf-8") as log:
                log.write(json.dumps(found) + "\n")
            text = table(arguments.output / "raw.jsonl")
            (arguments.output / "table.md").write_text(text, "utf-8")
    print(text)


def table(log: Path) -> str:
    """A line for each measurement of the log."""
    lines = ["| task | rows | labels | logits | memory grown by | CPU seconds |", "|---|---|---|---|---|---|"]
    for found in map(json.loads, log.read_text("utf-8").splitlines()):
        grown, whole = (found[name] / 2**20 for name in ("grown_bytes", "logits_bytes"))
        lines.append(
            f"| {found['task']} | {found['rows']:,} | {found['labels']:,} | {whole:,.0f} MiB | {grown:,.0f} MiB |"
            f" {found['cpu_s']:.0f} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()

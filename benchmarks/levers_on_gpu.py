"""What levers are to show on a GPU, one benchmark after another in the time that there is, the most telling first.

    python benchmarks/levers_on_gpu.py --date DATE-GPU --budget-s 580

Each goes on where an earlier call ended: call it until nothing is left. --only: some of them, by name. --list: the
commands, in order. --smoke: tiny shapes on a CPU, into --output, to test this script. It needs one NVIDIA GPU and
nothing from a network; what a command prints goes to the log beside its results.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

_HERE = Path(__file__).parent
#: Commands by name: words, the share of what is left that one may take, and whether they are a benchmark's, which is
#: given an output, a budget and --smoke.
_IN_ORDER: tuple[tuple[str, tuple[str, ...], float, bool], ...] = (
    ("kernels", ("-m", "pytest", "-q", "-x", "tests/gpu/test_update_memory_on_gpu.py", "-k", "reference"), 0.2, False),
    ("lean", ("guide_table", "--rows", "lean"), 0.6, True),
    ("checkpointing", ("checkpointing",), 0.5, True),
    ("guide", ("guide_table", "--rows", "guide"), 0.7, True),
    ("tests", ("-m", "pytest", "-q", "tests/gpu/test_update_memory_on_gpu.py", "tests/gpu/test_checkpointing_on_gpu.py",
               "tests/gpu/test_streaming_on_gpu.py", "tests/gpu/test_first_batch_on_gpu.py"), 0.4, False),
    ("adapters", ("adapters",), 0.5, True),
    ("quality", ("lever_quality",), 1.0, True),
)  # fmt: skip


def command_of(words: tuple[str, ...], budget_s: float, asked: argparse.Namespace, *, measures: bool) -> list[str]:
    """The command of one entry."""
    if not measures:
        return [sys.executable, *words]
    folder = _HERE / words[0]
    output = (asked.output or _HERE) / words[0] / asked.date
    more = ["--smoke"] if asked.smoke else []
    budget = ["--budget-s", f"{budget_s:.0f}"]
    return [sys.executable, str(folder / "run.py"), "--output", str(output), *budget, *words[1:], *more]


def main() -> int:
    """Run them; 1 if one of them failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--date", required=True, help="name of the folders of results, as 2026-11-25-h200")
    parser.add_argument("--budget-s", type=float, default=580.0, help="seconds for this call")
    parser.add_argument("--output", type=Path, help="parent of the results; default: the benchmarks' own folders")
    parser.add_argument("--only", help="names, separated by commas")
    parser.add_argument("--list", action="store_true", help="print the commands, and stop")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes on a CPU")
    asked = parser.parse_args()
    if asked.smoke:
        asked.output = asked.output or Path(tempfile.mkdtemp(prefix="brimful-smoke-"))
    names = None if asked.only is None else asked.only.split(",")
    began, failed = time.monotonic(), False
    for name, words, share, measures in _IN_ORDER:
        if (names is not None and name not in names) or (asked.smoke and not measures):
            continue
        left = asked.budget_s - (time.monotonic() - began)
        if left < 20 and not asked.list:
            print(f"{name}: no time left")
            continue
        command = command_of(words, share * left, asked, measures=measures)
        print(f"{name}: {shlex.join(command)}", flush=True)
        if asked.list:
            continue
        try:
            code = subprocess.run(command, cwd=_HERE.parent, timeout=left, check=False).returncode
        except subprocess.TimeoutExpired:
            code = 124
        print(f"{name}: exit code {code}, {time.monotonic() - began:.0f} s of {asked.budget_s:.0f}", flush=True)
        failed |= code != 0
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())

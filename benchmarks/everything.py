"""All benchmarks of speed beside Hugging Face, in order of what they are worth, within a budget of seconds.

    python benchmarks/everything.py --budget-s 580 [--name 2026-12-01-h200] [--parts training fallback]

Call it until it says that nothing is left: each part's own script goes on where its raw log ends. Logs are in
benchmarks/PART/NAME. --smoke runs each on tiny shapes, on a CPU, in --root.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
#: A part is not begun with less than this left.
_LEAST_S = 20.0


@dataclass(frozen=True, kw_only=True)
class Part:
    """A benchmark's script, and what it is called with. share: of the seconds that are left, at most.

    smoke: what makes its test small.
    """

    script: str
    words: tuple[str, ...] = ()
    share: float = 1.0
    smoke: tuple[str, ...] = ()

    @property
    def folder(self) -> Path:
        """Folder of its logs."""
        return Path(self.script).parent


PARTS: dict[str, Part] = {
    "fallback": Part(script="fallback/run.py", share=0.5, smoke=("--only", "fnet", "--shapes", "short")),
    "training": Part(script="training/run.py", share=0.6, smoke=("--no-sweep", "--rows", "tweets/minilm")),
    "classification": Part(script="classification/run.py", share=0.6, smoke=("--rows", "tweets/minilm")),
    "whole_command": Part(script="whole_command/run.py", share=0.7),
    "answers": Part(script="fallback/answers.py", smoke=("--only", "fnet", "--shapes", "short")),
}


def commands(arguments: argparse.Namespace) -> dict[str, list[str]]:
    """The command of each part, without its budget."""
    found = {}
    for name in arguments.parts:
        part = PARTS[name]
        output = arguments.root / part.folder / (arguments.name + ("-answers" if name == "answers" else ""))
        words = [sys.executable, str(HERE / part.script), "--output", str(output), *part.words]
        if arguments.smoke:
            words += ["--smoke", *part.smoke]
        elif arguments.tokenizer and name != "whole_command":
            words += ["--tokenizer", arguments.tokenizer]
        found[name] = words
    return found


def main() -> int:
    arguments = _arguments()
    deadline, left = time.monotonic() + arguments.budget_s, list[str]()
    for name, command in commands(arguments).items():
        seconds = deadline - time.monotonic()
        if arguments.dry_run:
            print(f"{name:15} {' '.join(command[1:])}")
        elif seconds < _LEAST_S:
            left.append(name)
        else:
            budget_s = max(_LEAST_S, seconds * PARTS[name].share)
            print(f"\n== {name}, {budget_s:.0f} s", flush=True)
            done = subprocess.run([*command, "--budget-s", f"{budget_s:.0f}"], stdout=subprocess.PIPE, text=True)
            print(done.stdout, flush=True)
            if done.returncode != 0 or "call again" in done.stdout:
                left.append(name)
    if not arguments.dry_run:
        print(f"\nnot whole yet: {' '.join(left)}; call again" if left else "\nnothing is left")
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--budget-s", type=float, default=580.0, help="begin nothing that would not be done after so many seconds")
    add("--parts", nargs="+", choices=list(PARTS), default=list(PARTS), help="these, in this order, instead of all")
    add("--name", default=time.strftime("%Y-%m-%d") + "-gpu", help="folder of the logs, in each part's own")
    add("--root", type=Path, default=HERE, help="folder of the parts' folders of logs")
    add("--tokenizer", help="folder of a BERT tokenizer; default: that of the packaged MiniLM-L6")
    add("--dry-run", action="store_true", help="print the commands alone")
    add("--smoke", action="store_true", help="tiny shapes, on a CPU: to test this script")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

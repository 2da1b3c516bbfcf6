"""transformers' own tests of its Trainer, run with `brimful.Trainer` in its place.

    python benchmarks/example_scripts/run_trainer_tests.py --source CHECKOUT --output OUTPUT [--path 5.17=FOLDER]

Each test runs with ours, on the regression model of the tests and on a tiny BERT classifier in its place
(stand_ins.py); those that fail run with transformers' Trainer as well. CHECKOUT is a source checkout of transformers,
FOLDER another version of the package. Needs `parameterized` and `sentencepiece`, and no network.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
#: Files whose tests make a Trainer, on one process of any device, for models that are no generators.
FILES = ("test_trainer.py", "test_trainer_callback.py", "test_trainer_utils.py", "test_trainer_jit_checkpoint.py")
#: Left out: it compiles a decoder, for many minutes on a CPU, by Trainer's own step on both sides.
_LEFT_OUT = "test_trainer.py::TrainerIntegrationTest::test_torch_compile_loss_func_compatibility"
MODELS = ("upstream", "classifier")
#: Words of a failure on both sides, and what they mean.
_REASONS = (
    (("connect to 'https", "Couldn't reach", "Can't load", "LocalEntryNotFound"), "needs the hub"),
    (("metric_for_best_model", "eval_accuracy", "ADAMW_APEX", "Lists differ", "Expected 2.008"), "of another version"),
    (("NoneType' object is not callable",), "of another version"),
)


def run(
    model: str, side: str, version: str, arguments: argparse.Namespace, only: Sequence[str] = ()
) -> dict[str, dict[str, Any]]:
    """Records of tests by name. only: these instead of all. A run that was ended goes on where it was."""
    log = arguments.output / f"{version}-{model}-{side}.jsonl"
    if not log.exists():
        part = log.with_suffix(".part")
        done = [json.loads(line)["test"] for line in part.read_text("utf-8").splitlines()] if part.exists() else []
        folders = [arguments.paths[version]] if version in arguments.paths else []
        path = os.pathsep.join([*folders, *filter(None, [os.environ.get("PYTHONPATH")]), str(HERE)])
        asked = {"BRIMFUL_SIDE": side, "BRIMFUL_MODEL": model, "BRIMFUL_TESTS_LOG": str(part.resolve())}
        offline = dict.fromkeys(("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE"), "1")
        files = [name for name in FILES if (arguments.source / "tests/trainer" / name).exists()]
        found = [f"tests/trainer/{name}" for name in only or files]
        command = [sys.executable, "-m", "pytest", "-q", "-p", "trainer_plugin", "-p", "no:cacheprovider", *found]
        for name in (f"tests/trainer/{_LEFT_OUT}", *done):
            command += ["--deselect", name]
        with log.with_suffix(".log").open("a") as said:
            environment = os.environ | asked | offline | {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}
            ended = subprocess.run(
                command, cwd=arguments.source, env=environment, stdout=said, stderr=said, check=False
            )
        if ended.returncode not in (0, 1, 5):
            raise SystemExit(f"pytest ended with {ended.returncode}: see {log.with_suffix('.log')}")
        if part.exists():
            part.rename(log)
    if not log.exists():
        return {}
    records = map(json.loads, log.read_text("utf-8").splitlines())
    return {record["test"].removeprefix("tests/trainer/"): record for record in records}


def verdict(stock: dict[str, Any] | None, ours: dict[str, Any]) -> str:
    """Passed, failed, or not applicable and why. stock: of transformers' own Trainer, where ours does not pass."""
    if ours["outcome"] == "passed":
        return "passed"
    if ours["outcome"] == "skipped":
        return "not applicable: " + str(ours["reason"]).removeprefix("Skipped: ")[:80]
    if stock is None:
        return "not run with transformers' Trainer"
    if stock["outcome"] == "passed":
        return f"FAILED: {ours['reason']}"
    reason = str(stock["reason"])
    for words, meaning in _REASONS:
        if any(word in reason for word in words):
            return f"not applicable: {meaning}"
    return "not applicable: fails with transformers' Trainer as well"


def report(results: dict[str, dict[str, Any]]) -> str:
    """Counts by version and model, then each test."""
    columns = list(dict.fromkeys(column for each in results.values() for column in each))
    lines = ["| transformers, model | passed | by our step | not applicable | failed |", "|---|---|---|---|---|"]
    for column in columns:
        found = [each[column] for each in results.values() if column in each]
        kinds = Counter(each["verdict"].split(":")[0] for each in found)
        ours = sum(each["verdict"] == "passed" and each["our_steps"] > 0 for each in found)
        lines.append(f"| {column} | {kinds['passed']} | {ours} | {kinds['not applicable']} | {kinds['FAILED']} |")
    lines += ["", "| test | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for test, each in results.items():
        file, _, name = test.partition("::")
        said = [_said(each.get(column)) for column in columns]
        lines.append(f"| {file.removesuffix('.py')} {name.replace('::', '.')} | " + " | ".join(said) + " |")
    return "\n".join(lines) + "\n"


def _said(found: dict[str, Any] | None) -> str:
    return "" if found is None else found["verdict"] + (", our step" if found["our_steps"] else "")


def main() -> None:
    parser = argparse.ArgumentParser(description="transformers' tests of its Trainer, with brimful.Trainer.")
    parser.add_argument("--source", type=Path, required=True, help="source checkout of transformers")
    parser.add_argument("--output", type=Path, required=True, help="folder of logs and trainer_tests.md")
    parser.add_argument("--path", action="append", default=[], metavar="NAME=FOLDER", help="another transformers")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--versions", nargs="+", help="of `installed` and names of --path; all by default")
    arguments = parser.parse_args()
    arguments.paths = dict(each.split("=", 1) for each in arguments.path)
    arguments.output.mkdir(parents=True, exist_ok=True)
    results: dict[str, dict[str, Any]] = {}
    for version in arguments.versions or ("installed", *arguments.paths):
        for model in arguments.models:
            ours = run(model, "brimful", version, arguments)
            left = [test for test, record in ours.items() if record["outcome"] == "failed"]
            stock = run(model, "stock", version, arguments, only=left) if left else {}
            for test, record in sorted(ours.items()):
                results.setdefault(test, {})[f"{version}, {model}"] = {
                    "verdict": verdict(stock.get(test), record), "our_steps": record["steps"]["brimful"]
                }  # fmt: skip
    text = report(results)
    (arguments.output / "trainer_tests.md").write_text(text, "utf-8")
    print(text.partition("\n\n")[0])


if __name__ == "__main__":
    main()

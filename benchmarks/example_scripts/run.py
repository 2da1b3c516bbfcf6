"""Hugging Face's text-classification example scripts as they are, and with brimful in their import.

    python benchmarks/example_scripts/run.py --source CHECKOUT --output OUTPUT [--path 5.17=FOLDER] [--seeds 0 1 2]

CHECKOUT is a source checkout of transformers, whose scripts are read there and changed in a temporary folder. FOLDER
holds another version of transformers, as `pip install --target` makes it. Needs `evaluate` and no network, and runs on
a CPU, with --gpu on a GPU. Runs that are in the raw log are not run again. README.md says how to read the table.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from works import FOLDER, WORKS, Work, changed, make_files, make_metrics

SIDES = ("stock", "brimful")


def run(work: Work, side: str, seed: int, version: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run one script in a process of its own, with an empty cache."""
    from brimful.data.readers.packaged import minilm

    text = (arguments.source / FOLDER / work.script).read_text("utf-8")
    diff: list[str] = []
    if side == "brimful":
        text, diff = changed(text, uses_trainer=work.uses_trainer)
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder)
        (here / work.script).write_text(text, "utf-8")
        make_metrics(here)
        make_files(here / "data", arguments.share)
        output = here / "output"
        command = [sys.executable, work.script, "--model_name_or_path", str(minilm()), "--output_dir", str(output)]
        for name, split in (("train_file", "train"), ("validation_file", "validation"), ("test_file", "test")):
            if work.uses_trainer or split != "test":
                command += [f"--{name}", str(here / "data" / f"{work.data}-{split}.json")]
        given = list(work.arguments)
        if arguments.gpu and work.uses_trainer:
            del given[(at := given.index("--use_cpu")) : at + 2]
        command += [*given, "--seed", str(seed)]
        began = time.monotonic()
        with (here / "log").open("w+") as log:
            process = subprocess.Popen(
                command, cwd=here, stdout=log, stderr=subprocess.STDOUT, env=_environment(here, version, arguments)
            )
            _, status, used = os.wait4(process.pid, 0)
            log.seek(0)
            said = log.read()
        found = {
            "version": _version_said(said) or version,
            "diff": diff,
            "exit_code": os.waitstatus_to_exitcode(status),
            "cpu_s": round(used.ru_utime + used.ru_stime, 1),
            "wall_s": round(time.monotonic() - began, 1),
        }
        if found["exit_code"] != 0:
            return found | {"error": "\n".join(said.strip().splitlines()[-5:])[-1500:]}
        return found | _results(output, said)


def _environment(here: Path, version: str, arguments: argparse.Namespace) -> dict[str, str]:
    offline = dict.fromkeys(("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "HF_EVALUATE_OFFLINE"), "1")
    folders = [arguments.paths[version]] if version in arguments.paths else []
    path = os.pathsep.join([*folders, *filter(None, [os.environ.get("PYTHONPATH")])])
    return os.environ | offline | ({} if arguments.gpu else {"CUDA_VISIBLE_DEVICES": ""}) | {
        "PYTHONPATH": path, "HF_HOME": str(here / "cache"), "HF_HUB_DISABLE_TELEMETRY": "1",
        "XDG_CACHE_HOME": str(here / "cache"),
    }  # fmt: skip


def _version_said(said: str) -> str | None:
    found = re.search(r'"transformers_version": "([^"]+)"', said)
    return None if found is None else found.group(1)


def _results(output: Path, said: str) -> dict[str, Any]:
    files = sorted(path.relative_to(output).as_posix() for path in output.rglob("*") if path.is_file())
    metrics = json.loads((output / "all_results.json").read_text("utf-8"))
    state = output / "trainer_state.json"
    history = json.loads(state.read_text("utf-8"))["log_history"] if state.exists() else []
    predicted = sorted(output.glob("predict_results*.txt"))
    return {
        "files": files,
        "metrics": metrics,
        "log_keys": [sorted(line) for line in history] or _epochs(said),
        "losses": [line["loss"] for line in history if "loss" in line],
        "num_predicted": [len(path.read_text("utf-8").splitlines()) for path in predicted],
        "warnings": sorted(set(re.findall(r"brimful\.\w+: .*", said))),
    }


def _epochs(said: str) -> list[list[str]]:
    """Keys of what a loop of its own logs of each epoch."""
    return [sorted(re.findall(r"'(\w+)'", line)) for line in re.findall(r"epoch \d+: (\{.*\})", said)]


def results(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Compare both sides of each script and version of transformers over seeds."""
    rows = []
    for version, name in sorted({(each["asked"], each["work"]) for each in records}):
        sides = {
            side: [r for r in records if (r["asked"], r["work"], r["side"]) == (version, name, side)] for side in SIDES
        }
        failed = [r for each in sides.values() for r in each if r["exit_code"] != 0]
        row = {"version": version, "work": name, "script": WORKS[name].script, "failed": len(failed)}
        if not failed and all(sides.values()):
            row |= _compared(WORKS[name], sides)
        rows.append(row)
    return rows


def _compared(work: Work, sides: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    stock, ours = (sides[side] for side in SIDES)
    values = {side: [r["metrics"][work.metric] for r in sides[side]] for side in SIDES}
    low, high = min(values["stock"]), max(values["stock"])
    means = {side: statistics.mean(values[side]) for side in SIDES}
    spread = statistics.stdev(values["stock"]) if len(values["stock"]) > 1 else 0.0
    return {
        "diff": ours[0]["diff"],
        "same_files": all(a["files"] == b["files"] for a, b in zip(stock, ours, strict=True)),
        "same_log_keys": all(a["log_keys"] == b["log_keys"] for a, b in zip(stock, ours, strict=True)),
        "same_metric_names": all(list(a["metrics"]) == list(b["metrics"]) for a, b in zip(stock, ours, strict=True)),
        "same_predicted": all(a["num_predicted"] == b["num_predicted"] for a, b in zip(stock, ours, strict=True)),
        "metric": work.metric,
        "values": values,
        "means": means,
        "within": _within(means, spread, high - low) if len(values["stock"]) > 1 else None,
        "cpu_s": {side: statistics.median(r["cpu_s"] for r in sides[side]) for side in SIDES},
        "wall_s": {side: statistics.median(r["wall_s"] for r in sides[side]) for side in SIDES},
        "train_runtime": {
            side: statistics.median(r["metrics"].get("train_runtime", 0.0) for r in sides[side]) for side in SIDES
        },
        "warnings": sorted({said for r in ours for said in r["warnings"]}),
    }


def _within(means: dict[str, float], spread: float, width: float) -> bool:
    """True if the means differ by no more than seeds of the stock script do."""
    return abs(means["brimful"] - means["stock"]) <= max(2 * spread, width)


def table(rows: list[dict[str, Any]]) -> str:
    """The comparison as Markdown."""
    lines = [
        "| transformers | script | metric | stock, by seed | brimful, by seed | files, log keys | CPU s | wall s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        if row["failed"] or "values" not in row:
            lines.append(f"| {row['version']} | {row['script']} ({row['work']}) | {row['failed']} failed | | | | | |")
            continue
        same = all(row[name] for name in ("same_files", "same_log_keys", "same_metric_names", "same_predicted"))
        values = [" ".join(f"{value:.3f}" for value in row["values"][side]) for side in SIDES]
        lines.append(
            f"| {row['version']} | {row['script']} ({row['work']}) | {row['metric']} | {values[0]} | {values[1]} | "
            f"{'the same' if same else 'DIFFER'} | {row['cpu_s']['stock']:.0f}, {row['cpu_s']['brimful']:.0f} | "
            f"{row['wall_s']['stock']:.1f}, {row['wall_s']['brimful']:.1f} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    arguments = _arguments()
    arguments.output.mkdir(parents=True, exist_ok=True)
    raw = arguments.output / "raw.jsonl"
    records = [json.loads(line) for line in raw.read_text("utf-8").splitlines()] if raw.exists() else []
    known = {(r["asked"], r["work"], r["side"], r["seed"]) for r in records}
    for seed in arguments.seeds:
        for version in arguments.versions or ("installed", *arguments.paths):
            for name in arguments.works:
                for side in SIDES:
                    if (version, name, side, seed) in known:
                        continue
                    found = run(WORKS[name], side, seed, version, arguments)
                    record = {
                        "asked": version,
                        "work": name,
                        "side": side,
                        "seed": seed,
                        "share": arguments.share,
                        **found,
                    }
                    records.append(record)
                    with raw.open("a", encoding="utf-8") as log:
                        log.write(json.dumps(record) + "\n")
                    said = found.get("error") or found["metrics"][WORKS[name].metric]
                    print(f"{version} {name} {side} {seed}: {said}, {found['cpu_s']} CPU s", file=sys.stderr)
    rows = results(records)
    (arguments.output / "results.json").write_text(json.dumps(rows, indent=1) + "\n", "utf-8")
    (arguments.output / "table.md").write_text(table(rows), "utf-8")
    print(table(rows))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Example scripts of transformers, as they are and with brimful.")
    parser.add_argument("--source", type=Path, required=True, help="source checkout of transformers")
    parser.add_argument("--output", type=Path, required=True, help="folder of raw.jsonl, results.json, table.md")
    parser.add_argument("--path", action="append", default=[], metavar="NAME=FOLDER", help="another transformers")
    parser.add_argument("--works", nargs="+", choices=WORKS, default=list(WORKS))
    parser.add_argument("--versions", nargs="+", help="of `installed` and names of --path; all by default")
    parser.add_argument("--share", type=float, default=1.0, help="of the rows, where time is short")
    parser.add_argument("--gpu", action="store_true", help="leave the GPU visible")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    arguments = parser.parse_args()
    arguments.paths = dict(each.split("=", 1) for each in arguments.path)
    return arguments


if __name__ == "__main__":
    main()

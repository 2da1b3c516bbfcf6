"""Two checkouts side by side: speed of training and classification, first losses, answers, memory of a whole run.

    git worktree add /tmp/before COMMIT
    python benchmarks/before_after/run.py --before /tmp/before --output benchmarks/before_after/DATE-GPU

For changes that must change nothing. Each measurement is a process of its own, the two sides in turns; weights are
random, and the same files for both. Needs one NVIDIA GPU, or --smoke for tiny models on a CPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parents[2]
_CORPORA, _SIZES = ("tweets", "bbc"), ("minilm", "base")
#: Train and classify at full length, and the steps that the losses of both sides are compared over.
_MAX_LENGTH, _FIRST_STEPS = 512, 20
_SMOKE_ROWS = 96

Job = dict[str, Any]
Record = dict[str, Any]


def jobs_of(smoke: bool) -> dict[str, list[Job]]:
    """What is measured, by how often: once, or as often as --repeats says."""
    precision, execution = ("fp32", "auto") if smoke else ("bf16", "compiled")
    common = {"precision": precision, "execution": execution, "max_length": 48 if smoke else _MAX_LENGTH}
    train = common | {"kind": "train", "warm_up": 3 if smoke else 100, "steps": 2 if smoke else 100}
    long = {"warm_up": 3 if smoke else 60, "steps": 2 if smoke else 30}
    repeated = [
        train | {"corpus": "tweets", "size": "base"},
        train | long | {"corpus": "bbc", "size": "base"},
        common | {"kind": "classify", "corpus": "tweets", "size": "base", "times": 1 if smoke else 2},
        common | {"kind": "classify", "corpus": "tweets", "size": "minilm", "times": 1 if smoke else 10},
    ]
    losses = common | {"kind": "losses"}
    once = [losses | {"corpus": "tweets", "size": "minilm"}]
    if not smoke:
        once = [
            losses | {"corpus": "tweets", "size": "base"},
            losses | {"corpus": "bbc", "size": "base"},
            losses | {"corpus": "tweets", "size": "minilm", "execution": "captured"},
        ]
    once.append(common | {"kind": "run", "corpus": "tweets", "size": "minilm", "steps": 4 if smoke else 400})
    return {"once": once, "repeated": repeated}


def name_of(job: Job) -> str:
    return f"{job['kind']} {job['corpus']}/{job['size']} {job['precision']} {job['execution']}"


def make_inputs(inputs: Path, tokenizer_folder: str | None, *, smoke: bool) -> None:
    """Texts, base models to train and classifiers to run, unless they are there."""
    sys.path.append(str(ROOT / "benchmarks"))
    import numpy as np
    from shapes import load_tokenizer, packaged_rows, save_model
    from transformers import AutoModel

    inputs.mkdir(parents=True, exist_ok=True)
    tokenizer = load_tokenizer(tokenizer_folder, smoke=smoke)
    for corpus in _CORPORA:
        if not (inputs / f"{corpus}.lengths.npy").exists():
            rows = packaged_rows(corpus)
            if smoke:
                rows = random.Random(0).sample(rows, _SMOKE_ROWS)
            (inputs / f"{corpus}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
            ids = tokenizer([row["text"] for row in rows], truncation=True, max_length=48 if smoke else _MAX_LENGTH)
            np.save(inputs / f"{corpus}.lengths.npy", np.array([len(each) for each in ids["input_ids"]]))
    for size in _SIZES:
        if not (inputs / size).exists():
            save_model(inputs / size, size, tokenizer, AutoModel.from_config, smoke=smoke)
        if not (inputs / f"classify-{size}").exists():
            save_model(inputs / f"classify-{size}", size, tokenizer, partial(_classifier), smoke=smoke)


def _classifier(config: Any) -> Any:
    """Random weights, with a head large enough for rounding not to decide labels."""
    from transformers import AutoModelForSequenceClassification

    config.id2label, config.label2id = {0: "a", 1: "b", 2: "c"}, {"a": 0, "b": 1, "c": 2}
    model = AutoModelForSequenceClassification.from_config(config)
    model.classifier.weight.data.mul_(20)
    return model


def measure(job: Job, inputs: Path, output: Path) -> Record:
    """One job, by whichever brimful is on the path."""
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    torch.manual_seed(7)
    return {"train": _train, "classify": _classify, "losses": _losses, "run": _run}[job["kind"]](job, inputs, output)


def _train(job: Job, inputs: Path, output: Path) -> Record:
    import brimful_side

    settings = {"batch_size": 32, "precision": job["precision"], "execution": job["execution"]}
    plan = {key: job[key] for key in ("warm_up", "steps", "smoke")}
    plan |= {"work": f"{job['corpus']}/{job['size']}", "rounds": 5, "settings": [settings]}
    (found,) = brimful_side.measure(plan, inputs)
    rates = sorted(each["samples"] / each["seconds"] for each in found["rounds"])
    kept = ("peak_allocated_bytes", "peak_reserved_bytes", "warnings", "graphs_at_marks", "warm_up_s", "recipe")
    return {"rate": rates[2], "rates": rates} | {key: found[key] for key in kept}


def _options(job: Job) -> dict[str, Any]:
    return {key: job[key] for key in ("precision", "execution", "max_length", "device")}


def _losses(job: Job, inputs: Path, output: Path) -> Record:
    import brimful

    brimful.train(
        inputs / f"{job['corpus']}.jsonl", model=inputs / job["size"], output=output, max_steps=_FIRST_STEPS,
        logging_steps=1, eval_split=0.0, batch_size=32, learning_rate=2e-5, seed=3, **_options(job),
    )  # fmt: skip
    events = [json.loads(line) for line in (output / "events.jsonl").read_text("utf-8").splitlines()]
    return {"losses": [each["loss"] for each in events if "grad_norm" in each]}


def _run(job: Job, inputs: Path, output: Path) -> Record:
    import brimful

    began = time.perf_counter()
    run = brimful.train(
        inputs / f"{job['corpus']}.jsonl", model=inputs / job["size"], output=output, max_steps=job["steps"],
        eval_steps=job["steps"] // 4, eval_split=0.2, batch_size=32, learning_rate=2e-5, seed=3, **_options(job),
    )  # fmt: skip
    return {
        "run_s": time.perf_counter() - began,
        "train_s": run.train_s,
        "peak_bytes": dataclasses.asdict(run.peak_bytes),
        "accuracy": run.metrics["accuracy"],
        "loss": run.metrics["loss"],
    }


def _classify(job: Job, inputs: Path, output: Path) -> Record:
    import brimful

    texts = [json.loads(line)["text"] for line in (inputs / f"{job['corpus']}.jsonl").read_text("utf-8").splitlines()]
    rates = []
    with brimful.Classifier(inputs / f"classify-{job['size']}", **_options(job)) as classifier:
        found = classifier(texts * job["times"])
        for _ in range(5):
            began = time.perf_counter()
            found = classifier(texts * job["times"])
            rates.append(len(found) / (time.perf_counter() - began))
    output.with_suffix(".json").write_text(json.dumps([[each["label"], each["score"]] for each in found[: len(texts)]]))
    return {"rate": median(rates), "rates": sorted(rates)}


def child(arguments: argparse.Namespace, side: str, job: Job, repeat: int, scratch: Path) -> Record:
    """One job in a process of its own, on one side's code, into the raw log."""
    tree = arguments.before if side == "before" else ROOT
    output = scratch / f"{side}-{name_of(job).replace('/', '-').replace(' ', '-')}-{repeat}"
    job = job | {"device": "cpu" if arguments.smoke else "cuda", "smoke": arguments.smoke}
    paths = [tree / "src", tree / "benchmarks", tree / "benchmarks" / "training"]
    own = {"PYTHONPATH": os.pathsep.join([*map(str, paths), os.environ.get("PYTHONPATH", "")]), "HF_HUB_OFFLINE": "1"}
    own["XDG_CACHE_HOME"] = str(scratch / f"cache-{side}")
    command = [sys.executable, __file__, "--one", json.dumps([job, str(arguments.inputs), str(output)])]
    began = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | own, cwd=scratch, check=False)
    rows = [json.loads(line[4:]) for line in done.stdout.splitlines() if line.startswith("ROW ")]
    record = {"side": side, "name": name_of(job), "repeat": repeat, "wall_s": round(time.monotonic() - began, 1)}
    record |= rows[0] if rows else {"error": done.stderr.strip()[-1500:]}
    with (arguments.output / "raw.jsonl").open("a", encoding="utf-8") as log:
        log.write(json.dumps(record) + "\n")
    print(side, record["name"], record.get("rate", ""), record.get("error", "")[-300:], record["wall_s"], flush=True)
    answers = output.with_suffix(".json")
    return record | ({"answers": json.loads(answers.read_text())} if answers.exists() else {})


def table(records: list[Record]) -> str:
    """What came of each measurement, before and after."""
    lines = []
    for name in dict.fromkeys(record["name"] for record in records):
        sides = [[r for r in records if r["name"] == name and r["side"] == side] for side in ("before", "after")]
        if any("error" in record for side in sides for record in side) or not all(sides):
            lines.append(f"{name}: failed")
            continue
        (old, *_), (new, *_) = sides
        if "rate" in old:
            rates = [median(record["rate"] for record in side) for side in sides]
            spread = [[round(record["rate"]) for record in side] for side in sides]
            lines.append(f"{name}: {rates[0]:,.0f} and {rates[1]:,.0f} a second, {rates[1] / rates[0]:.4f}; {spread}")
        if "answers" in old:
            pairs = list(zip(old["answers"], new["answers"], strict=True))
            same, equal = sum(a[0] == b[0] for a, b in pairs), sum(a == b for a, b in pairs)
            off = max(abs(a[1] - b[1]) for a, b in pairs)
            lines.append(f"  labels {same} of {len(pairs)}, answers bit for bit {equal}; scores off by {off:.1e}")
        if "losses" in old:
            off = [abs(a - b) for a, b in zip(old["losses"], new["losses"], strict=True)]
            again = [abs(a - b) for a, b in zip(old["losses"], sides[0][-1]["losses"], strict=True)]
            lines.append(
                f"{name}: {sum(each == 0 for each in off)} of {len(off)} bit for bit, off by {max(off):.1e}"
                + (f"; the code before run twice by {max(again):.1e}" if len(sides[0]) > 1 else "")
            )
        if "run_s" in old:
            kept = ("run_s", "train_s", "peak_bytes", "accuracy", "loss")
            lines += [f"{name}: { ({key: side[0][key] for key in kept}) }" for side in sides]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="Two checkouts side by side.")
    parser.add_argument("--before", type=Path, help="a checkout of the commit to compare with")
    parser.add_argument("--output", type=Path, help="folder of raw.jsonl and table.txt")
    parser.add_argument("--inputs", type=Path, default=Path(tempfile.gettempdir()) / "brimful-before-after")
    parser.add_argument("--tokenizer", help="folder of a BERT tokenizer; that of the packaged MiniLM-L6 unless given")
    parser.add_argument("--repeats", type=int, default=2, help="processes for each rate, of five repeats each")
    parser.add_argument("--part", choices=["all", "once", "repeated"], default="all", help="two parts for two GPUs")
    parser.add_argument("--smoke", action="store_true", help="tiny models on a CPU")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        job, inputs, output = json.loads(arguments.one)
        print("ROW " + json.dumps(measure(job, Path(inputs), Path(output))))
        return
    arguments.before, arguments.inputs = arguments.before.resolve(), arguments.inputs.resolve()
    arguments.output.mkdir(parents=True, exist_ok=True)
    make_inputs(arguments.inputs, arguments.tokenizer, smoke=arguments.smoke)
    jobs, records = jobs_of(arguments.smoke), []
    with tempfile.TemporaryDirectory() as scratch:
        run = partial(child, arguments)
        for repeat in range(arguments.repeats if arguments.part != "once" else 0):
            for job in jobs["repeated"]:
                for side in ("before", "after") if repeat % 2 == 0 else ("after", "before"):
                    records.append(run(side, job, repeat, Path(scratch)))
        for job in jobs["once"] if arguments.part != "repeated" else []:
            twice = ("before",) if job["kind"] == "losses" and job["execution"] == "compiled" else ()
            for repeat, side in enumerate(("before", "after", *twice)):
                records.append(run(side, job, repeat, Path(scratch)))
    text = table(records)
    (arguments.output / "table.txt").write_text(text + "\n", "utf-8")
    print(text)


if __name__ == "__main__":
    main()

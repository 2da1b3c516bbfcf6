"""Fine-tuning on 1 and 2 GPUs of one machine: Hugging Face Trainer with DDP, and brimful, in the same call.

    python benchmarks/several_gpus/run.py --output OUTPUT --tokenizer FOLDER --budget-s 580

Needs two NVIDIA GPUs, four for `--sizes 4x128`, and nothing from a network. What is in the raw log is not measured
again: call it until nothing is left. README.md says how to read it.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path += [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "training")]

import settings as trainer_settings
from resumable import Session, default_inputs, parser_of, print_rows, say, versions_here, write_texts
from works import Work, data_file, make_inputs

WORKS = ("tweets/base", "bbc/base", "bbc/large")
#: The last two are for two GPUs: by NCCL; and with gradients in bf16 on the way, only asked for, as it rounds.
SIDES = ("hf", "brimful", "brimful_nccl", "brimful_bf16")
#: GPUs, and rows of an effective batch: 32 a GPU, and 32 in all. The last one is only asked for.
SIZES = ((1, 32), (2, 64), (2, 32), (4, 128))
#: Trainer's fastest settings on one H200 (benchmarks/training), and what may be faster on two; the fastest counts.
_FASTEST = {"compile": "default"}
FORMS: dict[str, dict[str, Any]] = {
    "compiled": _FASTEST,
    "rebalanced": _FASTEST | {"sampling": "batch_rebalance"},
    "uncut": _FASTEST | {"uncut": True},  # torch does not cut compiled models where DDP's buckets end
    "eager": {},
    "grouped": _FASTEST | {"sampling": "group_by_length"},
    "buckets": _FASTEST | {"arguments": {"ddp_bucket_cap_mb": 100}},
}
_OURS: dict[str, dict[str, Any]] = {
    "brimful": {},
    "brimful_nccl": {"peer_copies": False},
    "brimful_bf16": {"reduce_dtype": "bf16"},
}
_EXPECTED_S = {"hf": 75.0, "brimful": 35.0, "brimful_nccl": 35.0, "brimful_bf16": 35.0}
#: Steps of warm-up, of a round, and rounds: Trainer's take longer, and it captures nothing.
_COUNTS = {"brimful": (140, 60, 5), "hf": (100, 30, 5)}


def rows_of(names: list[str], sides: list[str], sizes: list[str], forms: list[str]) -> list[dict[str, Any]]:
    """Return all measurements in their order: both sides of a row one after the other."""
    found = []
    for work, (gpus, batch) in itertools.product(names, SIZES):
        if f"{gpus}x{batch}" not in sizes:
            continue
        for side in sides:
            if side in ("brimful_nccl", "brimful_bf16") and gpus == 1:
                continue
            theirs = [FORMS[name] for name in forms] if gpus > 1 else [_FASTEST]
            for form in theirs if side == "hf" else (_OURS[side],):
                found.append({"work": work, "side": side, "gpus": gpus, "batch_size": batch, "form": form})
    return found


def measure(plan: dict[str, Any], inputs: Path) -> Iterator[dict[str, Any]]:
    """Measure one row in this process, one of `gpus`."""
    from brimful.cli.launch import watch_launcher

    watch_launcher()
    plan = plan | {"limit": whole_batches(inputs, Work.parse(plan["work"]))}
    if plan["side"] in _OURS:
        import together

        yield from together.measure(plan, inputs)
        return
    import trainer_side

    base = trainer_settings.BASE | plan["form"] | {"batch_size": plan["batch_size"] // plan["gpus"]}
    base["arguments"] = dict(base.get("arguments", {}))
    if base.pop("uncut", False):
        import torch

        torch._dynamo.config.optimize_ddp = False
    if plan["gpus"] > 1:
        base["arguments"] |= {"ddp_find_unused_parameters": False}
    if plan["smoke"]:
        base |= {"workers": 0, "compile": None}
        base["arguments"] |= {"ddp_backend": "gloo"} if plan["gpus"] > 1 else {}
    for found in trainer_side.measure(plan | {"settings": [base]}, inputs):
        for each in found["rounds"]:
            each["samples"] *= plan["gpus"]
        yield found


def whole_batches(inputs: Path, work: Work) -> int:
    """Return how many of a work's rows fill whole batches of every size: the last one of an epoch has fewer rows on a
    GPU, and of batches of 64 twice as many are last ones as of batches of 32."""
    largest = max(batch for _, batch in SIZES)
    with data_file(inputs, work).open() as file:
        return sum(1 for _ in file) // largest * largest


def one(plan: dict[str, Any], inputs: Path) -> int:
    """Run a plan in as many processes as it has GPUs; the first one prints what was found."""
    from brimful.cli.launch import launch

    if plan["gpus"] > 1 and "RANK" not in os.environ:
        return launch([sys.executable, *sys.argv], plan["gpus"])
    if plan["gpus"] == 1:  # Trainer would take all that it sees
        first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
        os.environ["CUDA_VISIBLE_DEVICES"] = "" if plan["smoke"] else first
    found = list(measure(plan, inputs))
    if os.environ.get("RANK", "0") == "0":
        print_rows(each | {"versions": versions_here("accelerate")} for each in found)
    return 0


def results(session: Session, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the newest measurement of each row; of Trainer's forms the fastest."""
    best: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in rows:
        known = session.known("row", here=False, ok=True, **row)
        if not known:
            continue
        newest = known[-1]
        rates = sorted(each["samples"] / each["seconds"] for each in newest["rounds"])
        key = (row["work"], row["side"], row["gpus"], row["batch_size"])
        found = {
            **{name: row[name] for name in ("work", "side", "gpus", "batch_size")},
            "samples_per_s": statistics.median(rates),
            "samples_per_s_range": [rates[0], rates[-1]],
            "settings": newest["settings"],
            **{name: newest.get(name) for name in ("recipe", "warnings", "versions", "gpu", "host", "commit", "call")},
        }
        if key not in best or found["samples_per_s"] > best[key]["samples_per_s"]:
            best[key] = found
    return list(best.values())


def table(found: list[dict[str, Any]]) -> str:
    """Return a table: samples/s, times one GPU's of the same side, and times Trainer's of the same row."""
    rates = {(r["work"], r["side"], r["gpus"], r["batch_size"]): r["samples_per_s"] for r in found}
    lines = [
        "| work | GPUs | rows of a batch | side | samples/s | times one GPU | times Trainer |",
        "|---|---|---|---|---|---|---|",
    ]
    for work, side, gpus, batch in rates:
        rate, alone, theirs = (
            rates.get(key)
            for key in ((work, side, gpus, batch), (work, side.split("_")[0], 1, 32), (work, "hf", gpus, batch))
        )
        ratios = [f"{rate / other:.2f}" if rate and other else "" for other in (alone, theirs)]
        lines.append(f"| {work} | {gpus} | {batch} | {side} | {rate:,.0f} | {ratios[0]} | {ratios[1]} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = parser_of((__doc__ or "").splitlines()[0], WORKS, timeout_s=240)
    named = {"choices": list(FORMS), "default": ["compiled", "rebalanced"]}
    parser.add_argument("--forms", nargs="+", **named, help="Trainer's settings that are tried on two GPUs")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES), help="these instead of both")
    sizes = [f"{gpus}x{batch}" for gpus, batch in SIZES]
    parser.add_argument("--sizes", nargs="+", choices=sizes, default=sizes[:-1], help="GPUs x rows of a batch")
    arguments = parser.parse_args()
    arguments.inputs = arguments.inputs or default_inputs("training", smoke=arguments.smoke)
    if arguments.one:
        return one(json.loads(arguments.one), arguments.inputs)
    make_inputs(arguments.inputs, [Work.parse(name) for name in WORKS], arguments.tokenizer, smoke=arguments.smoke)
    session = Session(arguments, __file__, gpu=not arguments.smoke)
    rows = rows_of(arguments.rows, arguments.sides, arguments.sizes, arguments.forms)
    left = 0
    for row in rows:
        if session.known("row", ok=True, **row) and not arguments.again:
            continue
        expected = session.last_wall_s("row", **row) or _EXPECTED_S[row["side"]]
        if arguments.dry_run or not session.fits(expected):
            say(f"{row}: about {expected:.0f} s{'' if arguments.dry_run else ', no time left'}")
            left += 1
            continue
        counted = (2, 2, 2) if arguments.smoke else _COUNTS[row["side"].split("_")[0]]
        counts = dict(zip(("warm_up", "steps", "rounds"), counted, strict=True))
        result = session.child(row | counts | {"smoke": arguments.smoke, "operations": False}, arguments.timeout_s)
        measured = result.pop("found")
        record = session.add(kind="row", **row, **(measured[0] if measured else {}), **result)
        said = [f"{r['samples'] / r['seconds']:.0f}" for r in record.get("rounds", ())]
        say(f"{row}: {' '.join(said) or str(record['error'])[-400:]} samples/s, {record['wall_s']} s")
    found = results(session, rows_of(list(WORKS), list(SIDES), sizes, list(FORMS)))
    write_texts(arguments.output, {"results.json": json.dumps(found, indent=1), "table.md": table(found)})
    print(table(found), end="")
    say(f"{left} rows are left" if left else "nothing is left")
    return 0


if __name__ == "__main__":
    sys.exit(main())

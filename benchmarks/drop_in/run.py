"""brimful inside the loops that people have: Trainer, an Accelerate loop, each as it is and with one change.

    python benchmarks/drop_in/run.py --output OUTPUT --budget-s 500 [--rows bbc/base] [--sides packed accelerate]

Needs one NVIDIA GPU and nothing from a network. Each side of a row is a process of its own; what is in the raw log is
not measured again. README.md says how to read it.
"""

from __future__ import annotations

import json
import statistics
import sys
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))
sys.path.append(str(Path(__file__).parents[1] / "training"))

from resumable import Session, default_inputs, parser_of, print_rows, say, script_of, versions_here, write_texts

WORKS = ("tweets/base", "bbc/base", "lora/1b")
SIDES = ("train", "step", "brimful_trainer", "packed", "accelerate", "trainer")
#: Settings of each side; of several the fastest counts.
_LOADERS = ({"workers": 4, "nan_filter": False}, {"workers": 0, "nan_filter": True})
_SETTINGS: dict[str, tuple[dict[str, Any], ...]] = {
    "train": tuple({"batch_size": 32, "precision": "bf16", "execution": mode} for mode in ("auto", "compiled")),
    "trainer": _LOADERS,
    "brimful_trainer": _LOADERS,
    "accelerate": ({"workers": 4},),
    "packed": ({"workers": 4, "graphs": True}, {"workers": 4, "graphs": False}),
    "step": (
        {"workers": 4, "execution": "compiled"},
        {"workers": 4, "execution": "compiled", "optimizer": "adamw_torch_fused"},
        {"workers": 4, "execution": "captured"},
    ),
}
#: Seconds of one side, to begin with.
_EXPECTED_S = 45.0
#: Ratios that must be reached: of a side to another, by row.
MUST = (
    ("brimful_trainer", "train", {"bbc/base": 0.90, "tweets/base": 0.60}),
    ("step", "train", {"bbc/base": 0.95, "tweets/base": 0.80}),
    ("packed", "accelerate", {"bbc/base": 1.2}),
)


def measured(plan: dict[str, Any], inputs: Path, tokenizer: str | None) -> Iterator[dict[str, Any]]:
    """Rows of one side, in this process: one a setting."""
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    versions = versions_here("accelerate", "peft")
    if plan["smoke"]:
        torch.set_num_threads(1)
    for settings in plan["settings"]:
        try:
            found = _one(plan, settings, inputs, tokenizer)
        except Exception as failure:  # of this setting alone: the others are measured
            found = {"error": f"{type(failure).__name__}: {failure}"[:300]}
        yield {"side": plan["side"], "settings": settings, "versions": versions, **found}


def _one(plan: dict[str, Any], settings: dict[str, Any], inputs: Path, tokenizer: str | None) -> dict[str, Any]:
    from loops import SIDES as LOOPS
    from loops import Clock

    if plan["side"] == "train":
        return _train(plan, settings, inputs, tokenizer)
    task = make_task(plan["work"], inputs, tokenizer, smoke=plan["smoke"])
    return LOOPS[plan["side"]](task, settings, Clock(plan["warm_up"], plan["steps"], plan["rounds"]))


def _train(plan: dict[str, Any], settings: dict[str, Any], inputs: Path, tokenizer: str | None) -> dict[str, Any]:
    """`brimful train` on the same rows, by the parts that it is wired of."""
    if plan["work"] == "lora/1b":
        adapters = script_of("adapters")
        _make_lora(inputs, smoke=plan["smoke"])
        blocks = {"warm_up": plan["warm_up"], "count": plan["rounds"], "steps": plan["steps"]}
        adapters._BLOCKS = replace(adapters._BLOCKS, **blocks)
        found = adapters._brimful({"execution": "captured"} | settings, _lora_folder(inputs), plan["smoke"])
        rounds = [{"seconds": 32 / rate, "cpu_s": 0.0, "samples": 32} for rate in found.pop("rates")]
        return found | {"rounds": rounds, "warm_up_s": 0.0}
    import brimful_side
    from works import Work, make_inputs

    make_inputs(inputs, [Work.parse(plan["work"])], tokenizer, smoke=plan["smoke"])
    asked = plan | {"settings": [settings | ({"precision": "fp32"} if plan["smoke"] else {})], "operations": False}
    [found] = brimful_side.measure(asked, inputs)
    return found


def make_task(name: str, inputs: Path, tokenizer_folder: str | None, *, smoke: bool) -> Any:
    """The model and tokenised rows of a work; files that are missing are made."""
    from loops import Task
    from shapes import max_length
    from transformers import AutoTokenizer
    from works import Work, data_file, make_inputs, model_folder, read_rows

    if name == "lora/1b":
        _make_lora(inputs, smoke=smoke)
        folder, file = _lora_folder(inputs) / "base", _lora_folder(inputs) / "rows.jsonl"
    else:
        work = Work.parse(name)
        make_inputs(inputs, [work], tokenizer_folder, smoke=smoke)
        folder, file = model_folder(inputs, work), data_file(inputs, work)
    rows, tokenizer = read_rows(file), AutoTokenizer.from_pretrained(folder)
    labels = sorted({row["label"] for row in rows})
    encoded = tokenizer([row["text"] for row in rows], truncation=True, max_length=max_length(smoke))
    names = [key for key in encoded if key != "token_type_ids" or name != "lora/1b"]
    made = [
        {key: encoded[key][i] for key in names} | {"labels": labels.index(row["label"])} for i, row in enumerate(rows)
    ]
    return Task(folder=folder, rows=made, num_labels=len(labels), lora=name == "lora/1b")


def _lora_folder(inputs: Path) -> Path:
    return inputs / "lora"


def _make_lora(inputs: Path, *, smoke: bool) -> None:
    """The decoder of 1.2 billion parameters, its tokenizer and its rows."""
    folder = _lora_folder(inputs)
    if not (folder / "rows.jsonl").exists():
        folder.mkdir(parents=True, exist_ok=True)
        script_of("adapters").make(folder, smoke)


def results(session: Session) -> list[dict[str, Any]]:
    """Of each row and side the fastest setting, with its spread over rounds."""
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for record in session.records:
        if record["kind"] != "row" or record["smoke"] != session.arguments.smoke:
            continue
        made, key = _row(record), (record["work"], record["side"])
        if key not in rows or (made["samples_per_s"] or 0) > (rows[key]["samples_per_s"] or 0):
            rows[key] = made
    return [rows[key] for key in sorted(rows)]


def _row(record: dict[str, Any]) -> dict[str, Any]:
    rates = [each["samples"] / each["seconds"] for each in record.get("rounds", ())]
    kept = ("work", "side", "settings", "gpu", "commit", "host", "versions", "call")
    more = (
        "error",
        "recipe",
        "first_batch",
        "stock_reason",
        "packed_calls",
        "plain_calls",
        "captured_calls",
        "peak_allocated_bytes",
    )
    return {name: record[name] for name in kept} | {name: record.get(name) for name in more} | {
        "samples_per_s": round(statistics.median(rates), 1) if rates else None,
        "lowest": round(min(rates), 1) if rates else None,
        "highest": round(max(rates), 1) if rates else None,
    }  # fmt: skip


def table(rows: list[dict[str, Any]]) -> str:
    """Samples a second of each side by row, and the ratios that must be reached."""
    by = {(row["work"], row["side"]): row["samples_per_s"] for row in rows}
    works = [work for work in WORKS if any(work == row["work"] for row in rows)]
    lines = ["| samples/s | " + " | ".join(works) + " |", "|---" * (len(works) + 1) + "|"]
    for side in reversed(SIDES):
        said = (by.get((work, side)) for work in works)
        lines.append(f"| {side} | " + " | ".join("" if rate is None else f"{rate:,.0f}" for rate in said) + " |")
    lines.append("")
    for side, beside, least in MUST:
        for work, ratio in least.items():
            ours, theirs = by.get((work, side)), by.get((work, beside))
            if ours and theirs:
                met = "met" if ours / theirs >= ratio else "MISSED"
                lines.append(
                    f"- {work}: {side} is {ours / theirs:.2f} of {beside}, of {ratio:.2f} that it must be: {met}"
                )
    return "\n".join(lines)


def main() -> None:
    arguments = _arguments()
    if arguments.one:
        print_rows(measured(json.loads(arguments.one), arguments.inputs, arguments.tokenizer))
        return
    session, left = Session(arguments, __file__, gpu=not arguments.smoke), []
    for work in arguments.rows:
        for side in arguments.sides:
            if session.known("side", work=work, name=side, ok=True):
                continue
            seconds = session.last_wall_s("side", work=work, name=side) or _EXPECTED_S
            if arguments.dry_run:
                print(f"{seconds:5.0f} s  {work} {side}")
            elif not session.fits(seconds):
                left.append(f"{work} {side}")
            else:
                _measure(session, work, side)
    if arguments.dry_run:
        return
    rows = results(session)
    text = table(rows)
    write_texts(arguments.output, {"results.json": json.dumps(rows, indent=1), "table.md": text})
    print(text)
    if left:
        print(f"\nnot measured yet: {', '.join(left)}; call again")


def _measure(session: Session, work: str, side: str) -> None:
    arguments, slow = session.arguments, work != "tweets/base"
    say(f"{work} {side}")
    steps = {"warm_up": 40 if work == "lora/1b" else 120, "steps": 20 if slow else 60, "rounds": 5}
    if arguments.smoke:
        steps = {"warm_up": 1, "steps": 1, "rounds": 2}
    settings = [each | ({"workers": 0} if arguments.smoke else {}) for each in _SETTINGS[side]]
    if arguments.smoke:
        settings = [{**each, "execution": "auto"} for each in settings[:2]]
    plan = {"work": work, "side": side, "settings": settings, "smoke": arguments.smoke, **steps}
    result = session.child(plan, arguments.timeout_s)
    for found in result.pop("found"):
        session.add(kind="row", work=work, **found)
    session.add(kind="side", work=work, name=side, **result)
    if not result["ok"]:
        say(f"{work} {side}: {result['error']}")


def _arguments() -> Namespace:
    parser = parser_of("brimful inside Trainer and Accelerate loops.", WORKS, timeout_s=240.0)
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES), help="these instead of all")
    arguments = parser.parse_args()
    arguments.inputs = arguments.inputs or default_inputs("drop-in", smoke=arguments.smoke)
    return arguments


if __name__ == "__main__":
    main()

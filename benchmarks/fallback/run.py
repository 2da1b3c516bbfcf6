"""Classifiers that are not packed: Hugging Face Trainer beside brimful, by architecture and length of texts.

    python benchmarks/fallback/run.py --output OUTPUT --budget-s 350 [--share 1/4] [--only big_bird t5]

Needs one NVIDIA GPU and nothing from a network. Each architecture is a process of its own, in which both sides take
turns; what is in the raw log is not measured again. README.md says how to read it.
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))
sys.path.append(str(Path(__file__).parents[1] / "training"))

import turns
from architectures import ARCHITECTURES, PRECISIONS, SHAPES, SIZES, SLOW, UNPACKED, Work, make_inputs
from resumable import Session, default_inputs, parser_of, print_rows, say, versions_here, write_texts
from settings import BASE

#: Settings of Trainer beside bf16 and tf32: each is measured, and the fastest counts.
_HF: dict[str, Any] = BASE | {"attention": None, "padding": "multiple of 8", "nan_filter": False}
_HF_SETTINGS = (
    *(_HF, _HF | {"workers": 0}),
    *(_HF | {"compile": "reduce-overhead", "padding": "buckets"}, _HF | {"compile": "default"}),
)
#: Seconds of one architecture, to begin with: with torch_compile, and without.
_EXPECTED_S = (130.0, 50.0)
#: Steps of the run that `brimful train` decides for, and over which seconds to begin with are counted as well.
_RUN_STEPS = 10_000


def architecture(plan: dict[str, Any], inputs: Path, tokenizer: str | None) -> Iterator[dict[str, Any]]:
    """Rows of one architecture, in this process: sides in turns, what takes longest to begin with last."""
    import torch
    import transformers
    from shapes import load_tokenizer

    transformers.logging.set_verbosity_error()
    if plan["scale"] != "base":
        torch.set_num_threads(plan["threads"])
    versions = versions_here("accelerate")
    works = [Work(model=plan["work"], shape=shape, scale=plan["scale"]) for shape in plan["shapes"]]
    for work in works:
        make_inputs(inputs, work, load_tokenizer(tokenizer, smoke=False))
    sides = [("brimful", {"batch_size": 32, "precision": plan["precision"], "execution": "auto"})]
    kept = [_HF_SETTINGS[number] for number in plan["settings"]]
    kept = [settings for settings in kept if plan["compile"] or settings["compile"] is None]
    sides += [("hf", settings | {"precision": plan["precision"]}) for settings in kept]
    if not torch.cuda.is_available():
        sides = [(side, settings) for side, settings in sides if not settings.get("workers")] * plan["repeats"]
    uncompiled = []
    for side, settings in sides:
        for work in works:
            found = _measured(side, work, settings, plan, inputs)
            yield {"side": side, "shape": work.shape, **found, "versions": versions}
            if found.get("packed") and not plan["packed_too"]:
                return
            if side == "brimful" and (found.get("recipe") or {}).get("execution") == "captured":
                uncompiled.append(work)
    for work in uncompiled if plan["compiled_too"] else ():
        found = _measured("brimful", work, sides[0][1] | {"execution": "compiled"}, plan, inputs)
        yield {"side": "brimful compiled", "shape": work.shape, **found, "versions": versions}


def _measured(side: str, work: Work, settings: dict[str, Any], plan: dict[str, Any], inputs: Path) -> dict[str, Any]:
    import torch

    if side == "hf":
        import trainer_side as measure
    else:
        import brimful_side as measure  # type: ignore[no-redef]
    short = work.shape == "short"
    to_compile = 12 if work.shape == "dense" else 40  # one length, or several
    steps = {"warm_up": 60 if short else 30, "steps": 40 if short else 12, "rounds": 5}
    if side == "hf":
        steps = {"warm_up": to_compile if settings["compile"] else 10, "steps": 20 if short else 8, "rounds": 5}
    if work.model in SLOW and side == "hf" and not settings["compile"]:
        few = 4 if short else 2  # a step takes seconds
        steps = {"warm_up": few, "steps": few, "rounds": 5}
    if plan["scale"] != "base":
        steps = {"warm_up": 2, "steps": 2 if plan["scale"] == "smoke" else 6, "rounds": 2}
    began = time.monotonic()
    try:
        torch._dynamo.reset()
        asked = {"settings": [settings], "smoke": False, "operations": False, **steps}
        [found] = measure.measure_work(work, asked, inputs)
    except Exception as failure:  # of this side alone: the others are measured
        found = {"settings": settings, "error": f"{type(failure).__name__}: {failure}"[:300]}
    turns.give()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    seconds = {"side_s": round(time.monotonic() - began, 1)}
    return found | {"warm_up": steps["warm_up"], "in_turns": turns.shared(), **seconds}


def results(session: Session) -> list[dict[str, Any]]:
    """Of each model, texts and side the fastest setting of the newest call, with its spread over rounds.

    `run_s`: seconds of 10,000 steps, of the setting that needs fewest.
    """
    rows: dict[tuple[str, str, str], dict[str, Any]] = {}
    for record in session.records:
        if record["smoke"] != session.arguments.smoke or record["kind"] != "row":
            continue
        key = (record["work"], record["shape"], record["side"])
        if "rounds" not in record:
            rows.setdefault(key, _unmeasured(record))
            continue
        made = _row(record)
        kept = rows.get(key)
        if kept is None or kept["samples_per_s"] is None or kept["call"] != made["call"]:
            rows[key] = made
            continue
        run_s = min(kept["run_s"], made["run_s"])
        rows[key] = (made if made["samples_per_s"] > kept["samples_per_s"] else kept) | {"run_s": run_s}
    return [rows[key] for key in sorted(rows)]


def _row(record: dict[str, Any]) -> dict[str, Any]:
    rates = [each["samples"] / each["seconds"] for each in record["rounds"]]
    cpu_rates = [each["samples"] / each["cpu_s"] for each in record["rounds"]]
    return _unmeasured(record) | {
        "samples_per_s": round(statistics.median(rates), 1),
        "lowest": round(min(rates), 1),
        "highest": round(max(rates), 1),
        "samples_per_cpu_s": round(statistics.median(cpu_rates), 1),
        "warm_up_s": round(record["warm_up_s"], 1),
        "run_s": round(_run_s(record), 1),
        "recipe": record.get("recipe"),
        "reasons": record.get("reasons"),
        "warnings": record.get("warnings"),
        "packed": record.get("packed"),
    }


def _run_s(record: dict[str, Any]) -> float:
    """Seconds of a run of 10,000 steps of this setting, from the loaded model on; ours with loading and checking it."""
    step_s = statistics.median(each["seconds"] for each in record["rounds"]) / record["steps_per_round"]
    to_begin_s: float = record.get("built_s", 0.0) + record["warm_up_s"]
    return to_begin_s + (_RUN_STEPS - record.get("warm_up", 0)) * step_s


def _unmeasured(record: dict[str, Any]) -> dict[str, Any]:
    return {
        "model": record["work"],
        "shape": record["shape"],
        "side": record["side"],
        "samples_per_s": None,
        "gpu": record["gpu"],
        "settings": record["settings"],
        "commit": record["commit"],
        "host": record["host"],
        "versions": record["versions"],
        "call": record["call"],
        "error": record.get("error"),
    }


def table(rows: list[dict[str, Any]]) -> str:
    """A line a model and kind of texts, and the medians of the ratios."""
    by = {(row["model"], row["shape"], row["side"]): row for row in rows}
    lines = [
        "| model | texts | Trainer, samples/s (range) | brimful (range) | ratio | brimful runs | compiled (range) "
        "| ratio | 10,000 steps: Trainer | brimful | ratio |"
    ]
    lines.append("|---|---|---|---|---|---|---|---|---|---|---|")
    ratios, of_runs = [], []
    for model, shape in dict.fromkeys((row["model"], row["shape"]) for row in rows):
        ours, theirs = by.get((model, shape, "brimful")), by.get((model, shape, "hf"))
        if ours is None:
            continue
        if ours.get("packed") and theirs is None:
            lines.append(f"| {model} | {shape} | | | | packed: not of this table | | | | | |")
            continue
        compiled = by.get((model, shape, "brimful compiled"))
        ratio, of_compiled, seconds = _ratio(ours, theirs), _ratio(compiled, theirs), ["", "", ""]
        ratios += [] if ratio is None else [ratio]
        if ratio is not None and theirs is not None:
            of_runs.append(theirs["run_s"] / ours["run_s"])
            seconds = [f"{theirs['run_s']:,.0f} s", f"{ours['run_s']:,.0f} s", f"{of_runs[-1]:.2f}"]
        failed = (ours["error"] or "").partition("\n")[0]
        runs = failed or f"{(ours['recipe'] or {}).get('execution')}"
        cells = [model, shape, _said(theirs), _said(ours), _two_places(ratio), runs, _said(compiled)]
        lines.append("| " + " | ".join([*cells, _two_places(of_compiled), *seconds]) + " |")
    for said, found in (("Median ratio", ratios), ("Over 10,000 steps: median ratio", of_runs)):
        if found:
            slower = sum(ratio < 1 for ratio in found)
            lines.append(f"\n{said} {statistics.median(found):.2f}; {slower} of {len(found)} below 1.")
    return "\n".join(lines)


def _ratio(ours: dict[str, Any] | None, theirs: dict[str, Any] | None) -> float | None:
    """Ours by theirs; None where one of them is missing."""
    if ours is None or theirs is None or not ours["samples_per_s"] or not theirs["samples_per_s"]:
        return None
    return float(ours["samples_per_s"] / theirs["samples_per_s"])


def _two_places(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}"


def _said(row: dict[str, Any] | None) -> str:
    if row is None:
        return ""
    if row["samples_per_s"] is None:
        return "failed"
    compiled = ", compiled" if row["settings"].get("compile") else ""
    return f"{row['samples_per_s']:,.0f} ({row['lowest']:,.0f} to {row['highest']:,.0f}){compiled}"


def main() -> None:
    arguments = _arguments()
    if arguments.one:
        print_rows(architecture(json.loads(arguments.one), arguments.inputs, arguments.tokenizer))
        return
    if arguments.at_once > 1:
        arguments.output.mkdir(parents=True, exist_ok=True)
        turns.begin(arguments.output.resolve())
    session = Session(arguments, __file__, gpu=not arguments.cpu)
    wanted = [model for model in arguments.rows if not session.known("model", work=model, ok=True)]
    if arguments.dry_run:
        for model in wanted:
            print(f"{_expected_s(session, model):5.0f} s  {model}")
        return
    with session.lanes(arguments.at_once) as lanes:
        measured = lanes.map(lambda model: _measure(session, model), wanted)
        left = [model for model, was in zip(wanted, measured, strict=True) if not was]
    rows = results(session)
    text = table(rows)
    write_texts(arguments.output, {"results.json": json.dumps(rows, indent=1), "table.md": text})
    print(text)
    if left:
        print(f"\nnot measured yet: {' '.join(left)}; call again")


def _expected_s(session: Session, model: str) -> float:
    return session.last_wall_s("model", work=model) or _EXPECTED_S[0 if session.arguments.compile else 1]


def _measure(session: Session, model: str) -> bool:
    """Measure one architecture; False if there is no time for it."""
    arguments = session.arguments
    if not session.fits(_expected_s(session, model)):
        return False
    say(model)
    plan = {"work": model, "scale": arguments.size, "shapes": arguments.shapes, "compile": arguments.compile}
    plan |= {"settings": arguments.settings, "compiled_too": arguments.compiled_too}
    plan |= {"packed_too": arguments.packed_too, "repeats": arguments.repeats, "threads": arguments.threads}
    plan |= {"precision": "auto" if arguments.cpu else PRECISIONS.get(model, "bf16")}
    result = session.child(plan, arguments.timeout_s)
    for found in result.pop("found"):
        session.add(kind="row", work=model, **found)
    session.add(kind="model", work=model, **result)
    if not result["ok"]:
        say(f"{model}: {result['error']}")
    return True


def _arguments() -> Namespace:
    parser = parser_of("Classifiers that are not packed, by Trainer and by brimful.", UNPACKED, timeout_s=320.0)
    parser.add_argument("--only", nargs="+", choices=list(ARCHITECTURES), help="these model types instead of all")
    parser.add_argument("--share", help="I/N: every Nth model type from the Ith on, for N calls on N GPUs")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["short", "dense"], help="lengths of texts")
    parser.add_argument("--size", choices=SIZES, default="base", help="small and smoke are for a CPU")
    parser.add_argument("--no-compile", dest="compile", action="store_false", help="without Trainer's torch_compile")
    settings = range(len(_HF_SETTINGS))
    parser.add_argument("--settings", nargs="+", type=int, choices=settings, default=list(settings), metavar="N",
                        help="Trainer's settings, by number; 2, CUDA graphs, was the fastest so far")  # fmt: skip
    parser.add_argument("--compiled-too", action="store_true", help="also what a longer run would choose")
    parser.add_argument("--packed-too", action="store_true", help="measure what runs packed, too")
    parser.add_argument("--at-once", type=int, default=1, help="processes that share the GPU by turns")
    parser.add_argument("--cpu", action="store_true", help="leave the GPU alone")
    parser.add_argument("--repeats", type=int, default=1, help="on a CPU: how often both sides take turns")
    parser.add_argument("--threads", type=int, default=1, help="of torch, in sizes below base")
    arguments = parser.parse_args()
    if arguments.smoke:
        arguments.size, arguments.cpu = "smoke", True
    if arguments.cpu:
        arguments.compile = False
    arguments.inputs = arguments.inputs or default_inputs("fallback", smoke=arguments.smoke)
    arguments.rows = arguments.only or arguments.rows
    if arguments.share:
        first, number = map(int, arguments.share.split("/"))
        arguments.rows = arguments.rows[first - 1 :: number]
    return arguments


if __name__ == "__main__":
    main()

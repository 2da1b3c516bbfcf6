"""Answers of each architecture: transformers' pipeline at its best batch beside brimful.Classifier.

    python benchmarks/fallback/answers.py --output OUTPUT --budget-s 350 [--share 1/4] [--only fnet xlnet]

On one NVIDIA GPU, or with --cpu on a CPU, where seconds of the process count: others may share it. Each architecture is
a process of its own, in which both sides take turns; what is in the raw log is not measured again.
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))

from architectures import ARCHITECTURES, SHAPES, SIZES, Work, make_inputs
from resumable import Session, default_inputs, parser_of, print_rows, say, versions_here, write_texts

Answer = Callable[[list[str]], list[Any]]

#: Sizes of the pipeline's batches: each is tried, on texts in order of their length too, and the fastest counts.
BATCHES = {"cuda": (32, 128, 512), "cpu": (1, 8, 32)}
#: Processes that tokenise for the pipeline, tried with its fastest batches. On a CPU they would take from the model.
WORKERS = {"cuda": (0, 8), "cpu": (0,)}
#: Answers of both sides agree to this, in fp32.
_SAME_SCORE = 1e-3


def architecture(plan: dict[str, Any], inputs: Path, tokenizer: str | None) -> Iterator[dict[str, Any]]:
    """Rows of one architecture, in this process: of each shape ours, and the pipeline's by its settings."""
    import torch
    import transformers
    from shapes import load_tokenizer

    transformers.logging.set_verbosity_error()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        torch.set_num_threads(plan["threads"])
    versions = versions_here()
    for shape in plan["shapes"]:
        work = Work(model=plan["work"], shape=shape, scale=plan["scale"])
        make_inputs(inputs, work, load_tokenizer(tokenizer, smoke=False))
        texts = [json.loads(line)["text"] for line in (inputs / f"{work.texts}.jsonl").read_text("utf-8").splitlines()]
        for found in _sides(
            str(inputs / work.size), texts[: plan["texts"]], device, plan["repeats"], plan["max_length"]
        ):
            yield {"shape": shape, "versions": versions, **found}


def _sides(
    folder: str, texts: list[str], device: str, repeats: int, max_length: int | None
) -> Iterator[dict[str, Any]]:
    import brimful

    dtype = "fp32" if device == "cpu" else "fp16"
    precision = "auto" if device == "cpu" else dtype
    with brimful.Classifier(folder, device=device, precision=precision, max_length=max_length) as classifier:
        ours: Answer = classifier.__call__  # type: ignore[assignment]
        expected = ours(texts)  # which checks and captures
        pipe = _pipe(folder, device, dtype)
        recipe = {lever.name: lever.value for lever in classifier.recipe.levers} if classifier.recipe else {}
        tried = [{"batch_size": size, "sorted": o, "workers": 0} for size in BATCHES[device] for o in (False, True)]
        short, errors = [], []
        for each in tried:
            run = _pipeline(pipe, each["batch_size"], ordered=each["sorted"], workers=0)
            try:
                short.append((sum(_seconds(run, texts[: max(32, len(texts) // 4)])), each))
            except Exception as failure:  # of some models in batches
                errors.append(f"{each}: {type(failure).__name__}: {failure}"[:200])
        best = min(short, key=lambda pair: pair[0])[1]
        agreement = _agreement(expected, _pipeline(pipe, best["batch_size"], ordered=True, workers=0)(texts))
        settings = [best | {"workers": number} for number in WORKERS[device]]
        runs = [("brimful", {}, ours)]
        runs += [("pipeline", s, _pipeline(pipe, s["batch_size"], ordered=s["sorted"], workers=s["workers"]))
                 for s in settings]  # fmt: skip
        rounds: dict[int, list[dict[str, Any]]] = {number: [] for number in range(len(runs))}
        for _ in range(repeats):
            for number, (_, _, run) in enumerate(runs):
                wall_s, cpu_s = _seconds(run, texts)
                rounds[number].append({"seconds": wall_s, "cpu_s": cpu_s, "texts": len(texts)})
        for number, (side, asked, _) in enumerate(runs):
            more = {"recipe": recipe, "agreement": agreement} if side == "brimful" else {"errors": errors}
            yield {"side": side, "settings": asked, "rounds": rounds[number], "dtype": dtype, **more}
    gc.collect()


def _pipe(folder: str, device: str, dtype: str) -> Any:
    import torch
    from transformers import pipeline

    kind = torch.float32 if dtype == "fp32" else torch.float16
    return pipeline("text-classification", model=folder, tokenizer=folder, dtype=kind, device=device)


def _pipeline(pipe: Any, batch_size: int, *, ordered: bool, workers: int) -> Answer:
    """Answers by the pipeline. ordered: texts are given to it the longest first, and answers put back."""

    def answer(texts: list[str]) -> list[Any]:
        order = sorted(range(len(texts)), key=lambda i: -len(texts[i])) if ordered else list(range(len(texts)))
        given = [texts[i] for i in order]
        found = pipe(given, batch_size=batch_size, num_workers=workers, truncation=True)
        answers: list[Any] = [None] * len(texts)
        for i, each in zip(order, found, strict=True):
            answers[i] = each
        return answers

    return answer


def _seconds(run: Answer, texts: list[str]) -> tuple[float, float]:
    """Seconds of the clock, and of this process's CPU."""
    began, cpu = time.perf_counter(), time.process_time()
    run(texts)
    return time.perf_counter() - began, time.process_time() - cpu


def _agreement(ours: list[Any], theirs: list[Any]) -> float:
    """Share of texts with the same label, or one of two that are as likely."""
    same = [
        one["label"] == other["label"] or abs(one["score"] - other["score"]) < _SAME_SCORE
        for one, other in zip(ours, theirs, strict=True)
    ]
    return sum(same) / len(same)


def results(session: Session) -> list[dict[str, Any]]:
    """Of each model, texts and side the fastest setting of the newest call."""
    rows: dict[tuple[str, str, str], dict[str, Any]] = {}
    for record in session.known("row"):
        made = _row(record)
        key = (made["model"], made["shape"], made["side"])
        kept = rows.get(key)
        if kept is None or kept["call"] != made["call"] or made["texts_per_cpu_s"] > kept["texts_per_cpu_s"]:
            rows[key] = made
    return [rows[key] for key in sorted(rows)]


def _row(record: dict[str, Any]) -> dict[str, Any]:
    rates = [each["texts"] / each["seconds"] for each in record["rounds"]]
    cpu_rates = [each["texts"] / each["cpu_s"] for each in record["rounds"]]
    kept = ("shape", "side", "settings", "gpu", "commit", "host", "versions", "call", "dtype")
    return {key: record[key] for key in kept} | {
        "model": record["work"],
        "texts_per_s": round(statistics.median(rates), 1),
        "texts_per_s_range": [round(min(rates), 1), round(max(rates), 1)],
        "texts_per_cpu_s": round(statistics.median(cpu_rates), 1),
        "recipe": record.get("recipe"),
        "agreement": record.get("agreement"),
    }


def table(rows: list[dict[str, Any]]) -> str:
    """A line a model and kind of texts, and the median of the ratios."""
    by = {(row["model"], row["shape"], row["side"]): row for row in rows}
    unit = "texts_per_cpu_s" if any(row["gpu"] == "CPU" for row in rows) else "texts_per_s"
    said = "texts per CPU second" if unit == "texts_per_cpu_s" else "texts/s"
    lines = [f"| model | texts | pipeline, {said} | its settings | brimful | ratio | brimful runs | same labels |"]
    lines.append("|---|---|---|---|---|---|---|---|")
    ratios = []
    for model, shape in dict.fromkeys((row["model"], row["shape"]) for row in rows):
        ours, theirs = (by.get((model, shape, side)) for side in ("brimful", "pipeline"))
        if ours is None or theirs is None:
            continue
        ratios.append(ours[unit] / theirs[unit])
        recipe, settings = ours["recipe"] or {}, theirs["settings"]
        how = f"batches of {settings['batch_size']}" + (", by length" if settings["sorted"] else "")
        runs, same = f"{recipe.get('packing')}, {recipe.get('execution')}", f"{100 * (ours['agreement'] or 0):.1f} %"
        speeds = f"{theirs[unit]:,.1f} | {how} | {ours[unit]:,.1f} | {ratios[-1]:.2f}"
        lines.append(f"| {model} | {shape} | {speeds} | {runs} | {same} |")
    if ratios:
        slower = sum(ratio < 1 for ratio in ratios)
        lines.append(f"\nMedian ratio {statistics.median(ratios):.2f}; {slower} of {len(ratios)} below 1.")
    return "\n".join(lines)


def main() -> None:
    arguments = _arguments()
    if arguments.one:
        print_rows(architecture(json.loads(arguments.one), arguments.inputs, arguments.tokenizer))
        return
    session, left = Session(arguments, __file__, gpu=not arguments.cpu), []
    for model in arguments.rows:
        if session.known("model", work=model, ok=True):
            continue
        seconds = session.last_wall_s("model", work=model) or arguments.expected_s
        if arguments.dry_run:
            print(f"{seconds:5.0f} s  {model}")
        elif session.fits(seconds):
            _measure(session, model)
        else:
            left.append(model)
    if arguments.dry_run:
        return
    rows = results(session)
    write_texts(arguments.output, {"results.json": json.dumps(rows, indent=1), "table.md": table(rows)})
    print(table(rows))
    if left:
        print(f"\nnot measured yet: {' '.join(left)}; call again")


def _measure(session: Session, model: str) -> None:
    arguments = session.arguments
    say(model)
    plan = {"work": model, "scale": arguments.size, "shapes": arguments.shapes, "texts": arguments.texts}
    plan |= {"repeats": arguments.repeats, "max_length": arguments.max_length, "threads": arguments.threads}
    result = session.child(plan, arguments.timeout_s)
    for found in result.pop("found"):
        session.add(kind="row", work=model, **found)
    session.add(kind="model", work=model, **result)
    if not result["ok"]:
        say(f"{model}: {result['error']}")


def _arguments() -> Namespace:
    parser = parser_of("Answers by transformers' pipeline and by brimful.", ARCHITECTURES, timeout_s=300.0)
    parser.add_argument("--only", nargs="+", choices=list(ARCHITECTURES), help="these model types instead of all")
    parser.add_argument("--share", help="I/N: every Nth model type from the Ith on, for N calls on N GPUs")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["short", "mixed"], help="lengths of texts")
    parser.add_argument("--size", choices=SIZES, default="base", help="small and smoke are for a CPU")
    parser.add_argument("--texts", type=int, default=2048, help="most texts of a round")
    parser.add_argument("--max-length", type=int, help="of ours, for a model of long windows that it checks otherwise")
    parser.add_argument("--cpu", action="store_true", help="leave the GPU alone")
    parser.add_argument("--repeats", type=int, default=3, help="how often both sides take turns")
    parser.add_argument("--threads", type=int, default=1, help="of torch, on a CPU")
    arguments = parser.parse_args()
    arguments.expected_s = 40.0
    if arguments.smoke:
        arguments.size, arguments.cpu, arguments.texts, arguments.repeats = "smoke", True, 32, 1
    arguments.inputs = arguments.inputs or default_inputs("fallback", smoke=arguments.smoke)
    arguments.rows = arguments.only or arguments.rows
    if arguments.share:
        first, number = map(int, arguments.share.split("/"))
        arguments.rows = arguments.rows[first - 1 :: number]
    return arguments


if __name__ == "__main__":
    main()

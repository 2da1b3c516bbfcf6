"""Default runs beside a sweep of five learning rates by three numbers of epochs, and beside TF-IDF.

    python benchmarks/defaults/run.py --inputs INPUTS --output benchmarks/defaults/DATE-GPU --budget-s 360

Every run is `brimful.train`; those of one row and model differ in learning rate and epochs alone. Runs that the raw log
has are not made again: call it until nothing is left. README.md says where INPUTS come from.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))

from works import LEARNING_RATES, MODELS, WORKS

Plan = dict[str, Any]
#: Of several runs at once: what decides which run it is.
_KEYS = ("work", "model", "learning_rate", "epochs")


def plans_of(arguments: argparse.Namespace) -> Iterator[Plan]:
    """The runs, defaults first, then the longest of the sweep first: they are what is waited for at the end."""
    pairs = [(work, model) for model in arguments.models for work in arguments.rows]
    for work, model in pairs:
        yield {"work": work, "model": model, "learning_rate": None, "epochs": None}
    sweep = [
        {"work": work, "model": model, "learning_rate": rate, "epochs": epochs}
        for work, model in pairs
        for rate in arguments.rates
        for epochs in (arguments.epochs or WORKS[work].epochs)
    ]
    yield from sorted(sweep, key=lambda plan: -plan["epochs"] * WORKS[plan["work"]].rows * (plan["model"] == "mpnet"))


def measure(plan: Plan, inputs: str, max_length: int, device: str, execution: Any) -> Plan:
    """One run: its metrics on the test rows, and the linear model's where the run is the default one."""
    import brimful
    from brimful.core.errors import BrimfulError

    is_default, folder = plan["learning_rate"] is None, Path(inputs) / plan["work"]
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as output:
        try:
            run = brimful.train(
                folder / "train.jsonl",
                eval_data=folder / "test.jsonl",
                model=Path(inputs) / plan["model"],
                output=Path(output) / "run",
                learning_rate=plan["learning_rate"],
                num_train_epochs=plan["epochs"],
                max_length=max_length,
                device=device,
                execution=execution,
                baselines=is_default,
                eval_steps=10**9,
                save_steps=10**9,
                progress=False,
            )
        except BrimfulError as error:
            return plan | {"ok": False, "error": str(error)}
        except Exception:
            return plan | {"ok": False, "error": traceback.format_exc()[-800:]}
    return plan | {
        "ok": True,
        "accuracy": run.metrics["accuracy"],
        "f1_macro": run.metrics["f1_macro"],
        "loss": run.metrics["loss"],
        "steps": run.steps,
        "train_s": run.train_s,
        "wall_s": round(time.monotonic() - began, 1),
        "baselines": run.baselines,
        "learning": vars(run.learning) if run.learning is not None else None,
        "num_labels": run.labels.num_outputs,
    }


def table(records: list[Plan]) -> str:
    """Rows of works and models: default, best of the sweep, linear model, and what is missed."""
    lines = [
        "| rows to train on | labels | model | default | chosen | best of sweep | at | default less best | TF-IDF |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    missed = []
    for work in WORKS:
        for model in MODELS:
            runs = [r for r in records if r["ok"] and (r["work"], r["model"]) == (work, model)]
            default = next((r for r in runs if r["learning_rate"] is None), None)
            sweep = [r for r in runs if r["learning_rate"] is not None]
            if default is None:
                continue
            linear = default["baselines"]["tfidf_linear"]["accuracy"]
            chosen = f"{default['learning']['learning_rate']:g}, {default['learning']['num_train_epochs']:g} epochs"
            row = [work, str(default["num_labels"]), model, f"{default['accuracy']:.3f}", chosen]
            if sweep:
                best = max(sweep, key=lambda r: float(r["accuracy"]))
                less = default["accuracy"] - best["accuracy"]
                at = f"{best['learning_rate']:g}, {best['epochs']:g} of {len(sweep)}"
                row += [f"{best['accuracy']:.3f}", at, f"{100 * less:+.1f}"]
                missed += [f"{work} {model}: {100 * less:+.1f} to the best"] if less < -0.01 else []
            else:
                row += ["", "", ""]
            missed += [f"{work} {model}: below TF-IDF"] if default["accuracy"] < linear else []
            lines.append("| " + " | ".join([*row, f"{linear:.3f}"]) + " |")
    return "\n".join([*lines, "", "Missed: " + ("; ".join(missed) or "nothing") + "."])


def work_off(todo: list[Plan], arguments: argparse.Namespace, add: Any) -> None:
    """Make the runs, several at once, each in a process that goes on to the next. add: takes what each found."""
    deadline = None if arguments.budget_s is None else time.monotonic() + arguments.budget_s
    settings = (str(arguments.inputs), arguments.max_length, arguments.device, arguments.execution)
    running: set[Future[Plan]] = set()
    with ProcessPoolExecutor(arguments.workers, multiprocessing.get_context("spawn")) as pool:
        while todo or running:
            while todo and len(running) < arguments.workers and (deadline is None or time.monotonic() < deadline):
                running.add(pool.submit(measure, todo.pop(0), *settings))
            if not running:
                break
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for each in done:
                add(each.result())
    if todo:
        print(f"{len(todo)} runs are left: call it again", file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description="Default runs beside a sweep, and beside TF-IDF.")
    add = parser.add_argument
    add("--inputs", type=Path, required=True, help="folder that works.py wrote")
    add("--output", type=Path, required=True, help="folder of raw.jsonl, results.json, table.md")
    add("--rows", nargs="+", default=list(WORKS), choices=list(WORKS), metavar="WORK")
    add("--models", nargs="+", default=list(MODELS), metavar="MODEL", help="folders of --inputs")
    add("--rates", nargs="*", type=float, default=list(LEARNING_RATES), help="none: defaults alone")
    add("--epochs", nargs="+", type=float, help="of the sweep; default: by row")
    add("--max-length", type=int, default=64)
    add("--device", default="auto")
    add("--execution", default="eager", help="captured: faster for models of many layers, on a GPU")
    add("--workers", type=int, default=8, help="runs at once, each in a process")
    add("--budget-s", type=float, help="begin no run after so many seconds")
    arguments = parser.parse_args()
    from provenance import commit_here, host_here
    from resumable import Nvml, versions_here, write_texts

    arguments.output.mkdir(parents=True, exist_ok=True)
    log = arguments.output / "raw.jsonl"
    text = log.read_text("utf-8") if log.exists() else ""
    records = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
    known = {tuple(record[key] for key in _KEYS) for record in records if record["ok"]}
    facts = {"commit": commit_here(), "host": host_here(), "gpu": Nvml(wanted=arguments.device != "cpu").gpu}
    facts |= {"max_length": arguments.max_length, "execution": arguments.execution, "versions": versions_here()}

    def keep(found: Plan) -> None:
        records.append(facts | found)
        with log.open("a", encoding="utf-8") as file:
            file.write(json.dumps(records[-1]) + "\n")
        said = f"{found['accuracy']:.4f}, {found['wall_s']} s" if found["ok"] else found["error"][-300:]
        print(*(found[key] for key in _KEYS), said, file=sys.stderr, flush=True)

    todo = [plan for plan in plans_of(arguments) if tuple(plan[key] for key in _KEYS) not in known]
    work_off(todo, arguments, keep)
    shown = table(records)
    results = [{key: value for key, value in record.items() if key != "versions"} for record in records]
    write_texts(arguments.output, {"table.md": shown, "results.json": json.dumps(results, indent=1)})
    print(shown)


if __name__ == "__main__":
    main()

"""Whole commands, from the shell's prompt to a saved model: `brimful train` warm and cold, and a Trainer script.

    python benchmarks/whole_command/run.py --output benchmarks/whole_command/DATE-h200 --budget-s 150

13,000 distinct tweets, 10,000 to train on and 3,000 to evaluate on after each of five epochs, MiniLM-L6 from a package.
What the raw log has of this machine is not measured again: call it until nothing is left. README.md says more.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))

from provenance import commit_here, host_here
from resumable import Nvml, say, versions_here, write_texts

Record = dict[str, Any]
HERE = Path(__file__).parent
EPOCHS, SMOKE_ROWS = 5, (96, 32)
#: Settings of the Trainer script that are tried; the fastest is measured again.
TRAINER: list[Record] = [
    {"workers": 4},
    {"workers": 0},
    {"workers": 4, "torch_compile": True},
    {"workers": 8, "optim": "adamw_torch"},
]
#: Seconds that a command is expected to take before the raw log knows better.
EXPECTED_S = {"brimful cold": 25.0, "brimful warm": 14.0, "trainer": 62.0}


class Commands:
    """The commands to be timed, and the folders that they share."""

    def __init__(self, work: Path, *, smoke: bool) -> None:
        from brimful.data.readers.packaged import minilm, tweets

        self.work, self.smoke, self.model = work, smoke, str(minilm())
        rows = list({row["text"]: row for row in tweets()}.values())
        random.Random(0).shuffle(rows)
        num_train, num_eval = SMOKE_ROWS if smoke else (10_000, 3_000)
        for name, part in (("train", rows[:num_train]), ("eval", rows[num_train : num_train + num_eval])):
            (work / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part), "utf-8")

    def run(self, side: str, settings: Record, caches: str, timeout_s: float) -> Record:
        """Time one command; its output goes with it. caches: name of the folders of compiled kernels."""
        output = Path(tempfile.mkdtemp(dir=self.work)) / "run"
        words = self._words(side, settings, output)
        kept = {
            "XDG_CACHE_HOME": self.work / caches / "cache",
            "TRITON_CACHE_DIR": self.work / caches / "triton",
            "TORCHINDUCTOR_CACHE_DIR": self.work / caches / "inductor",
            "PYTHONPYCACHEPREFIX": self.work / "bytecode",
        }
        more = {name: str(path) for name, path in kept.items()} | {"HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": ""}
        began = time.monotonic()
        with (self.work / "log.txt").open("w+", encoding="utf-8") as log:
            process = subprocess.Popen(words, stdout=log, stderr=log, env=os.environ | more, start_new_session=True)
            try:
                code: int | None = process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                code = None
            wall_s = time.monotonic() - began
            log.seek(0)
            text = log.read()
        found: Record = {"wall_s": round(wall_s, 3), "ok": code == 0}
        if code == 0:
            found |= self._found(side, output, text)
        else:
            found["error"] = f"not done after {timeout_s:.0f} s" if code is None else text[-1500:]
        shutil.rmtree(output.parent, ignore_errors=True)
        return found

    def _words(self, side: str, settings: Record, output: Path) -> list[str]:
        data = [str(self.work / f"{name}.jsonl") for name in ("train", "eval")]
        if side == "trainer":
            asked = settings | {"epochs": 1 if self.smoke else EPOCHS} | ({"workers": 0} if self.smoke else {})
            return [sys.executable, str(HERE / "trainer.py"), *data, self.model, str(output), json.dumps(asked)]
        words = ["train", data[0], "--eval-data", data[1], "--model", self.model, "--output", str(output)]
        words += ["--num-train-epochs", str(1 if self.smoke else EPOCHS), "--learning-rate", "2e-4"]
        return [sys.executable, "-m", "brimful", *words]

    def _found(self, side: str, output: Path, text: str) -> Record:
        if side == "trainer":
            lines = dict(line.split(" ", 1) for line in text.splitlines() if line.startswith(("PHASES ", "METRICS ")))
            metrics = json.loads(lines["METRICS"])
            return {"phases_s": json.loads(lines["PHASES"]), "accuracy": metrics["eval_accuracy"]}
        run = json.loads((output / "run.json").read_text("utf-8"))
        recipe = {lever["name"]: lever["value"] for lever in run["recipe"]["levers"]}
        facts = {key: run[key] for key in ("phases_s", "train_s", "compilations", "input_wait_s")}
        events = map(json.loads, (output / "events.jsonl").read_text("utf-8").splitlines())
        facts["rates"] = [round(each["samples_per_s"]) for each in events if each["kind"] == "step"]
        return facts | {"accuracy": run["metrics"]["accuracy"], "recipe": recipe}


class Session:
    """The raw log, what it knows of this machine, and the time that is left."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.output, self.smoke = arguments.output, arguments.smoke
        self.output.mkdir(parents=True, exist_ok=True)
        self.log = self.output / "raw.jsonl"
        lines = self.log.read_text("utf-8").splitlines() if self.log.exists() else []
        self.records: list[Record] = [json.loads(line) for line in lines]
        self.nvml = Nvml()
        self.facts = {"commit": commit_here(), "host": host_here(self.nvml.uuid), "gpu": self.nvml.gpu}
        self.facts |= {"smoke": self.smoke}
        self.deadline = time.monotonic() + (arguments.budget_s or 1e9)

    def known(self, state: str, settings: Record | None = None) -> list[Record]:
        """Records of this machine, commit and mode that went well."""
        wanted = self.facts | {"state": state, "ok": True} | ({} if settings is None else {"settings": settings})
        return [r for r in self.records if all(r.get(key) == value for key, value in wanted.items())]

    def measure(self, commands: Commands, state: str, settings: Record, caches: str) -> bool:
        """Time one command into the raw log; False if there is no time for it, or if it failed."""
        expected_s = max([r["wall_s"] for r in self.known(state)], default=EXPECTED_S[state])
        left_s = self.deadline - time.monotonic()
        if expected_s > left_s:
            say(f"no time left for {state}, {settings}")
            return False
        say(f"{state} {json.dumps(settings)}")
        found = commands.run(state.split()[0], settings, caches, min(left_s, 300.0))
        record = self.facts | {"state": state, "settings": settings, "versions": versions_here()} | found
        self.records.append(record)
        with self.log.open("a", encoding="utf-8") as log:
            log.write(json.dumps(record) + "\n")
        say(f"  {found['wall_s']:.1f} s" if found["ok"] else f"  failed: {found['error']}")
        return bool(found["ok"])


def measure_all(session: Session, commands: Commands, repeats: int) -> bool:
    """Measure what the raw log lacks, in an order that makes the first minutes count; False if something is left."""
    measure, known = session.measure, session.known
    whole = True
    if not known("brimful cold"):
        whole &= measure(commands, "brimful cold", {}, "cold-0")
    elif len(known("brimful warm")) < repeats:  # of an earlier call, whose caches are gone
        commands.run("brimful", {}, "cold-0", 300.0)
    while whole and len(known("brimful warm")) < repeats:
        whole &= measure(commands, "brimful warm", {}, "cold-0")
    for settings in TRAINER[:1] if session.smoke else TRAINER:
        if whole and not known("trainer", settings):
            whole &= measure(commands, "trainer", settings, "trainer")
    if whole:
        best = min(known("trainer"), key=lambda r: r["wall_s"])["settings"]
        while whole and len(known("trainer", best)) < repeats:
            whole &= measure(commands, "trainer", best, "trainer")
    number = len(known("brimful cold"))
    while whole and number < repeats:
        whole &= measure(commands, "brimful cold", {}, f"cold-{number}")
        number += 1
    return whole


def results(records: list[Record]) -> list[Record]:
    """Medians by machine, commit, state and settings, with ranges and phases."""
    groups: dict[str, list[Record]] = {}
    for r in records:
        if r["ok"]:
            groups.setdefault(json.dumps([r["commit"], r["host"]["id"], r["state"], r["settings"]]), []).append(r)
    found = []
    for of_kind in groups.values():
        first, walls = of_kind[0], [r["wall_s"] for r in of_kind]
        names = list(dict.fromkeys(name for r in of_kind for name in r["phases_s"]))
        phases = {name: statistics.median(r["phases_s"].get(name, 0.0) for r in of_kind) for name in names}
        unseen = statistics.median(r["wall_s"] - sum(r["phases_s"].values()) for r in of_kind)
        found.append(
            {key: first[key] for key in ("state", "settings", "commit", "host", "gpu", "versions")}
            | {"wall_s": statistics.median(walls), "wall_s_range": [min(walls), max(walls)], "repeats": len(walls)}
            | {"phases_s": phases | {"not in a phase": unseen}}
            | {"accuracy": statistics.median(r["accuracy"] for r in of_kind)}
        )
    return found


def table(found: list[Record]) -> str:
    """The results as Markdown: whole seconds, then where they went."""
    lines = ["| command | seconds, median (range) | repeats | accuracy | where they went |", "|---|---|---|---|---|"]
    for each in found:
        low, high = each["wall_s_range"]
        phases = ", ".join(f"{name} {s:.1f}" for name, s in each["phases_s"].items() if s >= 0.05)
        settings = " ".join(f"{key}={value}" for key, value in each["settings"].items())
        lines.append(
            f"| {each['state']} {settings} | {each['wall_s']:.1f} ({low:.1f} to {high:.1f}) | {each['repeats']}"
            f" | {each['accuracy']:.3f} | {phases} |"
        )
    machines = dict.fromkeys(
        f"{each['gpu']}, {each['host']['cores']} cores of {each['host']['cpu']} (host {each['host']['id']}),"
        f" commit {each['commit']}, torch {each['versions'].get('torch')},"
        f" transformers {each['versions'].get('transformers')}"
        for each in found
    )
    return "\n".join([*lines, "", *(f"- {machine}" for machine in machines)])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--output", type=Path, required=True, help="folder of raw.jsonl, results.json, table.md")
    add("--budget-s", type=float, help="begin nothing that would not be done after so many seconds")
    add("--repeats", type=int, default=3, help="of brimful warm and cold, and of the fastest Trainer; default: 3")
    add("--smoke", action="store_true", help="few rows, one epoch: to test this script on a CPU")
    arguments = parser.parse_args()
    session = Session(arguments)
    with tempfile.TemporaryDirectory() as work:
        commands = Commands(Path(work), smoke=arguments.smoke)
        # Bytecode is there, as pip leaves it and as Python keeps it from the second start on.
        environment = os.environ | {"PYTHONPYCACHEPREFIX": f"{work}/bytecode", "PYTHONDONTWRITEBYTECODE": ""}
        imports = "import brimful.cli.actions, transformers.models.bert.modeling_bert, transformers.trainer, sklearn"
        subprocess.run([sys.executable, "-c", imports], env=environment, check=True)
        whole = measure_all(session, commands, arguments.repeats)
    found = results([r for r in session.records if r["smoke"] == arguments.smoke])
    text = table(found)
    write_texts(arguments.output, {"results.json": json.dumps(found, indent=1), "table.md": text})
    print(text)
    if not whole:
        print("\nnot all was measured; call again")


if __name__ == "__main__":
    main()

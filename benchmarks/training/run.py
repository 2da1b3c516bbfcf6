"""Fine-tuning by Hugging Face Trainer at its best settings, and by brimful: speed, memory, distance from the floor.

    python benchmarks/training/run.py --output benchmarks/training/h200 --tokenizer FOLDER --budget-s 580

Needs one NVIDIA GPU and nothing from a network. Each side of a row is a process of its own, one after the other in one
call; what is in the raw log is not measured again, so call it until no row is left. README.md says how to read it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import report
from works import TABLE, Work, make_inputs

#: Trainer's settings that the sweep begins with, and those it tries instead, one at a time.
HF_BASE: dict[str, Any] = {
    "batch_size": 32,
    "padding": "longest",
    "pad_to_multiple_of": None,
    "sampling": "random",
    "workers": 4,
    "optim": "adamw_torch_fused",
    "nan_filter": True,
    "torch_compile": False,
}
HF_TRIED: list[dict[str, Any]] = [
    {"pad_to_multiple_of": 8},
    {"sampling": "group_by_length"},
    {"workers": 0},
    {"workers": 8},
    {"optim": "adamw_torch"},
    {"nan_filter": False},
]
HF_COMPILED = {"torch_compile": True}
#: A setting counts as faster from this ratio on: less is noise.
_FASTER = 1.01
_COMPILE_TIMEOUT_S = 150
#: Seconds that a measurement is expected to take, before the raw log knows better.
_EXPECTED_S = {"limits": 45.0, "sweep": 60.0, "compile": float(_COMPILE_TIMEOUT_S), "hf": 25.0, "brimful": 30.0}
_EXPECTED_MORE_S = {"large": 15.0, "modernbert": 15.0}
_POLL_S = 0.05


class Nvml:
    """The first GPU as the driver sees it, read from this process, so that what is measured is not disturbed."""

    def __init__(self) -> None:
        self._handle: Any = None
        self.driver: str | None = None
        self.gpu = "CPU"
        with contextlib.suppress(Exception):  # no driver, or none that answers: all is unknown
            import pynvml

            pynvml.nvmlInit()
            self._handle = pynvml.nvmlDeviceGetHandleByIndex(0)
            self.driver = str(pynvml.nvmlSystemGetDriverVersion())
            self.gpu = str(pynvml.nvmlDeviceGetName(self._handle))

    def used_bytes(self) -> int | None:
        """All that is used on the GPU."""
        if self._handle is None:
            return None
        import pynvml

        return int(pynvml.nvmlDeviceGetMemoryInfo(self._handle).used)


class Session:
    """One call of this script: its raw log, its clock, and what has been measured by it and by earlier ones."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.call = time.strftime("%Y%m%dT%H%M%S")
        self.nvml = Nvml()
        self.log: Path = arguments.output / "raw.jsonl"
        self.records: list[dict[str, Any]] = []
        if self.log.exists():
            text = self.log.read_text("utf-8")
            whole = text[: text.rfind("\n") + 1]
            self.records = [json.loads(line) for line in whole.splitlines()]
            if whole != text:  # a call was killed as it wrote: what it wrote is measured again
                self.log.write_text(whole, "utf-8")
        self.deadline = None if arguments.budget_s is None else time.monotonic() + arguments.budget_s

    def known(self, kind: str, **wanted: Any) -> list[dict[str, Any]]:
        """Records of this kind, GPU and mode with these values, oldest first. With --again only this call's."""
        arguments = self.arguments
        wanted |= {"kind": kind, "gpu": self.nvml.gpu, "smoke": arguments.smoke}
        if arguments.again:
            wanted["call"] = self.call
        return [r for r in self.records if all(r.get(key) == value for key, value in wanted.items())]

    def fits(self, seconds: float) -> bool:
        """Whether this much time is left."""
        return self.deadline is None or time.monotonic() + seconds <= self.deadline

    def expected_s(self, kind: str, work: Work, side: str = "") -> float:
        """Seconds that a measurement took when it last went well, or is guessed to take."""
        before = [r for r in self.records if r["kind"] == kind and r["work"] == work.name and r["ok"]]
        if found := [r["wall_s"] for r in before if r.get("side", "") == side]:
            return float(found[-1])
        return _EXPECTED_S[side or kind] + _EXPECTED_MORE_S.get(work.size, 0.0)

    def add(self, **record: Any) -> dict[str, Any]:
        """Appends to the raw log."""
        record = {"call": self.call, "gpu": self.nvml.gpu, "smoke": self.arguments.smoke, **record}
        self.records.append(record)
        with self.log.open("a", encoding="utf-8") as log:
            log.write(json.dumps(record) + "\n")
        return record

    def child(self, plan: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """Runs one plan in a process of its own: its `found` rows, `wall_s`, `nvml_bytes`, `ok`, `error` if not."""
        arguments = self.arguments
        if self.deadline is not None:
            timeout_s = min(timeout_s, self.deadline - time.monotonic())
        command = [sys.executable, __file__, "--one", json.dumps(plan), "--output", str(arguments.output)]
        command += ["--inputs", str(arguments.inputs)]
        command += ["--tokenizer", arguments.tokenizer] if arguments.tokenizer else []
        environment = os.environ | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
        before = peak = self.nvml.used_bytes()
        began, error = time.monotonic(), None
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            process = subprocess.Popen(command, stdout=out, stderr=err, env=environment, start_new_session=True)
            try:
                while process.poll() is None:
                    time.sleep(_POLL_S)
                    if peak is not None:
                        peak = max(peak, self.nvml.used_bytes() or 0)
                    if time.monotonic() - began > timeout_s:
                        error = f"not done after {timeout_s:.0f} s"
                        break
            finally:  # its own group: loader workers and compilers end with it
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            out.seek(0)
            err.seek(0)
            found = [json.loads(line[4:]) for line in out if line.startswith("ROW ")]
            if error is None and (process.returncode != 0 or not found):
                error = "\n".join(err.read().strip().splitlines()[-5:])[-1500:] or f"exit code {process.returncode}"
        return {
            "found": found,
            "ok": error is None,
            "error": error,
            "wall_s": round(time.monotonic() - began, 1),
            "nvml_bytes": None if peak is None or before is None else peak - before,
        }


def hf_settings(session: Session, work: Work) -> dict[str, Any] | None:
    """The fastest settings found on the row's sweep; None if it was not swept yet."""
    base = HF_BASE | {"padding": "max_length" if work.corpus == "tweets512" else "longest"}
    if session.arguments.no_sweep:
        return _here(session, base)
    if not all(_sweeps(session, kind, work.sweep) for kind in _sweep_kinds(session)):
        return None
    return _here(session, base | report.winners(swept(session, work.sweep), _FASTER))


def _here(session: Session, settings: dict[str, Any]) -> dict[str, Any]:
    """In a smoke test no workers are started."""
    return settings | {"workers": 0} if session.arguments.smoke else settings


def _sweep_kinds(session: Session) -> tuple[str, ...]:
    return ("sweep",) if session.arguments.smoke else ("sweep", "compile")


def _sweeps(session: Session, kind: str, name: str) -> list[dict[str, Any]]:
    """Sweeps of one row that can be believed: compiling may fail, what all is compared with may not."""
    return [r for r in session.known(kind, work=name) if kind == "compile" or "rounds" in r["tried"][0]]


def swept(session: Session, name: str) -> list[dict[str, Any]]:
    """The newest sweep of one row: `tried` (what differs from the first one, which is {}), rounds or `error`."""
    found = [_sweeps(session, kind, name) for kind in _sweep_kinds(session)]
    return [each for records in found if records for each in records[-1]["tried"]]


def sweep(session: Session, work: Work) -> bool:
    """Measures Trainer's settings on one row where that was not done; False if there is no time for it."""
    tried = [each for each in HF_TRIED if not (session.arguments.smoke and "workers" in each)]
    for kind, changes in (("sweep", [{}, *tried]), ("compile", [HF_COMPILED])):
        if kind not in _sweep_kinds(session) or _sweeps(session, kind, work.name):
            continue
        if not session.fits(session.expected_s(kind, work)):
            return False
        say(f"{work.name}: HF Trainer with {', '.join(json.dumps(each) for each in changes)}")
        settings = [_here(session, HF_BASE | change) for change in changes]
        # The first setting is measured twice, and the second time counts: what comes first in a process comes cold.
        order = settings[:1] + settings
        plan = steps_of(session, work, "hf") | {"work": work.name, "side": "hf", "settings": order}
        timeout_s = _COMPILE_TIMEOUT_S if kind == "compile" else session.arguments.timeout_s
        result = session.child(plan | {"rounds": 3 if not session.arguments.smoke else 1}, timeout_s)
        if not result["ok"] and not session.fits(0):
            return False  # cut by the budget, which says nothing of the setting
        rows = {json.dumps(row["settings"]): row for row in result.pop("found")}
        error = {"error": result["error"] or "no result"}
        found = [rows.get(json.dumps(s), error) | {"tried": c} for c, s in zip(changes, settings, strict=True)]
        session.add(kind=kind, work=work.name, tried=found, **result)
        if not result["ok"]:
            say(f"{work.name}, {kind}: failed: {result['error']}")
    return all(_sweeps(session, kind, work.name) for kind in _sweep_kinds(session))


def steps_of(session: Session, work: Work, side: str) -> dict[str, Any]:
    """Steps of warm-up and of each round: short ones are quick to run, and rounds must not be."""
    if session.arguments.smoke:
        return {"warm_up": 2, "steps": 2, "rounds": 2, "smoke": True}
    short = work.texts == "tweets" and work.corpus != "tweets512"
    warm_up, steps = {"hf": (20, 50 if short else 20), "brimful": (100, 100) if short else (60, 30)}[side]
    return {"warm_up": warm_up, "steps": steps, "rounds": 5, "smoke": False}


def settings_of(session: Session, work: Work, side: str) -> list[dict[str, Any]] | None:
    """What a side of a row is measured with, one process each; None if that waits for a sweep."""
    if side == "brimful":
        arguments = session.arguments
        precision = "fp8" if work.fp8 else "auto" if arguments.smoke else "bf16"
        execution = "auto" if arguments.smoke else arguments.execution
        return [{"batch_size": work.batch_size, "precision": precision, "execution": execution}]
    found = hf_settings(session, work)
    return None if found is None else [found | {"batch_size": batch} for batch in work.hf_batches]


def complete(session: Session, work: Work) -> bool:
    """Whether some call has measured all that the row asks for."""
    wanted = [(side, settings_of(session, work, side)) for side in work.sides]
    if any(settings is None for _, settings in wanted):
        return False
    keys = [(side, each) for side, settings in wanted for each in settings or ()]
    calls = {r["call"] for r in session.known("row", work=work.name, ok=True)}
    return any(
        all(session.known("row", work=work.name, call=call, side=side, asked=each, ok=True) for side, each in keys)
        for call in calls
    )


def row(session: Session, work: Work) -> bool:
    """Measures both sides of one row; False if there is no time for it."""
    asked = [(side, each) for side in work.sides for each in settings_of(session, work, side) or ()]
    if not session.fits(sum(session.expected_s("row", work, side) for side, _ in asked)):
        return False
    for side, settings in asked:
        say(f"{work.name}: {side} {json.dumps(settings)}")
        result = measure(session, work, side, settings, settings)
        if side == "hf" and settings["torch_compile"] and not result["ok"]:  # what won on one row may fail on another
            say(f"{work.name}: again without torch_compile")
            measure(session, work, side, settings, settings | {"torch_compile": False})
    return True


def measure(session: Session, work: Work, side: str, asked: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """One side of a row into the raw log. asked: the settings that it stands for, if others had to be taken."""
    plan = steps_of(session, work, side) | {"work": work.name, "side": side, "settings": [settings]}
    result = session.child(plan, session.arguments.timeout_s)
    found = result.pop("found")
    record = {"settings": settings} | (found[0] if found else {})
    record["versions"] = record.get("versions", {}) | {"driver": session.nvml.driver}
    if not result["ok"]:
        say(f"{work.name}, {side}: failed: {result['error']}")
    return session.add(kind="row", work=work.name, side=side, asked=asked, **record, **result)


def one(plan: dict[str, Any], inputs: Path, tokenizer: str | None) -> Iterator[dict[str, Any]]:
    """What a process of its own does: limits of the machine, or one side of one row."""
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    if plan["smoke"]:
        torch.set_num_threads(1)
    if plan["side"] == "limits":
        from chip import limits

        works = [Work.parse(name) for name in plan["work"]]
        make_inputs(inputs, works, tokenizer, smoke=plan["smoke"])
        yield limits(inputs, works, smoke=plan["smoke"])
        return
    if plan["side"] == "hf":
        import trainer_side as side
    else:
        import brimful_side as side  # type: ignore[no-redef]
    versions = versions_here()
    for found in side.measure(plan, inputs):
        yield found | {"versions": versions}


def versions_here() -> dict[str, str | None]:
    """Of what decides speed."""
    from importlib import metadata

    import torch

    import brimful
    from brimful.hardware.probe import probe

    versions = {**probe().versions, "brimful": brimful.__version__, "cuda": torch.version.cuda}
    with contextlib.suppress(metadata.PackageNotFoundError):
        versions["accelerate"] = metadata.version("accelerate")
    return versions


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def write_report(session: Session) -> str:
    """results.json, table.md and sweep.md from the raw log; the text of the tables."""
    mine = [r for r in session.records if r["smoke"] == session.arguments.smoke]
    results = report.results(mine)
    swept_names = dict.fromkeys(r["work"] for r in session.known("sweep"))
    sweeps = {name: tried for name in swept_names if (tried := swept(session, name)) and not tried[0]["tried"]}
    texts = [report.table(results), report.sweep_table(sweeps, HF_BASE, _FASTER)]
    output: Path = session.arguments.output
    for name, text in (
        ("results.json", json.dumps(results, indent=1)),
        ("table.md", texts[0]),
        ("sweep.md", texts[1]),
    ):
        temporary = output / f"{name}.tmp"
        temporary.write_text(text + "\n", "utf-8")
        temporary.replace(output / name)
    return "\n\n".join(reversed(texts))


def dry_run(session: Session, works: list[Work]) -> None:
    total = session.expected_s("limits", Work.parse("bbc/base")) if works else 0.0
    print(f"{total:5.0f} s  limits of the machine, and files for both sides")
    for name in dict.fromkeys(work.sweep for work in works):
        for kind in _sweep_kinds(session):
            if not session.arguments.no_sweep and not _sweeps(session, kind, name):
                seconds = session.expected_s(kind, Work.parse(name))
                total += seconds
                print(f"{seconds:5.0f} s  {name}: HF Trainer's settings ({kind})")
    for work in works:
        for side in work.sides:
            number = len(work.hf_batches) if side == "hf" else 1
            seconds = number * session.expected_s("row", work, side)
            total += seconds
            print(f"{seconds:5.0f} s  {work.name}: {side}")
    print(f"{total:5.0f} s  in all")


def main() -> None:
    parser = argparse.ArgumentParser(description="Fine-tuning by Hugging Face Trainer and by brimful.")
    parser.add_argument("--output", type=Path, required=True, help="folder of raw.jsonl, results.json, table.md")
    parser.add_argument("--rows", nargs="+", default=list(TABLE), metavar="WORK", help=f"of {', '.join(TABLE)}")
    parser.add_argument("--budget-s", type=float, help="begin nothing that would not be done after so many seconds")
    parser.add_argument("--tokenizer", help="folder of a BERT tokenizer; default: that of the packaged MiniLM-L6")
    parser.add_argument("--execution", default="compiled", help="how brimful launches steps: its own option")
    parser.add_argument("--timeout-s", type=float, default=240.0, help="most seconds of one process")
    parser.add_argument("--inputs", type=Path, help="folder for models and texts; default: in the temporary folder")
    parser.add_argument("--no-sweep", action="store_true", help="Trainer's settings as the sweep begins with them")
    parser.add_argument("--again", action="store_true", help="measure what is in the raw log already, too")
    parser.add_argument("--dry-run", action="store_true", help="print what would be measured, and expected seconds")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes, few steps: to test this script on a CPU")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inputs is None:
        suffix = "-smoke" if arguments.smoke else ""
        arguments.inputs = Path(tempfile.gettempdir()) / f"brimful-benchmark-training{suffix}"
    if arguments.one:
        for found in one(json.loads(arguments.one), arguments.inputs, arguments.tokenizer):
            print("ROW " + json.dumps(found), flush=True)
        return
    try:
        works = [Work.parse(name) for name in arguments.rows]
    except ValueError as error:
        parser.error(str(error))
    arguments.output.mkdir(parents=True, exist_ok=True)
    session = Session(arguments)
    works = [work for work in works if not complete(session, work)]
    if arguments.dry_run:
        dry_run(session, works)
        return
    left = run(session, works)
    print(write_report(session))
    if left:
        print(f"\nnot measured yet: {' '.join(left)}; call again")


def run(session: Session, works: list[Work]) -> list[str]:
    """Measures the works as long as there is time; the names of those left."""
    if not works:
        return []
    needed = [*works, *(Work.parse(work.sweep) for work in works)]
    names = list(dict.fromkeys(work.name for work in needed))
    say("files for both sides, and the limits of the machine")
    plan = {"work": names, "side": "limits", "smoke": session.arguments.smoke}
    result = session.child(plan, session.arguments.timeout_s)
    found = result.pop("found")
    session.add(kind="limits", work=names[0], limits=found[0] if found else None, **result)
    if not result["ok"]:
        sys.exit(f"the limits of this machine could not be measured: {result['error']}")
    left = []
    for work in works:
        known = session.arguments.no_sweep or sweep(session, Work.parse(work.sweep))
        # A row may be complete now: a new sweep can find again the settings that an earlier call has measured it with.
        if not complete(session, work) and not (known and row(session, work) and complete(session, work)):
            left.append(work.name)
        write_report(session)
    return left


if __name__ == "__main__":
    main()

"""Fine-tuning by Hugging Face Trainer at its best settings, and by brimful: speed, memory, share of the roofline.

    python benchmarks/training/run.py --output OUTPUT --tokenizer FOLDER --budget-s 580

Needs one NVIDIA GPU and nothing from a network. Each side of a row is a process of its own, one after the other in one
call; what is in the raw log is not measured again, so call it until no row is left. README.md says how to read it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))

import report
from resumable import Session, default_inputs, parser_of, print_rows, say, versions_here, write_texts
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
#: Steps that a compiled Trainer is given to meet shapes that it compiles anew for.
_COMPILED_WARM_UP = 120
#: Seconds that a measurement is expected to take, before the raw log knows better.
_EXPECTED_S = {"limits": 45.0, "sweep": 60.0, "compile": float(_COMPILE_TIMEOUT_S), "hf": 120.0, "brimful": 30.0}
_EXPECTED_MORE_S = {"large": 15.0, "modernbert": 15.0}


def expected_s(session: Session, kind: str, work: Work, side: str | None = None) -> float:
    """Seconds that a measurement took when it last went well, or is guessed to take."""
    wanted = {} if side is None else {"side": side}
    guess = _EXPECTED_S[side or kind] + _EXPECTED_MORE_S.get(work.size, 0.0)
    return session.last_wall_s(kind, work=work.name, **wanted) or guess


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
        if not session.fits(expected_s(session, kind, work)):
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
    """Settings of a side of a row, one process each; None if a sweep must find them first."""
    if side == "brimful":
        arguments = session.arguments
        precision = "fp8" if work.fp8 else "auto" if arguments.smoke else "bf16"
        execution = "auto" if arguments.smoke else arguments.execution
        return [{"batch_size": batch, "precision": precision, "execution": execution} for batch in work.batches]
    found = hf_settings(session, work)
    return None if found is None else [found | {"batch_size": batch} for batch in work.batches]


def complete(session: Session, work: Work) -> bool:
    """True if one call has measured all settings of the row."""
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
    if not session.fits(sum(expected_s(session, "row", work, side) for side, _ in asked)):
        return False
    for side, settings in asked:
        say(f"{work.name}: {side} {json.dumps(settings)}")
        result = measure(session, work, side, settings, settings)
        if not result["ok"] and not session.fits(0):
            return False  # cut by the budget, which says nothing of the setting
        # What won on one row may fail on another; what was only slow to compile is not measured as if it had failed.
        if side == "hf" and settings["torch_compile"] and not result["ok"] and not result["timed_out"]:
            say(f"{work.name}: again without torch_compile")
            measure(session, work, side, settings, settings | {"torch_compile": False})
    return True


def measure(session: Session, work: Work, side: str, asked: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """One side of a row into the raw log. asked: the settings that it stands for, if others had to be taken."""
    plan = steps_of(session, work, side) | {"work": work.name, "side": side, "settings": [settings]}
    if settings.get("torch_compile") and not session.arguments.smoke:
        plan["warm_up"] = _COMPILED_WARM_UP
    result = session.child(plan, session.arguments.timeout_s)
    found = result.pop("found")
    record = {"settings": settings, "warm_up": plan["warm_up"]} | (found[0] if found else {})
    record["versions"] = record.get("versions", {}) | {"driver": session.nvml.driver}
    if not result["ok"]:
        say(f"{work.name}, {side}: failed: {result['error']}")
    return session.add(kind="row", work=work.name, side=side, asked=asked, **record, **result)


def one(plan: dict[str, Any], inputs: Path, tokenizer: str | None) -> Iterator[dict[str, Any]]:
    """Measure one plan in this process: limits of the machine, or one side of one row."""
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
    versions = versions_here("accelerate")
    for found in side.measure(plan, inputs):
        yield found | {"versions": versions}


def write_report(session: Session) -> str:
    """results.json, table.md and sweep.md from the raw log; the text of the tables."""
    mine = [r for r in session.records if r["smoke"] == session.arguments.smoke]
    results = report.results(mine)
    swept_names = dict.fromkeys(r["work"] for r in session.known("sweep"))
    sweeps = {name: tried for name in swept_names if (tried := swept(session, name)) and not tried[0]["tried"]}
    texts = [report.table(results), report.sweep_table(sweeps, HF_BASE, _FASTER)]
    files = {"results.json": json.dumps(results, indent=1), "table.md": texts[0], "sweep.md": texts[1]}
    write_texts(session.arguments.output, files)
    return "\n\n".join(reversed(texts))


def dry_run(session: Session, works: list[Work]) -> None:
    total = expected_s(session, "limits", Work.parse("bbc/base")) if works else 0.0
    print(f"{total:5.0f} s  limits of the machine, and files for both sides")
    for name in dict.fromkeys(work.sweep for work in works):
        for kind in _sweep_kinds(session):
            if not session.arguments.no_sweep and not _sweeps(session, kind, name):
                seconds = expected_s(session, kind, Work.parse(name))
                total += seconds
                print(f"{seconds:5.0f} s  {name}: HF Trainer's settings ({kind})")
    for work in works:
        for side in work.sides:
            seconds = len(work.batches) * expected_s(session, "row", work, side)
            total += seconds
            print(f"{seconds:5.0f} s  {work.name}: {side}")
    print(f"{total:5.0f} s  in all")


def main() -> None:
    parser = parser_of("Fine-tuning by Hugging Face Trainer and by brimful.", TABLE, timeout_s=300.0)
    parser.add_argument("--execution", default="compiled", help="how brimful launches steps: its own option")
    parser.add_argument("--no-sweep", action="store_true", help="Trainer's settings as the sweep begins with them")
    arguments = parser.parse_args()
    arguments.inputs = arguments.inputs or default_inputs("training", smoke=arguments.smoke)
    if arguments.one:
        print_rows(one(json.loads(arguments.one), arguments.inputs, arguments.tokenizer))
        return
    try:
        works = [Work.parse(name) for name in arguments.rows]
    except ValueError as error:
        parser.error(str(error))
    session = Session(arguments, __file__)
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

"""Bulk classification by transformers' pipeline, by CrossEncoder and by brimful: texts a second, share of the roofline.

    python benchmarks/classification/run.py --output OUTPUT --tokenizer FOLDER --budget-s 580

On a GPU, or with --device cpu without one, and with nothing from a network. Each side of a row is a process of its own,
one after the other in one call; what is in the raw log is not measured again, so call it until no row is left. With
--at-once, sweeps of several rows share the GPU by turns; what they found fastest is measured alone. README.md says how
to read it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))

import report
import sweeps
from resumable import Session, default_inputs, parser_of, print_rows, say, versions_here, write_texts
from settings import fastest, next_trials
from works import CPU_TABLE, TABLE, Work, make_inputs

_SIDES = ("pipeline", "crossencoder", "brimful")
_PRECISIONS = {"cuda": ["bf16", "fp16"], "cpu": ["auto", "fp32"]}
#: Seconds that a measurement is expected to take, before the raw log knows better.
_EXPECTED_S = {
    "cuda": {"limits": 15.0, "pipeline": 60.0, "crossencoder": 50.0, "brimful": 60.0},
    "cpu": {"limits": 15.0, "pipeline": 120.0, "crossencoder": 60.0, "brimful": 60.0},
}
_EXPECTED_MORE_S = {"large": 15.0, "modernbert": 15.0}
#: What a row keeps of a trial's record.
_OF_A_TRIAL = ("settings", "texts_per_s", "error")


def sides_of(session: Session, work: Work) -> list[str]:
    """Sides of a row: CrossEncoder only if it is installed and texts are in memory."""
    missing = work.files or find_spec("sentence_transformers") is None
    return [side for side in session.arguments.sides if not (side == "crossencoder" and missing)]


def trials(session: Session, work: Work, side: str) -> list[dict[str, Any]]:
    """What this machine tried of another library on this row: `settings`, `texts_per_s` or `error`, `wall_s`."""
    wanted = {"work": work.for_others, "side": side, "device": session.arguments.device}
    return session.known("trial", here=True, **wanted)


def settings_of(session: Session, work: Work, side: str) -> list[dict[str, Any]]:
    """Settings of a side of a row that are measured in repeats."""
    if side != "brimful":
        return fastest(trials(session, work, side))
    arguments = session.arguments
    precisions = ["fp8"] if work.fp8 else arguments.precisions or _PRECISIONS[arguments.device]
    execution = arguments.execution or ("compiled" if arguments.device == "cuda" and not work.files else "auto")
    first, *others = [{"precision": precision, "execution": execution} for precision in precisions]
    if work.files:  # as it is called, and without a look at the plain model; each repeat loads the model anew
        return [first, first | {"verify": 0}]
    found = [each | {"returns": "objects"} for each in (first, *others)]
    if not work.candidates:  # what zero-shot returns is made of logits of many pairs
        found.insert(1, first | {"returns": "logits"})
    return found


def wanted_of(session: Session, row: tuple[Work, str]) -> list[dict[str, Any]]:
    """What the sweep of a side of a row tries next."""
    work, side = row
    about = {
        "flash": find_spec("flash_attn") is not None,
        "fixed": not work.candidates,
        "smoke": session.arguments.smoke,
    }
    tried = trials(session, work, side)
    wanted = next_trials(tried, side, session.arguments.device, **about)
    return wanted if sweeps.spent_s(tried) < session.arguments.sweep_s else []


def sweep(session: Session, work: Work, side: str) -> bool:
    """Try another library's settings on one row, round by round; False if the time was not enough."""
    while groups := sweeps.alike(wanted_of(session, (work, side))):
        tried = [_try(session, (work, side), each) for each in groups]
        if not all(tried):
            return False
    return True


def _try(session: Session, row: tuple[Work, str], wanted: list[dict[str, Any]]) -> bool:
    """Trials of one process, as long as the sweep may take; False if there was no time for all."""
    work, side = row
    if sweeps.spent_s(trials(session, work, side)) >= session.arguments.sweep_s:
        return True
    plan = plan_of(session, work, side, wanted) | {"trial": True}
    about = {"work": work.for_others, "side": side, "device": session.arguments.device}
    return sweeps.attempt(session, wanted, plan, about, size=work.size)


def plan_of(session: Session, work: Work, side: str, settings: list[dict[str, Any]]) -> dict[str, Any]:
    """Plan of one measuring process."""
    arguments = session.arguments
    about = {"device": arguments.device, "smoke": arguments.smoke, "repeat_s": arguments.repeat_s}
    return {"work": work.name, "side": side, "settings": settings, **about}


def complete(session: Session, work: Work) -> bool:
    """True if one call has measured all sides of the row, and ours with all settings that are asked for."""
    asked = {"asked": settings_of(session, work, "brimful")}
    return any(
        all(
            session.known("row", work=work.name, call=call, side=side, ok=True, **(asked if side == "brimful" else {}))
            for side in sides_of(session, work)
        )
        for call in {r["call"] for r in session.known("row", work=work.name, ok=True)}
    )


def expected_s(session: Session, work: Work, side: str) -> float:
    """Seconds that a side took when it last went well, on this row or on the one before, or is guessed to take."""
    machine = {"gpu": session.nvml.gpu, "smoke": session.arguments.smoke}
    if before := session.last_wall_s("row", work=work.name, side=side, **machine):
        return before
    usual_s = session.last_wall_s("row", side=side, **machine) or _EXPECTED_S[session.arguments.device][side]
    return usual_s + _EXPECTED_MORE_S.get(work.size, 0.0)


def row(session: Session, work: Work) -> bool:
    """Measures all sides of one row; False if there is no time for it, or if one of them failed."""
    sides = sides_of(session, work)
    if not all(sweep(session, work, side) for side in sides if side != "brimful"):
        return False
    if not session.fits(sum(expected_s(session, work, side) for side in sides)):
        return False
    well = True
    for side in sides:
        say(f"{work.name}: {side}")
        tried = [] if side == "brimful" else trials(session, work, side)
        asked = settings_of(session, work, side)
        if not asked:
            say(f"{work.name}: {side} worked with no setting")
            return False
        result = session.child(plan_of(session, work, side, asked), session.arguments.timeout_s)
        if not result["ok"] and not session.fits(0):
            return False  # cut by the budget, which says nothing of the setting
        versions = next((each["versions"] for each in result["found"]), {}) | {"driver": session.nvml.driver}
        if result["ok"] and not any("repeats" in each for each in result["found"]):
            errors = [each["error"] for each in result["found"] if "error" in each]
            result |= {"ok": False, "error": errors[-1] if errors else "nothing was measured"}
        if not result["ok"]:
            say(f"{work.name}, {side}: failed: {result['error']}")
        for each in result["found"]:
            if "error" in each:
                say(f"{work.name}, {side}, {json.dumps(each['settings'])}: {each['error']}")
        result["found"] = [{key: r[key] for key in _OF_A_TRIAL if key in r} for r in tried] + result["found"]
        session.add(kind="row", work=work.name, side=side, sides=sides, asked=asked, versions=versions, **result)
        well = well and result["ok"]
    return well


def one(plan: dict[str, Any], inputs: Path, tokenizer: str | None) -> Iterator[dict[str, Any]]:
    """Measure one plan in this process: limits of the machine, or one side of one row."""
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    if plan["smoke"]:
        torch.set_num_threads(1)
    if plan["side"] == "limits":
        from floor import limits

        for name in plan["work"]:
            make_inputs(inputs, Work.parse(name), tokenizer, smoke=plan["smoke"])
        yield limits(torch.device(plan["device"]), smoke=plan["smoke"])
        return
    from pace import measure, pace_of, try_settings

    work = Work.parse(plan["work"])
    make_inputs(inputs, work, tokenizer, smoke=plan["smoke"])
    pace = pace_of(work, plan["device"], plan["repeat_s"], smoke=plan["smoke"])
    versions = versions_here("sentence-transformers")
    for found in (try_settings if plan.get("trial") else measure)(plan | {"pace": asdict(pace)}, inputs):
        yield found | {"versions": versions}


def write_report(session: Session) -> str:
    """results.json, table.md and tried.md from the raw log; the text of the table."""
    found = report.results([r for r in session.records if r["smoke"] == session.arguments.smoke])
    text = report.table(found)
    files = {"results.json": json.dumps(found, indent=1), "table.md": text, "tried.md": report.tried_table(found)}
    write_texts(session.arguments.output, files)
    return text


def dry_run(session: Session, works: list[Work]) -> None:
    """Prints what would be measured."""
    total = _EXPECTED_S[session.arguments.device]["limits"] if works else 0.0
    print(f"{total:5.0f} s  limits of the machine")
    for work in works:
        for side in sides_of(session, work):
            seconds = expected_s(session, work, side)
            total += seconds
            print(f"{seconds:5.0f} s  {work.name}: {side}")
    print(f"{total:5.0f} s  in all")


def run(session: Session, works: list[Work]) -> list[str]:
    """Measures the works as long as there is time; the names of those left."""
    if not works:
        return []
    if "crossencoder" in session.arguments.sides and find_spec("sentence_transformers") is None:
        say("sentence-transformers is not installed: there is no CrossEncoder to compare with")
    say("files for all sides, and the limits of the machine")
    arguments = session.arguments
    names = [work.name for work in works]
    plan = {"side": "limits", "work": names, "device": arguments.device, "smoke": arguments.smoke}
    result = session.child(plan, arguments.timeout_s)
    found = result.pop("found")
    session.add(kind="limits", limits=found[0] if found else None, **result)
    if not result["ok"]:
        sys.exit(f"the limits of this machine could not be measured: {result['error']}")
    if arguments.at_once > 1:
        swept = {(work.for_others, side): (work, side) for work in works for side in sides_of(session, work)}
        rows = [row for row in swept.values() if row[1] != "brimful"]
        sweeps.at_once(session, rows, partial(wanted_of, session), partial(_try, session))
    left = []
    for work in works:
        if not row(session, work):
            left.append(work.name)
        write_report(session)
    return left


def main() -> None:
    parser = parser_of("Bulk classification by other libraries and by brimful.", TABLE, timeout_s=400.0)
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto", help="auto: a GPU if there is one")
    parser.add_argument("--sides", nargs="+", choices=_SIDES, default=list(_SIDES), help="default: all")
    parser.add_argument("--repeat-s", type=float, help="seconds of one repeat, about; default: 2, on a CPU 5")
    parser.add_argument("--precisions", nargs="+", help="brimful's; default: bf16 fp16, on a CPU auto fp32")
    parser.add_argument("--at-once", type=int, default=1, help="sweeps that share the GPU by turns")
    parser.add_argument("--sweep-s", type=float, default=600.0, help="most seconds of a side's trials; default: 600")
    parser.add_argument("--execution", help="brimful's; default: compiled, from file to file and on a CPU auto")
    arguments = parser.parse_args()
    arguments.inputs = arguments.inputs or default_inputs("classification", smoke=arguments.smoke)
    if arguments.one:
        print_rows(one(json.loads(arguments.one), arguments.inputs, arguments.tokenizer))
        return
    session = Session(arguments, __file__, gpu=arguments.device != "cpu")
    if arguments.device == "auto":
        arguments.device = "cpu" if session.nvml.gpu == "CPU" else "cuda"
    arguments.repeat_s = arguments.repeat_s or (2.0 if arguments.device == "cuda" else 5.0)
    names = list(CPU_TABLE) if arguments.device == "cpu" and arguments.rows == list(TABLE) else arguments.rows
    try:
        works = [Work.parse(name) for name in names]
    except ValueError as error:
        parser.error(str(error))
    works = [work for work in works if not complete(session, work)]
    if arguments.dry_run:
        dry_run(session, works)
        return
    left = run(session, works)
    print(write_report(session))
    if left:
        print(f"\nnot measured yet: {' '.join(left)}; call again")


if __name__ == "__main__":
    main()

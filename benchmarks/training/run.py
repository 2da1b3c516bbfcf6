"""Fine-tuning by Hugging Face Trainer at its best settings, and by brimful: speed, memory, share of the roofline.

    python benchmarks/training/run.py --output OUTPUT --tokenizer FOLDER --budget-s 580

Needs one NVIDIA GPU and nothing from a network. Each side of a row is a process of its own, one after the other in one
call; what is in the raw log is not measured again, so call it until no row is left. With --at-once, sweeps of several
rows share the GPU by turns; what they found fastest is measured alone. README.md says how to read it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))

import report
import settings as trainer_settings
import sweeps
import turns
from resumable import Session, default_inputs, parser_of, print_rows, say, versions_here, write_texts
from works import TABLE, Work, make_inputs

Settings = dict[str, Any]
#: Of a trial: steps of warm-up, before which all is compiled, the fewest steps of a round, rounds, and their seconds.
_TRIAL: Settings = {"warm_up": 20, "steps": 4, "rounds": 5, "trial_s": 3.0}
#: Seconds that a measurement is expected to take, before the raw log knows better.
_EXPECTED_S = {"limits": 45.0, "hf": 60.0, "brimful": 30.0}
_EXPECTED_MORE_S = {"large": 15.0, "modernbert": 15.0}


def expected_s(session: Session, kind: str, work: Work, side: str | None = None) -> float:
    """Seconds that a measurement took when it last went well, or is guessed to take."""
    wanted = {} if side is None else {"side": side}
    guess = _EXPECTED_S[side or kind] + _EXPECTED_MORE_S.get(work.size, 0.0)
    return session.last_wall_s(kind, work=work.name, **wanted) or guess


def base_of(session: Session, work: Work) -> Settings:
    """Trainer's settings that the sweep of a row begins with."""
    padding = "max_length" if work.corpus == "tweets512" else "longest"
    base = trainer_settings.BASE | {"padding": padding, "batch_size": work.batches[0]}
    return base | {"workers": 0} if session.arguments.smoke else base


def trials(session: Session, work: Work) -> list[dict[str, Any]]:
    """What was tried of Trainer on this row by this machine."""
    return session.known("trial", here=True, work=work.for_trainer)


def next_trials(session: Session, work: Work) -> list[Settings]:
    """What the sweep of a row tries next. A smoke test tries a few, in one process."""
    tried, base = trials(session, work), base_of(session, work)
    if session.arguments.no_sweep or session.arguments.settings or (session.arguments.smoke and tried):
        return []
    flash = find_spec("flash_attn") is not None
    wanted = trainer_settings.next_trials(tried, base, flash=flash, batches=work.batches)
    if session.arguments.smoke:
        return [each for each in wanted if each["compile"] is None][:3]
    return wanted if sweeps.spent_s(tried) < session.arguments.sweep_s else []


def sweep(session: Session, work: Work) -> bool:
    """Try Trainer's settings on one row, round by round; False if the time was not enough."""
    while groups := sweeps.alike(next_trials(session, work)):
        tried = [_try(session, work, each) for each in groups]
        if not all(tried):
            return False
    return True


def _try(session: Session, work: Work, wanted: list[Settings]) -> bool:
    """Trials of one process, as long as the sweep may take; False if there was no time for all."""
    if sweeps.spent_s(trials(session, work)) >= session.arguments.sweep_s:
        return True
    plan = {"work": work.name, "side": "hf", "smoke": session.arguments.smoke}
    plan |= {"warm_up": 2, "steps": 2, "rounds": 2, "trial_s": 0.1} if session.arguments.smoke else _TRIAL

    def noted(found: Settings) -> Settings:
        seconds = sum(each["seconds"] for each in found.get("rounds", ())) + found.get("warm_up_s", 0.0)
        return {"wall_s": round(seconds, 1), "ok": "rounds" in found}

    return sweeps.attempt(session, wanted, plan, {"work": work.for_trainer}, size=work.size, noted=noted)


def steps_of(session: Session, work: Work, side: str) -> dict[str, Any]:
    """Steps of warm-up and of each round: short ones are quick to run, and rounds must not be."""
    if session.arguments.smoke:
        return {"warm_up": 2, "steps": 2, "rounds": 2, "smoke": True}
    short = work.texts == "tweets" and work.corpus != "tweets512"
    warm_up, steps = {"hf": (20, 50 if short else 20), "brimful": (100, 100) if short else (60, 30)}[side]
    return {"warm_up": warm_up, "steps": steps, "rounds": 5, "smoke": False}


def settings_of(session: Session, work: Work, side: str) -> list[Settings]:
    """Settings of a side of a row that are measured at length, one process each."""
    if side == "brimful":
        arguments = session.arguments
        precision = "fp8" if work.fp8 else "auto" if arguments.smoke else "bf16"
        execution = "auto" if arguments.smoke else arguments.execution
        return [{"batch_size": batch, "precision": precision, "execution": execution} for batch in work.batches]
    if session.arguments.settings:
        return [base_of(session, work) | each for each in session.arguments.settings]
    if session.arguments.no_sweep:
        base = base_of(session, work)
        likeliest = trainer_settings.likeliest(base, short=work.texts == "tweets")
        return [base] if session.arguments.smoke else likeliest
    return trainer_settings.fastest(trials(session, work), session.arguments.keep)


def complete(session: Session, work: Work) -> bool:
    """True if one call has measured all settings of the row that it asked for."""

    def keys(settings: list[Settings]) -> set[str]:
        return {json.dumps(each, sort_keys=True) for each in settings}

    for call in {r["call"] for r in session.known("row", work=work.name, ok=True)}:
        rows = session.known("row", work=work.name, call=call)
        well = {r["side"] for r in rows if r["ok"]}
        asked = {side: keys([s for r in rows if r["side"] == side for s in r["all_asked"]]) for side in work.sides}
        done = {side: keys([r["settings"] for r in rows if r["side"] == side]) for side in work.sides}
        if well >= set(work.sides) and all(asked[side] and asked[side] <= done[side] for side in work.sides):
            return True
    return False


def row(session: Session, work: Work) -> bool:
    """Measures both sides of one row; False if there is no time for it."""
    asked = {side: settings_of(session, work, side) for side in work.sides}
    if not asked["hf"]:
        say(f"{work.name}: Trainer worked with no setting")
        return False
    if not session.fits(sum(expected_s(session, "row", work, side) * len(each) for side, each in asked.items())):
        return False
    for side, of_side in asked.items():
        for settings in of_side:
            say(f"{work.name}: {side} {json.dumps(settings)}")
            result = measure(session, work, side, settings, of_side)
            if not result["ok"] and not session.fits(0):
                return False  # cut by the budget, which says nothing of the setting
    return True


def rows_at_once(session: Session, works: list[Work]) -> None:
    """Measures our side of each row alone, then Trainer's by several processes that share the GPU by turns.

    Trainer's likeliest settings come first for each row, then the next ones, as far as there is time.
    """
    asked = {(work.name, side): settings_of(session, work, side) for work in works for side in work.sides}

    def measure_one(work: Work, side: str, number: int) -> None:
        of_side = asked[work.name, side]
        if number < len(of_side) and session.fits(expected_s(session, "row", work, side)):
            say(f"{work.name}: {side} {json.dumps(of_side[number])}")
            measure(session, work, side, of_side[number], of_side)

    def measure_side(side: str, at_once: int) -> None:
        of_side = [work for work in works if side in work.sides]
        most = max((len(asked[work.name, side]) for work in of_side), default=0)
        with session.lanes(at_once) as lanes:
            done = [lanes.submit(measure_one, work, side, number) for number in range(most) for work in of_side]
            for each in done:
                each.result()

    measure_side("brimful", 1)
    turns.begin(session.arguments.output.resolve())
    measure_side("hf", session.arguments.at_once)


def measure(session: Session, work: Work, side: str, settings: Settings, all_asked: list[Settings]) -> dict[str, Any]:
    """One setting of a side of a row into the raw log. all_asked: those of this side that the row is made of."""
    plan = steps_of(session, work, side) | {"work": work.name, "side": side, "settings": [settings]}
    result = session.child(plan, session.arguments.timeout_s)
    found = result.pop("found")
    record = {"settings": settings, "warm_up": plan["warm_up"]} | (found[0] if found else {})
    record["versions"] = record.get("versions", {}) | {"driver": session.nvml.driver}
    if not result["ok"]:
        say(f"{work.name}, {side}: failed: {result['error']}")
    return session.add(kind="row", work=work.name, side=side, all_asked=all_asked, **record, **result)


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
    texts = [report.table(results), report.sweep_table([r for r in mine if r["kind"] == "trial"])]
    files = {"results.json": json.dumps(results, indent=1), "table.md": texts[0], "sweep.md": texts[1]}
    write_texts(session.arguments.output, files)
    return "\n\n".join(reversed(texts))


def dry_run(session: Session, works: list[Work]) -> None:
    total = expected_s(session, "limits", Work.parse("bbc/base")) if works else 0.0
    print(f"{total:5.0f} s  limits of the machine, and files for both sides")
    for work in works:
        if next_trials(session, work):
            seconds = max(0.0, session.arguments.sweep_s - sweeps.spent_s(trials(session, work)))
            total += seconds
            print(f"{seconds:5.0f} s  {work.name}: Trainer's settings, at most")
        for side in work.sides:
            number = len(settings_of(session, work, side)) or session.arguments.keep
            seconds = number * expected_s(session, "row", work, side)
            total += seconds
            print(f"{seconds:5.0f} s  {work.name}: {side}")
    print(f"{total:5.0f} s  in all")


def main() -> None:
    parser = parser_of("Fine-tuning by Hugging Face Trainer and by brimful.", TABLE, timeout_s=300.0)
    parser.add_argument("--execution", default="compiled", help="how brimful launches steps: its own option")
    parser.add_argument("--no-sweep", action="store_true", help="Trainer in the two forms that a sweep begins with")
    parser.add_argument(
        "--settings",
        nargs="+",
        type=trainer_settings.given,
        metavar="JSON",
        help=f"Trainer with these instead of a sweep, beside its base: {', '.join(trainer_settings.BASE)}",
    )
    parser.add_argument("--sweep-s", type=float, default=900.0, help="most seconds of a row's trials; default: 900")
    parser.add_argument(
        "--keep", type=int, default=trainer_settings.KEPT, help="settings of a sweep measured at length"
    )
    parser.add_argument("--at-once", type=int, default=1, help="rows whose Trainer shares the GPU by turns")
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
    names = [work.name for work in works]
    say("files for both sides, and the limits of the machine")
    plan = {"work": names, "side": "limits", "smoke": session.arguments.smoke}
    result = session.child(plan, session.arguments.timeout_s)
    found = result.pop("found")
    session.add(kind="limits", work=names[0], limits=found[0] if found else None, **result)
    if not result["ok"]:
        sys.exit(f"the limits of this machine could not be measured: {result['error']}")
    if find_spec("flash_attn") is None and not (session.arguments.no_sweep or session.arguments.settings):
        say("FlashAttention-2 is not installed, and not tried")
    if session.arguments.at_once > 1:
        if session.arguments.no_sweep:
            rows_at_once(session, works)
        else:
            swept = list({work.for_trainer: work for work in works}.values())
            sweeps.at_once(session, swept, partial(next_trials, session), partial(_try, session))
    by_turns = session.arguments.at_once > 1 and session.arguments.no_sweep
    left = []
    for work in works:
        if not by_turns and sweep(session, work):
            row(session, work)
        left += [] if complete(session, work) else [work.name]
        write_report(session)
    return left


if __name__ == "__main__":
    main()

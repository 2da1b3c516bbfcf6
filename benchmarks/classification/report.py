"""The raw log as results and tables. Reads records, knows no torch."""

from __future__ import annotations

import statistics
from typing import Any

from works import TABLE

Record = dict[str, Any]


def results(records: list[Record]) -> list[Record]:
    """The newest complete measurement of each side of each row, all sides from one call.

    Of several settings of one side the fastest counts, and `also_measured` names the others. What brimful returns
    besides the pipeline's objects, and a file with other checks than usual, are sides of their own.
    """
    limits = {(r["call"], r["gpu"]): r["limits"] for r in records if r["kind"] == "limits" and r["ok"]}
    rows = [r for r in records if r["kind"] == "row" and r["ok"] and (r["call"], r["gpu"]) in limits]
    found = []
    for gpu, work in sorted({(r["gpu"], r["work"]) for r in rows}, key=_place):
        sides = _newest([r for r in rows if (r["gpu"], r["work"]) == (gpu, work)])
        if sides is None:
            continue
        fastest: dict[str, tuple[Record, Record]] = {}
        for record in sides.values():
            for each in record["found"]:
                name = side_of(record["side"], each["settings"])
                if "repeats" in each and _is_faster(each, fastest.get(name)):
                    fastest[name] = (record, each)
        known = {name: each for name, (_, each) in fastest.items()}
        for name, (record, each) in fastest.items():
            result = _result(name, record, each, limits[record["call"], gpu])
            if record["side"] == "brimful":
                result |= _compared(each, known)
            found.append(result)
    return found


def _place(key: tuple[str, str]) -> tuple[str, int, str]:
    gpu, work = key
    return (gpu, TABLE.index(work) if work in TABLE else len(TABLE), work)


def _newest(rows: list[Record]) -> dict[str, Record] | None:
    """The records of the last call that has all sides, by side."""
    by_call: dict[str, dict[str, Record]] = {}
    for record in rows:
        by_call.setdefault(record["call"], {})[record["side"]] = record
    whole = [sides for sides in by_call.values() if all(set(r["sides"]) <= set(sides) for r in sides.values())]
    return whole[-1] if whole else None


def side_of(side: str, settings: Record) -> str:
    """Under which name a setting stands in the table."""
    if settings.get("returns") == "logits":
        return f"{side}, logits"
    return f"{side}, verify {settings['verify']}" if "verify" in settings else side


def rates(each: Record) -> list[float]:
    """Texts a second, by repeat."""
    return [each["texts"] / repeat["seconds"] for repeat in each["repeats"]]


def _median(each: Record) -> float:
    return statistics.median(rates(each))


def _is_faster(each: Record, other: tuple[Record, Record] | None) -> bool:
    return other is None or _median(each) > _median(other[1])


def _result(name: str, record: Record, each: Record, limits: Record) -> Record:
    by_repeat = rates(each)
    floor_texts_per_s = limits["matmul_flops_per_s"] * each["texts"] / each["needed_operations"]
    others = [o for o in record["found"] if o is not each and side_of(record["side"], o["settings"]) == name]
    start_s = each.get("start_s")
    return {
        "work": record["work"],
        "side": name,
        "texts_per_s": _median(each),
        "texts_per_s_range": [min(by_repeat), max(by_repeat)],
        "tokens_per_s": _median(each) * each["tokens"] / each["texts"],
        "settings": each["settings"],
        "gpu": record["gpu"],
        "host": record.get("host"),
        "commit": record.get("commit"),
        "cpu": limits["cpu"],
        "num_cores": limits["num_cores"],
        "versions": record["versions"],
        "mfu": _median(each) * each["operations"] / each["texts"] / limits["matmul_flops_per_s"],
        "floor_texts_per_s": floor_texts_per_s,
        "share_of_floor": _median(each) / floor_texts_per_s,
        "repeats": len(by_repeat),
        "texts": each["texts"],
        "repeated_share": 1 - each.get("distinct", each["texts"]) / each["texts"],
        "start_s": statistics.median(start_s) if start_s else None,
        "peak_allocated_bytes": each["peak_allocated_bytes"],
        "nvml_bytes": record["nvml_bytes"],
        "also_measured": [_also(other) for other in others],
        "limits": limits,
        "call": record["call"],
        **each["facts"],
    }


def _also(other: Record) -> Record:
    if "error" in other:
        return {"settings": other["settings"], "error": other["error"]}
    speed = _median(other) if "repeats" in other else other["texts_per_s"]
    return {"settings": other["settings"], "texts_per_s": speed, "repeats": len(other.get("repeats", [0]))}


def _compared(ours: Record, known: dict[str, Record]) -> Record:
    """Against the other sides at their fastest."""
    found: Record = {}
    for side, name in (("pipeline", "ratio"), ("crossencoder", "ratio_to_crossencoder")):
        if side in known:
            fast, slow = rates(ours), rates(known[side])
            found[name] = statistics.median(fast) / statistics.median(slow)
            found[f"{name}_range"] = [min(fast) / max(slow), max(fast) / min(slow)]
    return found | agreement(ours, known.get("pipeline"))


def agreement(ours: Record, theirs: Record | None) -> Record:
    """Share of texts with the same label, and the largest difference of a score; empty where one of them has none."""
    if theirs is None or not ours["labels"] or not theirs["labels"]:
        return {}
    same = [a == b for a, b in zip(ours["labels"], theirs["labels"], strict=True)]
    differences = [abs(a - b) for a, b in zip(ours["scores"], theirs["scores"], strict=True)]
    return {
        "agreement": sum(same) / len(same),
        "compared_texts": len(same),
        "largest_score_difference": max(differences),
    }


def table(found: list[Record]) -> str:
    """The rows as Markdown, and what must be said of them."""
    lines = [
        "| work | side | texts/s, median (range) | real tokens/s | to the pipeline (range) | to CrossEncoder | MFU"
        " | share of floor | longest stage | same labels | repeated texts |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    notes = []
    for each in found:
        low, high = each["texts_per_s_range"]
        ratio = f"{each['ratio']:.1f} ({_range(each['ratio_range'])})" if "ratio" in each else ""
        other = f"{each['ratio_to_crossencoder']:.1f}" if "ratio_to_crossencoder" in each else ""
        same = f"{100 * each['agreement']:.1f} %" if "agreement" in each else ""
        lines.append(
            f"| {each['work']} | {each['side']} | {each['texts_per_s']:,.0f} ({low:,.0f} to {high:,.0f})"
            f" | {each['tokens_per_s']:,.0f} | {ratio} | {other} | {100 * each['mfu']:.1f} %"
            f" | {100 * each['share_of_floor']:.1f} % of {each['floor_texts_per_s']:,.0f} | {each.get('limit') or ''}"
            f" | {same} | {100 * each['repeated_share']:.0f} % |"
        )
        notes += _notes(each)
    calls = dict.fromkeys((each["call"], each["gpu"]) for each in found)
    notes += [_machine([each for each in found if (each["call"], each["gpu"]) == call]) for call in calls]
    return "\n".join([*lines, "", *(f"- {note}" for note in notes)])


def _notes(each: Record) -> list[str]:
    name = f"{each['work']}, {each['side']}"
    notes = [f"{name}: {_shown(each['settings'])}; {each['repeats']} repeats of {each['texts']:,} texts."]
    if each["start_s"] is not None:
        notes.append(f"{name}: {each['start_s']:.1f} s before the first row, loading and proving, are not counted.")
    if "stages_s" in each:
        stages = ", ".join(f"{stage} {seconds:.2f} s" for stage, seconds in each["stages_s"].items())
        notes.append(f"{name}: busy in the last repeat: {stages}.")
    if "agreement" in each:
        notes.append(
            f"{name}: on {each['compared_texts']:,} texts {100 * each['agreement']:.1f} % of the labels are the"
            f" pipeline's, and scores differ by {each['largest_score_difference']:.2g} at the most."
        )
    if each.get("fallback"):
        notes.append(f"{name}: {each['fallback']}.")
    return notes + [f"{name}: {line}" for line in each.get("warnings", [])]


def _machine(of_call: list[Record]) -> str:
    limits, versions, host = of_call[0]["limits"], of_call[0]["versions"], of_call[0]["host"] or {}
    works = ", ".join(dict.fromkeys(each["work"] for each in of_call))
    shown = ("torch", "transformers", "tokenizers", "sentence-transformers", "triton", "cuda", "driver", "brimful")
    said = ", ".join(f"{name} {versions[name]}" for name in shown if versions.get(name))
    rate = f"{limits['matmul_flops_per_s'] / 1e12:,.2f} TFLOP/s"
    return (
        f"{works}: {of_call[0]['gpu']}, {limits['num_cores']} cores of {limits['cpu']} (host"
        f" {host.get('id')}), commit {of_call[0]['commit']}: product of"
        f" {limits['matmul_shape'][0]}³ in {limits['matmul_dtype']} at {rate}, of call {of_call[0]['call']}; {said}."
    )


def tried_table(found: list[Record]) -> str:
    """Every setting that was measured, as Markdown."""
    lines = [
        "Every setting is measured shortly; the fastest of a side again, in repeats. brimful's are all in repeats.",
        "",
        "| work | side | settings | texts/s | runs |",
        "|---|---|---|---|---|",
    ]
    for each in found:
        own = {"settings": each["settings"], "texts_per_s": each["texts_per_s"], "repeats": each["repeats"]}
        for other in (own, *each["also_measured"]):
            speed = f"{other['texts_per_s']:,.0f}" if "texts_per_s" in other else " ".join(other["error"].split())[:160]
            settings, runs = _shown(other["settings"]), other.get("repeats", "")
            lines.append(f"| {each['work']} | {each['side']} | {settings} | {speed} | {runs} |")
    return "\n".join(lines)


def _shown(settings: Record) -> str:
    return ", ".join(f"{key} {value}" for key, value in settings.items())


def _range(pair: list[float]) -> str:
    return f"{pair[0]:.1f} to {pair[1]:.1f}"

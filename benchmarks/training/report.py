"""The raw log as results and tables. Reads records, knows no torch."""

from __future__ import annotations

import statistics
from typing import Any

from settings import BASE, KEPT, changed, samples_per_s
from works import KNOWN_HF, TABLE, Work

Record = dict[str, Any]


def rates(record: Record, key: str = "samples") -> list[float]:
    """So many a second, by round."""
    return [each[key] / each["seconds"] for each in record["rounds"]]


def results(records: list[Record]) -> list[Record]:
    """The newest complete measurement of each side of each row, both sides from one call.

    Of several settings of one side the fastest counts, and `also_measured` names the others.
    """
    limits = {(r["call"], r["gpu"]): r["limits"] for r in records if r["kind"] == "limits" and r["ok"]}
    rows = [r for r in records if r["kind"] == "row" and r["ok"] and (r["call"], r["gpu"]) in limits]
    found = []
    for name in sorted({r["work"] for r in rows}, key=_place):
        work = Work.parse(name)
        by_call: dict[str, dict[str, list[Record]]] = {}
        for r in rows:
            if r["work"] == name:
                by_call.setdefault(r["call"], {}).setdefault(r["side"], []).append(r)
        whole = [sides for sides in by_call.values() if set(work.sides) <= set(sides)]
        if not whole:
            continue
        fastest = {side: max(whole[-1][side], key=samples_per_s) for side in work.sides}
        for side, best in fastest.items():
            others = [r for r in whole[-1][side] if r is not best]
            result = _result(best, limits[best["call"], best["gpu"]], others)
            if side == "brimful":
                result |= _ratio(best, fastest["hf"])
            found.append(result)
    return found


def _place(name: str) -> tuple[int, str]:
    return (TABLE.index(name) if name in TABLE else len(TABLE), name)


def _result(record: Record, limits: Record, others: list[Record]) -> Record:
    work = Work.parse(record["work"])
    by_round = rates(record)
    mfu = statistics.median(rates(record, "operations")) / limits["matmul_flops_per_s"]
    floor = limits["floors"][work.name]
    batch = record["settings"]["batch_size"]
    layers_s = (floor["matmul_s"] + floor["attention_s"]) * batch / work.batch_size
    floor_samples_per_s = batch / (layers_s + floor["optimizer_s"])
    return {
        "work": record["work"],
        "side": record["side"],
        "samples_per_s": statistics.median(by_round),
        "samples_per_s_range": [min(by_round), max(by_round)],
        "tokens_per_s": statistics.median(rates(record, "tokens")),
        "mfu": mfu,
        "peak_allocated_bytes": record["peak_allocated_bytes"],
        "peak_reserved_bytes": record["peak_reserved_bytes"],
        "nvml_bytes": record["nvml_bytes"],
        "settings": record["settings"] | ({"recipe": record["recipe"]} if "recipe" in record else {}),
        "gpu": record["gpu"],
        "host": record.get("host"),
        "commit": record.get("commit"),
        "versions": record["versions"],
        "floor_samples_per_s": floor_samples_per_s,
        "share_of_floor": statistics.median(by_round) / floor_samples_per_s,
        "fill": sum(r["tokens"] for r in record["rounds"]) / sum(r["computed_tokens"] for r in record["rounds"]),
        "rounds": len(by_round),
        "steps_per_round": record["steps_per_round"],
        "warm_up_s": record["warm_up_s"],
        "warnings": record.get("warnings", []),
        "graphs_at_marks": record.get("graphs_at_marks"),
        "packed": record.get("packed"),
        "limits": limits | {"floors": {work.name: floor}},
        "also_measured": [{"settings": r["settings"], "samples_per_s": samples_per_s(r)} for r in others],
        "known_samples_per_s": KNOWN_HF.get(record["work"]) if record["side"] == "hf" else None,
        "call": record["call"],
    }


def _ratio(ours: Record, theirs: Record) -> Record:
    fast, slow = rates(ours), rates(theirs)
    return {
        "ratio": statistics.median(fast) / statistics.median(slow),
        "ratio_range": [min(fast) / max(slow), max(fast) / min(slow)],
    }


def table(found: list[Record]) -> str:
    """The rows as Markdown, and what must be said of them."""
    lines = [
        "| work | side | samples/s, median (range) | real tokens/s | MFU | allocated, reserved, NVML, GiB"
        " | ratio (range) | share of floor |",
        "|---|---|---|---|---|---|---|---|",
    ]
    notes = []
    for each in found:
        low, high = each["samples_per_s_range"]
        memory = ", ".join(_gib(each[k]) for k in ("peak_allocated_bytes", "peak_reserved_bytes", "nvml_bytes"))
        ratio = ""
        if "ratio" in each:
            ratio = f"{each['ratio']:.2f} ({each['ratio_range'][0]:.2f} to {each['ratio_range'][1]:.2f})"
        lines.append(
            f"| {each['work']} | {each['side']} | {each['samples_per_s']:,.0f} ({low:,.0f} to {high:,.0f})"
            f" | {each['tokens_per_s']:,.0f} | {100 * each['mfu']:.1f} % | {memory} | {ratio}"
            f" | {100 * each['share_of_floor']:.0f} % of {each['floor_samples_per_s']:,.0f} |"
        )
        notes += _notes(each)
    calls = dict.fromkeys((each["call"], each["gpu"]) for each in found)
    notes += [_machine([each for each in found if (each["call"], each["gpu"]) == call]) for call in calls]
    return "\n".join([*lines, "", *(f"- {note}" for note in notes)])


def _notes(each: Record) -> list[str]:
    name, notes = f"{each['work']}, {each['side']}", []
    known, speed = each["known_samples_per_s"], each["samples_per_s"]
    if known is not None and "H200" in each["gpu"] and speed < 0.95 * known:
        notes.append(f"{name}: {100 * (1 - speed / known):.0f} % below the {known:,} known: to be explained.")
    if each["side"] == "hf":
        settings = ", ".join(f"{key} {value}" for key, value in each["settings"].items())
        notes.append(f"{name}: {settings}.")
    for other in each["also_measured"]:
        differs = {k: v for k, v in other["settings"].items() if each["settings"].get(k) != v}
        notes.append(f"{name}: with {differs} {other['samples_per_s']:,.0f} samples/s.")
    if each["packed"] is False:
        notes.append(f"{name}: not packed.")
    graphs = each["graphs_at_marks"]
    if graphs and graphs[-1] > graphs[0]:
        notes.append(f"{name}: {graphs[-1] - graphs[0]} graphs were captured in the rounds, and count.")
    return notes + [f"{name}: {line}" for line in each["warnings"]]


def _machine(of_call: list[Record]) -> str:
    limits, versions, host = of_call[0]["limits"], of_call[0]["versions"], of_call[0]["host"] or {}
    works = ", ".join(dict.fromkeys(each["work"] for each in of_call))
    shown = ("torch", "transformers", "accelerate", "triton", "cuda", "driver", "brimful")
    said = ", ".join(f"{name} {versions[name]}" for name in shown if versions.get(name))
    return (
        f"{works}: {of_call[0]['gpu']}, {host.get('cores')} cores of {host.get('cpu')} (host {host.get('id')}),"
        f" commit {of_call[0]['commit']}: product of {limits['matmul_shape'][0]}³ in bf16 at"
        f" {limits['matmul_flops_per_s'] / 1e12:,.1f} TFLOP/s, device copy at"
        f" {limits['copy_bytes_per_s'] / 1e12:.2f} TB/s (read and write), of call {of_call[0]['call']}; {said}."
    )


def _gib(number: int | None) -> str:
    return "unknown" if number is None else f"{number / 2**30:.1f}"


def sweep_table(trials: list[Record]) -> str:
    """Everything that was tried of Trainer, by row and machine, as Markdown."""
    text = ", ".join(f"{key} {value}" for key, value in BASE.items())
    lines = [
        f"Short trials on the row's own host, fastest first; the {KEPT} fastest are measured at length. Unless it says"
        f" otherwise: {text}.",
        "",
        "| work | host | commit | settings | samples/s | to the fastest |",
        "|---|---|---|---|---|---|",
    ]
    groups: dict[tuple[str, str], list[Record]] = {}
    for each in trials:
        groups.setdefault((each["work"], each["host"]["id"]), []).append(each)
    for (work, host), tried in groups.items():
        by_speed = sorted(tried, key=samples_per_s, reverse=True)
        for each in by_speed:
            speed = samples_per_s(each)
            shown = f"{speed:,.0f}" if speed else f"failed: {' '.join(each['error'].split())[-160:]}"
            ratio = f"{speed / samples_per_s(by_speed[0]):.2f}" if speed else ""
            said = changed(each["settings"])
            lines.append(f"| {work} | {host} | {each['commit']} | {said} | {shown} | {ratio} |")
    return "\n".join(lines)

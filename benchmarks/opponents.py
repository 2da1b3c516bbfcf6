"""Every row's newest figure of ours beside the fastest opponent that any committed log has, on whatever host.

    python benchmarks/opponents.py [--write]

Reads results.json and raw logs of training/ and classification/; --write makes opponents.md of them. The README's
ratios are this table's.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
#: Sides of either benchmark that are not ours, as the table names them.
_OPPONENTS = {"hf": "Trainer", "pipeline": "pipeline", "crossencoder": "CrossEncoder"}
_UNITS = {"training": "samples", "classification": "texts"}


@dataclass(frozen=True, kw_only=True)
class Seen:
    """One measurement: a side's median rate a second, with the slowest and the fastest round."""

    benchmark: str
    gpu: str
    work: str
    side: str
    rate: float
    low: float
    high: float
    call: str
    commit: str | None
    log: str
    alone: bool


def seen(folder: Path = HERE) -> Iterator[Seen]:
    """Yield what the logs have, those of tiny shapes left out."""
    for benchmark, unit in _UNITS.items():
        for file in sorted((folder / benchmark).rglob("*.jsonl")):
            for line in file.read_text("utf-8").splitlines():
                yield from _of_raw(benchmark, json.loads(line), file.relative_to(folder))
        for file in sorted((folder / benchmark).rglob("results.json")):
            for r in json.loads(file.read_text("utf-8")):
                low, high = r[f"{unit}_per_s_range"]
                rates = {"rate": r[f"{unit}_per_s"], "low": low, "high": high}
                yield _seen(benchmark, r, file.relative_to(folder), r["side"], rates)


def _of_raw(benchmark: str, record: dict[str, Any], log: Path) -> Iterator[Seen]:
    if record.get("smoke"):
        return
    if record.get("kind") in ("sweep", "compile"):  # of earlier scripts: settings one at a time, in one record
        for each in record["tried"]:
            yield from _of_raw(benchmark, record | {"kind": "row", "ok": True, "side": "hf"} | each, log)
        return
    if record.get("kind") == "trial":
        side = {"side": "hf"} if benchmark == "training" else {}
        short = [{"texts": record.get("texts_per_s", 0.0), "repeats": [{"seconds": 1.0}]}]
        found = {"found": short if "texts_per_s" in record else []}
        yield from _of_raw(benchmark, record | {"kind": "row", "ok": True} | side | found, log)
        return
    # What a process found counts, too, where it did not end in time.
    if record.get("kind") != "row" or not (record.get("ok") or record.get("timed_out")):
        return
    if benchmark == "training":
        measured = [[each["samples"] / each["seconds"] for each in record.get("rounds", ())]]
    else:
        found = [each for each in record["found"] if "repeats" in each and record["side"] in _OPPONENTS]
        measured = [[each["texts"] / repeat["seconds"] for repeat in each["repeats"]] for each in found]
    for rates in filter(None, measured):
        of_rates = {"rate": statistics.median(rates), "low": min(rates), "high": max(rates)}
        yield _seen(benchmark, record, log, record["side"], of_rates)


def _seen(benchmark: str, record: dict[str, Any], log: Path, side: str, rates: dict[str, float]) -> Seen:
    work, gpu, call = (str(record[key]) for key in ("work", "gpu", "call"))
    facts = {"commit": record.get("commit"), "log": str(log), "alone": record.get("nvml_bytes", 0) is not None}
    return Seen(benchmark=benchmark, gpu=gpu, work=work, side=side, call=call, **facts, **rates)


def beside(found: list[Seen], gpu: str) -> list[tuple[Seen, Seen]]:
    """Return our newest figure of each row on a GPU, of a process that had it alone, and the row's fastest opponent."""
    pairs = []
    of_gpu = [each for each in found if gpu in each.gpu]
    for benchmark, work in dict.fromkeys((each.benchmark, each.work) for each in of_gpu):
        rows = [each for each in of_gpu if (each.benchmark, each.work, each.side) == (benchmark, work, "brimful")]
        rows = [each for each in rows if each.alone]
        theirs = [e for e in of_gpu if e.benchmark == benchmark and e.side in _OPPONENTS]
        theirs = [each for each in theirs if each.work.removesuffix("-fp8") == work.removesuffix("-fp8")]
        if rows and theirs:
            newest = max(each.call for each in rows)
            ours = max((each for each in rows if each.call == newest), key=lambda each: each.rate)
            pairs.append((ours, max(theirs, key=lambda each: each.rate)))
    return sorted(pairs, key=lambda pair: (pair[0].benchmark != "training", pair[0].work))


def table(pairs: list[tuple[Seen, Seen]], gpu: str) -> str:
    """The pairs as Markdown."""
    lines = [
        "# The fastest opponent seen",
        "",
        f"By `python benchmarks/opponents.py --write`, from all logs of {gpu}s. Medians of samples/s, of texts/s",
        "where it classifies: ours the newest of a call in which it had the GPU alone, theirs the fastest of any",
        "call, host and setting. Ratio: of the medians; in brackets our slowest round to their fastest, and our",
        "fastest to their median.",
        "",
        "| row | brimful | the fastest opponent | ratio (range) | brimful's log | their log |",
        "|---|---|---|---|---|---|",
    ]
    for ours, theirs in pairs:
        ratio = f"{ours.rate / theirs.rate:.1f} ({ours.low / theirs.high:.1f} to {ours.high / theirs.rate:.1f})"
        commit = f", {ours.commit}" if ours.commit else ""
        lines.append(
            f"| {'train' if ours.benchmark == 'training' else 'classify'} {ours.work} | {ours.rate:,.0f}"
            f" | {theirs.rate:,.0f}, {_OPPONENTS[theirs.side]} | {ratio} | [{Path(ours.log).parent.name}]({ours.log})"
            f"{commit} | [{Path(theirs.log).parent.name}]({theirs.log}) |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gpu", default="H200", help="part of the GPU's name; default: H200")
    parser.add_argument("--write", action="store_true", help="into opponents.md, beside this script")
    arguments = parser.parse_args()
    text = table(beside(list(seen()), arguments.gpu), arguments.gpu)
    print(text, end="")
    if arguments.write:
        (HERE / "opponents.md").write_text(text, "utf-8")


if __name__ == "__main__":
    main()

"""Results of benches by row: those of `brimful bench`, and those of the folders of `benchmarks/`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from brimful.core.bench import is_disturbed
from brimful.core.comparison import Difference, RowFigures
from brimful.core.errors import DataError, first_line, printable
from brimful.core.options.checks import flag

RESULTS = "results.json"
#: Options of `brimful bench` that change none of its rows.
_NOT_OF_THE_WORK = frozenset({"output", "rows", "budget_s", "quiet", "json"})
#: Settings and facts of a bench that its rows' speed is of, by their names among the differences.
_WORK = (
    *("--model", "--shape", "--batch-size", "--max-length", "task", "labels", "rows", "batch size", "median tokens"),
    *("longest tokens", "data fingerprint", "parameters"),
)
#: Fields that say what a row of `benchmarks/` is of, in the order in which they make its name.
_NAMED_BY = ("work", "model", "shape", "row", "setting", "side")


@dataclass(frozen=True, kw_only=True)
class Results:
    """A bench as it was read. rows: by name. settings: of all rows, by part and name, as text.

    recommended: name of the row whose settings are.
    """

    rows: Mapping[str, RowFigures]
    settings: Mapping[tuple[str, str], str]
    device: str | None = None
    recommended: str | None = None


def read_results(file: Path) -> Results:
    """Results in a file. Raises: DataError for one that holds no rows."""
    try:
        found = json.loads(file.read_text("utf-8"))
        rows = found["rows"] if isinstance(found, Mapping) else found
        work = (found.get("workload") or {}) if isinstance(found, Mapping) else {}
        is_ours = [isinstance(row.get("row"), Mapping) for row in rows]
        named = [_of_bench(row, work) if ours else _of_log(row) for row, ours in zip(rows, is_ours, strict=True)]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        said = f"it has no rows of a bench ({first_line(error)})"
        raise DataError(said, file=str(file), hint="give the folder of a bench") from error
    if not rows:
        raise DataError("it has no rows of a bench", file=str(file), hint="let the bench measure one")
    if isinstance(found, Mapping):
        told = {"device": work.get("device"), "recommended": found.get("recommended")}
        return Results(rows=_apart(named), settings=_work(found), **told)
    return Results(rows=_apart(named), settings=_host(rows[0]), device=rows[0].get("gpu"))


def other_work(differences: Iterable[Difference]) -> str | None:
    """Sentence that benches measured other work, by the differences of their settings; None where they did not."""
    known = {each.name for each in differences if len(set(each.values) - {None}) > 1 and each.name in _WORK}
    names = [name for name in _WORK if name in known and flag(name.replace(" ", "_")) not in known - {name}]
    if not names:
        return None
    return f"the benches measured other work ({', '.join(names)}): ratios between them say little of how it ran"


def _work(bench: Mapping[str, Any]) -> dict[tuple[str, str], str]:
    """Work and machine of a bench: ratios of its rows to those of another one say little where they differ."""
    work = bench.get("workload") or {}
    machine = work.get("machine") or {}
    told = {"model": bench.get("model"), "data": bench.get("data")} | (bench.get("options") or {})
    found = {("learned", flag(name)): value for name, value in told.items() if name not in _NOT_OF_THE_WORK}
    facts = ("task", "labels", "rows", "batch_size", "median_tokens", "longest_tokens", "data_fingerprint")
    found |= {("learned", name.replace("_", " ")): work.get(name) for name in (*facts, "parameters")}
    found |= {("run", f"steps: {name.replace('_', ' ')}"): n for name, n in (bench.get("steps") or {}).items()}
    gpus = ", ".join(gpu["name"] for gpu in machine.get("gpus") or ())
    found |= {("machine", "CPU"): machine.get("cpu"), ("machine", "CPU cores"): machine.get("num_cores")}
    found |= {("machine", "GPU"): gpus or None, ("machine", "threads"): work.get("num_threads")}
    found |= {("machine", name): version for name, version in (machine.get("versions") or {}).items()}
    return {key: str(value) for key, value in found.items() if value is not None}


def _host(row: Mapping[str, Any]) -> dict[tuple[str, str], str]:
    """Machine and versions of a log, by its first row."""
    found = {("machine", "GPU"): row.get("gpu"), ("machine", "commit"): row.get("commit")}
    found |= {("machine", name): version for name, version in (row.get("versions") or {}).items()}
    return {key: str(value) for key, value in found.items() if value is not None}


def _of_bench(row: Mapping[str, Any], work: Mapping[str, Any]) -> tuple[str, RowFigures]:
    """A row of `brimful bench`. work: of all its rows."""
    name = f"{row['row']['side']}: {row['row']['name']}"
    measured = row.get("measured")
    if measured is None:
        why = row.get("reason") or str(row.get("status", "not measured")).replace("_", " ")
        return name, RowFigures(reason=printable(why, 200))
    rates, peak = measured.get("block_rates") or [], measured.get("peak_bytes") or {}
    held = [measured.get("nvml_bytes"), peak.get("nvml"), peak.get("resident"), peak.get("total")]
    return name, RowFigures(
        samples_per_s=_number(measured.get("samples_per_s")),
        low=min(map(float, rates), default=None),
        high=max(map(float, rates), default=None),
        peak_bytes=next((int(each) for each in held if each), None),
        loss=_number(measured.get("loss")),
        disturbed=work.get("device") == "CPU"
        and is_disturbed(measured.get("cores"), work.get("num_threads"), measured.get("waiting")),
        cut_short=bool(row.get("cut_short")),
    )


def _of_log(row: Mapping[str, Any]) -> tuple[str, RowFigures]:
    """A row of a folder of `benchmarks/`."""
    name = " · ".join(str(row[key]) for key in _NAMED_BY if isinstance(row.get(key), str | int))
    if row.get("error"):
        return name, RowFigures(reason=printable(row["error"], 200))
    rate = row.get("samples_per_s", row.get("texts_per_s"))
    ends = row.get("samples_per_s_range") or row.get("texts_per_s_range") or [row.get("lowest"), row.get("highest")]
    held = row.get("nvml_bytes") or row.get("peak_reserved_bytes") or row.get("peak_allocated_bytes")
    losses = row.get("losses")
    return name, RowFigures(
        samples_per_s=_number(rate),
        low=_number(ends[0]),
        high=_number(ends[-1]),
        peak_bytes=None if held is None else int(held),
        loss=_number(losses[-1]) if isinstance(losses, list) and losses else _number(row.get("loss")),
    )


def _apart(named: list[tuple[str, RowFigures]]) -> dict[str, RowFigures]:
    """Rows by names that differ: a name that comes again gets its number."""
    rows: dict[str, RowFigures] = {}
    for name, figures in named:
        number = 1 + sum(1 for other in rows if other == name or other.startswith(f"{name} ("))
        rows[name if number == 1 else f"{name} ({number})"] = figures
    return rows


def _number(value: Any) -> float | None:
    return None if value is None else float(value)

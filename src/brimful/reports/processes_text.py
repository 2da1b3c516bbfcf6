"""Work of each of several processes of a training, as a line and as rows of a table."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from brimful.core.errors import printable
from brimful.core.records import Processes, ProcessWork
from brimful.core.units import bytes_text, count_text, share_text

#: Heads of the columns of `processes_rows`.
COLUMNS = ("Process", "Rows", "Tokens", "Tokens per second", "Waiting", "Communication", "of it hidden", "Peak memory")


def processes_text(found: Processes) -> str:
    """One line: how even the shares were, and how long processes waited for one another."""
    said = [f"{len(found.each)}, the one with the most tokens of a batch has {found.imbalance:.3f} of the mean"]
    rates = [each.tokens_per_s for each in found.each if each.tokens_per_s is not None]
    if rates:
        said.append(f"{_span(rates, count_text)} tokens/s each")
    waits = [each.waited_s / each.steps_s for each in found.each if each.steps_s and each.waited_s is not None]
    if waits:
        said.append(f"they waited for others {_span(waits, share_text)} of their steps")
    sent = sum(each.sent_s or 0.0 for each in found.each)
    if sent:
        hidden = sum(each.hidden_s or 0.0 for each in found.each)
        said.append(f"{share_text(hidden / sent)} of the time of sums is hidden")
    if (rank := nearest_limit(found)) is not None:
        each = found.each[rank]
        what = "had the most memory" if each.limit_bytes is None else "came the nearest to its memory's limit"
        said.append(f"process {rank} {what} while training: {_memory(each)}")
    return "; ".join(said)


def nearest_limit(found: Processes) -> int | None:
    """Return the process whose memory was the fullest, by shares of limits, or by bytes; None where none is known."""
    full = [_used(each) / (each.limit_bytes or 1) for each in found.each]
    return full.index(max(full)) if any(full) else None


def _used(each: ProcessWork) -> int:
    """Bytes of a process, by the driver, else by torch, on a CPU what was resident; 0 where nothing is known."""
    peak = each.peak_bytes
    return 0 if peak is None else peak.nvml or peak.reserved or peak.resident or 0


def _memory(each: ProcessWork) -> str:
    used = _used(each)
    if not used:
        return "not known"
    return bytes_text(used) + ("" if each.limit_bytes is None else f" of {bytes_text(each.limit_bytes)}")


def _span(values: Sequence[float], text: Callable[[float], str]) -> str:
    least, most = text(min(values)), text(max(values))
    return most if least == most else f"{least} to {most}"


def processes_rows(found: Processes) -> list[tuple[str, ...]]:
    """Rows of a table, a process each, under `COLUMNS`."""
    rows: list[tuple[str, ...]] = []
    for rank, each in enumerate(found.each):
        rows.append(
            (
                f"{rank}: {printable(each.host, 60)}, {each.device}",
                f"{each.samples:,}",
                f"{each.tokens:,}",
                "not known" if each.tokens_per_s is None else count_text(each.tokens_per_s),
                _share(each.waited_s, each.steps_s),
                _share(each.sent_s, each.steps_s),
                _share(each.hidden_s, each.sent_s),
                _memory(each),
            )
        )
    return rows


def _share(part_s: float | None, whole_s: float | None) -> str:
    return share_text(part_s / whole_s) if part_s is not None and whole_s else "not known"

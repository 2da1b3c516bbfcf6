"""Numbers into text, and sizes back: the only place that formats bytes, seconds, counts and shares for people."""

from __future__ import annotations

import re

_SIZES = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "t": 1000**4}
_BINARY = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def parse_bytes(text: str) -> int:
    """Bytes of `8GB` (10^9 each), `7.5GiB` (2^30 each), `500 MB` or `1000000`. Raises: ValueError for anything else."""
    found = re.fullmatch(r"(\d{1,18}(?:\.\d{1,18})?) ?(?:([kmgt]?)(i?)b?)", text.strip().lower())
    if found is None or (found[3] and not found[2]):
        raise ValueError(f"{text} is no size, as 8GB, 7.5GiB or 500MB")
    return int(float(found[1]) * (_BINARY if found[3] else _SIZES)[found[2]])


def bytes_text(num_bytes: float | None) -> str:
    """`1.5 GiB`; `unknown` for None."""
    if num_bytes is None:
        return "unknown"
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def seconds_text(seconds: float | None) -> str:
    """`0.8 s`, `3 min 05 s`, `2 h 10 min`; `unknown` for None."""
    if seconds is None:
        return "unknown"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min"


def count_text(count: float | None) -> str:
    """`950`, `12,400`, `1.3 M`, `22.7 M`, `7.2 B`; `unknown` for None."""
    if count is None:
        return "unknown"
    if count < 1_000_000:
        return f"{count:,.0f}"
    return f"{count / 1e6:.1f} M" if count < 1e9 else f"{count / 1e9:.1f} B"


def share_text(share: float | None) -> str:
    """A share as per cent, never rounded to none or all: `3.4 %`, `< 0.1 %`; `unknown` for None."""
    if share is None:
        return "unknown"
    if 0 < share < 0.0005:
        return "< 0.1 %"
    return "> 99.9 %" if 0.9995 <= share < 1 else f"{100 * share:.1f} %"


def number_text(number: float | None) -> str:
    """A metric: `0.9775`, and `0.0000` without a sign; `unknown` for None."""
    return "unknown" if number is None else f"{number:z.4f}"


def amount_text(number: float | None) -> str:
    """A number in units of the data: `7.0498`, `62,500,000`, `1.234e-05`; `unknown` for None."""
    if number is None or not number or 0.1 <= abs(number) < 1000:
        return number_text(number)
    return f"{number:,.0f}" if abs(number) >= 1000 else f"{number:.4g}"


def target_text(number: float) -> str:
    """A target or an answer of a regression, short: `4.612`, `0.0004612`, `461,184`."""
    return f"{number:,.0f}" if abs(number) >= 1000 else f"{number:.4g}"


def part_text(count: int, whole: int) -> str:
    """Count and share, never rounded to none or all: `12 (< 0.1 %)`; `0` of nothing."""
    return f"{count:,} ({share_text(count / whole)})" if whole else f"{count:,}"

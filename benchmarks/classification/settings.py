"""Settings of the pipeline and of CrossEncoder that a row's sweep tries, in three rounds, each on what came before.

    1  batches   every size, in the given order and sorted by length
    2  changes   tokenising workers, torch.compile's modes with padding to the longest text of the corpus where shapes
                 must repeat, FlashAttention-2 where it is installed: one at a time, to the fastest of round 1
    3  together  the fastest way of compiling with the fastest number of workers, and neighbouring batches with it

Knows no torch: what was tried comes in as records, what to try next goes out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Settings = dict[str, Any]
Record = dict[str, Any]

#: On a GPU some rates still rise at the last ones; on a CPU larger ones gain nothing.
BATCHES: dict[str, dict[str, tuple[int, ...]]] = {
    "pipeline": {"cuda": (1, 32, 128, 256, 512, 1024, 2048), "cpu": (1, 8, 32, 128)},
    "crossencoder": {"cuda": (32, 64, 128, 256, 512, 1024, 2048, 4096), "cpu": (8, 32, 128)},
}
DTYPES = {"cuda": ("fp16",), "cpu": ("fp32", "bf16")}
#: Settings that nothing is said of. padding: to the longest text of a batch, or to the `corpus`'s.
BASE: Settings = {"workers": 0, "compile": None, "padding": "batch", "attention": "sdpa"}
#: Second round, what is cheap to try first.
WORKERS: dict[str, tuple[Settings, ...]] = {
    "pipeline": ({"workers": 4}, {"workers": 8}, {"workers": 12}),
    "crossencoder": (),  # `predict` tokenises in its own process
}
FLASH: Settings = {"attention": "flash_attention_2"}
COMPILED: tuple[Settings, ...] = (
    {"compile": "default"},
    {"compile": "reduce-overhead", "padding": "corpus"},
    {"compile": "max-autotune", "padding": "corpus"},
)
#: Settings that are measured in repeats.
KEPT = 2


def first_trials(side: str, device: str, *, smoke: bool) -> list[Settings]:
    """Return what a sweep begins with."""
    batches, dtypes = BATCHES[side][device], DTYPES[device]
    if smoke:
        batches, dtypes = batches[1:2], dtypes[:1]
    orders = (False, True) if side == "pipeline" else (None,)
    return [
        {"batch_size": batch, "dtype": dtype} | ({} if order is None else {"sorted": order}) | BASE
        for dtype in dtypes
        for batch in batches
        for order in orders
        if not (batch == 1 and order)
    ]


def next_trials(
    tried: Sequence[Record], side: str, device: str, *, flash: bool, fixed: bool, smoke: bool
) -> list[Settings]:
    """Return what to try next; nothing where the sweep is complete.

    tried: records with `settings`, and `texts_per_s` or `error`. flash: FlashAttention-2 is installed. fixed: texts can
    be padded to one length, which zero-shot's pipeline cannot.
    """
    first = first_trials(side, device, smoke=smoke)
    if missing := _untried(first, tried):
        return missing
    best = fastest(_of(tried, first), 1)
    if not best:
        return []
    compiled = () if device == "cpu" else COMPILED if fixed else COMPILED[:1]
    workers = () if smoke else WORKERS[side][:1] if device == "cpu" else WORKERS[side]
    changes = (*workers, *((FLASH,) if flash and device == "cuda" else ()), *compiled)
    if missing := _untried([best[0] | change for change in changes], tried):
        return missing
    return [] if smoke else _untried(_together(tried, best[0], side, device), tried)


def fastest(tried: Sequence[Record], number: int = KEPT) -> list[Settings]:
    """Return the fastest settings of those tried, fewer if fewer worked."""
    worked = sorted((r for r in tried if r.get("texts_per_s")), key=lambda r: r["texts_per_s"], reverse=True)
    return [record["settings"] for record in worked[:number]]


def _together(tried: Sequence[Record], best: Settings, side: str, device: str) -> list[Settings]:
    """Each kind of change at its fastest, where it was faster, all at once; then larger and smaller batches with it."""
    speed = {_key(r["settings"]): r.get("texts_per_s", 0.0) for r in tried}
    taken: Settings = {}
    for kind in (("workers",), ("attention",), ("compile", "padding")):
        alike = [
            r["settings"]
            for r in tried
            if _differing(r["settings"], best) and _differing(r["settings"], best) <= {*kind}
        ]
        if alike and speed[_key(winner := max(alike, key=lambda s: speed[_key(s)]))] > speed[_key(best)]:
            taken |= {key: winner[key] for key in kind}
    if not taken:
        return []
    sizes = BATCHES[side][device]
    place = sizes.index(best["batch_size"])
    return [best | taken | {"batch_size": size} for size in sizes[max(0, place - 1) : place + 2]]


def _differing(settings: Settings, best: Settings) -> set[str]:
    return {key for key, value in settings.items() if best[key] != value}


def _of(tried: Sequence[Record], wanted: Sequence[Settings]) -> list[Record]:
    keys = {_key(each) for each in wanted}
    return [record for record in tried if _key(record["settings"]) in keys]


def _untried(wanted: Sequence[Settings], tried: Sequence[Record]) -> list[Settings]:
    known = {_key(record["settings"]) for record in tried}
    return [each for each in wanted if _key(each) not in known]


def _key(settings: Settings) -> tuple[tuple[str, Any], ...]:
    return tuple(sorted(settings.items(), key=lambda pair: pair[0]))

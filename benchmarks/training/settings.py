"""Settings of Hugging Face Trainer that a row's sweep tries, in three rounds, each on what the one before found.

    1  forms     of batches and of compilation, together: padding, buckets, grouping by length, torch.compile's modes,
                 FlashAttention-2 where it is installed
    2  changes   of everything else, one at a time, to the two fastest forms
    3  together  every change that was faster, on each of the two forms

Knows no torch: what was tried comes in as records, what to try next goes out.
"""

from __future__ import annotations

import json
import statistics
from argparse import ArgumentTypeError
from collections.abc import Sequence
from typing import Any

Settings = dict[str, Any]
Record = dict[str, Any]

#: Settings that nothing is said of.
BASE: Settings = {
    "batch_size": 32,
    "padding": "longest",
    "sampling": "random",
    "workers": 4,
    "optim": "adamw_torch_fused",
    "nan_filter": False,
    "compile": None,
    "attention": "sdpa",
}
#: The length of a batch is the next of these: few shapes, so that compiled code and CUDA graphs are used again.
BUCKETS = (16, 32, 48, 64, 96, 128, 192, 256, 384, 512)
#: torch.compile's modes. `default` with other padding than buckets has symbolic shapes, all others fixed ones.
MODES = ("default", "reduce-overhead", "max-autotune")
#: First round, what is likeliest to win first: a budget may end it.
FORMS: tuple[Settings, ...] = (
    {"compile": "default"},
    {"compile": "reduce-overhead", "padding": "buckets"},
    {},
    {"compile": "default", "padding": "buckets"},
    {"sampling": "group_by_length"},
    {"compile": "reduce-overhead", "padding": "buckets", "sampling": "group_by_length"},
    {"compile": "default", "sampling": "group_by_length"},
    {"padding": "multiple of 8"},
    {"compile": "max-autotune", "padding": "buckets"},
)
#: Where its package is installed. ModernBERT of transformers 5.17 leaves out no padding of its own any more.
FLASH: tuple[Settings, ...] = (
    {"attention": "flash_attention_2"},
    {"attention": "flash_attention_2", "sampling": "group_by_length"},
    {"attention": "flash_attention_2", "compile": "default"},
)
#: Second round.
CHANGES: tuple[Settings, ...] = ({"workers": 0}, {"workers": 8}, {"optim": "adamw_torch"}, {"nan_filter": True})
#: A change counts as faster from this ratio on: less is noise.
FASTER = 1.01
#: Forms that are followed up, and settings that are measured at length.
KEPT = 2


def samples_per_s(record: Record) -> float:
    """Median of a trial's rounds; 0 where it failed."""
    rounds = record.get("rounds", ())
    return statistics.median(each["samples"] / each["seconds"] for each in rounds) if rounds else 0.0


def next_trials(tried: Sequence[Record], base: Settings, *, flash: bool, batches: Sequence[int]) -> list[Settings]:
    """Return what to try next, in order; nothing where the sweep is complete.

    tried: records with `settings`, and `rounds` or `error`. base: of this row. flash: FlashAttention-2 is installed.
    batches: sizes that may be chosen from.
    """
    known = {_key(record["settings"]) for record in tried}
    rounds = (_forms(base, flash=flash), _changed(tried, base, batches), _together(tried, base))
    for wanted in rounds:
        if missing := [each for each in wanted if _key(each) not in known]:
            return missing
    return []


def fastest(tried: Sequence[Record], number: int = KEPT) -> list[Settings]:
    """Return the fastest settings of those tried, fewer if fewer worked."""
    worked = [record for record in tried if samples_per_s(record)]
    return [record["settings"] for record in sorted(worked, key=samples_per_s, reverse=True)[:number]]


def given(text: str) -> Settings:
    """Read settings in JSON, some of those in BASE. Raises: ArgumentTypeError."""
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ArgumentTypeError(f"{text} is no JSON: {error}") from error
    if not isinstance(found, dict) or not found.keys() <= BASE.keys():
        raise ArgumentTypeError(f"{text} is no JSON object of {', '.join(BASE)}")
    return found


def likeliest(base: Settings, *, short: bool) -> list[Settings]:
    """Return the settings that were the fastest so far, for a row that is not swept.

    short: of short texts, where launching takes longest, CUDA graphs come first.
    """
    found = _forms(base, flash=False)[:KEPT]
    return found[::-1] if short else found


def changed(settings: Settings, base: Settings = BASE) -> str:
    """Name settings by what differs from `base`."""
    return ", ".join(f"{key} {value}" for key, value in settings.items() if base.get(key) != value) or "as begun with"


def _key(settings: Settings) -> tuple[tuple[str, Any], ...]:
    return tuple(sorted(settings.items(), key=lambda pair: pair[0]))


def _forms(base: Settings, *, flash: bool) -> list[Settings]:
    forms = [base | form for form in (*FORMS, *(FLASH if flash else ()))]
    if base["padding"] == "max_length":  # one shape already
        forms = [form | {"padding": "max_length", "sampling": "random"} for form in forms]
    return list({_key(form): form for form in forms}.values())


def _best_forms(tried: Sequence[Record], base: Settings) -> list[Record]:
    own = ("compile", "padding", "sampling", "attention")
    of_forms = [r for r in tried if all(r["settings"][key] == base[key] for key in base if key not in own)]
    return sorted((r for r in of_forms if samples_per_s(r)), key=samples_per_s, reverse=True)[:KEPT]


def _changed(tried: Sequence[Record], base: Settings, batches: Sequence[int]) -> list[Settings]:
    sizes = [{"batch_size": size} for size in batches if size != base["batch_size"]]
    return [form["settings"] | change for form in _best_forms(tried, base) for change in (*CHANGES, *sizes)]


def _together(tried: Sequence[Record], base: Settings) -> list[Settings]:
    """Every change that was faster than its form, taken together; of two values of a setting the faster one."""
    wanted, forms = [], _best_forms(tried, base)
    for form in forms:
        best: dict[str, tuple[float, Any]] = {}
        for record in tried:
            differs = {k: v for k, v in record["settings"].items() if form["settings"][k] != v}
            if len(differs) != 1:
                continue
            [(key, value)] = differs.items()
            speed = samples_per_s(record)
            if key in ("compile", "padding", "sampling", "attention") or speed < FASTER * samples_per_s(form):
                continue
            best[key] = max(best.get(key, (0.0, None)), (speed, value), key=lambda pair: pair[0])
        taken = {key: value for key, (_, value) in best.items()}
        wanted += [other["settings"] | taken for other in forms if len(taken) > 1 or (taken and other is not form)]
    return list({_key(each): each for each in wanted}.values())

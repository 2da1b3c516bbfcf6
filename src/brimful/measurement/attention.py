"""Seconds that attention kernels take on this machine, forward and backward, kept in the user's cache folder."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch

from brimful.core.cache import cache_path, read_cached, write_cached
from brimful.hardware.process_settings import unchanged_random_streams
from brimful.kernels.attention.dispatch import LENGTH_CLASSES, Attention
from brimful.kernels.attention.pattern import Heads, Pattern
from brimful.kernels.layout import PackedShape, Segments, make_segments, map_tensors
from brimful.kernels.precompile import precompiled
from brimful.measurement.peaks import median_seconds

T = TypeVar("T")

#: Numbers of all queries that kernels are timed on: enough for a call to take a device longer than the host.
_TIMED = 65_536 * 768
#: Seconds that timing one kernel may take, and how often all are timed in turns: the first time clocks rise.
_WITHIN_S, _ROUNDS = 0.05, 2
#: Raised when the kernels change, so that old timings are not believed.
_REVISION = 1


def attention_seconds(
    kernels: Sequence[Attention], device: torch.device, dtype: torch.dtype, pattern: Pattern, heads: Heads, length: int
) -> dict[str, float]:
    """Seconds of each kernel, by its name, for mean lengths of the class `length`; from the cache where they are known.

    A kernel that is refused, or finds no memory, is left out, and then nothing is kept: it may do better next time.
    """
    names = [each.__name__ for each in kernels]
    path = cache_path("attention", asked(names, device, dtype, pattern, heads, length))
    known = None if path is None else read_cached(path)
    if (
        known is not None
        and list(known) == names
        and all(isinstance(t, float) and 0 < t < math.inf for t in known.values())
    ):
        return known
    found: dict[str, float] = {}
    with precompiled():  # those without dropout too: evaluation's, and the equivalence check's
        for each, drawn in itertools.product(kernels, {pattern, replace(pattern, dropout=0.0)}):
            _unless_refused(device, partial(_call_once, each, device, dtype, drawn, heads, length))
    for _ in range(_ROUNDS):
        for each in kernels:
            seconds = _unless_refused(device, partial(_time, each, device, dtype, pattern, heads, length))
            if seconds is not None:
                found[each.__name__] = min(seconds, found.get(each.__name__, math.inf))
    if path is not None and list(found) == names:
        write_cached(path, found)
    return found


def asked(
    names: list[str], device: torch.device, dtype: torch.dtype, pattern: Pattern, heads: Heads, length: int
) -> list[Any]:
    """All that the seconds depend on."""
    import triton

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    versions = [torch.__version__, torch.version.cuda, triton.__version__, _REVISION]
    deterministic = torch.are_deterministic_algorithms_enabled()
    return [name, versions, names, str(dtype), repr(pattern), repr(heads), length, deterministic]


def _unless_refused(device: torch.device, work: Callable[[], T]) -> T | None:
    """Run `work` with gradients and leave the random generators unchanged; None if its kernel is refused here.

    What is freed is the device's again: what comes next looks at how much there is.
    """
    from triton.errors import TritonError

    try:
        with unchanged_random_streams([device] if device.type == "cuda" else []), torch.enable_grad():
            return work()  # dropout draws from the generator that a run's own draws come from
    except torch.AcceleratorError:  # the device failed, and would at whatever comes next
        raise
    except (RuntimeError, TritonError):
        return None
    finally:
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _time(
    attend: Attention, device: torch.device, dtype: torch.dtype, pattern: Pattern, heads: Heads, length: int
) -> float:
    """Seconds of a forward and a backward pass over sequences of one length in the middle of the class."""
    count = max(1, _TIMED // (heads.queries * heads.size) // _middle(length))
    call = _passes(attend, device, dtype, pattern, heads, length, count)
    return median_seconds(device, call, within_s=_WITHIN_S, replayed=False)


def _call_once(
    attend: Attention, device: torch.device, dtype: torch.dtype, pattern: Pattern, heads: Heads, length: int
) -> None:
    _passes(attend, device, dtype, pattern, heads, length, count=1)()


def _middle(length: int) -> int:
    """Of a class of lengths."""
    edges = (0, *LENGTH_CLASSES, 2 * LENGTH_CLASSES[-1])
    return (edges[length] + edges[length + 1]) // 2


def _passes(
    attend: Attention, device: torch.device, dtype: torch.dtype, pattern: Pattern, heads: Heads, length: int, count: int
) -> Callable[[], None]:
    """A forward and a backward pass over `count` sequences of one length in the middle of the class."""
    each = _middle(length)
    shape = PackedShape(num_tokens=count * each, num_slots=count, max_length=each, typical_length=each)
    segments: Segments = map_tensors(make_segments([each] * count, shape), lambda x: x.to(device))
    random = torch.Generator(device).manual_seed(0)
    q, k, v = (
        torch.randn(count * each, number, heads.size, device=device, dtype=dtype, generator=random).transpose(0, 1)
        for number in (heads.queries, heads.keys, heads.keys)
    )
    for leaf in (q, k, v):
        leaf.requires_grad_(True)

    def call() -> None:
        out = attend(q, k, v, segments, pattern)
        torch.autograd.grad(out, (q, k, v), out.detach())

    return call

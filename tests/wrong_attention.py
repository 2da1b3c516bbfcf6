"""Attention that is wrong, one way each: what the equivalence check must refuse in every precision, on any device."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from brimful.kernels.attention.dispatch import Attention, reference_attention
from brimful.kernels.attention.pattern import Pattern
from brimful.kernels.layout import Segments

Change = Callable[[Attention], Attention]


def changed_pattern(**changes: Any) -> Change:
    """Attention with another pattern. changes: values, or functions of the value."""

    def change(attend: Attention) -> Attention:
        def run(q: Tensor, k: Tensor, v: Tensor, segments: Segments, pattern: Pattern) -> Tensor:
            new = {name: to(getattr(pattern, name)) if callable(to) else to for name, to in changes.items()}
            return attend(q, k, v, segments, dataclasses.replace(pattern, **new))

        return run

    return change


def blind(_: Attention) -> Attention:
    """Attention across the sequences of a row."""

    def run(q: Tensor, k: Tensor, v: Tensor, segments: Segments, pattern: Pattern) -> Tensor:
        one = dataclasses.replace(segments, segment_T=torch.zeros_like(segments.segment_T))
        return reference_attention(q, k, v, one, pattern)

    return run


def gradient_lost(*tensors: str) -> Change:
    """Attention that gives some of its inputs no gradient."""

    def change(attend: Attention) -> Attention:
        def run(q: Tensor, k: Tensor, v: Tensor, segments: Segments, pattern: Pattern) -> Tensor:
            given = [x.detach() if name in tensors else x for name, x in (("q", q), ("k", k), ("v", v))]
            return attend(*given, segments, pattern)

        return run

    return change


#: Name -> the change, and the family of `tiny.FAMILIES` that it is wrong for.
WRONG: dict[str, tuple[Change, str]] = {
    "blind to segments": (blind, "bert"),
    "causal": (changed_pattern(causal=True), "bert"),
    "not causal": (changed_pattern(causal=False), "llama"),
    "window removed": (changed_pattern(window=None), "modernbert"),
    "window one too wide": (changed_pattern(window=lambda w: w and w + 1), "modernbert"),
    "scale doubled": (changed_pattern(scale=lambda scale: 2 * scale), "bert"),
    "scale a tenth off": (changed_pattern(scale=lambda scale: 1.1 * scale), "bert"),
    "soft cap dropped": (changed_pattern(softcap=None), "gemma2"),
    "bias dropped": (changed_pattern(relative=None), "deberta-v2"),
    "bias of scores dropped": (changed_pattern(relative=None), "mpnet"),
    "gradient of queries lost": (gradient_lost("q"), "bert"),
    "gradient of queries and keys lost": (gradient_lost("q", "k"), "bert"),
    "gradient of values lost": (gradient_lost("v"), "llama"),
}

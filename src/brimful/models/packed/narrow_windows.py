"""Windows of attention that are no wider than the rows of a pass.

Longformer pads every batch to a multiple of its window, 512 tokens as released, and computes all of them. On rows that
half a window covers each token sees all others, and so it does with a window of twice the row: the same logits and
gradient but for the order of sums, of rows of 32 tokens with 64 tokens computed for each, not 512.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

#: Tokens that an attention module sees on either side, and the window of both, an even number or one for each layer, in
#: a configuration, by which the model pads.
_HALF, _WINDOW = "one_sided_attn_window_size", "attention_window"
#: Halves of windows are multiples of it.
_MULTIPLE = 8


class NarrowWindows:
    """The windows of one model."""

    def __init__(self, model: nn.Module) -> None:
        modules: list[Any] = [each for each in model.modules() if isinstance(getattr(each, _HALF, None), int)]
        self._modules = modules
        configs = {id(config): config for each in model.modules() if (config := getattr(each, "config", None))}
        self._configs = [config for config in configs.values() if modules and hasattr(config, _WINDOW)]
        self._narrowest = min((getattr(each, _HALF) for each in modules), default=0)

    def plain_length(self, length: int) -> int:
        """Tokens that the model itself computes of a row of so many, by its own windows."""
        window = 2 * max((getattr(each, _HALF) for each in self._modules), default=0)
        return -(-length // window) * window if window else length

    @contextmanager
    def for_rows(self, length: int) -> Iterator[None]:
        """Within, a pass over rows of so many tokens has windows that cover them and no more, where its own do."""
        half = -(-length // _MULTIPLE) * _MULTIPLE
        if half >= self._narrowest:
            yield
            return
        halves = [getattr(each, _HALF) for each in self._modules]
        windows = [getattr(each, _WINDOW) for each in self._configs]
        try:
            for each in self._modules:
                setattr(each, _HALF, half)
            for config, window in zip(self._configs, windows, strict=True):
                setattr(config, _WINDOW, 2 * half if isinstance(window, int) else [2 * half] * len(window))
            yield
        finally:
            for each, was in zip(self._modules, halves, strict=True):
                setattr(each, _HALF, was)
            for config, window in zip(self._configs, windows, strict=True):
                setattr(config, _WINDOW, window)

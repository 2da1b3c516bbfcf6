"""Windows of attention that are no wider than the rows of a pass.

Longformer pads every batch to a multiple of its window, 512 tokens as released, and computes all of them. On rows that
half a window covers each token sees all others, and so it does with a window of twice the row: the same logits and
gradient but for the order of sums, of rows of 32 tokens with 64 tokens computed for each, not 512.
"""

from __future__ import annotations

import copy
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
    """The windows of one model, as they are when this is made: passes end with these."""

    def __init__(self, model: nn.Module) -> None:
        modules: list[Any] = list(model.modules())
        self._halves = [(each, half) for each in modules if isinstance(half := getattr(each, _HALF, None), int)]
        configured = [(each, each.config) for each in modules if hasattr(getattr(each, "config", None), _WINDOW)]
        self._configs = configured if self._halves else []
        self._narrowest = min((half for _, half in self._halves), default=0)

    def plain_length(self, length: int) -> int:
        """Tokens that the model itself computes of a row of so many, by its own windows."""
        window = 2 * max((half for _, half in self._halves), default=0)
        return -(-length // window) * window if window else length

    @contextmanager
    def for_rows(self, length: int) -> Iterator[None]:
        """Within, a pass over rows of so many tokens has windows that cover them and no more, where its own do.

        So has a layer that is recomputed once the pass is over, within a block of its own.
        """
        half = -(-length // _MULTIPLE) * _MULTIPLE
        if half >= self._narrowest or all(getattr(each, _HALF) == half for each, _ in self._halves):
            yield
            return
        try:
            for each, _ in self._halves:
                setattr(each, _HALF, half)
            for each, config in self._configs:
                each.config = _narrowed(config, 2 * half)
            yield
        finally:
            for each, own in self._halves:
                setattr(each, _HALF, own)
            for each, config in self._configs:
                each.config = config


def _narrowed(config: Any, window: int) -> Any:
    """A configuration that differs in its windows. Other models may have the same object: it is left alone."""
    narrowed, own = copy.copy(config), getattr(config, _WINDOW)
    setattr(narrowed, _WINDOW, window if isinstance(own, int) else [window] * len(own))
    return narrowed

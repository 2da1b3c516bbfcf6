"""Buffers of a model, such as running statistics, as they were before a pass that does not count."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


def state_buffers(model: nn.Module) -> Iterator[Tensor]:
    """Yield the buffers that are part of a model's state: others of transformers' are constants, such as masks."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield buffer


@contextmanager
def put_back(
    buffers: Iterable[Tensor], when: Callable[[BaseException | None], bool] = lambda _: True
) -> Iterator[None]:
    """Copy buffers, and put them back after the block: one that changes need not say so.

    when: asked with what the block raised, None where it ended.
    """
    copies = [(buffer, buffer.clone()) for buffer in buffers if not buffer.is_inference()]
    raised: BaseException | None = None
    try:
        yield
    except BaseException as error:
        raised = error
        raise
    finally:
        if when(raised):
            with torch.no_grad():
                for buffer, value in copies:
                    buffer.copy_(value)

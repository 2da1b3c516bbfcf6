"""Buffers of a model, such as running statistics, as they were before a pass that does not count."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

#: A module's buffers, and the name of one of them.
Place = tuple[dict[str, Tensor | None], str]


def buffers_of(model: nn.Module) -> Iterator[Place]:
    """Yield the places of a model's buffers."""
    for module in model.modules():
        for name in module._buffers:
            yield module._buffers, name


def state_buffers(model: nn.Module) -> Iterator[Place]:
    """Yield those that are part of a model's state: others of transformers' are constants, such as masks."""
    for module in model.modules():
        for name in module._buffers.keys() - module._non_persistent_buffers_set:
            yield module._buffers, name


@contextmanager
def put_back(places: Iterable[Place], when: Callable[[BaseException | None], bool] = lambda _: True) -> Iterator[None]:
    """Copy buffers, and put them back after the block: those that it wrote, and those that it replaced.

    when: asked with what the block raised, None where it ended.
    """
    there = [(holder, name, holder[name]) for holder, name in places]
    copies = {id(each): (each, each.clone()) for *_, each in there if each is not None and not each.is_inference()}
    raised: BaseException | None = None
    try:
        yield
    except BaseException as error:
        raised = error
        raise
    finally:
        if when(raised):
            with torch.no_grad():
                for buffer, value in copies.values():
                    buffer.copy_(value)
            for holder, name, found in there:
                holder[name] = found

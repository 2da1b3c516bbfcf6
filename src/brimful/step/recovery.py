"""When memory runs out: the same work again, in smaller micro-batches. The result is the same up to the order of sums.

What the failed attempt has left is dropped, captured graphs and torch's cache with it; then the token budget is halved
until the work fits. Where larger micro-batches fitted before, or one is a single row already, the work is tried once
more with what was freed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar

import torch

from brimful.core.errors import MemoryFullError, first_line
from brimful.core.records import OutOfMemory, Work
from brimful.core.units import bytes_text
from brimful.hardware.memory import CaptureMemoryError, allowed_bytes, free_bytes, is_out_of_memory, release_unused

T = TypeVar("T")

#: Bytes under a limit that hardly any step does with.
_LITTLE = 256 << 20
_HINT = "lower --max-length, or end what else is in this memory"
#: Called for what to do where memory does not suffice; None where no lever is known.
HintOf = Callable[[], str | None]


class Budget(Protocol):
    """The token budget of some work that can be done in micro-batches."""

    @property
    def most_tokens(self) -> int:
        """Of a micro-batch."""
        ...

    @property
    def captures(self) -> bool:
        """True while what comes again is captured."""
        ...

    def abandon(self) -> bool:
        """Drop what an attempt has left; False if the work must not be done again."""
        ...

    @property
    def has_fitted(self) -> bool:
        """True if work with larger micro-batches fitted before: then what is kept is in the way, not their size."""
        ...

    def halve(self, *, in_capture: bool) -> bool:
        """Make it smaller; False if it cannot be. in_capture: whether memory ran out while a graph was captured."""
        ...


def until_it_fits(
    work: Callable[[], T], budget: Budget, device: torch.device, hear: Callable[[OutOfMemory], None], *,
    where: Work, batch: int | None = None, remedy: HintOf | None = None,
) -> T:  # fmt: skip
    """Return what `work` returns, done again with half the budget for as long as memory runs out.

    hear: called once the work is done, if memory ran out on the way. batch: number of the batch, in training. remedy:
    called for the hint of an error.
    Raises: MemoryFullError.
    """
    first: OutOfMemory | None = None
    captured, attempts = budget.captures, 0
    while True:
        try:
            result = work()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            attempts += 1
            in_capture, said, free = isinstance(error, CaptureMemoryError), first_line(error), free_bytes(device)
        else:
            if first is not None:
                eager = captured and not budget.captures
                hear(replace(first, tokens_after=budget.most_tokens, eager=eager))
            return result
        # The error is gone by now, and the tensors that its frames held.
        tokens = budget.most_tokens
        first = first or OutOfMemory(
            where="capture" if in_capture else where,
            batch=batch,
            tokens_before=tokens,
            tokens_after=tokens,
            free_bytes=free,
        )
        again = budget.abandon()
        release_unused(device)
        if not again:
            raise _updating_failed(first, said)
        if attempts == 1 and budget.has_fitted and not in_capture:
            continue  # what was freed may be enough
        if not budget.halve(in_capture=in_capture) and attempts > 1:  # the same
            raise _nothing_smaller(first, tokens, said, _hint(allowed_bytes(device), remedy, _HINT))


@dataclass(frozen=True, kw_only=True)
class OutOfMemoryLog:
    """Hears each time that memory ran out: says it, and keeps it for the record."""

    warn: Callable[[str], None]
    found: list[OutOfMemory] = field(default_factory=list)

    def __call__(self, found: OutOfMemory) -> None:
        self.found.append(found)
        self.warn(out_of_memory_text(found))


@contextmanager
def whole_model_fits(device: torch.device, remedy: HintOf | None = None) -> Iterator[None]:
    """Within, weights and optimizer states are put on a device. remedy: called for an error's hint.

    Raises: MemoryFullError.
    """
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        free = bytes_text(free_bytes(device))
        raise MemoryFullError(
            f"the model and what training keeps of it do not fit: {free} were free ({first_line(error)})",
            hint=_hint(allowed_bytes(device), remedy, "end what else is in this memory, or take a smaller model"),
        ) from error


def _hint(allowed: int | None, remedy: HintOf | None, otherwise: str) -> str:
    """The remedy: a higher limit where it leaves torch hardly anything. allowed: bytes that a limit leaves torch, None
    where there is none."""
    if allowed is None or allowed >= _LITTLE:
        return (remedy() if remedy is not None else None) or otherwise
    several = torch.distributed.is_available() and torch.distributed.is_initialized()
    of_nccl = "; NCCL takes some 1.2 GB, once processes send to one another" if several else ""
    return (
        f"give --memory-limit more: it leaves torch {bytes_text(allowed)} beside what this process takes of itself, as"
        f" driver and libraries do{of_nccl}"
    )


def out_of_memory_text(found: OutOfMemory) -> str:
    """Return what happened, and what follows from it, as one sentence."""
    began = f"memory ran out in {_place(found)}, with {bytes_text(found.free_bytes)} free:"
    if found.eager:
        return f"{began} no graph of it fits, and kernels are launched one by one from here on"
    if found.tokens_after == found.tokens_before:
        return f"{began} captured graphs and what torch keeps were given back, and that was enough"
    same = "answers are" if found.batch is None else "the gradient of a batch is"
    return (
        f"{began} micro-batches have at most {found.tokens_after:,} tokens from here on, {found.tokens_before:,} until"
        f" now; {same} the same up to the order of sums"
    )


def _place(found: OutOfMemory) -> str:
    names: dict[Work, str] = {"check": "the check", "capture": "the capture", "step": "the step"}
    name = names.get(found.where, found.where)
    return name if found.batch is None else f"{name} of batch {found.batch:,}"


def _nothing_smaller(found: OutOfMemory, tokens: int, said: str, hint: str) -> MemoryFullError:
    """The error of what cannot be made smaller."""
    return MemoryFullError(
        f"memory ran out in {_place(found)}, and micro-batches of {tokens:,} tokens cannot be split any further;"
        f" {bytes_text(found.free_bytes)} were free ({said})",
        hint=hint,
    )


def _updating_failed(found: OutOfMemory, said: str) -> MemoryFullError:
    return MemoryFullError(
        f"memory ran out in {_place(found)} while weights were being changed, or other processes went on ({said})",
        resumable=False,
        hint="go on from the last checkpoint with --resume, and a lower --token-budget if it happens again",
    )

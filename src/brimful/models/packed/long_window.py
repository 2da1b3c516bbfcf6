"""Windows of attention of hundreds of tokens and more, made short in the equivalence check's copy of a model.

The check computes rows longer than the window, whose reference grows with the square of their tokens: minutes on a CPU
for a window of 4,096. So its copy gets a window of 16 tokens, which a difference of one token shows in more than it
does in thousands. It is set wherever the real one is kept as `sliding_window`: in the configuration, and in modules
that took it from there. That stands for the real window if

    calls correspond          packed attention is given the short window in the calls that have the real one, and calls
                              without a window and all else are the same
    the plain model obeys     its logits change with the window, or do not where no call has one
    rows are independent      at the real window too: a short text beside one that exceeds it

Otherwise, and where rows of the copy are not independent, the check is made at the real window. Where the copy passes,
the real window is set again, and a text that exceeds it, or is as long as texts may be, is computed once packed, in
fp32, behind others; and each kernel is tried on it, call by call.

Copies that are computed for something else, for what the host reads or how layers are cut, have the short window alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from brimful.core.tolerances import TOLERANCES
from brimful.kernels.attention.dispatch import Attention
from brimful.kernels.attention.pattern import Pattern
from brimful.kernels.layout import PackedInputs, Segments, map_tensors
from brimful.models.packed.check_inputs import BEYOND, Kernel, filled_row, padded_rows, random_sequences
from brimful.models.packed.family_forms import has_form, recurrent_layers, uses_attention_interface
from brimful.models.packed.packed_forward import PackedForm, PackedModel, PaddedModel
from brimful.models.packed.tried_row import TriedRow, relative_error

#: Tokens of the short window.
SHORT = 16
#: Tokens of the longest sequence with which a check takes a second or two.
QUICK = 300
#: Tokens of the sequence beside one that exceeds the window.
_BESIDE = 17
_NAME = "sliding_window"


@dataclass(frozen=True, kw_only=True)
class LongWindow:
    """The window of a model, `real` tokens, and who keeps it.

    sequences: a short one, one of a quarter of the window, and one that exceeds it as far as the model's own do, which
    so begins deep in a packed row. plain: their logits.
    """

    small: Any
    real: int
    owners: tuple[Any, ...]
    sequences: list[np.ndarray]
    plain: Tensor

    @classmethod
    def of(cls, small: Any, max_length: int) -> LongWindow | None:
        """Return the window of a model in eval mode on the CPU. None where the check is made as the model is: without a
        window, with one that is tried quickly, and where the short one does not stand for it."""
        real = getattr(small.config.get_text_config(), _NAME, None)
        if not isinstance(real, int) or min(real + BEYOND, max_length) <= QUICK:
            return None
        if has_form(small.config) or recurrent_layers(small.config) or not uses_attention_interface(small):
            return None
        try:
            owners = _owners(small, real)
            if not _is_shown_by_short(small, owners, real):
                return None
            lengths = [_BESIDE, min(max(real // 4, QUICK), max_length), min(real + BEYOND, max_length)]
            sequences = random_sequences(small.config, lengths)
            short, middle, long = sequences
            beside = _plain(small, [short, long])
            if not relative_error(beside[:1], _plain(small, [short])) <= TOLERANCES["fp32"].logits:
                return None
            plain = torch.cat([beside[:1], _plain(small, [middle]), beside[1:]])
        except Exception:  # of a model's own code: the check itself says what
            return None
        return cls(small=small, real=real, owners=owners, sequences=sequences, plain=plain)

    def short(self) -> AbstractContextManager[None]:
        """Within, the window is short."""
        return _short(self.owners, self.real)

    def forward_error(self, form: PackedForm) -> float:
        """Relative error of packed logits in fp32 on the CPU, at the real window. The model is left in eval mode."""
        with torch.no_grad():
            packed = PackedModel(self.small.to("cpu").eval(), form, plain=True)
            found = packed(filled_row(self.sequences, self.small.config)).logits[: len(self.sequences)]
        return relative_error(found, self.plain)

    def kernel_error(self, form: PackedForm, kernel: Kernel, precision: str, device: torch.device) -> tuple[float, str]:
        """Error of each kernel on the sequences, call by call, in units of its tolerance, and where the worst is.

        Two heads of queries stand for all: the short window tells of them.
        """
        config = self.small.config
        row = filled_row(random_sequences(config, [SHORT + BEYOND]), config, kernel)
        tried = TriedRow(form=form, row=row, num_tokens=0, plain=torch.empty(0), gradient=[], precision=precision)
        long = map_tensors(filled_row(self.sequences, config, kernel), lambda tensor: tensor.to(device))
        assert isinstance(long, PackedInputs)
        calls = tried.attention_calls(self.small.to(device)).on(long.segments)
        return calls.error(sum(map(len, self.sequences)), precision)


def shorten_window(small: Any, max_length: int) -> None:
    """Make a window of hundreds of tokens and more short, for good, in a copy in eval mode on the CPU that is computed
    for what its code does at a row longer than its window, wherever the real one is kept. Not where the plain model's
    logits do not change with it: what looks at the window is then elsewhere."""
    real = getattr(small.config.get_text_config(), _NAME, None)
    if not isinstance(real, int) or min(real + BEYOND, max_length) <= QUICK:
        return
    with suppress(Exception):  # of a model's own code, which whoever asked for the copy meets, too
        [sequence] = random_sequences(small.config, [SHORT + BEYOND])
        owners, logits = _owners(small, real), _plain(small, [sequence])
        with _short(owners, real):
            error = relative_error(_plain(small, [sequence]), logits)
        if error > TOLERANCES["fp32"].logits:
            for owner in owners:
                object.__setattr__(owner, _NAME, SHORT)


def _is_shown_by_short(small: Any, owners: Sequence[Any], real: int) -> bool:
    """Return whether the short window stands for the real one: calls correspond, and the plain model obeys."""
    [sequence] = random_sequences(small.config, [SHORT + BEYOND])
    logits, calls = _plain(small, [sequence]), _calls(small, sequence)
    with _short(owners, real):
        short_logits, short_calls = _plain(small, [sequence]), _calls(small, sequence)
    if short_calls != [replace(call, window=call.window and SHORT) for call in calls]:
        return False
    if all(call.window is None for call in calls):
        return torch.equal(short_logits, logits)
    return relative_error(short_logits, logits) > TOLERANCES["fp32"].logits


@contextmanager
def _short(owners: Sequence[Any], real: int) -> Iterator[None]:
    """Within, these have the short window."""
    for owner in owners:
        object.__setattr__(owner, _NAME, SHORT)
    try:
        yield
    finally:
        for owner in owners:
            object.__setattr__(owner, _NAME, real)


def _plain(small: Any, sequences: Sequence[np.ndarray]) -> Tensor:
    """Logits of the plain model, the sequences in one batch."""
    with torch.no_grad():
        return PaddedModel(small, "eager")(padded_rows(sequences, small.config)).logits


def _calls(small: Any, sequence: np.ndarray) -> list[Pattern]:
    """Calls of attention of the packed model, in their order."""
    calls = list[Pattern]()

    def hear(attend: Attention, qkv: Sequence[Tensor], segments: Segments, pattern: Pattern) -> None:
        calls.append(pattern)

    form = PackedForm(pooling="last", first_position=0)
    with torch.no_grad():
        PackedModel(small, form, plain=True, watch=hear)(filled_row([sequence], small.config))
    return calls


def _owners(small: nn.Module, real: int) -> tuple[Any, ...]:
    """Modules, and configurations of theirs, that keep this window."""
    kept = {id(module): module for module in small.modules()}
    for config in [vars(module)["config"] for module in small.modules() if "config" in vars(module)]:
        kept |= {id(each): each for each in (config, config.get_text_config())}
    return tuple(owner for owner in kept.values() if vars(owner).get(_NAME) == real)

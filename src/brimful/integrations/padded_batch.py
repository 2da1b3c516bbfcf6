"""Padded tensors of a forward call, read and laid out as one packed row.

What is read on the host, in one copy, are ids, mask, token types and positions: the number of real tokens is the shape
of the row. A batch that the packed forward cannot give the plain forward's answer to is refused with the reason.

Legend: B rows, L columns of the padded batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from brimful.kernels.layout import PackedInputs, PackedShape, pack_numbers, packed_inputs
from brimful.models.packed.packed_forward import PackedForm, has_token_types, padding_id_of

#: Positions of a row that is padded on the left, where the model is given none: of the column, or counted from its
#: first token on.
LeftPositions = Literal["columns", "counted"]
#: Tokens of a packed row on a GPU are a multiple of this: products of such sizes reach the matrix units' full rate.
_MULTIPLE = {"cuda": 64, "cpu": 1}


def _step_of(num_tokens: int) -> int:
    """Tokens from one shape to the next: at most a sixteenth of the row is not used, and a loop has a dozen shapes."""
    return max(_MULTIPLE["cuda"], 1 << max(0, (num_tokens - 1).bit_length() - 5))


class CannotPackError(Exception):
    """A batch whose plain answer no packed row gives. Its message is the reason."""


def _without_numbers(ids_BL: Tensor) -> str | None:
    """Return why the numbers of a call cannot be read, or must not be: what is made of it is to hold for others."""
    if torch._C._is_tracing():
        return "torch.jit traces the call, and a packed row has the example's shape"
    if torch.compiler.is_exporting() or isinstance(ids_BL, FakeTensor) or ids_BL.is_meta:
        return "the call is exported, or of tensors without numbers"
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return "torch.func transforms the call"
    return None


@dataclass(frozen=True, kw_only=True)
class PaddedBatch:
    """Rows of a padded batch on the host. types_BL, positions_BL: None where the call had none.

    mask_BL: True at tokens, one run of them in each row.
    """

    ids_BL: np.ndarray
    mask_BL: np.ndarray
    types_BL: np.ndarray | None
    positions_BL: np.ndarray | None

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> PaddedBatch:
        """Read the tensors of a call, waiting for their device once. Raises: CannotPackError."""
        ids_BL = given.get("input_ids")
        if not isinstance(ids_BL, Tensor) or ids_BL.ndim != 2 or not ids_BL.numel():
            raise CannotPackError("input_ids are not rows of tokens")
        if (why := _without_numbers(ids_BL)) is not None:
            raise CannotPackError(why)
        names = ("attention_mask", "token_type_ids", "position_ids")
        others = {name: given[name] for name in names if given.get(name) is not None}
        for name, value in others.items():
            whole = isinstance(value, Tensor) and not value.is_floating_point()
            if not whole or value.shape[-1:] != ids_BL.shape[1:] or value.ndim > 2:
                raise CannotPackError(f"{name} is not a whole number for each token")
        each = [ids_BL, *(value.to(ids_BL).expand_as(ids_BL) for value in others.values())]
        host = dict(zip(("input_ids", *others), torch.stack(each).cpu().numpy(), strict=True))
        mask_BL = host.get("attention_mask", np.ones_like(host["input_ids"]))
        if not ((mask_BL == 0) | (mask_BL == 1)).all():
            raise CannotPackError("attention_mask has other numbers than 0 and 1")
        batch = cls(
            ids_BL=host["input_ids"],
            mask_BL=mask_BL.astype(bool),
            types_BL=host.get("token_type_ids"),
            positions_BL=host.get("position_ids"),
        )
        batch._require_runs()
        unmasked = batch.positions_BL if "attention_mask" not in others else None
        if unmasked is not None and (unmasked != np.arange(ids_BL.shape[1])).any():
            raise CannotPackError("without an attention_mask, position_ids may say where sequences end")
        return batch

    def _require_runs(self) -> None:
        if not self.lengths_B.all():
            raise CannotPackError("a row has no tokens")
        length = self.mask_BL.shape[1]
        ends_B = length - self.mask_BL[:, ::-1].argmax(axis=1)
        if (ends_B - self.starts_B != self.lengths_B).any():
            raise CannotPackError("attention_mask leaves out tokens between others")

    @cached_property
    def lengths_B(self) -> np.ndarray:
        """Tokens of each row."""
        counts: np.ndarray = self.mask_BL.sum(axis=1)
        return counts

    @cached_property
    def starts_B(self) -> np.ndarray:
        """Column of each row's first token."""
        columns: np.ndarray = self.mask_BL.argmax(axis=1)
        return columns

    @property
    def padded_on_the_left(self) -> bool:
        """True if some row does not begin in the first column."""
        return bool(self.starts_B.any())

    def require_pooling(self, config: Any, form: PackedForm, *, masked: bool) -> None:
        """Raise CannotPackError where the plain head reads a place that is not of the sequence.

        masked: whether the call had an attention_mask.
        """
        padding_id = getattr(config.get_text_config(), "pad_token_id", None)
        if form.pooling == "first" and self.padded_on_the_left:
            raise CannotPackError("rows are padded on the left, and the model's head reads the first column")
        if form.pooling == "last" and not isinstance(padding_id, int):
            raise CannotPackError("the model's configuration has no pad_token_id")
        if form.pooling == "last" and (self.ids_BL[~self.mask_BL] != padding_id).any():
            raise CannotPackError("masked tokens are not pad_token_id, by which the head finds the last token")
        if form.pooling == "last" and self.padded_on_the_left and (self._real_BL(padding_id).sum(axis=1) == 0).any():
            raise CannotPackError("a row has nothing but padding tokens")
        if not masked and isinstance(padding_id, int) and (self.ids_BL == padding_id).any():
            raise CannotPackError("there are padding tokens and no attention_mask; a tokenizer returns one")

    def _real_BL(self, padding_id: Any) -> np.ndarray:
        real: np.ndarray = self.mask_BL & (self.ids_BL != padding_id)
        return real

    def pack(
        self, config: Any, form: PackedForm, device_type: str, *, groups: bool, typical_length: int | None = None,
        left: LeftPositions | None = None,
    ) -> tuple[PackedInputs, Tensor | None]:  # fmt: skip
        """Lay the rows out in one packed row, on the host; return it and the positions of its tokens.

        Positions are None where they are those that the packed forward counts. groups, typical_length: as of
        `PackedLayout`. left: as the model numbers a row that is padded on the left. Raises: CannotPackError.
        """
        rows = range(len(self.ids_BL))
        shape = self._shape(_MULTIPLE[device_type], typical_length)
        inputs = packed_inputs(
            [self.ids_BL[row, self.mask_BL[row]] for row in rows],
            shape,
            padding_id=padding_id_of(config),
            types=self._types(config),
            groups=groups,
        )
        return inputs, self._positions_T(form, shape.num_tokens, left)

    def numbers(
        self, config: Any, form: PackedForm, *, pinned: bool, typical_length: int | None, left: LeftPositions | None
    ) -> tuple[Tensor, PackedShape, bool]:
        """Lay the rows out in one packed row of one of few shapes; return it as one int32 tensor on the host.

        Returned, too: its shape, and whether the positions of its tokens come last. Raises: CannotPackError.
        """
        shape = self._shape(_step_of(int(self.lengths_B.sum())), typical_length)
        types = self._types(config)
        numbers = pack_numbers(
            self.ids_BL[self.mask_BL], self.lengths_B, shape, padding_id=padding_id_of(config),
            types=None if types is None else np.concatenate(types), pinned=pinned,
        )  # fmt: skip
        positions_T = self._positions_T(form, shape.num_tokens, left)
        if positions_T is not None:
            numbers = torch.cat([numbers, positions_T.int()])
        return numbers, shape, positions_T is not None

    def _shape(self, multiple: int, typical_length: int | None) -> PackedShape:
        """The shape of the packed row. multiple: of which its tokens are one."""
        longest = int(self.lengths_B.max())
        return PackedShape(
            num_tokens=-(-int(self.lengths_B.sum()) // multiple) * multiple,
            num_slots=len(self.ids_BL),
            max_length=1 << (longest - 1).bit_length(),
            typical_length=typical_length,
        )

    def _types(self, config: Any) -> list[np.ndarray] | None:
        """Token types of each row, None where the model is to be given none."""
        if not has_token_types(config):
            if self.types_BL is not None and self.types_BL.any():
                raise CannotPackError("the model is given token_type_ids that it is not known to read")
            return None
        types_BL = self.types_BL
        if types_BL is None:
            if getattr(config, "type_vocab_size", None) is None:
                return None  # types are words, and none is added
            types_BL = np.zeros_like(self.ids_BL)
        return [types[mask] for types, mask in zip(types_BL, self.mask_BL, strict=True)]

    def _positions_T(self, form: PackedForm, num_tokens: int, left: LeftPositions | None) -> Tensor | None:
        positions_BL = self.positions_BL
        if positions_BL is None:
            if not self.padded_on_the_left or left != "columns" or form.skips_padding:
                return None
            positions_BL = np.broadcast_to(np.arange(self.ids_BL.shape[1]) + form.first_position, self.ids_BL.shape)
        positions_T = np.zeros(num_tokens, dtype=np.int64)
        found = positions_BL[self.mask_BL]
        positions_T[: len(found)] = found
        return torch.from_numpy(positions_T)

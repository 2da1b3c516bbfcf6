"""Copies in a packed pass over rows that leave nothing to pack: no more than on padded rows."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from brimful.kernels.layout import PackedShape, packed_inputs
from brimful.models.packed.packed_forward import PackedForm, PackedModel
from plain import padded
from tiny import FAMILIES, sequences

LENGTHS = [24] * 4
#: Operators that copy what they are given, or zeros with it in them.
COPIES = {"clone", "copy_", "select_backward", "slice_backward", "index_select", "index_add", "cat"}


class _Copied(TorchDispatchMode):
    """Counts numbers that are copied within."""

    numbers = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        if function._overloadpacket.__name__ in COPIES:
            self.numbers += out.numel()
        return out


@pytest.mark.parametrize("name", ["bert", "modernbert", "mistral"])
def test_no_more_is_copied_than_on_padded_rows(name: str) -> None:
    model, family = FAMILIES[name].model().train(), FAMILIES[name]
    plain = copy.deepcopy(model)
    shape = PackedShape(num_tokens=sum(LENGTHS), num_slots=len(LENGTHS), max_length=24)
    row = packed_inputs(sequences(LENGTHS), shape, padding_id=1, groups=True)
    run = PackedModel(model, PackedForm(pooling=family.form.pooling, first_position=family.first_position))
    with _Copied() as packed:
        run(row).logits.sum().backward()
    with _Copied() as of_rows:
        plain(**padded(sequences(LENGTHS), None, 1)).logits.sum().backward()
    of_head = 3 * 24 * 4 * model.config.hidden_size  # states of first or last tokens are gathered, and put back
    assert packed.numbers <= of_rows.numbers + of_head

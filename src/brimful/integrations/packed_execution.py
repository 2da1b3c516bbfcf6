"""One packed pass that answers as the model's own forward does, with its own head, and the loss of that head."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.loss.loss_utils import ForSequenceClassificationLoss

from brimful.core.tolerances import TOLERANCES
from brimful.engine.sequence_lengths import DEFAULT_MAX_LENGTH
from brimful.hardware.process_settings import matmul_precision
from brimful.integrations.module_hooks import PLACES
from brimful.integrations.padded_batch import LeftPositions, PaddedBatch
from brimful.kernels.forward_context import ForwardContext, active_context
from brimful.models.packed.check_inputs import make_sequences, one_layer_of_each_kind, wake
from brimful.models.packed.packed_forward import PackedForm, PackedModel, PaddedModel, padding_id_of
from brimful.models.packed.training_check import without_dropout
from brimful.models.packed.tried_row import relative_error


class PackedExecution(PackedModel):
    """A packed pass that answers as the model's own forward does. own_class: the model's, where it has another one."""

    def __init__(self, model: Any, form: PackedForm, own_class: type[Any] | None = None) -> None:
        configs = {id(c): c for c in (getattr(module, "config", None) for module in model.modules()) if c is not None}
        configs[id(model.config)] = model.config
        self._own = [(config, config._attn_implementation) for config in configs.values() if _has_attention(config)]
        super().__init__(model, form)
        self._head.__class__ = own_class or type(model)  # a copy: calls of the model itself go on through its class
        vars(self._head).pop("forward", None)
        for name in PLACES:
            setattr(self._head, name, type(getattr(self._head, name))())  # the model's own call runs them
        self._in_row = [(config, config._attn_implementation) for config, _ in self._own]
        self._checkpointable: list[Any] = [m for m in model.modules() if hasattr(m, "gradient_checkpointing")]
        self._positions, self._arguments, self._found = None, {}, None
        self.attend(None)

    _positions: Tensor | None
    _arguments: dict[str, Any]
    _found: Any

    @property
    def takes_positions(self) -> bool:
        """True if the base model reads position_ids."""
        return self._takes_positions

    @property
    def recomputed_elsewhere(self) -> bool:
        """True where layers are recomputed that must be told of the row."""
        return self._family is not None and self.recomputes

    @property
    def recomputes(self) -> bool:
        """True if layers are computed again in the backward pass."""
        layers = any(module.gradient_checkpointing for module in self._checkpointable)
        return layers and bool(self.model.training) and torch.is_grad_enabled()

    def attend(self, row: Any) -> None:
        """Have layers attend as on a packed row, or with None as the model's own forward has them."""
        for config, name in self._own if row is None else self._in_row:
            config._attn_implementation = name

    def outputs(self, inputs: Any, positions_T: Tensor | None, arguments: Mapping[str, Any]) -> Any:
        """Return what the model's own forward returns. arguments: labels, and others of the head."""
        self._positions, self._arguments, self._found = positions_T, dict(arguments), None
        now = [(config, config._attn_implementation) for config, _ in self._own]
        if now != self._in_row:  # as it is in a layer that is recomputed
            self._own = now
        self.attend(inputs)
        try:
            with self._recomputed_in_context(inputs):
                logits = self(inputs).logits
            found = self._found
            if self.form.pooling == "late":  # the head has seen tokens, and labels are of rows
                loss = {"loss": _loss(logits, **arguments, config=self.model.config)} if arguments else {}
                found = type(found)(**loss, logits=logits)
            return found
        finally:
            self._positions, self._arguments, self._found = None, {}, None
            self.attend(None)

    @contextmanager
    def _recomputed_in_context(self, inputs: Any) -> Iterator[None]:
        """Within, layers that are recomputed in the backward pass are so in the context of this one."""
        recomputed = [module for module in self._checkpointable if module.gradient_checkpointing]
        functions = [getattr(module, "_gradient_checkpointing_func", None) for module in recomputed]
        for module, function in zip(recomputed, functions, strict=True):
            module._gradient_checkpointing_func = functools.partial(self._checkpoint, function, module, inputs)
        try:
            yield
        finally:
            for module, function in zip(recomputed, functions, strict=True):
                module._gradient_checkpointing_func = function

    def _checkpoint(self, checkpoint: Any, layer: Any, inputs: Any, function: Any, *arguments: Any) -> Any:
        """Call the layer's own checkpoint of a function, which recomputes it in the context of now."""
        return checkpoint(functools.partial(self._in_context, active_context(), layer, inputs, function), *arguments)

    def _in_context(
        self, context: ForwardContext | None, layer: Any, inputs: Any, function: Any, *arguments: Any
    ) -> Any:
        """Call a function of a layer as in its pass, during it or after: then other calls may have been between."""
        before = [config._attn_implementation for config, _ in self._own]
        self.attend(inputs)
        layer.gradient_checkpointing = False  # this call is the checkpoint
        try:
            with nullcontext() if context is None else context.active():
                return function(*arguments)
        finally:
            layer.gradient_checkpointing = True
            for (config, _), name in zip(self._own, before, strict=True):
                config._attn_implementation = name

    def head(self, states_SH: Tensor) -> Tensor:
        """Logits of pooled states; with labels, where the head is given rows."""
        arguments = {} if self.form.pooling == "late" else self._arguments
        self._found = self.head_outputs(states_SH, **arguments, return_dict=True)
        logits: Tensor = self._found.logits
        return logits

    def _positions_T(self, inputs: Any) -> Tensor:
        return super()._positions_T(inputs) if self._positions is None else self._positions


def _loss(logits: Tensor, *, labels: Tensor | None = None, config: Any, **others: Any) -> Tensor | None:
    """The loss that transformers computes of logits of rows."""
    if labels is None:
        return None
    found: Tensor = ForSequenceClassificationLoss(labels, logits, config, **others)
    return found


def _has_attention(config: Any) -> bool:
    return hasattr(config, "_attn_implementation")


@contextmanager
def no_autocast() -> Iterator[None]:
    """Within, products are in the dtype of their operands."""
    with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
        yield


def find_left_positions(model: Any, form: PackedForm) -> LeftPositions | None:
    """Return how the plain forward numbers rows that are padded on the left; None where no packed row gives its answer.

    Tried on a copy with few layers, in fp32 on the CPU with eager attention.
    """
    small = one_layer_of_each_kind(model).to("cpu", torch.float32).eval()
    wake(small)
    sequences = [ids[:40] for ids in make_sequences(small.config, DEFAULT_MAX_LENGTH)]
    longest, padding_id = max(map(len, sequences)), padding_id_of(small.config)
    ids_BL = np.full((len(sequences), longest), padding_id, dtype=np.int64)
    for row, ids in enumerate(sequences):
        ids_BL[row, longest - len(ids) :] = ids
    mask_BL = np.arange(longest) >= longest - np.array([len(ids) for ids in sequences])[:, None]
    batch = PaddedBatch(ids_BL=ids_BL, mask_BL=mask_BL, types_BL=None, positions_BL=None)
    with torch.no_grad(), matmul_precision("highest"), without_dropout(small):
        plain = PaddedModel(small, "eager").model(
            input_ids=torch.from_numpy(ids_BL), attention_mask=torch.from_numpy(mask_BL.astype(np.int64))
        )
        for left in _LEFT:
            inputs, positions_T = batch.pack(small.config, form, "cpu", groups=True, left=left)
            run = PackedExecution(small, form)
            run.plain = True
            if relative_error(run.outputs(inputs, positions_T, {}).logits, plain.logits) <= TOLERANCES["fp32"].logits:
                return left
    return None


_LEFT: Sequence[LeftPositions] = ("columns", "counted")

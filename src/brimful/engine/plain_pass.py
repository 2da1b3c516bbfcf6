"""Rows of a batch through the plain Hugging Face model, with eager attention on padded rows, dropout off: losses and
gradients by the weights that a step has in memory.

A step is compared before it trains, and the comparison should not need more memory than the training: layers are
recomputed by torch's own checkpointing, as Hugging Face does it, each gradient goes to host memory when it is complete
(all at the end where they are gigabytes, and several times as much is free), and weights that are kept in half
precision are wide a layer at a time. Passes are of half as many tokens as the step's: a token takes twice the bytes in
fp32.

Layers whose weights are streamed are here, too: each comes for its turn, and the update takes its gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from brimful.engine.assemble import Assembled
from brimful.engine.widened_layers import WidenedLayers
from brimful.hardware.memory import device_free_bytes
from brimful.kernels.layout import Inputs, map_tensors, padded_inputs
from brimful.models.packed.layer_calls import as_they_were
from brimful.models.packed.narrow_windows import NarrowWindows
from brimful.models.packed.packed_forward import PaddedModel, padding_id_of
from brimful.models.packed.recompute import all_kept_in, keep_all
from brimful.models.packed.streamed_layers import StreamedLayers
from brimful.models.packed.training_check import without_dropout
from brimful.step.kept_buffers import buffers_of, put_back
from brimful.step.precision import Precision
from brimful.step.step import Probed
from brimful.tasks.task import Task

#: Most tokens that are compared, by device, and most of one row: eager scores grow with the square of a row.
_MOST_TOKENS = {"cuda": 16384, "cpu": 512}
_LONGEST = {"cuda": 1024, "cpu": 512}
#: Fewest rows that are compared, however many tokens the plain model pads each to, where the step takes more.
_FEWEST_ROWS = 4
#: Most tokens of a batch of the plain model, padding counted, by the same reason.
_PLAIN_TOKENS = 4096
#: Fewest bytes of all gradients that may stay on the device, where times as many are free: those of 1.2 billion
#: parameters take seconds to host memory, more than the pass. Fewer would show in the peak of a small run.
_MANY_BYTES, _ROOM = 2 << 30, 6


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Rows of a batch: ids and token types of each, all targets, and weights, if rows have any."""

    ids: Sequence[np.ndarray]
    types: Sequence[np.ndarray] | None
    targets_N: np.ndarray
    weights_N: np.ndarray | None = None

    def some(self, device_type: str, plain_length: Callable[[int], int]) -> Rows:
        """As many of the first as are compared, cut where they are too long; at least one.

        plain_length: tokens that the plain model computes of a row of so many.
        """
        longest, most = _LONGEST[device_type], _MOST_TOKENS[device_type]
        lengths = [min(len(each), longest) for each in self.ids]
        of_step, of_plain = (
            int(np.searchsorted(np.cumsum(each), most, side="right"))
            for each in (lengths, [plain_length(length) for length in lengths])
        )
        count = max(1, min(of_step, max(of_plain, _FEWEST_ROWS)))
        return replace(
            self.first(count),
            ids=[each[:longest] for each in self.ids[:count]],
            types=None if self.types is None else [each[:longest] for each in self.types[:count]],
        )

    def first(self, count: int) -> Rows:
        """So many of the first rows."""
        return Rows(
            ids=self.ids[:count],
            types=None if self.types is None else self.types[:count],
            targets_N=self.targets_N[:count],
            weights_N=None if self.weights_N is None else self.weights_N[:count],
        )


def plain(made: Assembled, rows: Rows, precision: Precision) -> Probed:
    """Compute losses and gradient by the plain model on padded rows, by the fp32 weights of the step in memory.

    Gradients are in host memory, and go there once, where the device has room for all of them meanwhile.
    """
    step, model = made.step, made.model
    streamed: StreamedLayers | None = getattr(model, "streamed_layers", None)
    elsewhere = {id(p) for each in (() if streamed is None else streamed.parameters) for p in each}
    moved = {name for name, p in step.update.named.items() if id(p) in elsewhere}
    taken: dict[str, Tensor] = {}
    names = {id(p): name for name, p in step.update.named.items()}
    halves = {id(p) for p in model.parameters() if not p.requires_grad and p.dtype.itemsize == 2}
    halves = set() if streamed else halves | {id(step.update.named[name]) for name in step.update.halves()}
    widened = WidenedLayers(model, halves, lambda p, g: _take(taken, names[id(p)], g))
    elsewhere |= widened.members
    weights = {name: step.update.weight(name) for name, p in step.update.named.items() if id(p) not in elsewhere}
    weights = {name: w.detach().requires_grad_(True) for name, w in weights.items()}
    task, device = step.task, step.device
    stay = _may_stay(sum(w.nbytes for w in weights.values()), device)
    for name, weight in () if stay else weights.items():
        weight.register_post_accumulate_grad_hook(partial(_take_and_free, taken, name))
    denominator = task.denominator(rows.targets_N, rows.weights_N)
    losses_N = torch.zeros(len(rows.ids), dtype=torch.float64)
    whole = not (made.packing.packed or made.packing.equivalence.independent)
    update = step.update
    with ExitStack() as stack:
        stack.enter_context(put_back(buffers_of(model)))
        for context in (_plain_form(model), without_dropout(model), torch.enable_grad(), _no_kept_casts()):
            stack.enter_context(context)
        stack.enter_context(widened.taking_turns())
        if streamed is not None:
            stack.enter_context(update.undisturbed())
            stack.enter_context(streamed.widened())
        windows = NarrowWindows(model)
        lengths = [windows.plain_length(len(each)) for each in rows.ids]
        for members in [np.arange(len(rows.ids))] if whole else _cut(lengths, made.layout.most_tokens // 2):
            update.before()
            form = _Plain(model, precision, task, denominator)
            rows_R = _plain_losses(form, weights, rows, members, device, elsewhere)
            losses_N[torch.from_numpy(members)] = rows_R.double().cpu()
        for name, weight in weights.items():
            if weight.grad is not None:
                _take_and_free(taken, name, weight)
        if moved:
            found = dict(zip(update.named, update.gradients(gathered=False), strict=True))
            taken |= {name: found[name] for name in moved}
    gradients = (taken.get(name, torch.zeros(p.shape)) for name, p in update.named.items())
    return Probed(losses_N=losses_N, gradients=[g.float() for g in gradients])


class _Plain(nn.Module):
    """The plain model as a module, for its weights to be others, in its forward and its backward pass.

    denominator: of the loss of the whole batch.
    """

    def __init__(self, model: Any, precision: Precision, task: Task, denominator: float) -> None:
        super().__init__()
        self.model, self._padded = model, PaddedModel(model, "eager", plain=True)
        self._precision, self._task, self._denominator = precision, task, denominator

    def forward(self, inputs: Inputs, targets_R: Tensor, weights_R: Tensor | None) -> Tensor:
        """(R,) addends to the loss sum. Their gradient is left in the weights: layers that are recomputed read them."""
        with self._precision.apply():  # of both passes: whoever had products in TF32 before has them so afterwards
            with self._precision.autocast():
                logits_RC = self._padded(inputs).logits
                logits_RC = logits_RC if logits_RC.dtype == torch.float64 else logits_RC.float()
                rows_R: Tensor = self._task.loss_rows_S(logits_RC, targets_R)
                if weights_R is not None:
                    rows_R = rows_R * weights_R.to(rows_R)
            (rows_R.sum() / self._denominator).backward()  # type: ignore[no-untyped-call]
        return rows_R.detach()


def _plain_losses(
    form: _Plain, weights: dict[str, Tensor], rows: Rows, members: np.ndarray, device: torch.device,
    elsewhere: Collection[int] = (),
) -> Tensor:  # fmt: skip
    """(R,) addends to the loss sum of some rows. Frozen weights are as they are kept, in fp32. elsewhere: ids of
    parameters that come by themselves."""
    model = form.model
    ids = [rows.ids[i] for i in members]
    types = None if rows.types is None else [rows.types[i] for i in members]
    longest, padding_id = max(len(each) for each in ids), padding_id_of(model.config)
    inputs = padded_inputs(ids, len(ids), longest, padding_id=padding_id, types=types)
    inputs = map_tensors(inputs, lambda tensor: tensor.to(device))
    others = ((name, p) for name, p in model.named_parameters() if name not in weights and id(p) not in elsewhere)
    frozen = {name: p for name, p in others if p.dtype.itemsize == 2}
    by_name = {name: weight.float() for name, weight in frozen.items()} | weights
    targets_R = torch.from_numpy(rows.targets_N[members]).to(device)
    weights_R = None if rows.weights_N is None else torch.from_numpy(rows.weights_N[members])
    with _having(model, by_name):
        found: Tensor = form(inputs, targets_R, weights_R)
    return found


@contextmanager
def _having(model: nn.Module, weights: Mapping[str, Tensor]) -> Iterator[None]:
    """Within, a model has these tensors for its parameters of these names, wherever it has them.

    `torch.func.functional_call` gives a module that is at two places of a model its parameters back but once.
    """
    ids = {id(p): weights[name] for name, p in model.named_parameters() if name in weights}
    places = [(own, name, p) for m in model.modules() for own in [m._parameters] for name, p in own.items()]
    places = [(own, name, p) for own, name, p in places if id(p) in ids]
    for own, name, p in places:
        own[name] = ids[id(p)]  # type: ignore[assignment]  # it need not be a Parameter
    try:
        yield
    finally:
        for own, name, p in places:
            own[name] = p


def _may_stay(num_bytes: int, device: torch.device) -> bool:
    """Return whether gradients of all passes are added up on the device."""
    return device.type == "cuda" and num_bytes >= _MANY_BYTES and _ROOM * num_bytes <= device_free_bytes(device)


def _take(taken: dict[str, Tensor], name: str, gradient: Tensor) -> None:
    """Add a gradient to what there is of it in host memory."""
    found = gradient.float().cpu()
    taken[name] = taken[name].add_(found) if name in taken else found


def _take_and_free(taken: dict[str, Tensor], name: str, weight: Tensor) -> None:
    assert weight.grad is not None
    _take(taken, name, weight.grad)
    weight.grad = None


def _cut(lengths: Sequence[int], most_tokens: int) -> Iterator[np.ndarray]:
    """Rows of each padded batch of so many tokens, if one row has no more, in order of length."""
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    while order:
        count = max(1, min(_PLAIN_TOKENS, most_tokens) // lengths[order[0]])
        yield np.array(order[:count])
        order = order[count:]


@contextmanager
def _no_kept_casts() -> Iterator[None]:
    """Within, autocast keeps no weights that it has cast: there would be one of each until a pass is over."""
    kept = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(kept)


@contextmanager
def _plain_form(model: Any) -> Iterator[None]:
    """Within, nothing of a model that trains is compiled, and Hugging Face's layers are recomputed by torch; streamed
    ones stay as they are. Its attention is given back."""
    before = model.config._attn_implementation
    with ExitStack() as stack:
        stack.enter_context(as_they_were(model))
        if getattr(model, "streamed_layers", None) is None:
            stack.enter_context(_recomputed_by_torch(model))
        try:
            yield
        finally:
            model.set_attn_implementation(before)


@contextmanager
def _recomputed_by_torch(model: nn.Module) -> Iterator[None]:
    """Within, layers that Hugging Face's code can recompute are, as by its `gradient_checkpointing_enable`."""
    layers: list[Any] = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    again = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
    with all_kept_in(model):
        for layer in layers:
            layer.gradient_checkpointing, layer._gradient_checkpointing_func = True, again
        try:
            yield
        finally:
            keep_all(layers)

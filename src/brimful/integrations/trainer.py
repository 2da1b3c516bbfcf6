"""transformers' Trainer with our training step: packed, of fixed shape, captured on a GPU, exactly accumulated.

The loop around the step is Trainer's own: data, sampling, clipping, optimizer, schedule, callbacks, logs, evaluation,
checkpoints and their resumption. Each update's micro-batches are collected, and the last one's `training_step` leaves
the gradient of all of them in `.grad`, where Trainer clips it and updates. On a GPU, where nobody looks at gradients in
between, that step also clips and updates, by the AdamW that Trainer made; Trainer's own calls then find it done. What
asks for another step runs by Trainer's own, and a Python warning says why, once.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor

from brimful.core.errors import OptionError
from brimful.hardware.process_settings import products_are_full
from brimful.integrations.gradient_step import GradientStep, OutgrownError
from brimful.integrations.model_structure import ModelStructure
from brimful.integrations.module_hooks import hooked_gradient
from brimful.integrations.packed import WRAPPERS
from brimful.integrations.problem_type import keeps_problem_type, problem_of
from brimful.integrations.process_group import ProcessGroup
from brimful.integrations.quick_padding import quick_padding
from brimful.integrations.trainer_data import rows_to_come
from brimful.integrations.trainer_reasons import (
    reason_of_batch,
    reason_of_model,
    reason_of_trainer,
    reason_of_update,
)
from brimful.models.hub.adapters import unwrapped
from brimful.models.hub.inspection import max_positions
from brimful.models.model_stats import layers_of
from brimful.step.updates.given_adamw import GivenAdamW, can_take

_TASKS = {
    "regression": "regression",
    "single_label_classification": "single_label",
    "multi_label_classification": "multi_label",
}
#: Between seeds of processes: each draws masks of its own.
_APART = 7_368_787
#: A method of the model that is replaced for one call.
_CLEARS = "zero_grad"


class Trainer(transformers.Trainer):  # type: ignore[misc]
    """transformers' Trainer for a sequence classifier, whose training step is ours wherever that is exact.

    Arguments, methods, callbacks, files and results are those of transformers' Trainer, except that an update's
    gradient is that of all its rows as one batch: Trainer's own is as many times larger as micro-batches are
    accumulated. Dropout masks are drawn by `args.seed`, the process and the number of the update.
    gradient_step: what runs, with its `recipe`; None while nothing trains, and where Trainer's own step does.
    stock_reason: the reason for that.
    Raises: OptionError for a model that is wrapped already and for a dataset without length and `max_steps`.
    """

    data_collator: Any
    label_names: list[str]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        _refuse(_SIGNATURE.bind(self, *args, **kwargs).arguments)
        self.gradient_step: GradientStep | None = None
        self.stock_reason: str | None = None
        self._refused: str | None = None
        self._group: ProcessGroup | None = None
        self._waiting: list[Any] = []
        self._expected = 1
        self._structure: ModelStructure | None = None
        self._looks: tuple[Any, ...] = ()
        self._flops_a_number: int | None = None
        self._updates_within = True
        self._filters_nan = self._keeps_items = False
        super().__init__(*args, **kwargs)
        if not self.label_names and self.args.label_names is None:
            self.label_names = ["labels"]  # of a classifier, which a class like Qwen3.5's takes without naming them
        self._made_optimizer = self.optimizer is None and self.optimizer_cls_and_kwargs is None

    def get_train_dataloader(self) -> Any:
        """As Trainer has it; batches stay on the host, where the step reads them, and are padded by numpy."""
        ours = reason_of_trainer(self, Trainer) is None
        self._keeps_items = ours and self.args.world_size == 1
        if not ours:
            return super().get_train_dataloader()
        collator = self.data_collator
        self.data_collator = quick_padding(collator)
        try:
            loader = super().get_train_dataloader()
        finally:
            self.data_collator = collator
        if getattr(loader, "device", None) is not None:
            loader.device = None
        return loader

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: torch.device) -> Any:
        """As Trainer has it: all micro-batches of an update.

        Their number of items, which only Trainer's own step reads, stays on the host: to be sent to the device, it
        would wait for the step before.
        """
        kept = self._keeps_items and self.stock_reason is None
        found = super().get_batch_samples(epoch_iterator, num_batches, torch.device("cpu") if kept else device)
        self._waiting, self._expected = [], len(found[0])
        return found

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Take one micro-batch; with the last one of an update leave the gradient of all, and return its loss."""
        is_last = len(self._waiting) + 1 >= self._expected
        as_it_was = is_last and self.stock_reason is None and self._is_as_it_was()
        if self.stock_reason is None and self._refused is None:
            self._refused = self._reason(model, inputs)
        if self._refused is not None and self._group is None:
            self._leave(self._refused)
        if self.stock_reason is not None:
            return self._by_trainer(model, [*self._waiting, inputs], num_items_in_batch)
        self._waiting.append(inputs)
        if not is_last:
            return self._without_waiting(torch.zeros((), device=self.args.device))
        batches, self._waiting = self._waiting, []
        if self._some_process_refuses(batches):
            return self._by_trainer(model, batches, num_items_in_batch)
        if not (as_it_was and self._structure is not None and self._structure.trains and model.training):
            model.train()
        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()
        loss = self._gradients(unwrapped(self.model), batches)
        return self._without_waiting(loss.to(self.args.device))

    def _reason(self, model: Any, inputs: Any) -> str | None:
        """Why Trainer's own step is to run from now on, if it is."""
        if self.gradient_step is None:  # what holds for all batches is asked before the first
            if (reason := reason_of_trainer(self, Trainer)) is not None:
                self._end_group()  # all processes have it
                return reason
            if self.args.world_size > 1 and self._group is None:
                self._group = ProcessGroup()
            if (reason := reason_of_model(self.model)) is not None:
                return reason
            if self.accelerator.unwrap_model(model) is not self.model:
                return f"the model is wrapped in {type(model).__name__}"
        return reason_of_batch(inputs, unwrapped(self.model), smooths=self.label_smoother is not None)

    def _some_process_refuses(self, batches: list[Any]) -> bool:
        """Have all processes take this update by the same step: none waits for one that computes otherwise."""
        if self._group is None:
            return False
        own = self._refused
        if self._group.agree(num_rows=sum(map(_num_rows, batches)), refuses=own is not None):
            self._leave(own or "another process's rows ask for it")
            return True
        return False

    def _leave(self, reason: str) -> None:
        """Have Trainer's own step run from now on, and say why."""
        self.stock_reason, self._refused = reason, None
        self._end_step()
        self._end_group()
        warnings.warn(f"brimful.Trainer: {reason}; transformers' own training step runs", stacklevel=4)

    def _by_trainer(self, model: Any, batches: list[Any], num_items_in_batch: Any) -> Tensor:
        """Trainer's own step on each of these, and the sum of their losses."""
        self._waiting = []
        if isinstance(num_items_in_batch, Tensor):
            num_items_in_batch = num_items_in_batch.to(self.args.device)
        losses = [super(Trainer, self).training_step(model, each, num_items_in_batch) for each in batches]
        return torch.stack([loss.detach() for loss in losses]).sum() if len(losses) > 1 else losses[0]

    def _is_as_it_was(self) -> bool:
        """End the step if the model, the optimizer or those who look at gradients are others than it was made for."""
        structure, step = self._structure, self.gradient_step
        if step is None or structure is None:
            return False
        update = step.update
        if structure.is_of(self.model) and self._looks == self._who_looks() and (update is None or update.is_current()):
            return True
        if update is not None and not update.was_loaded:  # what changes once may do so at each step
            self._updates_within = False
        self._end_step()
        return False

    def _who_looks(self) -> tuple[Any, ...]:
        """Return facts by which somebody may see gradients between the backward pass and the update."""
        return (id(self.optimizer), self.args.max_grad_norm, *map(type, self.callback_handler.callbacks))

    def _own_adamw(self, model: Any) -> torch.optim.AdamW | None:
        """The optimizer, if our step may clip and update by it: Trainer made it, and nobody sees gradients before."""
        inner = getattr(self.optimizer, "optimizer", self.optimizer)
        within = self._updates_within and self._made_optimizer and self._group is None
        if not within or hooked_gradient(model) is not None or reason_of_update(self, Trainer) is not None:
            return None
        return inner if can_take(model, inner) else None

    def _gradients(self, model: Any, batches: list[Any]) -> Tensor:
        while True:
            if self.gradient_step is None:
                self.gradient_step = self._make_step(model, batches)
                self._looks = self._who_looks()
            try:
                loss = self.gradient_step.gradients(batches, self.state.global_step, self._group)
                self._structure = self._structure or ModelStructure(self.model)  # as the first batch has left it
                return loss
            except OutgrownError:
                self._end_step()

    def _make_step(self, model: Any, batches: list[Any]) -> GradientStep:
        args, labels = self.args, batches[0]["labels"]
        problem = problem_of(model.config, labels)
        # As heads of transformers set it when they first see labels.
        if self.label_smoother is None and not keeps_problem_type(model.config):
            model.config.problem_type = problem
        here_N = np.concatenate([each["attention_mask"].sum(dim=1).cpu().numpy() for each in batches])
        rows = rows_to_come(self, here_N)
        limit = max_positions(model.config, model)
        checkpoints = args.gradient_checkpointing and layers_of(model) is not None
        return GradientStep(
            self.model,
            adamw=self._own_adamw(model),
            max_grad_norm=args.max_grad_norm,
            num_steps=self.state.max_steps,
            num_rows=rows.num_rows,
            longest=rows.longest if limit is None else min(rows.longest, limit),
            lengths=rows.lengths_N,
            task=_TASKS[problem],
            seed=args.seed + _APART * args.process_index,
            precision=_precision(args),
            device=args.device.type,
            label_smoothing_factor=args.label_smoothing_factor,
            gradient_checkpointing="full" if checkpoints else "none",
        )

    def _without_waiting(self, loss: Tensor) -> Tensor:
        """A loss that Trainer need not look at: its filter of what is not finite is applied on the device.

        Looking would have the host wait for each step. The argument is put back before any callback sees it.
        """
        if not (loss.is_cuda and self.args.logging_nan_inf_filter and hasattr(self, "_tr_loss")):
            return loss
        self._filters_nan, self.args.logging_nan_inf_filter = True, False
        mean = self._tr_loss / (1 + self.state.global_step - self._globalstep_last_logged)
        return torch.where(torch.isfinite(loss), loss, mean)

    def floating_point_ops(self, inputs: Any) -> int:
        """As Trainer has it, which calls it after each micro-batch and counts the model's parameters each time."""
        if self._filters_nan:
            self._filters_nan, self.args.logging_nan_inf_filter = False, True
        ids = inputs.get(getattr(self.model, "main_input_name", "input_ids")) if isinstance(inputs, Mapping) else None
        if self.gradient_step is None or ids is None:
            return int(super().floating_point_ops(inputs))
        if self._flops_a_number is None:
            self._flops_a_number = int(super().floating_point_ops(inputs)) // ids.numel()
        return self._flops_a_number * int(ids.numel())

    def _clip_grad_norm(self, model: Any) -> Any:
        """As Trainer has it; nothing is left to do where the step has clipped."""
        norm = self._norm_of_step
        return super()._clip_grad_norm(model) if norm is None else norm

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        """As Trainer has it. The last call before the optimizer's `step` and the model's `zero_grad`."""
        norm = self._norm_of_step
        if norm is None or self._structure is None:
            return super()._get_grad_norm(model, grad_norm=grad_norm)
        if type(model).zero_grad is torch.nn.Module.zero_grad and _CLEARS not in vars(model):
            _clear_once(model, self._structure.parameters)
        if (step := self.gradient_step) is not None and step.update is not None:
            _skip_once(self.optimizer, step.update)
        return norm if grad_norm is None else grad_norm

    @property
    def _norm_of_step(self) -> Tensor | None:
        return None if self.gradient_step is None else self.gradient_step.grad_norm

    def log(self, *args: Any, **kwargs: Any) -> None:
        """As Trainer has it; a warning says how many updates were left out since the last line."""
        self._say_skipped()
        super().log(*args, **kwargs)

    def _say_skipped(self) -> None:
        if self.gradient_step is not None and (skipped := self.gradient_step.take_skipped()):
            warnings.warn(
                f"brimful.Trainer: updates left out, as their loss or gradient was not finite: {skipped:,}, up to step"
                f" {self.state.global_step:,}",
                stacklevel=3,
            )

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        self.stock_reason, self._refused, self._updates_within = None, None, True
        try:
            return super()._inner_training_loop(*args, **kwargs)
        finally:
            self._end_step()
            self._end_group()

    def _end_step(self) -> None:
        self._say_skipped()
        step, self.gradient_step, self._structure = self.gradient_step, None, None
        self._flops_a_number = None
        if isinstance(self.model_wrapped, torch.nn.Module):
            vars(self.model_wrapped).pop(_CLEARS, None)
        if step is not None:
            step.release()

    def _end_group(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.close()


_SIGNATURE = inspect.signature(transformers.Trainer.__init__)
vars(Trainer)["__init__"].__signature__ = _SIGNATURE


def _refuse(given: dict[str, Any]) -> None:
    """Refuse what no Trainer can train. Raises: OptionError."""
    model, dataset, args = given.get("model"), given.get("train_dataset"), given.get("args")
    kind = type(model).__name__
    if hasattr(model, "_orig_mod") or kind in WRAPPERS:
        raise OptionError(f"the model is wrapped in {kind} already", hint="pass the model itself; Trainer wraps it")
    if dataset is not None and not hasattr(dataset, "__len__") and (args is None or args.max_steps <= 0):
        raise OptionError(
            f"train_dataset is a {type(dataset).__name__} without length, and max_steps is not set",
            hint="TrainingArguments(max_steps=...) says when training ends",
        )


def _skip_once(optimizer: Any, update: GivenAdamW) -> None:
    """Have Accelerate's next `step` do nothing: it looks for a package first, each time."""
    before = vars(optimizer).get("step")
    if type(optimizer).__name__ != "AcceleratedOptimizer" or not hasattr(before, "_wrapped_by_lr_sched"):
        return

    def step(closure: Any = None) -> None:
        vars(optimizer)["step"] = before
        optimizer._opt_called = True  # as the schedule's own wrapper says
        update.skip()

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    vars(optimizer)["step"] = step


def _clear_once(model: Any, parameters: list[Any]) -> None:
    """Have the model's next `zero_grad` go through these parameters, which are all it has, not through its modules."""

    def zero_grad(set_to_none: bool = True) -> None:
        vars(model).pop(_CLEARS, None)
        if not set_to_none:
            model.zero_grad(set_to_none=False)
        for parameter in parameters:
            parameter.grad = None

    vars(model)[_CLEARS] = zero_grad


def _num_rows(inputs: Any) -> int:
    """Rows of a micro-batch; 0 for what is none."""
    labels = inputs.get("labels") if isinstance(inputs, Mapping) else None
    return 0 if labels is None else len(labels)


def _precision(args: Any) -> str:
    """The precision that the arguments and torch's own setting of products ask for."""
    if args.bf16:
        return "bf16"
    loose = args.device.type == "cuda" and not products_are_full()
    return "tf32" if loose else "fp32"

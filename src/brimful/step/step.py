"""One optimizer step: `accumulate` each micro-batch, `reduce`, `update`. Nothing in it waits for the device.

The loss of a micro-batch is a sum over its rows, divided by the denominator of the whole effective batch, so gradients
of micro-batches add up to the plain batch's. Learning rate, applied steps, loss scale and whether the step is finite
live on the device; the update predicates itself, and the host reads the outcome when it is ready.

Randomness: dropout is seeded by (seed, batch, micro-batch) before each `accumulate`, so a run resumes with the masks it
would have had.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from brimful.data.batches import Batch, MicroBatch
from brimful.models.execution import Execution
from brimful.tasks.task import Task
from brimful.techniques.optimizer import Optimizer
from brimful.techniques.precision import Precision

#: torch.amp.GradScaler's own constants.
_FIRST_SCALE, _GROWTH, _BACKOFF, _GROWTH_INTERVAL = 2.0**16, 2.0, 0.5, 2000


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of one effective batch, read from the device.

    loss: mean over the batch as the plain loss has it. grad_norm: before clipping. applied: whether weights changed.
    overflow: fp16 only, the gradients did not fit under the loss scale, which was lowered.
    culprits: dataset indices of the samples whose own loss is not finite; of all the batch's if none is.
    """

    number: int
    loss: float
    grad_norm: float
    learning_rate: float
    scale: float
    applied: bool
    overflow: bool
    culprits: tuple[int, ...]
    num_samples: int
    num_tokens: int


class Pending:
    """The outcome of a step that may still be running."""

    def __init__(self, batch: Batch, readings: Tensor, rows: Sequence[Tensor], scaled: bool) -> None:
        self._batch, self._rows, self._scaled = batch, rows, scaled
        self._event: torch.cuda.Event | None = None
        if readings.device.type == "cuda":
            self._readings = torch.empty(readings.shape, dtype=readings.dtype, pin_memory=True)
            self._readings.copy_(readings, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
        else:
            self._readings = readings.clone()

    def read(self) -> Outcome:
        """Waits for this step, not for those behind it."""
        if self._event is not None:
            self._event.synchronize()
        loss, grad_norm, learning_rate, scale, skipped = self._readings.tolist()
        culprits: tuple[int, ...] = ()
        if skipped:
            culprits = self._culprits()
        return Outcome(
            number=self._batch.number,
            loss=loss,
            grad_norm=grad_norm,
            learning_rate=learning_rate,
            scale=scale,
            applied=not skipped,
            overflow=bool(skipped) and self._scaled and bool(np.isfinite(loss)) and scale > 1.0,
            culprits=culprits,
            num_samples=self._batch.num_samples,
            num_tokens=self._batch.num_tokens,
        )

    def _culprits(self) -> tuple[int, ...]:
        named: list[int] = []
        for micro, rows_S in zip(self._batch.micro_batches, self._rows, strict=True):
            finite = torch.isfinite(rows_S).cpu().numpy()[: len(micro.samples)]
            named.extend(int(s) for s in micro.samples[~finite])
        return tuple(named or (int(s) for s in self._batch.samples))


class Step:
    """One optimizer step of one model, eager. State that training must keep is in `state` and the optimizer.

    schedule: (steps + 1,) fp32 learning rate by applied steps; the last one holds for any step beyond.
    """

    def __init__(
        self,
        execution: Execution,
        task: Task,
        optimizer: Optimizer,
        precision: Precision,
        schedule: Tensor,
        *,
        max_grad_norm: float,
        seed: int,
    ) -> None:
        self.execution, self.task, self.precision = execution, task, precision
        self.max_grad_norm, self.seed = max_grad_norm, seed
        self.parameters = [p for p in execution.model.parameters() if p.requires_grad]
        device = self.parameters[0].device
        self.device = device
        self._schedule = schedule.to(device=device, dtype=torch.float32)
        self._learning_rate = torch.zeros((), device=device)
        self.optimizer = optimizer.apply(execution.model, self._learning_rate)
        self.applied = torch.zeros((), dtype=torch.int64, device=device)
        self.scale = torch.full((), _FIRST_SCALE if precision.scaled else 1.0, device=device)
        self.growth = torch.zeros((), dtype=torch.int32, device=device)
        self._loss = torch.zeros((), dtype=self.parameters[0].dtype, device=device)
        for parameter in self.parameters:
            parameter.grad = None  # made by the first backward, then kept: what a model does not use is never decayed

    def run(self, batch: Batch) -> Pending:
        """One step on one effective batch. Returns at once; the outcome is read later."""
        rows = [self.accumulate(batch, index) for index in range(len(batch.micro_batches))]
        self.reduce()
        readings = self.update()
        self.clear_gradients()
        return Pending(batch, readings, rows, self.precision.scaled)

    def accumulate(self, batch: Batch, index: int) -> Tensor:
        """Adds the gradient of one micro-batch to the parameters' own; its rows' losses, (S,), detached."""
        self.draw_seed(batch, index)
        return self.backward(batch.micro_batches[index], batch.denominator)

    def draw_seed(self, batch: Batch, index: int) -> None:
        """Seeds dropout of one micro-batch by (seed, batch, micro-batch)."""
        torch.manual_seed(_mix(self.seed, batch.number, index))

    def backward(self, micro: MicroBatch, denominator: Tensor) -> Tensor:
        """`accumulate` without the seed: what runs on the device, and can be captured."""
        loss_rows_S = self.loss_rows_S(micro)
        loss = loss_rows_S.sum() / denominator.to(loss_rows_S.dtype)
        (loss * self.scale).backward()  # type: ignore[no-untyped-call]
        self._loss.add_(loss.detach())
        return loss_rows_S.detach()

    def loss_rows_S(self, micro: MicroBatch) -> Tensor:
        """Each slot's addend to the loss sum; 0 in empty slots."""
        with self.precision.autocast():
            logits_SC = self.execution(micro.inputs)
        if logits_SC.dtype != torch.float64:
            logits_SC = logits_SC.float()
        rows_S = self.task.loss_rows_S(logits_SC, micro.targets_S)
        return torch.where(micro.valid_S, rows_S, 0.0)

    def reduce(self) -> None:
        """Where gradients of several processes meet; with one there is nothing to do."""

    def update(self) -> Tensor:
        """Clips, applies the optimizer where all is finite, advances the schedule and the scale.

        Returns readings, (5,) on the device: loss, gradient norm, learning rate, scale, whether it was skipped.
        """
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients, foreach=True) / self.scale
        skipped = (~(torch.isfinite(norm) & torch.isfinite(self._loss))).float()
        clip = (self.max_grad_norm / (norm + 1e-6)).clamp(max=1.0) if self.max_grad_norm else torch.ones_like(norm)
        place = self.applied.clamp(max=len(self._schedule) - 1)
        self._learning_rate.copy_(self._schedule.index_select(0, place.view(1))[0])
        self.optimizer.grad_scale = (self.scale / clip).float()  # type: ignore[attr-defined]
        self.optimizer.found_inf = skipped  # type: ignore[attr-defined]
        self.optimizer.step()
        readings = torch.stack([t.double() for t in (self._loss, norm, self._learning_rate, self.scale, skipped)])
        self.applied += (1 - skipped).long()
        if self.precision.scaled:
            torch._amp_update_scale_(self.scale, self.growth, skipped, _GROWTH, _BACKOFF, _GROWTH_INTERVAL)
        self._loss.zero_()
        return readings

    def clear_gradients(self) -> None:
        """Makes gradients zero, where they are: the next micro-batch adds to them."""
        torch._foreach_zero_([p.grad for p in self.parameters if p.grad is not None])

    def state_tensors(self) -> dict[str, dict[str, Tensor]]:
        """Everything an exact continuation needs: weights, optimizer states by parameter name, counters."""
        model = self.execution.model
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        states = {
            f"{names[id(parameter)]}/{key}": value
            for parameter, state in self.optimizer.state.items()
            for key, value in state.items()
            if isinstance(value, Tensor)
        }
        # A parameter that no batch has used yet has no gradient, and no update: not even decay.
        in_use = torch.tensor([parameter.grad is not None for parameter in self.parameters])
        counters = {"applied": self.applied, "scale": self.scale, "growth": self.growth, "in_use": in_use}
        weights = dict(model.named_parameters()) | dict(model.named_buffers())
        return {"weights": {k: v.detach() for k, v in weights.items()}, "optimizer": states, "step": counters}

    def load_state_tensors(self, tensors: dict[str, dict[str, Tensor]]) -> None:
        """Takes up where `state_tensors` was taken."""
        model = self.execution.model
        with torch.no_grad():
            for name, target in [*model.named_parameters(), *model.named_buffers()]:
                target.copy_(tensors["weights"][name])
            for name, counter in (("applied", self.applied), ("scale", self.scale), ("growth", self.growth)):
                counter.copy_(tensors["step"][name])
        for parameter, used in zip(self.parameters, tensors["step"]["in_use"].tolist(), strict=True):
            parameter.grad = torch.zeros_like(parameter) if used else None
        self.optimizer.state.clear()
        by_name: dict[str, dict[str, Tensor]] = {}
        for key, value in tensors["optimizer"].items():
            name, _, field = key.rpartition("/")
            by_name.setdefault(name, {})[field] = value
        for name, parameter in model.named_parameters():
            if name in by_name:
                self.optimizer.state[parameter] = {k: v.to(self.device, copy=True) for k, v in by_name[name].items()}


def _mix(seed: int, number: int, index: int) -> int:
    """One 63-bit seed of three numbers (Philox of numpy's seed sequence)."""
    return int(np.random.SeedSequence([seed, number, index]).generate_state(1, np.uint64)[0] >> np.uint64(1))


def make_schedule(name: str, learning_rate: float, num_steps: int, num_warmup_steps: int) -> Tensor:
    """(num_steps + 1,) fp32: the learning rate of transformers' schedule `name` at each applied step."""
    from transformers import get_scheduler

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=learning_rate)
    scheduler = get_scheduler(name, optimizer, num_warmup_steps=num_warmup_steps, num_training_steps=num_steps)
    factor = scheduler.lr_lambdas[0]
    factors = [factor(step) for step in range(num_steps)]
    try:
        factors.append(factor(num_steps))
    except ZeroDivisionError:  # a polynomial decay with no step left after its warm-up
        factors.append(factors[-1])
    return torch.tensor([learning_rate * each for each in factors], dtype=torch.float32)

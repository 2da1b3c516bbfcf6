"""One optimizer step: `accumulate` each micro-batch, `reduce`, `update.apply`. Nothing in it waits for the device.

The loss of a micro-batch is a sum over its rows, divided by the denominator of the whole effective batch, so gradients
of micro-batches add up to the plain batch's. Learning rate, applied steps, loss scale and whether the step is finite
live on the device; the update predicates itself, and the host reads the outcome when it is ready.

Randomness: our kernels draw dropout masks by (seed, batch, a token's place in the batch), the same however it is split
into micro-batches and processes; torch draws by (seed, batch, micro-batch, process). A run resumes with the masks it
would have had. The process's own generators are lent for it, and given back.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from brimful.data.batches.batch import Batch, MicroBatch
from brimful.hardware.memory import ElsewhereMemoryError, is_out_of_memory, let_go, set_aside
from brimful.hardware.process_settings import RandomStream
from brimful.hardware.pulse import Lost
from brimful.hardware.ranks import ALONE, Ranks
from brimful.hardware.read_back import ReadBack, host_room
from brimful.kernels.precompile import Compiling, precompiled
from brimful.measurement.memory import PhaseMemory
from brimful.models.packed.layer_calls import compiled_modules
from brimful.models.packed.packed_forward import LayoutModel
from brimful.models.packed.training_check import without_dropout
from brimful.step.kept_buffers import buffers_of, put_back, state_buffers
from brimful.step.precision import Precision
from brimful.step.seeds import seed_of
from brimful.step.state import StepState
from brimful.step.updates.update import Update
from brimful.tasks.task import Task

#: Loss scale of fp16 while a batch is probed.
_PROBE_SCALE = 2.0**10


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Result of one effective batch, read from the device.

    loss: mean over the batch as the plain loss has it. grad_norm: before clipping. applied: whether weights changed.
    overflow: fp16 only, the gradients did not fit under the loss scale, which was lowered.
    bad_samples: dataset indices of the samples whose own loss is not finite; of all the batch's if none is.
    """

    number: int
    loss: float
    grad_norm: float
    learning_rate: float
    scale: float
    applied: bool
    overflow: bool
    bad_samples: tuple[int, ...]
    num_samples: int
    num_tokens: int


class Pending:
    """The outcome of a step that may still be running.

    on_device: (5,) fp64 readings, until the next step.
    room: of `room`. again: runs the step in another way, where a loss that is not finite may say that it must be; None
    where it never does.
    """

    def __init__(
        self, batch: Batch, readings: Tensor, rows: Sequence[Tensor], scaled: bool, room: Tensor,
        again: Callable[[Batch], Outcome] | None = None,
    ) -> None:  # fmt: skip
        self._batch, self.rows, self._scaled, self.again = batch, rows, scaled, again
        self.on_device = readings
        self._readings = ReadBack(readings, room=room)

    @staticmethod
    def room(device: torch.device) -> Tensor:
        """Host memory for the readings, to allocate before the update: after it the step must not fail."""
        return host_room((5,), torch.float64, device)

    def read(self) -> Outcome:
        """Waits for this step, not for those behind it."""
        loss, grad_norm, learning_rate, scale, skipped = self._readings.wait().tolist()
        if skipped and self.again is not None and not np.isfinite(loss):
            return self.again(self._batch)
        return Outcome(
            number=self._batch.number,
            loss=loss,
            grad_norm=grad_norm,
            learning_rate=learning_rate,
            scale=scale,
            applied=not skipped,
            overflow=bool(skipped) and self._scaled and bool(np.isfinite(loss)) and scale > 1.0,
            bad_samples=self._bad_samples() if skipped else (),
            num_samples=self._batch.num_samples,
            num_tokens=self._batch.num_tokens,
        )

    def _bad_samples(self) -> tuple[int, ...]:
        named: list[int] = []
        for micro, rows_S in zip(self._batch.micro_batches, self.rows, strict=True):
            finite = torch.isfinite(rows_S).cpu().numpy()[: len(micro.samples)]
            named.extend(int(s) for s in micro.samples[~finite])
        if not named and not self._batch.is_part:  # all of them together
            named = [int(s) for s in self._batch.samples]
        return tuple(named)


@dataclass(frozen=True, kw_only=True, eq=False)
class Probed:
    """Losses and gradient of one batch, without dropout.

    losses_N: each sample's addend to the loss sum, fp64, on the host, in order of the samples' numbers. gradients: of
    the batch's loss, fp32, in the order of the update's parameters, in host memory.
    """

    losses_N: Tensor
    gradients: list[Tensor]


class Step:
    """One optimizer step of one model, eager. State that training must keep is in its `update`.

    memory: watches its phases, once it is told to.
    seeded_dropout: whether dropout of the model's own code is drawn by its place in the pass, as ours is.
    ranks: processes that take each step together, each on a part of its batch; all have the same weights. half_wire:
    whether gradients are in bf16 on their way between them. overlap: whether they are sent within backward passes.
    """

    def __init__(
        self,
        execution: LayoutModel,
        task: Task,
        update: Update,
        precision: Precision,
        *,
        seed: int,
        seeded_dropout: bool = False,
        ranks: Ranks = ALONE,
        half_wire: bool = False,
        overlap: bool = True,
    ) -> None:
        self.execution, self.task, self.update, self.precision, self.seed = execution, task, update, precision, seed
        self.seeded_dropout, self.ranks = seeded_dropout, ranks
        self.device = self.update.device
        self.memory = PhaseMemory(self.update.kept, self.update.parameters)
        self._random = RandomStream(self.device)
        # Of our kernels' masks, and the batch that it is of. Graphs read it where it lies.
        self._mask_seed, self._masks_of = torch.zeros((), dtype=torch.int64, device=self.device), -1
        self._keeps_all = self._failed_together = False
        self.full: Lost | None = None  # the process that memory ran out in last, of several
        self._between: Callable[[], None] | None = None
        if ranks.count > 1:
            update.share(ranks, half=half_wire, overlap=overlap)

    @property
    def num_graphs(self) -> int:
        """CUDA graphs captured so far."""
        return 0

    @property
    def is_shared(self) -> bool:
        """True while other processes take part in what is computed."""
        return self.ranks.count > 1 and not self._keeps_all

    def run(self, batch: Batch) -> Pending:
        """One step on one effective batch. Returns at once; the outcome is read later.

        Raises: ElsewhereMemoryError where memory ran out in another process: the step is then taken again by all.
        """
        several, room = len(batch.micro_batches) > 1, Pending.room(self.device)
        self.update.begin()
        self.tell_update(whole=not (several or self.is_shared), single=not several)
        rows: list[Tensor] = []
        model = self.execution.model  # it may be left undone for want of memory, or wherever `between` says so
        kept = state_buffers(model) if self._between is None else buffers_of(model)
        with put_back(kept, when=lambda raised: raised is not None and not self.update.committed):
            if self.is_shared:
                self._accumulate_together(batch, rows)
            else:
                self._accumulate_all(batch, rows, gather_last=several)
            readings = self.apply_update(gathered=several or self.is_shared)
        return self._pending(batch, readings, rows, room)

    def tell_update(self, *, whole: bool, single: bool) -> None:
        """Say what comes. whole, single: as of `Update`."""
        self.update.whole, self.update.single, self.update.together = whole, single, self.is_shared

    def _accumulate_all(self, batch: Batch, rows: list[Tensor], *, gather_last: bool) -> None:
        """Compute gradients of all micro-batches, and put losses of their rows into `rows`.

        gather_last: whether to gather those of the last one.
        """
        last, sums = len(batch.micro_batches) - 1, self.update.reduction if self.is_shared else None
        for index in range(len(batch.micro_batches)):
            if sums is not None and (index == last or sums.each):
                sums.arm()
            rows.append(self.accumulate(batch, index))
            if sums is not None and sums.each and index < last:
                sums.finish()
            if index < last or gather_last:
                self.update.gather()

    @contextmanager
    def interruptible(self, between: Callable[[], None]) -> Iterator[None]:
        """Within, `between` is called before backward passes of eager steps and often in them, until weights change.

        It may raise, to leave the step undone: `abandon` drops what there is of it. On a CPU, of one process alone.
        """

        def look(_: object = None) -> None:
            if not self.update.committed:
                between()

        self._between = look
        hooks = [parameter.register_hook(look) for parameter in self.update.parameters if parameter.requires_grad]
        try:
            yield
        finally:
            self._between = None
            for hook in hooks:
                hook.remove()

    def _accumulate_together(self, batch: Batch, rows: list[Tensor]) -> None:
        """As `_accumulate_all`, summed over processes; one that memory runs out in does not keep the others waiting."""
        failure: Exception | None = None
        try:
            with self.with_others():
                self._accumulate_all(batch, rows, gather_last=False)
                set_aside(self.device)  # for the update, which must not fail any more
        except Exception as error:
            if not is_out_of_memory(error) or self.update.gathers_weights:
                raise
            let_go(error)  # others wait for what comes now, and it takes memory, too
            failure, sums = error, self.update.reduction
            if sums is not None and sums.each:
                for _ in range(len(batch.micro_batches) - 1 - len(rows)):
                    sums.finish()
        self.reduce()
        self.agree(failure)

    def agree(self, failure: Exception | None, kind: Callable[[str], Exception] = ElsewhereMemoryError) -> None:
        """Fail in all processes if memory ran out in one. Waits for the other hosts.

        Raises: `failure`, of this process, or a `kind`.
        """
        failed = self.ranks.any([failure is not None and rank == self.ranks.rank for rank in range(self.ranks.count)])
        if any(failed):
            self._failed_together = True
            self.full = self.ranks.where(failed.index(True), "out of memory")
            raise failure or kind(str(self.full))

    def _pending(
        self, batch: Batch, readings: Tensor, rows: Sequence[Tensor], room: Tensor,
        again: Callable[[Batch], Outcome] | None = None,
    ) -> Pending:  # fmt: skip
        """The outcome of a step that is under way: from here on, what fails is not this step."""
        pending = Pending(batch, readings, rows, self.precision.scaled, room, again)
        self.update.committed = False
        return pending

    def abandon(self) -> bool:
        """Drop all that a step which failed has left; True if it may be taken again.

        It may not where weights were changed, nor where it failed in one of several processes without their knowing.
        Masks of dropout are drawn anew from the batch's own seeds, so the batch may come in other micro-batches.
        """
        again = not self.update.committed and (self._failed_together or not self.is_shared)
        self.update.committed = self._failed_together = False
        self.update.abandon()
        return again

    @property
    def captures(self) -> bool:
        """True while steps whose shapes come again are captured."""
        return False

    def stop_capturing(self) -> None:
        """Launch one kernel after another from now on."""

    def keep_room(self, num_tokens: int = 0) -> None:
        """Have memory for a pass that no graph holds, where all processes take part in it, and end where it runs out in
        one. All do so together. num_tokens: of the pass, if it may be larger than those before. Unless overridden,
        nothing."""

    def accumulate(self, batch: Batch, index: int) -> Tensor:
        """Computes the gradient of one micro-batch, with those before it; its rows' losses, (S,), detached."""
        with self.settings(batch, index):
            return self.backward(batch.arrived(index))

    @contextmanager
    def settings(self, batch: Batch, index: int) -> Iterator[None]:
        """Within, dropout of one micro-batch has its seeds, and products have their precision.

        The process's own random streams and precision are as they were afterwards.
        """
        if self._masks_of != batch.number:
            self._mask_seed.fill_(seed_of(self.seed, batch.number))
            self._masks_of = batch.number
        seed = seed_of(self.seed, batch.number, index, self.ranks.data_rank)
        with self.precision.apply(), self._random.seeded(seed):
            yield

    def backward(self, micro: MicroBatch) -> Tensor:
        """`accumulate` without these settings: what runs on the device, and can be captured."""
        self.update.before()
        with self.memory.forward(micro.shape):
            loss_rows_S = self.loss_rows_S(micro)
            loss = loss_rows_S.sum() / micro.denominator.to(loss_rows_S.dtype)
        if self._between is not None:
            self._between()
        with self.memory.backward(), self.update.around_backward():
            self.update.backward(loss)
        self.execution.settle()
        self.update.loss.add_(loss.detach())
        return loss_rows_S.detach()

    def apply_update(self, *, gathered: bool) -> Tensor:
        """Update the weights from the gradients that there are; return the update's readings."""
        with self.memory.update():
            readings = self.update.apply(gathered=gathered)
        self.precision.after_update()
        return readings

    def loss_rows_S(self, micro: MicroBatch) -> Tensor:
        """Each slot's addend to the loss sum; 0 in empty slots."""
        with self.precision.autocast(caches=self.update.casts_once):
            context = self.precision.context(self.update.side_stream, seeded_dropout=self.seeded_dropout)
            context = replace(context, keeps_all=self._keeps_all, seed=self._mask_seed)
            logits_SC = self.execution(micro.inputs, context).logits
        if logits_SC.dtype != torch.float64:
            logits_SC = logits_SC.float()
        rows_S = self.task.loss_rows_S(logits_SC, micro.targets_S)
        if micro.weights_S is not None:
            rows_S = rows_S * micro.weights_S.to(rows_S.dtype)
        return torch.where(micro.valid_S, rows_S, 0.0)

    def compile_kernels(self, batch: Batch, *, wait: bool = True) -> Compiling:
        """Compiles together the kernels of ours that a step of such batches launches, and that were not compiled yet.

        Weights, gradients, buffers and the batch are as they were. wait: False to wait for the kernels later.
        """
        parameters, model = self.update.parameters, self.execution.model
        single = len(batch.micro_batches) == 1
        self.tell_update(whole=single, single=single)
        first_of = {micro.shape: index for index, micro in reversed(list(enumerate(batch.micro_batches)))}
        # Gradients may be left in host memory.
        with put_back(buffers_of(model)), precompiled(wait=wait) as compiling, self.update.undisturbed():
            for index in first_of.values():
                for parameter in parameters:
                    parameter.grad = None
                with self.settings(batch, index):
                    rows_S = self.loss_rows_S(copy.deepcopy(batch.arrived(index)))
                    rows_S.sum().backward()  # type: ignore[no-untyped-call]
            self.update.compile_kernels(gathered=len(batch.micro_batches) > 1 or self.is_shared)
        self.precision.after_update()  # copies of the weights that were made within
        return compiling

    def begin_compiling(self, batch: Batch) -> None:
        """Begin to compile what the first step of such batches would wait for."""

    def cancel_compiling(self) -> None:
        """Compile no more of that than was begun."""

    def probe(self, batch: Batch) -> Probed:
        """Compute losses and gradient of a batch as `run` does, dropout off. Nothing is updated, and all is as before.

        Waits for the device.
        """
        self._prepare(batch)
        model, update = self.execution.model, self.update
        compiled = compiled_modules(model)
        self._keeps_all = True
        try:
            with put_back(buffers_of(model)), update.undisturbed(), without_dropout(model, but=compiled):
                self._hold_scale()
                if compiled and self._differs_by_seed(batch):  # torch's compiler has dropout in its code: other code
                    with without_dropout(model):
                        rows, gradients = self._probed(batch)
                else:
                    rows, gradients = self._probed(batch)
        finally:
            self._keeps_all = update.committed = False
            self.precision.after_update()
        micros = zip(batch.micro_batches, rows, strict=True)
        losses_N = torch.cat([rows_S[: len(micro.samples)].double().cpu() for micro, rows_S in micros])
        losses_N = losses_N[torch.from_numpy(np.argsort(batch.samples, kind="stable"))]
        scale = _PROBE_SCALE if self.precision.scaled else 1.0
        return Probed(losses_N=losses_N, gradients=[(g.float() / scale).cpu() for g in gradients])

    def _prepare(self, batch: Batch) -> None:
        """Whatever is done once, before the first step. Unless overridden, nothing."""

    def _probed(self, batch: Batch) -> tuple[list[Tensor], list[Tensor]]:
        """Losses of each micro-batch's rows, and the gradients."""
        several, rows = len(batch.micro_batches) > 1, []
        self.tell_update(whole=not several, single=not several)
        for index in range(len(batch.micro_batches)):
            rows.append(self.accumulate(batch, index))
            if several:
                self.update.gather()
        gradients = self.update.gradients(gathered=several)
        self._wait()
        return rows, gradients

    def _wait(self) -> None:
        """Wait until the device has done all that it was told: gradients may be on their way to the host."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _hold_scale(self) -> None:
        """Set the loss scale of fp16 to one that no first gradient overflows under. A skipped update lowers it."""
        if self.precision.scaled:
            self.update.scale.fill_(_PROBE_SCALE)

    def _differs_by_seed(self, batch: Batch) -> bool:
        """True if dropout is still at work."""
        found = []
        for number in (batch.number, batch.number + 1):
            with self.settings(replace(batch, number=number), 0):
                found.append(self.loss_rows_S(batch.arrived(0)).detach())
        return float((found[0] - found[1]).norm()) > 1e-4 * float(found[0].norm())

    def reduce(self) -> None:
        """Sum loss and gradients over all processes; nothing to do for one."""
        if self.is_shared:
            self.update.reduce()

    def meet(self) -> str:
        """Do what all processes do together before the first step; return what users are to be warned of, or ""."""
        with self.with_others():
            warning = self.update.meet()
        self.precision.after_training()  # fp8 copies of weights that may have moved: they are made again
        return warning

    def with_others(self) -> AbstractContextManager[None]:
        """The context of passes in which weights are put together of parts of all processes."""
        return self.ranks.passing() if self.update.gathers_weights else nullcontext()

    def state(self) -> StepState:
        """Everything an exact continuation needs."""
        with self.with_others():
            return self.update.state()

    def tensors(self) -> dict[str, Tensor]:
        """Trained weights in fp32, and buffers, by their names."""
        return {**self.update.weights(), **dict(self.execution.model.named_buffers())}

    def load_state(self, state: StepState) -> None:
        """Take up where `state` was taken."""
        self.update.load_state(state)

    def release(self, *, together: bool = True) -> None:
        """End training: the model's parameters are plain fp32 ones again, and the step may not run any more.

        together: whether other processes do so at once; else nobody may need the weights any more.
        """
        self.precision.after_training()
        with self.with_others():
            if together:
                self.update.collect()
            self.update.release()


def make_schedule(name: str, learning_rate: float, num_steps: int, num_warmup_steps: int) -> Tensor:
    """(num_steps + 1,) fp32: the learning rate of transformers' schedule `name` at each applied step."""
    if name == "linear":  # the default, without the quarter of a second that its module takes to import
        steps = np.arange(num_steps + 1)
        falling = np.maximum(0, num_steps - steps) / max(1, num_steps - num_warmup_steps)
        factors = np.where(steps < num_warmup_steps, steps / max(1, num_warmup_steps), falling)
        return torch.tensor(learning_rate * factors, dtype=torch.float32)
    from transformers import get_scheduler

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=learning_rate)
    scheduler = get_scheduler(name, optimizer, num_warmup_steps=num_warmup_steps, num_training_steps=num_steps)
    factor = scheduler.lr_lambdas[0]
    found = [factor(step) for step in range(num_steps)]
    try:
        found.append(factor(num_steps))
    except ZeroDivisionError:  # a polynomial decay with no step left after its warm-up
        found.append(found[-1])
    return torch.tensor([learning_rate * each for each in found], dtype=torch.float32)

"""A row by transformers' Trainer, as a script of a user has it: rows in a list, a collator that pads, its arguments.

Times are read in a callback, when the device has done all that it was told. Loading, setting up and saving are outside.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset
from transformers import DataCollatorWithPadding, PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from brimful.benchmarking.figures import Blocks, figures
from brimful.benchmarking.fixed_lengths import FixedLengths, compiled_apart, lengths_for, meet_shapes
from brimful.benchmarking.rows import PADDED_LENGTHS
from brimful.benchmarking.workload import Work, useful_flops
from brimful.core.bench import Measured, Steps
from brimful.core.callbacks import Callbacks
from brimful.core.records import Arithmetic
from brimful.hardware.device_memory import device_memory
from brimful.measurement.memory import Kept, MemoryWatch, PhaseMemory
from brimful.models.hub.quiet import quiet_transformers
from brimful.tasks.label_rows import dense, taken

#: Steps whose memory is watched phase by phase: all are warm-up.
_WATCHED_STEPS = 2


def measure_trainers(
    work: Work, settings: Mapping[str, Any], steps: Steps, callbacks: Callbacks, told: Callable[[int], None],
    parent: Path | None = None, until: float | None = None,
) -> Measured:  # fmt: skip
    """Train for some steps and time them. told: called with the steps done so far. parent: of Trainer's own folder.
    until: as of `Blocks`.

    Raises: what Trainer raises.
    """
    options, device = work.options, work.device
    model = work.model()
    with device_memory(device, options.memory_limit, "default"), quiet_transformers(), ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(dir=parent))
        arguments = _arguments(work, settings, steps, folder)
        clock = _Clock(steps, told, until)
        collator = None if work.random else DataCollatorWithPadding(work.prepared.tokenizer)
        if PADDED_LENGTHS in settings:
            stack.enter_context(compiled_apart())
            clock.meets = not work.random
            if clock.meets:
                fixed = _lengths(work, arguments.per_device_train_batch_size, steps, settings[PADDED_LENGTHS])
                collator = FixedLengths(work.prepared.tokenizer, fixed)
        trainer = _Watched(
            model=model, args=arguments, train_dataset=_Rows(work, steps), data_collator=collator, callbacks=[clock]
        )
        trainer.remove_callback(PrinterCallback)
        trainer.last_block, clock.watched = steps.total - steps.block, trainer
        trainer.phases = PhaseMemory(lambda: _kept(trainer, device), list(model.parameters()))
        memory = MemoryWatch(device, trainer.phases, limit=options.memory_limit)
        trainer.train()
        peak = memory.peak()
        if clock.met_s is not None:
            lengths_text = "1 length" if len(fixed) == 1 else f"{len(fixed)} lengths"
            callbacks.warning(f"compiled for {lengths_text} in {clock.met_s:.0f} s, before its timed steps")
    blocks = clock.blocks
    if not blocks.is_over(steps):
        raise RuntimeError(f"Trainer ended after {trainer.state.global_step} of {steps.total} steps")
    steps = blocks.done(steps)
    lengths = work.lengths(range(steps.warm_up, steps.total))
    # A batch's tokens are read back after the last step: reading them beside the steps would wait for the device.
    computed = [int(each) for each in trainer.computed]
    per_step = len(computed) // steps.total
    blocks.computed_tokens = sum(computed[steps.warm_up * per_step : steps.total * per_step])
    blocks.losses = [float(each) for each in trainer.losses]
    logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    if logged and blocks.losses and (times := logged[-1] / max(fmean(blocks.losses), 1e-9)) > 1.5:
        callbacks.warning(
            f"Trainer logs {times:.1f} times the mean loss of its micro-batches, and its gradient before clipping is as"
            " much larger: transformers does not divide this model's loss by the number of micro-batches"
        )
    return figures(
        blocks,
        steps,
        lengths=lengths,
        flops=useful_flops(model, lengths),
        precision=next((each for each in ("bf16", "fp16", "tf32") if settings.get(each)), "fp32"),
        arithmetic=_arithmetic(settings),
        peak=peak,
    )


def _arguments(work: Work, settings: Mapping[str, Any], steps: Steps, folder: str) -> TrainingArguments:
    options, on_cpu = work.options, work.device.type == "cpu"
    fixed: dict[str, Any] = {
        "max_steps": options.max_steps, "learning_rate": options.learning_rate, "lr_scheduler_type": "linear",
        "per_device_train_batch_size": options.batch_size, "seed": options.seed, "use_cpu": on_cpu,
        "train_sampling_strategy": "sequential", "dataloader_pin_memory": not on_cpu, "logging_strategy": "no",
        "logging_nan_inf_filter": False, "save_strategy": "no", "report_to": "none", "disable_tqdm": True,
        "log_level": "error",
    }  # fmt: skip
    given = {name: value for name, value in settings.items() if name != PADDED_LENGTHS}
    return TrainingArguments(output_dir=folder, **{**fixed, **given})


def _lengths(work: Work, rows: int, steps: Steps, most: int) -> tuple[int, ...]:
    """At most so many lengths for the micro-batches of these steps, of so many rows each."""
    lengths = work.lengths(range(steps.total))
    return lengths_for([lengths[start : start + rows].max() for start in range(0, len(lengths), rows)], most)


def _arithmetic(settings: Mapping[str, Any]) -> Arithmetic:
    if settings.get("optim", "adamw_torch_fused") not in ("adamw_torch_fused", "adamw_torch", "sgd"):
        return "training"
    return "rounding" if any(settings.get(each) for each in ("bf16", "fp16", "tf32")) else "exact"


def _kept(trainer: Trainer, device: torch.device) -> Kept:
    """Bytes of Trainer's tensors that outlive a step."""
    parameters = list(trainer.model.parameters())
    gradients = [each.grad for each in parameters if each.grad is not None]
    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)  # Accelerate's wrapper holds the other
    states = [] if optimizer is None else [
        value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)
    ]  # fmt: skip
    return Kept.of(device, [*parameters, *trainer.model.buffers()], gradients, states)


class _Rows(Dataset[Any]):
    """The rows of all batches in their order, as a tokenizer gives them."""

    def __init__(self, work: Work, steps: Steps) -> None:
        part, self._random = work.prepared.training, work.random
        self._samples = np.concatenate([work.samples(number) for number in range(steps.total)])
        self._tokens, self._targets = part.tokens, dense(taken(part.targets_N, self._samples))
        if (scale := work.prepared.target_scale) is not None:  # as our side's loss has them
            self._targets = (self._targets.reshape(len(self._samples), -1) - scale.centers) / scale.spread
            self._targets = self._targets[:, 0] if len(scale.centers) == 1 else self._targets
        self._floating = work.prepared.space.task != "single_label"

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, place: int) -> dict[str, Any]:
        sample = int(self._samples[place])
        target = self._targets[place]
        row: dict[str, Any] = {"input_ids": self._tokens.sequence(sample).tolist()}
        if (types := self._tokens.sequence_types(sample)) is not None:
            row["token_type_ids"] = types.tolist()
        row["labels"] = np.asarray(target, dtype=np.float32).tolist() if self._floating else int(target)
        return {name: torch.as_tensor(value) for name, value in row.items()} if self._random else row


class _Watched(Trainer):  # type: ignore[misc]
    """Trainer, its first steps watched by phase for their memory. Its steps are its own.

    computed: tokens of each micro-batch, padding counted. losses: of each from step `last_block` on, on the device.
    """

    phases: PhaseMemory
    last_block: int
    _meeting = False

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.computed: list[int] = []
        self.losses: list[torch.Tensor] = []
        self._step_arguments: tuple[Any, ...] = ()
        self._backward = ExitStack()

    @property
    def watching(self) -> bool:
        return int(self.state.global_step) < _WATCHED_STEPS

    def training_step(self, model: Any, inputs: dict[str, Any], *arguments: Any, **others: Any) -> Any:
        self.computed.append(inputs["input_ids"].numel())
        self._step_arguments = arguments
        with self._backward:
            return super().training_step(model, inputs, *arguments, **others)

    def meet_shapes(self) -> float:
        """Meet each length of the micro-batches, of which nothing is noted; the seconds that it took."""
        self._meeting = True
        try:
            return meet_shapes(self, self._step_arguments)
        finally:
            self._meeting = False

    def compute_loss(self, *arguments: Any, **others: Any) -> Any:
        if self._meeting:
            return super().compute_loss(*arguments, **others)
        if self.watching:
            with self.phases.forward(self.state.global_step):
                loss = super().compute_loss(*arguments, **others)
            self._backward.enter_context(self.phases.backward())
        else:
            loss = super().compute_loss(*arguments, **others)
        if self.state.global_step >= self.last_block:
            self.losses.append(loss.detach().clone())  # a CUDA graph writes the next one to the same memory
        return loss


class _Clock(TrainerCallback):  # type: ignore[misc]
    """Notes the time at the edges of blocks, and ends the training after the last one.

    meets: micro-batches of all lengths are met after the first step; met_s: the seconds that it took.
    """

    watched: _Watched
    meets = False
    met_s: float | None = None

    def __init__(self, steps: Steps, told: Callable[[int], None], until: float | None) -> None:
        self.blocks, self._steps, self._told, self._update = Blocks(until=until), steps, told, ExitStack()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.watched.watching:
            self._update.enter_context(self.watched.phases.update())

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._update.close()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        done = int(state.global_step)
        if done == 1:
            _wait()
            self.blocks.first_step_at = time.perf_counter()
            if self.meets:
                self.met_s = self.watched.meet_shapes()
        self._told(done)
        if done >= self._steps.warm_up and (done - self._steps.warm_up) % self._steps.block == 0:
            _wait()
            self.blocks.mark()
            control.should_log = True  # the mean loss since the last log: of the block
            control.should_training_stop = self.blocks.is_over(self._steps)


def _wait() -> None:
    """Wait for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()

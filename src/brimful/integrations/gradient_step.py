"""Gradients of effective batches, for a loop that clips and updates by itself, such as transformers' Trainer."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from brimful.data.batches.batch import Whole
from brimful.integrations.custom_loop import Step
from brimful.integrations.process_group import ProcessGroup
from brimful.integrations.rows import ReadRows, Rows, joined
from brimful.models.hub.inspection import max_positions
from brimful.step.updates.given_adamw import GivenAdamW, OwnersAdamW


class OutgrownError(Exception):
    """An update has more rows, or a longer one, than the step was made for."""


class GradientStep(Step):
    """`Step` up to the gradient, which it leaves in `.grad`; with `adamw` up to the update by this optimizer of the
    loop's, whose next `step` then does nothing. Between its passes the model's own forward works.

    longest: most tokens that a row is expected to have. num_rows: of an effective batch at most.
    grad_norm: () of the last gradient before clipping, on the device; None where the loop clips and updates.
    """

    def __init__(
        self, model: Any, *, num_steps: int, num_rows: int, longest: int, lengths: np.ndarray | None,
        adamw: torch.optim.AdamW | None = None, **options: Any,
    ) -> None:  # fmt: skip
        self._adamw, self.grad_norm = adamw, cast(Tensor | None, None)
        self._num_updates = self._num_applied = 0
        self._resting: list[tuple[Any, str]] = _attention_of(model)
        super().__init__(
            model, num_steps=num_steps, batch_size=num_rows, max_length=longest, lengths=lengths, **options
        )
        own = self._given.model
        limit = max_positions(own.config, own)
        self._reader = dataclasses.replace(self._reader, max_length=limit or 1 << 30)
        self._modules = list(own.modules())
        self._working: list[tuple[Any, str]] = []
        self._calls: list[tuple[Any, Any]] = []
        self._rest()

    def _owner(self, optimizer: Any) -> Any:
        return "elsewhere" if self._adamw is None else OwnersAdamW(optimizer=self._adamw)

    def _follow(self) -> None:
        """Nothing: the loop makes another step where other weights are trained."""

    @property
    def update(self) -> GivenAdamW | None:
        """The update that is part of the step; None where it is the loop's."""
        found = self._built.step.update
        return found if isinstance(found, GivenAdamW) else None

    def gradients(self, batches: Sequence[Rows], number: int, group: ProcessGroup | None = None) -> Tensor:
        """Leave the gradient of all these rows as one batch; return its loss, () fp32 on the device.

        number: of the effective batch, from which dropout is seeded. group: of processes whose rows are of this batch
        too: gradient and loss are those of all.
        Raises: OptionError for rows that the model cannot take, OutgrownError, MemoryFullError.
        """
        rows = joined([self._reader.read(each) for each in batches])
        longest = max(len(each) for each in rows.ids)
        if longest > self.longest or len(rows) > self._options.batch_size:
            raise OutgrownError(f"{len(rows)} rows of at most {longest} tokens")
        whole = None if group is None else self._whole(rows, group)
        with self._at_work():
            pending = self.run(self._made(rows, number, whole))
        readings = pending.on_device.float()  # a copy: the next step writes others
        loss, self.grad_norm = readings[0], None
        if (update := self.update) is not None:
            self.grad_norm = readings[1]
            self._num_updates += 1
            update.made()
        if group is not None:
            group.sum([p for p in self._given.model.parameters() if p.requires_grad], loss)
        return loss

    def take_skipped(self) -> int:
        """Count updates that were left out since the last call, where they are the step's. Waits for the device."""
        update = self.update
        if update is None or not self._num_updates:
            return 0
        skipped = self._num_updates - (applied := int(update.applied)) + self._num_applied
        self._num_updates, self._num_applied = 0, applied
        return skipped

    def _whole(self, rows: ReadRows, group: ProcessGroup) -> Whole:
        """Facts of the effective batch that these rows are a part of."""
        own = self._task.denominator(rows.targets_N, rows.weights_N)
        return Whole(
            denominator=own * group.num_rows / len(rows), num_samples=group.num_rows, num_tokens=sum(map(len, rows.ids))
        )

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        """Within, the model's modules are called as the step calls them."""
        own = self._given.model
        self._resting = [(config, config._attn_implementation) for config, _ in self._resting]
        for config, name in self._working:
            config._attn_implementation = name
        for module, call in self._calls:
            module._compiled_call_impl = call
        for name in self._given.attributes:
            vars(own).pop(name, None)
        try:
            yield
        finally:
            self._rest()

    def _rest(self) -> None:
        own = self._given.model
        self._working = [(config, config._attn_implementation) for config, _ in self._resting]
        self._calls = [(module, call) for module in self._modules if (call := module._compiled_call_impl) is not None]
        for config, name in self._resting:
            config._attn_implementation = name
        for module, _ in self._calls:
            module._compiled_call_impl = None
        vars(own).update(self._given.attributes)

    def release(self) -> Any:
        """As `Step` has it. Gradients and modes are the loop's."""
        with self._at_work():
            self._built.step.release()
            self._put_back()
        return self._given.restored()


def _attention_of(model: Any) -> list[tuple[Any, str]]:
    """Configurations of all modules, and the attention that each names."""
    configs = {id(c): c for c in (getattr(module, "config", None) for module in model.modules()) if c is not None}
    return [(c, c._attn_implementation) for c in configs.values() if hasattr(c, "_attn_implementation")]

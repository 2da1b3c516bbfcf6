"""A process that takes the steps of a run which another one leads, on its part of each batch.

The leader reads, decides and writes: its loop gives an order wherever others take part. So nothing that depends on what
one process alone has met, a signal, a full disk, a metric, can lead two of them apart.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from brimful.core.callbacks import Callbacks
from brimful.core.errors import DiskFullError, MemoryFullError, OutputError, RanksError
from brimful.core.options.train import TrainOptions
from brimful.core.phases import Phases
from brimful.core.records import OutOfMemory, Run
from brimful.data.batches.batch import Batch
from brimful.data.batches.prefetch import Feed
from brimful.engine.assemble import Built
from brimful.engine.fitted_step import FittedStep
from brimful.engine.inference import evaluating, evaluation_forward, predict, send_part, timed
from brimful.engine.learning import resumed
from brimful.engine.prepare import Prepared, prepare
from brimful.engine.signals import passing_on
from brimful.engine.training.checkpoint import checkpoint_path, load_checkpoint
from brimful.engine.training.checkpoint_writer import PartWriter
from brimful.engine.training.orders import Order, own_work
from brimful.engine.training.run_folder import RunFolder
from brimful.engine.training.same_path import build_led
from brimful.hardware.ranks import Ranks, digest
from brimful.levers.precision import choose_precision
from brimful.measurement.memory import MemoryWatch
from brimful.step.recovery import out_of_memory_text
from brimful.step.step import Pending

#: Steps whose rows can still be asked about: more than the leader has in flight.
_REMEMBERED = 8


def follow(options: TrainOptions, device: torch.device, ranks: Ranks) -> Run:
    """Take part in a run to its end; return the record that its leader wrote.

    Raises: what `train` raises for data, model and memory; RanksError if another process is gone.
    """
    path = Path(options.output)
    with passing_on(ranks):
        _take_part(options, device, ranks)
    run = RunFolder(path).read()
    if run is None:
        raise RanksError("the leading process has left no record of the run")
    return run


def _take_part(options: TrainOptions, device: torch.device, ranks: Ranks) -> None:
    callbacks, precision, phases = Callbacks(), choose_precision(options.precision, device), Phases()
    ranks.pulse.follow(phases)
    phases.enter("data")
    found = RunFolder(Path(options.output)).read() if options.resume else None
    if found is not None:
        options = resumed(options, found)
    prepared = prepare(options, callbacks, phases, before=found)
    order, _ = ranks.hear()
    if order == Order.END:
        return
    folder = Path(options.output)
    built = build_led(ranks.spread(), options, prepared, precision, callbacks, phases, ranks, folder)
    _Follower(options, prepared, built, ranks).run()


class _Follower:
    """Does what the leader orders until the end."""

    def __init__(self, options: TrainOptions, prepared: Prepared, built: Built, ranks: Ranks) -> None:
        self._options, self._prepared, self._built, self._ranks = options, prepared, built, ranks
        self._fitted = FittedStep(built, self._out_of_memory)
        self._forward = evaluation_forward(built, most_rows=options.batch_size, note=lambda _: None)
        self._steps: deque[tuple[int, Pending]] = deque(maxlen=_REMEMBERED)
        self._batches: Iterator[Batch] = iter(())
        self._begun_at = 0
        self._full: MemoryFullError | None = None  # in a step, of all processes
        self._parts: PartWriter | None = None
        self._memory = MemoryWatch(built.step.device, built.step.memory, limit=options.memory_limit)

    def run(self) -> None:
        """Do what one order after another says, until the end."""
        try:
            self._work()
        finally:
            if self._parts is not None:
                self._ranks.pulse.enter("saving")
                self._parts.close()
        if self._full is not None:
            raise self._full

    def _work(self) -> None:
        if self._obey() == Order.BEGIN:
            device, start, stop = self._built.step.device, self._begun_at, self._prepared.num_batches
            with Feed(self._built.source, device, start=start, stop=stop, ahead=self._built.ahead) as feed:
                self._batches = iter(feed)
                self._obey()
        if not self._built.step.update.gathers_weights:
            self._built.step.release(together=False)

    def _obey(self) -> int:
        """Do what is ordered, but for steps before they begin; return the order that says to begin, or to end."""
        while True:
            order, number = self._ranks.hear()
            if order == Order.BEGIN:
                self._begun_at = number
            if order in (Order.BEGIN, Order.END):
                return order
            self._do(order, number)

    def _do(self, order: int, number: int) -> None:
        if order == Order.STEP:
            self._ranks.pulse.await_input()
            try:
                self._step(next(self._batches), number)
            except MemoryFullError as error:
                if not error.resumable:
                    raise
                self._full = error  # the leader saves what there is, and then ends
        elif order == Order.EVALUATE:
            self._evaluate()
        elif order == Order.ROWS:
            self._name_rows(number)
        elif order == Order.STATE:
            self._write_part(*divmod(number, 2))
        elif order == Order.WORK:
            pulse = self._ranks.pulse
            pulse.peak_bytes, pulse.limit_bytes = self._memory.peak(), self._memory.limit_bytes
            self._ranks.send_beat()
        elif order == Order.LOAD:
            self._load(number)
        elif order == Order.RELEASE:
            self._built.step.release()
        elif order == Order.COMPARE:
            self._ranks.send(np.array([digest(self._built.step.update.alike())]))
        else:
            raise RuntimeError(f"the leader gave order {order}, which this process does not know")

    def _write_part(self, step: int, second: int) -> None:
        """Begin to write this process's part of a checkpoint."""
        self._ranks.pulse.enter("saving")  # until the next order
        if self._parts is None:
            assert self._ranks.watch is not None
            folder = RunFolder(Path(self._options.output)).checkpoints
            watch, pulse = self._ranks.watch, self._ranks.pulse
            self._parts = PartWriter(folder, pulse, self._ranks.count, watch.board())
        try:
            state = self._built.step.state()
        except (DiskFullError, OutputError) as error:  # of another disk
            self._parts.fail(error)
        else:
            self._parts.begin(step, second, state)

    def _load(self, step: int) -> None:
        """Take up a checkpoint, and the sizes of micro-batches where memory ran out before it."""
        saved = load_checkpoint(checkpoint_path(RunFolder(Path(self._options.output)).checkpoints, step))
        self._built.step.load_state(saved.state)
        if (limit := saved.loop.get("token_budget")) is not None:
            self._fitted.limit_to(limit)
            self._built.source.layout = self._fitted.layout

    def _out_of_memory(self, found: OutOfMemory) -> None:
        """Have the leader say that memory ran out here."""
        pulse = self._ranks.pulse
        pulse.warnings = (*pulse.warnings, f"process {pulse.rank}: {out_of_memory_text(found)}")

    def _step(self, batch: Batch, number: int) -> None:
        if batch.number != number:
            raise RuntimeError(f"the leader is at batch {number}, and this process at {batch.number}")
        self._ranks.pulse.begin(number + 1, **own_work(batch))
        pending = self._fitted.run(batch)
        self._built.source.layout = self._fitted.layout
        self._steps.append((number, pending))
        self._memory.look_beside()

    def _evaluate(self) -> None:
        evaluation = self._prepared.evaluation
        assert evaluation is not None
        self._ranks.pulse.enter("evaluation")
        step = self._built.step
        memory = self._memory.phases.phase("evaluation")
        with memory, evaluating(self._built.model), step.update.reading(), step.with_others():
            if not step.update.gathers_weights:
                send_part(self._forward, evaluation.tokens, self._ranks)
                return
            step.keep_room()
            for _ in timed(predict(self._forward, evaluation.tokens), self._ranks):  # all take part in each pass
                pass

    def _name_rows(self, number: int) -> None:
        """Send the rows of a skipped step whose loss was not finite."""
        rows = next((pending.read().bad_samples for each, pending in self._steps if each == number), ())
        self._ranks.send(np.array(rows, dtype=np.int64))

"""Baselines of a run, made beside it.

A linear model takes a second or two of one core, half of it for importing its library. Where a GPU trains, a process of
its own makes it while the steps run; on a CPU, whose cores are all at work, it is made after them.
"""

from __future__ import annotations

import multiprocessing.spawn
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from brimful.core.callbacks import Callbacks
from brimful.core.cores import num_cores
from brimful.core.evaluation import Baseline
from brimful.core.options.train import TrainOptions
from brimful.engine.prepare import Part, Prepared
from brimful.tasks.scoring import baseline_worker
from brimful.tasks.scoring.baselines import Labelled, LinearTask, constant_baseline, linear_task


class Baselines:
    """The baselines of one run, if it has rows to evaluate on and was not told to make none. Close it at the end.

    beside: whether a process makes them beside the run, from `begin` on.
    """

    def __init__(self, prepared: Prepared, options: TrainOptions, *, beside: bool) -> None:
        self._prepared, self._options = prepared, options
        self._beside = beside and (num_cores() or 1) > 1
        self._linear: _Beside | None = None

    def begin(self) -> None:
        """Begin with the linear model, where there is a process for it."""
        if self._beside and self._options.baselines and self._prepared.evaluation is not None:
            self._linear = _Beside(self._task(self._prepared.evaluation))

    def result(self, callbacks: Callbacks) -> tuple[Baseline, ...]:
        """Return the baselines, when they are made. What a process failed to make is made here."""
        evaluation = self._prepared.evaluation
        if not self._options.baselines or evaluation is None:
            return ()
        if self._linear is None or not self._linear.ended:
            callbacks.stage("fitting a linear model of words to compare with (--no-baselines leaves it out)")
        training = self._prepared.training
        constant = constant_baseline(self._prepared.space, training.targets_N, evaluation.targets_N)
        try:
            linear = self._task(evaluation).fit() if self._linear is None else self._linear.result()
        except ProcessLookupError:
            linear = self._task(evaluation).fit()
        return (constant,) if linear is None else (constant, linear)

    def close(self) -> None:
        """End the process, if nobody asked for what it makes."""
        if self._linear is not None:
            self._linear.close()

    def _task(self, evaluation: Part) -> LinearTask:
        prepared = self._prepared
        parts = (_labelled(prepared.training), _labelled(evaluation))
        return linear_task(prepared.space, *parts, seed=self._options.seed)


class _Beside:
    """One linear model in a process of its own. A thread gives it the task and takes the answer."""

    def __init__(self, task: LinearTask) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._lock, self._closed = threading.Lock(), False
        self._answer = b""
        self._thread = threading.Thread(target=self._work, args=(task,), name="baselines", daemon=True)
        self._thread.start()

    @property
    def ended(self) -> bool:
        """True if `result` would not wait."""
        return not self._thread.is_alive()

    def result(self) -> Baseline | None:
        """Return what was made. Raises: ProcessLookupError where the process did not answer."""
        self._thread.join()
        try:
            made: Baseline | None = pickle.loads(self._answer)
        except (EOFError, pickle.UnpicklingError) as error:
            raise ProcessLookupError from error
        return made

    def close(self) -> None:
        """End the process and the thread."""
        with self._lock:
            self._closed = True
            if self._process is not None:
                self._process.kill()
        self._thread.join()

    def _work(self, task: LinearTask) -> None:
        # The process inherits what its thread is deaf to: stopping is the main process's to decide.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        executable = os.fsdecode(multiprocessing.spawn.get_executable() or sys.executable)
        with suppress(OSError):
            process = subprocess.Popen(
                [executable, *baseline_worker.COMMAND, *sys.path],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=os.environ | baseline_worker.ENVIRONMENT,
            )
            with self._lock:
                self._process = process
                if self._closed:
                    process.kill()
            self._answer = process.communicate(pickle.dumps(task, protocol=5))[0]


def _labelled(part: Part) -> Labelled:
    """Texts of a part, each with its pair behind it, made for the rows that are asked for."""
    return Labelled(texts=partial(_texts, part), targets_N=part.targets_N)


def _texts(part: Part, rows: npt.NDArray[np.int64]) -> Sequence[str]:
    chosen = pa.array(rows)
    first: list[str] = part.examples.texts.take(chosen).to_pylist()
    if part.examples.pairs is None:
        return first
    return [f"{a} {b}" for a, b in zip(first, part.examples.pairs.take(chosen).to_pylist(), strict=True)]

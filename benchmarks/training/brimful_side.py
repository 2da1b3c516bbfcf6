"""brimful, by the parts that `brimful train` is wired of: prepare, build, feed, and the loop of steps in flight."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import turns
from chip import operations
from shapes import max_length
from works import Work, data_file, model_folder

from brimful.core.callbacks import Callbacks
from brimful.core.options.train import TrainOptions
from brimful.data.batches.prefetch import Feed
from brimful.engine.assemble import Built, build
from brimful.engine.prepare import prepare
from brimful.hardware.probe import choose_device
from brimful.hardware.process_settings import freed_memory_kept
from brimful.levers.precision import choose_precision

_IN_FLIGHT = 2
#: Steps of the run that is begun and not finished: its length decides how many batches budgets are chosen from.
_RUN_STEPS = 10_000


@dataclass
class _Warnings(Callbacks):
    """Keeps what a user would be warned of: a fallback must not go unseen."""

    lines: list[str] = field(default_factory=list)

    def warning(self, text: str) -> None:
        self.lines.append(text)


def measure(plan: dict[str, Any], inputs: Path) -> Iterator[dict[str, Any]]:
    """One row a setting of the plan: what each round took, and the recipe that ran."""
    yield from measure_work(Work.parse(plan["work"]), plan, inputs)


def measure_work(work: Any, plan: dict[str, Any], inputs: Path) -> Iterator[dict[str, Any]]:
    """The same for a work of any table, which has a `size` and `texts`."""
    for settings in plan["settings"]:
        options = TrainOptions(
            data=str(data_file(inputs, work)),
            model=str(model_folder(inputs, work)),
            output="",
            eval_split=0.0,
            max_length=max_length(plan["smoke"]),
            batch_size=settings["batch_size"],
            learning_rate=1e-5,
            max_steps=_RUN_STEPS,
            seed=1,
            precision=settings["precision"],
            execution=settings["execution"],
        )
        callbacks = _Warnings()
        began = time.perf_counter()
        precision = choose_precision(options.precision, choose_device(options.device))
        prepared = prepare(options, callbacks)
        with precision.apply(), freed_memory_kept(precision.device):  # as in a run
            built = build(options, prepared, precision, callbacks)
            warm_up, steps, rounds = plan["warm_up"], plan["steps"], plan["rounds"]
            if options.batch_size > 32:
                warm_up, steps = warm_up // 2, steps // 2
            built_s = time.perf_counter() - began
            marks, cpu_marks, graphs, computed, wait_s = _run(built, warm_up, steps, rounds)
        turns.give()
        lengths = prepared.training.tokens.lengths
        found = []
        for number in range(rounds):
            first = warm_up + number * steps
            samples = np.concatenate([prepared.order.samples(i) for i in range(first, first + steps)])
            found.append(
                {
                    "seconds": marks[number + 1] - marks[number],
                    "cpu_s": cpu_marks[number + 1] - cpu_marks[number],
                    "samples": len(samples),
                    "tokens": int(lengths[samples].sum()),
                    "computed_tokens": sum(computed[first : first + steps]),
                    "operations": operations(built.model, lengths[samples]) if plan.get("operations", True) else None,
                }
            )
        cuda = precision.device.type == "cuda"
        yield {
            "settings": settings,
            "rounds": found,
            "built_s": built_s,
            "warm_up_s": marks[0] - began - built_s,
            "peak_allocated_bytes": torch.cuda.max_memory_allocated() if cuda else None,
            "peak_reserved_bytes": torch.cuda.max_memory_reserved() if cuda else None,
            "steps_per_round": steps,
            "recipe": {lever.name: lever.value for lever in built.recipe.levers},
            "reasons": {lever.name: lever.reason for lever in built.recipe.levers},
            "precision_reason": next(lever.reason for lever in built.recipe.levers if lever.name == "precision"),
            "packed": built.packing.packed,
            "packed_reason": built.packing.reason,
            "warnings": callbacks.lines,
            "graphs_at_marks": graphs,
            "waited_for_input_s": wait_s,
        }


def _run(
    built: Built, warm_up: int, steps: int, rounds: int
) -> tuple[list[float], list[float], list[int], list[int], float]:
    """Times at the edges of rounds, when the device has done all that it was told, and the process's CPU seconds by
    then; graphs captured by then; tokens that each step computes; and seconds that the rounds waited for input."""
    step, marks, cpu_marks, graphs, computed = built.step, list[float](), list[float](), list[int](), list[int]()
    flying: deque[Any] = deque()
    waited_s = 0.0
    total = warm_up + rounds * steps
    with closing(built.source) as source, Feed(source, step.device, stop=total, ahead=built.ahead) as feed:
        for number, batch in enumerate(feed, 1):
            if number == max(1, warm_up - 10):  # most is compiled by then
                turns.take()
            flying.append(step.run(batch))
            computed.append(batch.num_computed)
            if len(flying) > _IN_FLIGHT:
                flying.popleft().read()
            if number >= warm_up and (number - warm_up) % steps == 0:
                while flying:
                    flying.popleft().read()
                if step.device.type == "cuda":
                    torch.cuda.synchronize()
                marks.append(time.perf_counter())
                cpu_marks.append(time.process_time())
                graphs.append(step.num_graphs)
                if number == warm_up:
                    waited_s = feed.wait_s
        return marks, cpu_marks, graphs, computed, feed.wait_s - waited_s

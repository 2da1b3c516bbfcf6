"""brimful in one of several processes, by the parts that `brimful train` is wired of, without its leader's orders."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from brimful_side import _RUN_STEPS, _Warnings
from shapes import max_length
from works import Work, data_file, model_folder

from brimful.core.options.train import TrainOptions
from brimful.core.place import find_place
from brimful.data.batches.prefetch import Feed
from brimful.engine.assemble import Built, build
from brimful.engine.prepare import prepare
from brimful.hardware.probe import choose_device
from brimful.hardware.ranks import joined
from brimful.levers.precision import choose_precision

_IN_FLIGHT = 2


def measure(plan: dict[str, Any], inputs: Path) -> Iterator[dict[str, Any]]:
    """Yield what the rounds took. All processes make the same choices: the same GPUs, data and options."""
    work, place = Work.parse(plan["work"]), find_place()
    options = TrainOptions(
        data=str(data_file(inputs, work)),
        model=str(model_folder(inputs, work)),
        output="",
        eval_split=0.0,
        limit=plan["limit"],
        max_length=max_length(plan["smoke"]),
        batch_size=plan["batch_size"],
        learning_rate=1e-5,
        max_steps=_RUN_STEPS,
        seed=1,
        execution="auto" if plan["smoke"] else "compiled",
        **plan["form"],
    )
    device = choose_device("cpu" if plan["smoke"] else "cuda", place.local_rank)
    callbacks, precision = _Warnings(), choose_precision(options.precision, device)
    with joined(place, device) as ranks, precision.apply():
        ranks.pulse.enter("capture")
        prepared = prepare(options, callbacks)
        built = build(options, prepared, precision, callbacks, ranks=ranks)
        built.step.meet()
        marks, graphs = _run(built, plan["warm_up"], plan["steps"], plan["rounds"])
        rounds = []
        for number in range(plan["rounds"]):
            first = plan["warm_up"] + number * plan["steps"]
            samples = sum(len(prepared.order.samples(i)) for i in range(first, first + plan["steps"]))
            rounds.append({"seconds": marks[number + 1] - marks[number], "samples": samples})
        yield {
            "settings": {"batch_size": options.batch_size, "reduce_dtype": options.reduce_dtype},
            "rounds": rounds,
            "recipe": {lever.name: lever.value for lever in built.recipe.levers},
            "reasons": {lever.name: lever.reason for lever in built.recipe.levers},
            "graphs_at_marks": graphs,
            "warnings": callbacks.lines,
        }
        built.step.release()


def _run(built: Built, warm_up: int, steps: int, rounds: int) -> tuple[list[float], list[int]]:
    """Times at the edges of rounds, when the device has done all that it was told, and graphs captured by then."""
    step, marks, graphs = built.step, list[float](), list[int]()
    flying: deque[Any] = deque()
    with closing(built.source) as source, Feed(source, step.device, stop=warm_up + rounds * steps) as feed:
        for number, batch in enumerate(feed, 1):
            step.ranks.pulse.move()
            flying.append(step.run(batch))
            if len(flying) > _IN_FLIGHT:
                flying.popleft().read()
            if number >= warm_up and (number - warm_up) % steps == 0:
                while flying:
                    flying.popleft().read()
                marks.append(time.perf_counter())
                graphs.append(step.num_graphs)
    return marks, graphs

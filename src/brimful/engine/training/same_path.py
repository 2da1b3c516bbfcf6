"""The leader's way to run, in all processes: rows packed or not, the launch mode, and the sizes of micro-batches.

What was measured or checked on one device may come out otherwise on another: the leader decides.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Literal

from brimful.core.errors import ModelError
from brimful.core.options import TrainOptions
from brimful.data.batches.batch import Layout, PackedLayout, PaddedLayout
from brimful.engine.assemble import Built


def path_of(built: Built) -> str:
    """Return the way of the leader's run as JSON."""
    layout = built.layout
    sizes: dict[str, object] = {}
    if isinstance(layout, PackedLayout):
        sizes = {"budgets": layout.budgets.tokens}
    elif isinstance(layout, PaddedLayout):
        sizes = {
            "lengths": layout.shapes.lengths,
            "tokens": layout.shapes.num_tokens,
            "call": layout.shapes.call_tokens,
        }
    return json.dumps(
        {
            "execution": built.recipe.value("execution"),
            "packed": built.packing.packed,
            "eager_attention": built.eager_attention,
            "sharding": built.recipe.value("sharding"),
            "fp8": built.precision.plan is not None,
            "sizes": sizes,
        }
    )


def options_of(path: str, options: TrainOptions) -> tuple[TrainOptions, bool]:
    """Return options that lead to the same way, and whether padded rows must have eager attention."""
    told = json.loads(path)
    precision = "bf16" if options.precision == "fp8" and not told["fp8"] else options.precision
    packing: Literal["auto", "off"] = "auto" if told["packed"] else "off"
    sharding = told["sharding"]
    asked = replace(options, execution=told["execution"], packing=packing, precision=precision, sharding=sharding)
    return asked, bool(told["eager_attention"])


def with_sizes(path: str, built: Built) -> Built:
    """Return a run with the leader's sizes of micro-batches. Raises: ModelError where rows are packed only there."""
    told = json.loads(path)
    if built.packing.packed != told["packed"]:
        raise ModelError(
            f"the model runs packed in the first process and not in this one: {built.packing.reason}",
            hint="add --packing off",
        )
    sizes, layout = told["sizes"], built.layout
    changed: Layout = layout
    if isinstance(layout, PackedLayout):
        changed = replace(layout, budgets=replace(layout.budgets, tokens=tuple(sizes["budgets"])))
    elif isinstance(layout, PaddedLayout):
        lengths = None if sizes["lengths"] is None else tuple(sizes["lengths"])
        shapes = replace(layout.shapes, lengths=lengths, num_tokens=sizes["tokens"], call_tokens=sizes["call"])
        changed = replace(layout, shapes=shapes)
    built.source.layout = changed
    return replace(built, layout=changed)

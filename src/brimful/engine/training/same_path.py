"""The leader's way to run, in all processes: rows packed or not, the launch mode, the attention kernel, and the sizes
of micro-batches.

What was measured or checked on one device may come out otherwise on another: the leader decides. What a run is made of,
data and model, must be the same.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from brimful.core.callbacks import Callbacks
from brimful.core.errors import BrimfulError, DataError, ModelError, OutputError, listed, printable
from brimful.core.options.train import TrainOptions
from brimful.core.phases import Phases
from brimful.data.batches.batch import Layout, PackedLayout, PaddedLayout
from brimful.engine.assemble import Built, build
from brimful.engine.prepare import Prepared
from brimful.hardware.ranks import Ranks, digest
from brimful.levers.precision import choose_precision
from brimful.models.model_stats import layers_of
from brimful.models.packed.ways import Way, set_ways, ways_of
from brimful.step.precision import Precision

#: Seconds in which a file system of several machines may not show a new folder yet, and between two looks.
_SEEN_S, _LOOK_S = 90.0, 0.1


def path_of(prepared: Prepared, built: Built) -> str:
    """Return the way of the leader's run as JSON, and what it is made of."""
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
            "attention": (isinstance(layout, PackedLayout) and layout.attention) or "",
            "kernels": built.recipe.value("attention"),
            "sharding": built.recipe.value("sharding"),
            "copies": getattr(built.step.update, "find_peers", None) is not None,
            "precision": "fp8" if built.precision.plan is not None else built.precision.value,
            "sizes": sizes,
            "ways": ways_of(layers_of(built.model) or ()),
            "made of": _made_of(prepared, built),
        }
    )


@dataclass(frozen=True, kw_only=True)
class Told:
    """Options that lead to the leader's way, and the attention that it has: as of `Assembly`."""

    options: TrainOptions
    eager_attention: bool
    attention: str


def options_of(path: str, options: TrainOptions) -> Told:
    """Return what leads to the same way."""
    told = json.loads(path)
    precision = told["precision"] if options.precision in ("auto", "fp8") else options.precision
    packing: Literal["auto", "off"] = "auto" if told["packed"] else "off"
    sharding = told["sharding"]
    asked = replace(options, execution=told["execution"], packing=packing, precision=precision, sharding=sharding)
    asked = replace(asked, peer_copies=told["copies"])
    return Told(options=asked, eager_attention=told["eager_attention"], attention=told["attention"])


def with_sizes(path: str, built: Built) -> Built:
    """Return a run with the leader's sizes of micro-batches, whose layers keep as much as there.

    Raises: ModelError where rows are packed only there.
    """
    told = json.loads(path)
    if built.packing.packed != told["packed"]:
        raise ModelError(
            f"the model runs packed in the first process and not in this one: {built.packing.reason}",
            hint="add --packing off",
        )
    if told["ways"]:
        set_ways(layers_of(built.model) or (), {int(number): Way(way) for number, way in told["ways"].items()})
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


def check_kernels(path: str, built: Built) -> None:
    """Check that attention is that of the leader. Raises: ModelError: masks of dropout are the kernel's."""
    told, own = json.loads(path)["kernels"], built.recipe.value("attention")
    if told != own:
        hint = "give all processes the same GPUs, torch and Triton, or add --packing off"
        raise ModelError(f"attention is by {told} in the first process, and by {own} in this one", hint=hint)


def check_made_of(path: str, prepared: Prepared, built: Built) -> None:
    """Check that a run is made of what the leader's is, before weights are cut. Raises: DataError naming the rest."""
    told, own = json.loads(path)["made of"], _made_of(prepared, built)
    if apart := [name for name in {**told, **own} if told.get(name) != own.get(name)]:
        hint = "give all processes the same files"
        raise DataError(f"not the same as in process 0: {listed(apart, 6)}", hint=hint)


def build_led(
    path: str, options: TrainOptions, prepared: Prepared, precision: Precision, callbacks: Callbacks,
    phases: Phases | None, ranks: Ranks, folder: Path | None = None,
) -> Built:  # fmt: skip
    """Build a run that goes the leader's way, whose step all processes have met for.

    folder: of the run, which all must see. Raises: what `build`, `check_seen`, `with_sizes`, `check_kernels` and
    `check_made_of` raise, and `agree`.
    """
    told = options_of(path, options)
    if told.options.precision != options.precision:
        precision = choose_precision(told.options.precision, precision.device)
    built = build(
        told.options, prepared, precision, callbacks, phases, eager_attention=told.eager_attention,
        attention=told.attention, ranks=ranks,
    )  # fmt: skip
    built = _on_path(path, prepared, built, ranks, folder)
    built.step.meet()
    return built


def _on_path(path: str, prepared: Prepared, built: Built, ranks: Ranks, folder: Path | None) -> Built:
    """Return the run with the leader's sizes, once all processes have found that they can go its way."""
    refusal: BrimfulError | None = None
    try:
        if folder is not None:
            check_seen(folder)
        built = with_sizes(path, built)
        check_kernels(path, built)
        check_made_of(path, prepared, built)
    except BrimfulError as error:
        refusal = error
    agree(ranks, refusal)
    return built


def met(built: Built, callbacks: Callbacks) -> Built:
    """Return a run whose step all processes have met for. What turned out otherwise is warned of, and in its recipe."""
    warning = built.step.meet()
    if warning:
        callbacks.warning(warning)
    notes = [note for note in (built.step.update.how_sent, warning) if note]
    return replace(built, recipe=built.recipe.with_note("processes", "; ".join(notes))) if notes else built


def agree(ranks: Ranks, refusal: BrimfulError | None = None) -> None:
    """Go on together, or not at all. refusal: this process's, of the leader's way.

    Raises: the refusal; DataError with another process's.
    """
    if ranks.watch is None:
        if refusal is not None:
            raise refusal
        return
    board = ranks.watch.board()
    if refusal is not None:
        board.leave(f"refusal/{ranks.rank}", str(refusal))
        board.leave(f"hint/{ranks.rank}", refusal.hint or "")
    refused = ranks.any([refusal is not None and rank == ranks.rank for rank in range(ranks.count)])
    if refusal is not None:
        raise refusal
    if any(refused):
        ranks.end_orders()
        rank = refused.index(True)
        why = board.find(f"refusal/{rank}") or "it cannot take this process's way"
        hint = board.find(f"hint/{rank}") or "give all processes the same files"
        raise DataError(f"process {rank}: {why}", hint=hint)


def check_seen(folder: Path) -> None:
    """Check that the leader's folder of the run is seen from here. Raises: OutputError."""
    until = time.monotonic() + _SEEN_S
    while not folder.is_dir() and time.monotonic() < until:
        time.sleep(_LOOK_S)
    if not folder.is_dir():
        hint = "--output must be a folder that all processes see under this name"
        raise OutputError(f"{printable(folder, 200)} is not there, where process 0 writes", hint=hint)


def _made_of(prepared: Prepared, built: Built) -> dict[str, str]:
    """Identity of data and model, by displayed name. Weights that will be cut are told by the size of their files."""
    found = {"the data": prepared.data_fingerprint, "what outputs mean": str(prepared.space)}
    found |= {"--max-length": str(prepared.max_length), "the number of steps": str(prepared.num_steps)}
    found |= {f"the {name}": sha256 for name, sha256 in prepared.report["sha256"].items()}
    if built.step.update.gathers_weights:
        return found | {"the size of the model's weights": str(prepared.facts.weight_bytes)}
    return found | {"the model's weights": str(digest(built.step.update.weights().values()))}

"""Rows that a Trainer's updates will have: how many, and their lengths where reading them runs no dataset.

Budgets and kernels are chosen by them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from transformers.trainer_utils import has_length

#: Numbers of masks that are summed at most; beyond, rows are taken to have no padding.
_MOST_NUMBERS = 100_000_000
#: Tokens that rows are taken to have at most, where their dataset does not say.
_LONGEST = 512
#: Batches that are then drawn from the rows of the first one, to choose token budgets by.
_BATCHES = 200
#: Name under which Trainer's state holds, and checkpoints have, what batches alone have said of rows.
_PLACE = "brimful.Trainer"


@dataclass(frozen=True, kw_only=True)
class RowsToCome:
    """Rows that updates are expected to have. num_rows, longest: most rows of an update, most tokens of a row.

    lengths_N: tokens of rows, those to come or like them.
    """

    num_rows: int
    longest: int
    lengths_N: np.ndarray


def rows_to_come(trainer: Any, here_N: np.ndarray) -> RowsToCome:
    """Return the rows that a Trainer's step is made for. here_N: tokens of the rows of the update that it is made at.

    Arguments and dataset say it as far as they can; what batches alone say is that of the first one, or of the last
    one that the step was too small for, and is in Trainer's state: a resumed run makes the step of one that was not
    interrupted.
    """
    lengths_N, states = lengths_of(dataset_of(trainer)), trainer.state.stateful_callbacks
    said: dict[str, Any] = states.get(_PLACE, {})
    asked, usual = rows_of_an_update(trainer), _LONGEST if lengths_N is None else int(lengths_N.max())
    before = max(asked, said.get("num_rows", 0)), max(usual, said.get("longest", 0))
    num_rows, longest = max(before[0], len(here_N)), max(before[1], int(here_N.max()))
    if (num_rows, longest) != before or (lengths_N is None and not said):
        said = states[_PLACE] = {"lengths": here_N.tolist()}
        said |= {"num_rows": num_rows} if num_rows > asked else {}
        said |= {"longest": longest} if longest > usual else {}
    if lengths_N is None:  # as many batches of these: one alone would be the only size that is expected
        lengths_N = np.random.default_rng(0).choice(np.array(said["lengths"]), size=_BATCHES * num_rows)
    return RowsToCome(num_rows=num_rows, longest=longest, lengths_N=lengths_N)


def lengths_of(dataset: Any) -> np.ndarray | None:
    """(N,) tokens of each row of a `datasets.Dataset`, or of a list of dictionaries, padding not counted.

    None where rows are made when asked for.
    """
    if type(dataset) in (list, tuple):
        return _of_rows(dataset)
    table = getattr(getattr(dataset, "data", None), "table", None)
    if not isinstance(table, pa.Table) or "input_ids" not in table.column_names:
        return None
    if (getattr(dataset, "format", None) or {}).get("type") == "custom":
        return None  # `set_transform`: rows are made when asked for
    ids = table.column("input_ids")
    if not (pa.types.is_list(ids.type) or pa.types.is_large_list(ids.type)) or ids.null_count:
        return None
    lengths_N = pc.list_value_length(ids).to_numpy().astype(np.int64)
    if "attention_mask" in table.column_names and lengths_N.sum() <= _MOST_NUMBERS and lengths_N.all():
        flat = pc.list_flatten(table.column("attention_mask")).to_numpy()
        starts = np.concatenate([[0], np.cumsum(lengths_N)[:-1]])
        if len(flat) == lengths_N.sum():
            lengths_N = np.add.reduceat(flat.astype(np.int64), starts)
    indices = getattr(dataset, "_indices", None)
    if indices is not None:
        lengths_N = lengths_N[indices.column(0).to_numpy()]
    found: np.ndarray = lengths_N[lengths_N > 0]
    return found if len(found) else None


def dataset_of(trainer: Any) -> Any:
    """Return the dataset that a Trainer's loader reads: where the loader is overridden, it may be another one."""
    return getattr(trainer.callback_handler.train_dataloader, "dataset", trainer.train_dataset)


def rows_of_an_update(trainer: Any) -> int:
    """Return how many rows the arguments, or the loader, give one process's update at most.

    Batches may have more: those of a batch sampler that does not say its batch size.
    """
    loader = trainer.callback_handler.train_dataloader
    found = [getattr(each, "batch_size", None) for each in (loader, getattr(loader, "batch_sampler", None))]
    size = max(trainer._train_batch_size, *(each for each in found if isinstance(each, int)), 1)
    if trainer.accelerator.split_batches:
        size = -(-size // trainer.args.world_size)
    rows: int = size * trainer.args.gradient_accumulation_steps
    dataset = dataset_of(trainer)
    return min(rows, len(dataset)) if has_length(dataset) else rows


def _of_rows(rows: Sequence[Any]) -> np.ndarray | None:
    """Lengths of dictionaries of token ids; None where a row is something else."""
    if not rows or not all(type(row) is dict and hasattr(row.get("input_ids"), "__len__") for row in rows):
        return None
    lengths = [len(row["input_ids"]) for row in rows]
    if sum(lengths) <= _MOST_NUMBERS:
        masks = [row.get("attention_mask") for row in rows]
        lengths = [
            n if mask is None else sum(mask) if type(mask) is list else int(np.asarray(mask).sum())
            for n, mask in zip(lengths, masks, strict=True)
        ]
    found = np.array([length for length in lengths if length > 0], dtype=np.int64)
    return found if len(found) else None

"""Orders that the leading process of a training gives the others, each with a number."""

from __future__ import annotations

from enum import IntEnum

from brimful.data.batches.batch import Batch


class Order(IntEnum):
    """An order, and what its number is.

    BUILD: nothing; the leader's way to run follows. LOAD: step of a checkpoint. BEGIN: first batch to come. STEP: batch
    to take a step on. ROWS: batch whose rows that are not finite are to be named. STATE (all write their parts of it):
    twice the step of the checkpoint, and which of two names files have. EVALUATE, COMPARE (all weights), WORK (all say
    what they have done), RELEASE (all put weights together, at the end), END: nothing.
    """

    END = 0
    BUILD = 1
    LOAD = 2
    BEGIN = 3
    STEP = 4
    ROWS = 5
    EVALUATE = 6
    COMPARE = 7
    STATE = 8
    RELEASE = 9
    WORK = 10


def own_work(batch: Batch) -> dict[str, int]:
    """Return the tokens and rows of a batch, or of this process's part of it."""
    if batch.rows is None:
        return {"tokens": batch.num_tokens, "rows": batch.num_samples}
    return {"tokens": sum(len(each) for each in batch.rows.ids), "rows": len(batch.rows.ids)}

"""Orders that the leading process of a training gives the others, each with a number."""

from __future__ import annotations

from enum import IntEnum


class Order(IntEnum):
    """An order, and what its number is.

    BUILD: faster paths that failed on the first batch. LOAD: step of a checkpoint. BEGIN: first batch to come.
    STEP: batch to take a step on. ROWS: batch whose rows that are not finite are to be named. EVALUATE, COMPARE (all
    weights), END: nothing.
    """

    END = 0
    BUILD = 1
    LOAD = 2
    BEGIN = 3
    STEP = 4
    ROWS = 5
    EVALUATE = 6
    COMPARE = 7

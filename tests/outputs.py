"""Windows of results, with nested columns and nulls, and what is on the disk of them."""

from __future__ import annotations

import random
from pathlib import Path

import pyarrow as pa

from brimful.core.classification import Classification, Counts
from brimful.core.records import LabelSpace, Machine, Recipe

RECORD = Classification(
    model="m",
    data="d",
    output="o",
    command="brimful classify m d",
    options={"max_length": 128},
    labels=LabelSpace(task="single_label", names=("bad", "good"), values={"bad": 0, "good": 1}),
    recipe=Recipe(device="cpu", levers=()),
    machine=Machine(cpu=None, num_cores=2, memory_bytes=None),
    wall_s=1.5,
)
_SCORES = pa.list_(pa.struct([("label", pa.string()), ("score", pa.float64())]))
SCHEMA = pa.schema(
    [("id", pa.int64()), ("text", pa.large_string()), ("label", pa.string()), ("scores", _SCORES), ("raw", pa.binary())]
)


def window(first_row: int, num_rows: int, seed: int = 0) -> pa.Table:
    """Rows that are the same whenever they are asked for."""
    draw = random.Random(f"{seed} {first_row} {num_rows}")
    rows = [
        {
            "id": row,
            "text": draw.choice(["good film", 'so "so"', "two\nlines", "caf\u00e9 \U0001f600", "", None]),
            "label": draw.choice(["good", "bad", None]),
            "scores": draw.choice([None, [], [{"label": "good", "score": draw.random()}, {"label": "bad"}]]),
            "raw": draw.choice([None, b"", draw.randbytes(9)]),
        }
        for row in range(first_row, first_row + num_rows)
    ]
    return pa.Table.from_pylist(rows, schema=SCHEMA)


def windows(sizes: list[int], seed: int = 0) -> list[pa.Table]:
    return [window(sum(sizes[:index]), size, seed) for index, size in enumerate(sizes)]


def counts_of(table: pa.Table) -> Counts:
    labels = [label for label in table["label"].to_pylist() if label]
    return Counts(
        num_rows=table.num_rows,
        num_tokens=7 * table.num_rows,
        labels={label: labels.count(label) for label in dict.fromkeys(labels)},
    )


def contents(path: Path) -> dict[str, bytes]:
    """All files of results and beside them, by name."""
    return {str(file.relative_to(path.parent)): file.read_bytes() for file in path.parent.rglob("*") if file.is_file()}

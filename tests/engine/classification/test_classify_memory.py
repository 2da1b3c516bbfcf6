"""Memory of a classification does not grow with its input. Larger ones: benchmarks/classification/memory.py."""

from __future__ import annotations

import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from runs import Runner
from tiny_files import review, save_classifier

pytestmark = pytest.mark.xdist_group("runs")  # one process makes what they share

#: Bytes that a row carries from the input to the results and that cannot be made smaller; the texts are few and short.
CARRIED_BYTES = 1000
FEW, MANY = 15_000, 150_000


def write_rows(path: Path, num_rows: int) -> Path:
    """Rows of which one in 20 has a text, a row group at a time."""
    draw, group = random.Random(0), 5000
    texts = [review(bool(i % 3), i) if i % 20 == 0 else None for i in range(group)]
    with pq.ParquetWriter(path, pa.schema([("text", pa.string()), ("carried", pa.binary())])) as writer:
        for _ in range(num_rows // group):
            carried = [draw.randbytes(CARRIED_BYTES) for _ in range(group)]
            writer.write_table(pa.table({"text": texts, "carried": carried}), row_group_size=group)
    return path


@pytest.mark.thorough
@pytest.mark.parametrize("output", ["results.parquet", "results"])
def test_ten_times_the_rows_need_no_more_memory(output: str, runner: Runner, tmp_path: Path) -> None:
    model, peak_bytes = save_classifier(tmp_path / "model", ["bad", "good"]), {}
    for num_rows in (FEW, MANY):
        rows = write_rows(tmp_path / "rows.parquet", num_rows)
        place = tmp_path / str(num_rows) / output
        ended = runner(["classify", str(model), str(rows), "--output", str(place), "--device", "cpu"])
        assert ended.code == 0, ended.said
        files = [place] if place.is_file() else list(place.glob("*.parquet"))
        assert sum(pq.ParquetFile(file).metadata.num_rows for file in files) == num_rows
        peak_bytes[num_rows] = ended.peak_bytes
    grown = peak_bytes[MANY] - peak_bytes[FEW]
    assert grown < 0.4 * (MANY - FEW) * CARRIED_BYTES, peak_bytes

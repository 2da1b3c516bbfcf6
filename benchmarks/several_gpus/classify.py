"""Classification of tweets, file to file, on one GPU and on two of one machine.

    python benchmarks/several_gpus/classify.py --output benchmarks/several_gpus/DATE-GPU-classify --tokenizer FOLDER

Texts are the tweets, and as many again with their words in other orders as it takes: no text occurs twice, and lengths
are the tweets'. The rate is of the second half of the rows but for the last twentieth, when all GPUs are at work; that
of the whole pass, from the first row read to the last one written, is beside it: the second GPU's process joins when it
has loaded the model, and the GPU that is done first waits for the other one.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

sys.path += [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "classification")]

from resumable import default_inputs, parser_of, print_rows, write_texts
from sides import Row, run_rows, with_peaks
from works import Work, make_inputs, model_folder, read_texts

_REPEATS = 2
#: Shares of the rows between which the rate is taken.
_TIMED = (0.5, 0.95)
#: Texts, so many that the second GPU is at work, some 20 s after the first, well before half of them are done.
_TEXTS = {"base": 4_000_000, "minilm": 12_000_000}
ROWS = tuple(Row(side="brimful", name=f"tweets/{size}, {n}", settings={"gpus": n, "work": f"parquet/tweets/{size}"})
             for size in ("base", "minilm") for n in (1, 2))  # fmt: skip


def make_rows(inputs: Path, work: Work, *, smoke: bool) -> Path:
    """Write the file of distinct texts, if it is not there; return its path."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    file = inputs / f"distinct-{work.size}.parquet"
    if not file.exists():
        texts, _ = read_texts(inputs, work)
        number, draw = 100 if smoke else _TEXTS[work.size], random.Random(0)
        found = dict.fromkeys(texts)
        while len(found) < number:
            words = draw.choice(texts).split()
            draw.shuffle(words)
            found[" ".join(words)] = None
        pq.write_table(pa.table({"text": list(found)[:number]}), file)
    return file


def one(arguments: Namespace) -> int:
    """Classify the file several times, and print its rates."""
    import brimful
    from brimful.core.callbacks import Callbacks

    class Clock(Callbacks):
        """Rows that are done, by time."""

        def __init__(self) -> None:
            self.marks: list[tuple[float, int]] = []

        def count(self, done: int, total: int | None, share: float | None = None) -> None:
            self.marks.append((time.perf_counter(), done))

    plan = json.loads(arguments.one)
    settings, smoke = plan["settings"], plan["smoke"]
    work = Work.parse(settings["work"])
    file, model = make_rows(arguments.inputs, work, smoke=smoke), model_folder(arguments.inputs, work)
    where: dict[str, Any] = {"device": "cpu"} if smoke else {"gpus": str(settings["gpus"])}
    rates, whole = [], []
    for _ in range(_REPEATS):
        with tempfile.TemporaryDirectory() as kept:
            clock = Clock()
            record = brimful.classify(model, file, output=Path(kept) / "answers.parquet", callbacks=clock, **where)
        assert record.texts_per_s is not None
        first, last = (int(share * record.counts.num_rows) for share in _TIMED)
        marks = [mark for mark in clock.marks if first <= mark[1] <= last]
        rows, seconds = (marks[-1][k] - marks[0][k] if marks else 0 for k in (1, 0))
        whole.append(record.texts_per_s)
        rates.append(rows / seconds if rows else record.texts_per_s)  # of a few rows there are no two marks
    told = {"limit": record.limit, "start_s": record.start_s, "stages": [vars(stage) for stage in record.stages]}
    told["each_gpu"] = [vars(each) for each in record.gpus]
    print_rows([with_peaks({"rates": sorted(rates), "whole": whole, **told}, smoke=True)])
    return 0


def table(results: list[dict[str, Any]]) -> str:
    """Texts/s, with the range, and times one GPU's."""
    rates = {found["row"]: found.get("samples_per_s") for found in results}
    lines = ["| work, GPUs | texts/s (range) | times one GPU | whole pass | slowest stage |", "|---|---|---|---|---|"]
    for found in results:
        if not found["ok"]:
            lines.append(f"| {found['row']} | failed | | | |")
            continue
        alone, each = rates.get(f"{found['row'].rpartition(',')[0]}, 1"), found["rates"]
        gained = f"{found['samples_per_s'] / alone:.2f}" if alone else ""
        rate = f"{found['samples_per_s']:,.0f} ({each[0]:,.0f} to {each[-1]:,.0f})"
        passes = " ".join(f"{each:,.0f}" for each in found["whole"])
        lines.append(f"| {found['row']} | {rate} | {gained} | {passes} | {found['limit']} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Measure what is left, and write the table."""
    parser = parser_of((__doc__ or "").splitlines()[0], [row.key for row in ROWS], timeout_s=240.0)
    arguments = parser.parse_args()
    arguments.inputs = arguments.inputs or default_inputs("classification", smoke=arguments.smoke)
    if arguments.one:
        return one(arguments)
    for size in sorted({Work.parse(row.settings["work"]).size for row in ROWS if row.key in arguments.rows}):
        work = Work.parse(f"parquet/tweets/{size}")
        make_inputs(arguments.inputs, work, arguments.tokenizer, smoke=arguments.smoke)
        make_rows(arguments.inputs, work, smoke=arguments.smoke)
    text = table(run_rows(arguments, __file__, ROWS, lambda row: 90.0))
    write_texts(arguments.output, {"table.md": text})
    print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Classification of tweets, file to file, on one GPU and on two of one machine, by the command.

    python benchmarks/several_gpus/classify.py --output benchmarks/several_gpus/DATE-GPU-classify --tokenizer FOLDER

Texts are the tweets, and as many again with their words in other orders as it takes: no text occurs twice, and lengths
are the tweets'. The rate is of the record: from the first row read to the last one written, loading not counted.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
from argparse import Namespace
from pathlib import Path
from typing import Any

sys.path += [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "classification")]

from resumable import default_inputs, parser_of, print_rows, write_texts
from sides import Row, run_rows, with_peaks
from works import Work, make_inputs, model_folder, read_texts

_REPEATS = 3
#: Texts, so many that a pass takes some ten seconds.
_TEXTS = {"base": 1_000_000, "minilm": 4_000_000}
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
    """Classify the file by the command, several times, and print what its records say."""
    plan = json.loads(arguments.one)
    settings, smoke = plan["settings"], plan["smoke"]
    work = Work.parse(settings["work"])
    file, model = make_rows(arguments.inputs, work, smoke=smoke), model_folder(arguments.inputs, work)
    records: list[dict[str, Any]] = []
    for _ in range(2 if smoke else _REPEATS):
        with tempfile.TemporaryDirectory() as kept:
            output = Path(kept) / "answers.parquet"
            words = [sys.executable, "-m", "brimful", "classify", str(model), str(file)]
            where = ["--device", "cpu"] if smoke else ["--gpus", str(settings["gpus"])]
            done = subprocess.run(
                [*words, "--output", str(output), *where], capture_output=True, text=True, check=False
            )
            if done.returncode:
                raise RuntimeError(done.stderr[-1500:])
            records.append(json.loads((Path(f"{output}.manifest.json")).read_text())["record"])
    told = {name: records[-1][name] for name in ("limit", "start_s", "wall_s", "counts", "recipe", "stages")}
    print_rows([with_peaks({"rates": sorted(record["texts_per_s"] for record in records), **told}, smoke=True)])
    return 0


def table(results: list[dict[str, Any]]) -> str:
    """Texts/s, with the range, and times one GPU's."""
    rates = {found["row"]: found.get("samples_per_s") for found in results}
    lines = ["| work, GPUs | texts/s (range) | times one GPU | slowest stage |", "|---|---|---|---|"]
    for found in results:
        if not found["ok"]:
            lines.append(f"| {found['row']} | failed | | |")
            continue
        alone, each = rates.get(f"{found['row'].rpartition(',')[0]}, 1"), found["rates"]
        gained = f"{found['samples_per_s'] / alone:.2f}" if alone else ""
        rate = f"{found['samples_per_s']:,.0f} ({each[0]:,.0f} to {each[-1]:,.0f})"
        lines.append(f"| {found['row']} | {rate} | {gained} | {found['limit']} |")
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

"""Memory of `brimful classify` over files of a million and of 20 million rows: it must not grow with the input.

    python benchmarks/classification/memory.py --rows 1000000 20000000 --log memory.log

Each row is a number and a text of 3 to 21 words. The model is a BERT of 2 layers of 32 channels with random weights,
so nearly all of the time and the memory is what surrounds a model. The command line runs in a process of its own, on
the CPU, Parquet to Parquet. Its memory (VmRSS and VmHWM of Linux) is read every few seconds, and at the end the peak
is the one that the system kept (`ru_maxrss`).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

_NUM_WORDS = 2000
_GROUP_ROWS = 100_000
_SAMPLE_S = 10.0
_COMMAND = [sys.executable, "-m", "brimful", "classify"]


def save_model(folder: Path) -> Path:
    """A tiny BERT with a head of three labels, and a tokenizer of one token a word."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    vocabulary = {word: index for index, word in enumerate(special + words())}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder)
    config = BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=128,
        num_labels=3,
        initializer_range=0.2,
    )
    BertForSequenceClassification(config).save_pretrained(folder)
    return folder


def words() -> list[str]:
    return [f"word{number}" for number in range(_NUM_WORDS)]


def write_rows(path: Path, num_rows: int) -> Path:
    """Rows of an id and a text, written a row group at a time. The texts repeat from one row group to the next."""
    draw, vocabulary = np.random.default_rng(0), np.array(words())
    ends = np.concatenate([[0], np.cumsum(draw.integers(3, 22, _GROUP_ROWS))])
    chosen = pa.array(vocabulary[draw.integers(0, _NUM_WORDS, ends[-1])])
    texts = pc.binary_join(pa.ListArray.from_arrays(pa.array(ends, pa.int32()), chosen), " ")
    schema = pa.schema([("id", pa.int64()), ("text", pa.string())])
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        for first in range(0, num_rows, _GROUP_ROWS):
            count = min(_GROUP_ROWS, num_rows - first)
            ids = np.arange(first, first + count)
            writer.write_table(pa.table({"id": ids, "text": texts.slice(0, count)}, schema=schema))
    return path


def memory_bytes(process_id: int) -> tuple[int, int]:
    """Resident and peak memory of a process; (0, 0) if it has ended."""
    try:
        lines = Path(f"/proc/{process_id}/status").read_text("utf-8").splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0, 0
    parts = (line.partition(":") for line in lines)
    found = {name: int(rest.split()[0]) << 10 for name, _, rest in parts if rest.endswith("kB")}
    return found.get("VmRSS", 0), found.get("VmHWM", 0)


def classify(model: Path, rows: Path, output: Path, log: Log, limit_s: float) -> dict[str, Any] | None:
    """Runs the command line and writes its memory down; the record of the pass, None if it ended before its time."""
    command = [*_COMMAND, str(model), str(rows), "--output", str(output), "--device", "cpu", "--json"]
    began, said_s = time.perf_counter(), -_SAMPLE_S
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = subprocess.Popen(command, stdout=out, stderr=err, env=os.environ | {"HF_HUB_OFFLINE": "1"})
        while os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            time.sleep(0.2)
            passed_s = time.perf_counter() - began
            if passed_s - said_s >= _SAMPLE_S:
                said_s = passed_s
                log.say(passed_s, *memory_bytes(process.pid))
            if passed_s > limit_s:
                process.terminate()
                limit_s = math.inf
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        log.line(f"ended with {process.returncode}, peak {(usage.ru_maxrss << 10) / 1e6:.0f} MB")
        err.seek(0)
        out.seek(0)
        if process.returncode:
            for line in err.read().decode().splitlines()[-2:]:  # how many rows were done, and a hint
                log.line(line)
            return None
        return cast(dict[str, Any], json.load(out))


class Log:
    """Lines that are printed and kept."""

    def __init__(self, path: Path | None) -> None:
        self._file = path.open("w", encoding="utf-8") if path else None

    def line(self, text: str) -> None:
        print(text, flush=True)
        if self._file:
            print(text, file=self._file, flush=True)

    def say(self, passed_s: float, now_bytes: int, peak_bytes: int) -> None:
        """Resident memory after so many seconds."""
        self.line(f"{passed_s:8.1f} s   now {now_bytes / 1e6:6.0f} MB   peak {peak_bytes / 1e6:6.0f} MB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1_000_000, 20_000_000])
    parser.add_argument("--log", type=Path)
    parser.add_argument("--limit-s", type=float, default=math.inf, help="end a pass after so long, as Ctrl-C would")
    options = parser.parse_args()
    log = Log(options.log)
    with tempfile.TemporaryDirectory() as folder:
        model = save_model(Path(folder, "model"))
        for num_rows in options.rows:
            rows = write_rows(Path(folder, "rows.parquet"), num_rows)
            threads = os.environ.get("OMP_NUM_THREADS", "as torch chooses")
            size = f"{rows.stat().st_size / 1e6:,.0f} MB of Parquet"
            log.line(f"{num_rows:,} rows, {size}; {os.cpu_count()} cores, OMP_NUM_THREADS: {threads}")
            if record := classify(model, rows, Path(folder, f"{num_rows}.parquet"), log, options.limit_s):
                stages = ", ".join(f"{each['name']} {each['busy_s']:.1f}" for each in record["stages"])
                log.line(f"{record['texts_per_s']:,.0f} rows/s in {record['wall_s']:.1f} s; busy seconds: {stages}\n")


if __name__ == "__main__":
    main()

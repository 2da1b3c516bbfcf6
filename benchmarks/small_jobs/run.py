"""A small job on a CPU, from the shell's prompt to the prompt again: 300 articles by `brimful classify` and by a script
around transformers' pipeline, in turns.

    python benchmarks/small_jobs/run.py --output benchmarks/small_jobs/DATE-cpu [--repeats 5] [--smoke]

MiniLM-L6 with a head of five labels, articles of BBC News, cut at 512 tokens. It needs the extra `demo` and no network.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

from provenance import commit_here, host_here
from resumable import versions_here, write_texts

HERE = Path(__file__).parent
#: Settings of the pipeline: rows of a batch, dtype, and whether texts are sorted by length first.
PIPELINE = (("1", "float32"), ("8", "float32", "sorted"), ("1", "bfloat16"), ("8", "bfloat16", "sorted"))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--smoke", action="store_true", help="eight texts")
    asked = parser.parse_args()
    asked.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        lines = _measure(Path(folder), 8 if asked.smoke else 300, asked.repeats)
    facts = {"commit": commit_here(), "host": host_here(), "versions": versions_here()}
    texts = {"raw.jsonl": "\n".join(json.dumps(facts | line) for line in lines), "table.md": _table(lines)}
    write_texts(asked.output, texts)
    print(texts["table.md"])
    return 0


def _measure(work: Path, count: int, repeats: int) -> list[dict[str, object]]:
    """Seconds of each command, one after another, each kind once in a round."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    from brimful.data.readers.packaged import bbc_news, minilm

    model, texts = work / "model", work / "texts.jsonl"
    AutoModelForSequenceClassification.from_pretrained(minilm(), num_labels=5).save_pretrained(model)
    AutoTokenizer.from_pretrained(minilm()).save_pretrained(model)
    rows = list(bbc_news())[:: 2225 // 300][:count]
    texts.write_text("".join(json.dumps({"text": row["text"]}) + "\n" for row in rows), "utf-8")
    ours = [sys.executable, "-m", "brimful", "classify", str(model), str(texts), "--quiet", "-o"]
    theirs = [sys.executable, str(HERE / "pipeline.py"), str(model), str(texts)]
    found: list[dict[str, object]] = []
    for number in range(repeats):
        cache = work / f"cache-{number}"  # of models that were checked: the first command of a round finds none
        for side in ("brimful, first", "brimful, again"):
            seconds = _seconds([*ours, str(work / f"{number}-{side[9:]}.jsonl")], cache)
            found.append({"side": side, "round": number, "wall_s": seconds})
        for settings in PIPELINE:
            seconds = _seconds([*theirs, str(work / "theirs.jsonl"), *settings], cache)
            found.append({"side": "pipeline " + " ".join(settings), "round": number, "wall_s": seconds})
    return found


def _seconds(words: list[str], cache: Path) -> float:
    more = {"XDG_CACHE_HOME": str(cache), "HF_HUB_OFFLINE": "1"}
    began = time.monotonic()
    subprocess.run(words, env=os.environ | more, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return round(time.monotonic() - began, 2)


def _table(lines: list[dict[str, object]]) -> str:
    sides = dict.fromkeys(str(line["side"]) for line in lines)
    text = "| command | seconds, median | from | to |\n|---|---|---|---|\n"
    for side in sides:
        walls = [float(str(line["wall_s"])) for line in lines if line["side"] == side]
        text += f"| {side} | {statistics.median(walls):.1f} | {min(walls):.1f} | {max(walls):.1f} |\n"
    return text


if __name__ == "__main__":
    sys.exit(main())

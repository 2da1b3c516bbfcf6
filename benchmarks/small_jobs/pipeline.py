"""Labels of a file of texts by transformers' pipeline, as a script of one's own: JSONL in, JSONL out.

python benchmarks/small_jobs/pipeline.py MODEL TEXTS OUTPUT BATCH_SIZE DTYPE [sorted]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main() -> None:
    model, texts, output, batch_size, dtype, *order = sys.argv[1:]
    import torch
    from transformers import pipeline

    rows = [json.loads(line)["text"] for line in Path(texts).read_text("utf-8").splitlines()]
    if order:
        rows.sort(key=len)
    classify = pipeline("text-classification", model=model, device="cpu", dtype=getattr(torch, dtype))
    found = classify(rows, batch_size=int(batch_size), truncation=True)
    Path(output).write_text("".join(json.dumps(each) + "\n" for each in found), "utf-8")


if __name__ == "__main__":
    main()

"""Where the device's time goes in a pass: its kernels by the time they take, and what is idle between them.

    python benchmarks/classification/kernels.py tweets/base bbc/base --tokenizer FOLDER

The second call of `Classifier.logits` is recorded, on a GPU.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np
from torch.profiler import ProfilerActivity, profile

sys.path.append(str(Path(__file__).parents[1]))  # what the benchmarks share

from resumable import default_inputs
from works import Pool, Work, lengths_file, make_inputs, model_folder, read_texts

import brimful

_TOKENS, _LONGEST_LIST = 2_000_000, 12


def record(work: Work, inputs: Path) -> None:
    """Prints the kernels of one pass over some two million tokens."""
    tokens_N = np.load(lengths_file(inputs, work)).sum(1)
    pool = Pool(*read_texts(inputs, work), tokens_N=tokens_N, operations_N=tokens_N, needed_N=tokens_N)
    texts = pool.sample(round(_TOKENS / float(tokens_N.mean()))).texts
    with brimful.Classifier(str(model_folder(inputs, work)), precision="bf16", execution="compiled") as classifier:
        classifier.logits(texts)
        classifier.logits(texts)
        with profile(activities=[ProfilerActivity.CUDA]) as recorded:
            classifier.logits(texts)
    taken: dict[str, list[float]] = defaultdict(list)
    spans = []
    for event in recorded.events():
        if event.device_type.name == "CUDA" and event.device_time_total > 0:
            taken[event.name].append(event.device_time_total / 1e3)
            spans.append((event.time_range.start / 1e3, event.time_range.end / 1e3))
    spans.sort()
    busy, end = 0.0, spans[0][0]
    for start, stop in spans:
        busy, end = busy + max(0.0, stop - max(start, end)), max(end, stop)
    whole = end - spans[0][0]
    print(f"{work.name}: {len(texts):,} texts, {whole:.1f} ms, idle {1 - busy / whole:.1%}")
    for name, times in sorted(taken.items(), key=lambda item: -sum(item[1]))[:_LONGEST_LIST]:
        print(f"  {sum(times):8.1f} ms {sum(times) / whole:6.1%} {len(times):6d}  {name[:90]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("works", nargs="+")
    parser.add_argument("--tokenizer", help="folder of the tokenizer, if the extra demo is not installed")
    options = parser.parse_args()
    inputs = default_inputs("classification", smoke=False)
    for work in map(Work.parse, options.works):
        make_inputs(inputs, work, options.tokenizer, smoke=False)
        record(work, inputs)


if __name__ == "__main__":
    main()

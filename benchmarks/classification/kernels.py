"""Device time of a pass by class and by kernel, and idle time between.

    python benchmarks/classification/kernels.py tweets/base bbc/base --tokenizer FOLDER

The third call of `Classifier.logits` is recorded, on a GPU.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile

sys.path.append(str(Path(__file__).parents[1]))

from floor import read_pool
from resumable import default_inputs
from works import Work, make_inputs, model_folder

import brimful
from brimful.measurement.kernels import Span, breakdown

_TOKENS, _LONGEST_LIST = 2_000_000, 12


def record(work: Work, inputs: Path) -> None:
    """Prints the parts and the longest kernels of one pass over some two million tokens."""
    pool = read_pool(inputs, work)
    texts = pool.sample(round(_TOKENS / pool.mean_tokens)).texts
    with brimful.Classifier(str(model_folder(inputs, work)), precision="bf16", execution="compiled") as classifier:
        classifier.logits(texts)
        classifier.logits(texts)
        with profile(activities=[ProfilerActivity.CUDA]) as recorded:
            classifier.logits(texts)
    print_parts(f"{work.name}: {len(texts):,} texts", list(_spans(recorded.events())))


def _spans(events: Iterable[Any]) -> Iterator[Span]:
    for event in events:
        if event.device_type.name == "CUDA" and event.device_time_total > 0:
            yield Span(name=event.name, start_s=event.time_range.start / 1e6, end_s=event.time_range.end / 1e6)


def print_parts(title: str, spans: list[Span]) -> None:
    """As `brimful profile` counts them; shares are of the time from the first kernel's begin to the last one's end."""
    whole_s = max(span.end_s for span in spans) - min(span.start_s for span in spans)
    found = breakdown(spans, spans, steps=1, step_s=whole_s, stretch=1.0)
    print(f"{title}, {whole_s * 1e3:.1f} ms")
    for part in found.parts:
        print(f"  {part.seconds * 1e3:8.1f} ms {part.share:6.1%} {part.count:7,.0f}  {part.name}")
    for kernel in found.kernels[:_LONGEST_LIST]:
        share = kernel.seconds / whole_s
        print(f"    {kernel.seconds * 1e3:8.1f} ms {share:6.1%} {kernel.count:7,.0f}  {kernel.name[:90]}")


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

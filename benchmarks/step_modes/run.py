"""One training step launched three ways: eager, captured as a CUDA graph, captured with compiled layers.

    python benchmarks/step_modes/run.py --tokenizer MODEL_FOLDER --work tweets/base bbc/base ...

Real texts (BBC News and tweets, from Python packages), batch 32, bf16, dropout 0.1, AdamW; BERT shapes with random
weights: speed does not depend on them. Each mode is a process of its own: 30 steps of warm-up, which meet and capture
all shapes, then five rounds of 100 steps; median and range of the rounds.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from typing import Any

import numpy as np

SHAPES: dict[str, dict[str, int]] = {
    "minilm": {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536},
    "base": {},
    "large": {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096},
}
MODES = ("eager", "captured", "compiled")
BATCH_SIZE, WARM_UP, STEPS, ROUNDS = 32, 60, 100, 5


def measure(work: str, mode: str, tokenizer: str) -> dict[str, Any]:
    import pyarrow as pa
    import torch
    from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification

    from brimful.core.records import LabelSpace
    from brimful.data.batches import Order, PackedLayout
    from brimful.data.feed import Feed, Source
    from brimful.data.packaged import bbc_news, tweets
    from brimful.data.packing import choose_budgets
    from brimful.data.tokens import Encoder, tokenize
    from brimful.models.execution import PackedExecution, PackedForm
    from brimful.step.captured import CapturedStep
    from brimful.step.step import Step, make_schedule
    from brimful.tasks.task import make_task
    from brimful.techniques.execution import ExecutionMode
    from brimful.techniques.optimizer import Optimizer
    from brimful.techniques.precision import choose_precision

    corpus, size = work.split("/")
    rows = bbc_news() if corpus == "bbc" else tweets()
    encoder = Encoder.from_tokenizer(AutoTokenizer.from_pretrained(tokenizer), 512, with_types=True)
    tokens = tokenize(encoder, pa.chunked_array([pa.array([row["text"] for row in rows], pa.large_string())]))
    names = tuple(sorted({row["label"] for row in rows}))
    space = LabelSpace(task="single_label", names=names, values={name: i for i, name in enumerate(names)})
    targets = np.array([space.values[row["label"]] for row in rows])
    order = Order(num_samples=len(rows), batch_size=BATCH_SIZE, seed=1)
    budgets = choose_budgets([tokens.lengths[order.samples(i)] for i in range(1000)], 32768, 512)
    layout = PackedLayout(
        budgets=budgets,
        num_slots=BATCH_SIZE,
        max_length=512,
        padding_id=0,
        groups=False,
        typical_length=round(float(tokens.lengths.mean())),
    )
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    device = torch.device("cuda")
    model = BertForSequenceClassification(BertConfig(num_labels=len(names), **SHAPES[size])).to(device).train()
    ExecutionMode(value=mode, reason="asked for").apply(model)
    task = make_task(space, targets)
    arguments = (
        PackedExecution(model, PackedForm(pooling="first", first_position=0)),
        task,
        Optimizer(value="adamw_torch_fused"),
        choose_precision("bf16", device),
        make_schedule("linear", 1e-5, 10_000, 0),
    )
    options: dict[str, Any] = {"max_grad_norm": 1.0, "seed": 1}
    step = Step(*arguments, **options) if mode == "eager" else CapturedStep(*arguments, note=print, **options)
    rates, marks = [], []
    samples = real_tokens = 0
    began = time.perf_counter()
    with Feed(Source(tokens, targets, task, layout, order), device, stop=WARM_UP + ROUNDS * STEPS) as feed:
        for number, batch in enumerate(feed):
            if number >= WARM_UP and (number - WARM_UP) % STEPS == 0:
                torch.cuda.synchronize()
                marks.append(time.perf_counter())
                if number > WARM_UP:
                    rates.append((samples / (marks[-1] - marks[-2]), real_tokens / (marks[-1] - marks[-2])))
                samples = real_tokens = 0
            pending = step.run(batch)
            samples += batch.num_samples
            real_tokens += batch.num_tokens
        pending.read()
        rates.append((samples / (time.perf_counter() - marks[-1]), real_tokens / (time.perf_counter() - marks[-1])))
    by_sample = [rate[0] for rate in rates]
    return {
        "work": work,
        "mode": mode,
        "samples_per_s": float(np.median(by_sample)),
        "range": [min(by_sample), max(by_sample)],
        "tokens_per_s": float(np.median([rate[1] for rate in rates])),
        "warm_up_s": marks[0] - began,
        "fill": budgets.fill,
        "peak_allocated_bytes": torch.cuda.max_memory_allocated(),
        "peak_reserved_bytes": torch.cuda.max_memory_reserved(),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Samples a second of one training step, launched three ways.")
    parser.add_argument("--tokenizer", required=True, help="folder of a BERT tokenizer")
    parser.add_argument("--work", nargs="+", default=["tweets/minilm", "tweets/base", "tweets/large", "bbc/base"])
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print("ROW " + json.dumps(measure(arguments.work[0], arguments.one, arguments.tokenizer)))
        return
    print("| work | mode | samples/s, median (range) | real tokens/s | first 60 steps, s | reserved, GiB |")
    print("|---|---|---|---|---|---|")
    for work in arguments.work:
        for mode in MODES:
            command = [sys.executable, __file__, "--tokenizer", arguments.tokenizer, "--work", work, "--one", mode]
            done = subprocess.run(command, capture_output=True, text=True)
            found = [line for line in done.stdout.splitlines() if line.startswith("ROW ")]
            if not found:
                print(done.stderr[-2000:], file=sys.stderr)
                continue
            print(found[0], file=sys.stderr)
            row = json.loads(found[0].removeprefix("ROW "))
            low, high = row["range"]
            print(
                f"| {work} | {mode} | {row['samples_per_s']:,.0f} ({low:,.0f} to {high:,.0f}) "
                f"| {row['tokens_per_s']:,.0f} | {row['warm_up_s']:.1f} | {row['peak_reserved_bytes'] / 2**30:.1f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()

"""Weights that stream from host memory: rates of training and classification, beside the host link's and the device's.

    python benchmarks/streaming/run.py --output benchmarks/streaming/DATE-GPU --budget-s 300

BERT of 96 layers of 1,024 with random weights (1.2 billion), 32 rows of 512 tokens a step, AdamW in fp32, products in
bf16; classification of 2,048 such rows. Each row is a process of its own, and none is measured again that is in the raw
log. table.md holds a step to what the link and the device allow. Needs one NVIDIA GPU, 40 GB of host memory and nothing
from a network; --smoke is a tiny model on a CPU.
"""

from __future__ import annotations

import json
import sys
import time
from argparse import Namespace
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))

from resumable import default_inputs, parser_of, print_rows, write_texts
from sides import Row, run_rows, wait, with_peaks

_STREAMED, _FILED = {"stream_weights": "host"}, {"stream_weights": "disk"}
_FREED = {"optimizer_in_backward": True, "max_grad_norm": 0.0}
_LIMITED = {"memory_limit": "5GB", "batch_size": 8}
_LAYERS_AGAIN = {"execution": "captured", "gradient_checkpointing": "full"}
ROWS = (
    Row(side="classification", name="on the device", settings={"execution": "eager"}),
    Row(side="classification", name="streamed", settings=_STREAMED),
    Row(side="classification", name="streamed, within 2 GB", settings=_STREAMED | {"memory_limit": "2GB"}),
    Row(side="classification", name="streamed from a file", settings=_FILED),
    Row(side="training", name="on the device", settings=_LAYERS_AGAIN),
    Row(side="training", name="streamed", settings=_STREAMED),
    Row(side="training", name="streamed, in backward", settings=_STREAMED | _FREED),
    Row(side="training", name="streamed, in backward, 8 rows within 5 GB", settings=_STREAMED | _FREED | _LIMITED),
    Row(side="training", name="streamed, 8 rows within 5 GB", settings=_STREAMED | _LIMITED),
    Row(
        side="training", name="streamed from a file, in backward, 8 rows", settings=_FILED | _FREED | {"batch_size": 8}
    ),
)
#: Of the forward and the backward pass: their share of the operations, layers being computed again, and bytes in and
#: out over the link for each weight of a layer. Weights in fp32 come in for both. Where the norm of the whole gradient
#: is to be known, gradients leave in the backward pass, and come in with states in the next forward pass, from which
#: weights and states leave; else states come in and leave, with weights, in the backward pass.
_PASSES = {
    "streamed": ((1 / 4, 16, 12), (3 / 4, 4, 4)),
    "streamed, in backward": ((1 / 4, 4, 0), (3 / 4, 12, 12)),
}
_DEPTH, _WIDTH, _LENGTH, _BATCH, _TEXTS = 96, 1024, 512, 32, 2048


def make_model(folder: Path, smoke: bool) -> Path:
    """The model with a tokenizer of one token a word; made once, by a process whose memory no row is charged with."""
    if not (folder / "config.json").exists():
        with ProcessPoolExecutor(1, get_context("spawn")) as process:
            process.submit(_make_model, folder, smoke).result()
    return folder


def _make_model(folder: Path, smoke: bool) -> None:
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoModelForSequenceClassification, BertConfig, PreTrainedTokenizerFast

    torch.manual_seed(0)
    depth, width = (4, 32) if smoke else (_DEPTH, _WIDTH)
    config = BertConfig(
        vocab_size=2000, hidden_size=width, num_hidden_layers=depth, num_attention_heads=max(2, width // 64),
        intermediate_size=4 * width, num_labels=2,
    )  # fmt: skip
    with torch.device("cpu" if smoke else "cuda"):
        model = AutoModelForSequenceClassification.from_config(config)
    model.to(torch.bfloat16).save_pretrained(folder)  # half of what is written and read
    vocabulary = {"[PAD]": 0, "[UNK]": 1} | {f"w{number}": number for number in range(2, 2000)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]").save_pretrained(folder)


def _folder(inputs: Path, smoke: bool) -> Path:
    return inputs / ("tiny" if smoke else "model")


def measure(plan: dict[str, Any], inputs: Path) -> dict[str, Any]:
    """One row, in this process."""
    smoke = plan["smoke"]
    model = _folder(inputs, smoke)
    link = None if smoke else link_bytes_per_s()
    found = (_training if plan["side"] == "training" else _classification)(model, plan["settings"], smoke)
    return with_peaks(found | {"link_bytes_per_s": link}, smoke)


def link_bytes_per_s() -> dict[str, float]:
    """Rates of copies from and to pinned host memory, alone and both at once."""
    import torch

    host = [torch.empty(256 << 20, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    there = [torch.zeros(256 << 20, dtype=torch.uint8, device="cuda") for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in range(2)]

    def seconds(ways: tuple[int, ...]) -> float:
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(4):
            for way in ways:
                with torch.cuda.stream(streams[way]):
                    (host if way else there)[way].copy_((there if way else host)[way], non_blocking=True)
        torch.cuda.synchronize()
        return (time.perf_counter() - began) / 4

    seconds((0, 1))
    size = 256 << 20
    ways = {"in": (0,), "out": (1,), "each of both": (0, 1)}
    return {name: size / median(seconds(each) for _ in range(3)) for name, each in ways.items()}


def _training(model: Path, settings: dict[str, Any], smoke: bool) -> dict[str, Any]:
    from brimful.benchmarking.our_side import measure_ours
    from brimful.benchmarking.workload import make_work
    from brimful.core.bench import Steps
    from brimful.core.callbacks import Callbacks
    from brimful.core.options.bench import BenchOptions

    length = 16 if smoke else _LENGTH
    given = {**settings}
    limit, rows = given.pop("memory_limit", None), given.pop("batch_size", _BATCH)
    device = "cpu" if smoke else "cuda"
    shape = f"256x{length}"
    options = BenchOptions(model=str(model), shape=shape, batch_size=rows, device=device, memory_limit=limit)
    callbacks = Callbacks()
    work = make_work(options, callbacks, precision="fp32" if smoke else "bf16", **given)
    block = 1 if smoke else 2 if given.get("stream_weights") == "disk" else 4  # from a file each takes seconds
    steps = Steps(warm_up=block, block=block, repeats=2 if smoke else 5)
    found = measure_ours(work, steps, callbacks, lambda number: None)
    levers = found.recipe.levers if found.recipe is not None else ()
    recipe = {lever.name: f"{lever.value}: {lever.reason}" for lever in levers}
    return {"rates": sorted(found.block_rates), "loss": found.loss, "arithmetic": found.arithmetic, "recipe": recipe}


def _classification(model: Path, settings: dict[str, Any], smoke: bool) -> dict[str, Any]:
    import numpy as np
    import torch

    import brimful
    from brimful.hardware.device_memory import device_memory

    draw, length = np.random.default_rng(0), 14 if smoke else _LENGTH
    count = 64 if smoke else _TEXTS
    texts = [" ".join(f"w{each}" for each in draw.integers(2, 2000, length)) for _ in range(count)]
    asked = {"device": "cpu" if smoke else "cuda", "precision": "fp32" if smoke else "bf16", "max_length": length}
    given, rates = {**settings}, []
    asked_limit = given.pop("memory_limit", None)
    limit = device_memory(torch.device("cpu" if smoke else "cuda:0"), None if smoke else asked_limit, "default")
    with limit, brimful.Classifier(model, **asked, **given) as classifier:
        classifier(texts[: count // 4])
        for _ in range(2 if smoke else 5):
            wait(smoke)
            began = time.perf_counter()
            classifier(texts)
            rates.append(count / (time.perf_counter() - began))
    return {"rates": sorted(rates)}


def table(results: list[dict[str, Any]], weights: int) -> str:
    """A line a row: its rate, and what share that is of what the link and the device allow.

    The bound of a training step is the sum of both passes', each the longest of its copies in, its copies out, both at
    once, and its part of the step on the device. In brackets: were all copies beside the whole step. Of classification
    it is the rate on the device. weights: of all layers.
    """
    lines = ["| work | row | samples/s (range) | driver, MB | bound | share of it |", "|---|---|---|---|---|---|"]
    on_device = {
        found["side"]: found["samples_per_s"] for found in results if found["ok"] and found["row"] == "on the device"
    }
    for found in (each for each in results if each["ok"]):
        bound_s, at_once_s, share = None, None, ""
        rows = found["settings"].get("batch_size", _BATCH)
        if found["row"] != "on the device" and found["side"] in on_device:
            device_s = rows / on_device[found["side"]]
            link = found["link_bytes_per_s"]
            passes = _PASSES.get(found["row"].partition(", 8 rows")[0])
            if found["side"] == "training" and link is not None and passes is not None:
                byte_s = weights / link["each of both"]
                bound_s = sum(max(part * device_s, *(byte_s * each for each in ways)) for part, *ways in passes)
                _, *both_ways = zip(*passes, strict=True)
                at_once_s = max(device_s, *(byte_s * sum(way) for way in both_ways))
            elif found["side"] == "classification":
                bound_s = device_s
            share = "" if bound_s is None else f"{bound_s * found['samples_per_s'] / rows:.0%}"
            share += "" if at_once_s is None else f" ({at_once_s * found['samples_per_s'] / rows:.0%})"
        bound = "" if bound_s is None else f"{rows / bound_s:,.1f}"
        rates, memory = found["rates"], found["nvml_bytes"]
        said = f"{found['samples_per_s']:,.1f} ({rates[0]:,.1f} to {rates[-1]:,.1f})"
        driver = "" if memory is None else f"{memory / 1e6:,.0f}"
        lines.append(f"| {found['side']} | {found['row']} | {said} | {driver} | {bound} | {share} |")
    return "\n".join(lines)


def main(arguments: Namespace) -> None:
    """Measure what is left, and write the table."""
    arguments.inputs = arguments.inputs or default_inputs("streaming", smoke=arguments.smoke)
    if arguments.one:
        print_rows([measure(json.loads(arguments.one), arguments.inputs)])
        return
    if not arguments.dry_run:
        make_model(_folder(arguments.inputs, arguments.smoke), arguments.smoke)
    results = run_rows(arguments, __file__, ROWS, lambda row: 45.0)
    width = 32 if arguments.smoke else _WIDTH
    text = table(results, (4 if arguments.smoke else _DEPTH) * 12 * width * width)
    write_texts(arguments.output, {"table.md": text})
    print(text)


if __name__ == "__main__":
    main(parser_of(__doc__ or "", [row.key for row in ROWS], timeout_s=200.0).parse_args())

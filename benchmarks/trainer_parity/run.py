"""The same fine-tune by transformers' Trainer and by brimful: BBC News, MiniLM-L6, equal hyperparameters and seeds.

    python benchmarks/trainer_parity/run.py --device cpu --output OUTPUT
    python benchmarks/trainer_parity/run.py --device cuda --output OUTPUT

    python benchmarks/trainer_parity/run.py --device cuda --output OUTPUT --together \
        --sides trainer eager captured compiled --seeds 0 1 2 3 4 --epochs 3 --max-length 512
    python benchmarks/trainer_parity/run.py --device cuda --output OUTPUT --together \
        --sides compiled fp8 fp8-all --seeds 0 1 2 --epochs 3 --max-length 512

Each run is a process of its own; sides alternate, so that a machine that gets slower gets slower for both. With
`--together` all seeds of a side share a process: for losses and accuracies, not for times. Runs that are in
results.jsonl are not run again. Times are of the training loop alone: no loading, tokenising, evaluation. Trainer runs
at its best settings: dynamic padding, fused AdamW, on a GPU bf16, tf32 and four pinned loader workers.

`compiled` takes products in bf16, `fp8` those in fp8 that are faster so, and `fp8-all` all that can be, faster or not:
on a small model that is another question than speed.

`losses` of a row are means over ten steps each.
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
from functools import partial
from pathlib import Path
from typing import Any

HYPERPARAMETERS = {
    "learning_rate": 1e-4,
    "weight_decay": 0.0,
    "max_grad_norm": 1.0,
    "lr_scheduler_type": "linear",
}
BATCH_SIZE, WARMUP_RATIO, TEST_SHARE = 32, 0.1, 0.2


def corpus(folder: Path) -> tuple[Path, Path]:
    """BBC News as train.jsonl and test.jsonl, one stratified split for all runs."""
    from sklearn.model_selection import train_test_split

    from brimful.data.readers.packaged import bbc_news

    train, test = folder / "train.jsonl", folder / "test.jsonl"
    if not test.exists():
        rows = bbc_news()
        parts = train_test_split(rows, test_size=TEST_SHARE, random_state=0, stratify=[r["label"] for r in rows])
        for path, part in zip((train, test), parts, strict=True):
            path.write_text("".join(json.dumps(row) + "\n" for row in part), "utf-8")
    return train, test


def rows_of(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def by_trainer(
    model: str, train: Path, test: Path, device: str, seed: int, max_length: int, epochs: float
) -> dict[str, Any]:
    """transformers' Trainer."""
    import torch
    from transformers import (
        AutoModelForSequenceClassification,
        AutoTokenizer,
        DataCollatorWithPadding,
        Trainer,
        TrainingArguments,
        set_seed,
    )

    class Rows(torch.utils.data.Dataset):  # type: ignore[type-arg]
        def __init__(self, path: Path, names: list[str]) -> None:
            rows = rows_of(path)
            self.encoded = tokenizer([r["text"] for r in rows], truncation=True, max_length=max_length)
            self.labels = [names.index(r["label"]) for r in rows]

        def __len__(self) -> int:
            return len(self.labels)

        def __getitem__(self, index: int) -> dict[str, Any]:
            return {key: value[index] for key, value in self.encoded.items()} | {"labels": self.labels[index]}

    tokenizer = AutoTokenizer.from_pretrained(model)
    names = sorted({row["label"] for row in rows_of(train)})
    set_seed(seed)
    classifier = AutoModelForSequenceClassification.from_pretrained(model, num_labels=len(names), dtype=torch.float32)
    cuda = device == "cuda"
    settings = {"bf16": True, "tf32": True, "dataloader_num_workers": 4, "dataloader_pin_memory": True} if cuda else {}
    data = Rows(train, names)
    steps = -(-len(data) // BATCH_SIZE) * epochs
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        num_train_epochs=epochs,
        per_device_train_batch_size=BATCH_SIZE,
        per_device_eval_batch_size=64,
        warmup_steps=-int(-WARMUP_RATIO * steps // 1),
        optim="adamw_torch_fused",
        seed=seed,
        use_cpu=not cuda,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        logging_steps=10,
        log_level="error",
        **HYPERPARAMETERS,
        **settings,
    )
    trainer = Trainer(
        model=classifier, args=arguments, train_dataset=data, data_collator=DataCollatorWithPadding(tokenizer)
    )
    if cuda:
        torch.cuda.synchronize()
    began = time.perf_counter()
    trainer.train()
    if cuda:
        torch.cuda.synchronize()
    train_s = time.perf_counter() - began
    held_out = Rows(test, names)
    predicted = trainer.predict(held_out).predictions.argmax(-1)
    accuracy = sum(int(p) == t for p, t in zip(predicted, held_out.labels, strict=True)) / len(held_out)
    samples = len(data) * epochs
    peak = torch.cuda.max_memory_allocated() if cuda else None
    return {
        "accuracy": accuracy,
        "train_s": train_s,
        "samples_per_s": samples / train_s,
        "peak_allocated_bytes": peak,
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
    }


def by_brimful(
    model: str,
    train: Path,
    test: Path,
    device: str,
    seed: int,
    max_length: int,
    epochs: float,
    execution: str = "auto",
    precision: str = "auto",
    margin: float | None = None,
) -> dict[str, Any]:
    """brimful, through its Python interface. margin: factor by which fp8 must be faster, instead of its own."""
    import brimful
    from brimful.levers import float8

    if margin is not None:
        float8.MARGIN = margin
    folder = Path(tempfile.mkdtemp())
    run = brimful.train(
        train,
        model=model,
        output=folder,
        execution=execution,
        precision=precision,
        logging_steps=10,
        num_train_epochs=epochs,
        eval_data=str(test),
        max_length=max_length,
        batch_size=BATCH_SIZE,
        warmup_ratio=WARMUP_RATIO,
        seed=seed,
        device=device,
        eval_steps=10**9,
        save_steps=10**9,
        **HYPERPARAMETERS,
    )
    events = rows_of(folder / "events.jsonl")
    return {
        "losses": [event["loss"] for event in events if event["kind"] == "step"],
        "accuracy": run.metrics["accuracy"],
        "train_s": run.train_s,
        "samples_per_s": run.samples_per_s,
        "tokens_per_s": run.tokens_per_s,
        "peak_allocated_bytes": run.peak_bytes.allocated,
        "levers": {lever.name: lever.value for lever in run.recipe.levers},
        "precision": next(lever.reason for lever in run.recipe.levers if lever.name == "precision"),
    }


SIDES = {
    "trainer": by_trainer,
    "brimful": by_brimful,
    "eager": partial(by_brimful, execution="eager"),
    "captured": partial(by_brimful, execution="captured"),
    "compiled": partial(by_brimful, execution="compiled"),
    "fp8": partial(by_brimful, execution="compiled", precision="fp8"),
    "fp8-all": partial(by_brimful, execution="compiled", precision="fp8", margin=0.0),
}


def table(results: list[dict[str, Any]]) -> str:
    lines = [
        "| side | seeds | accuracy, mean (min to max) | last loss, mean (min to max) | training, s, median "
        "| samples/s, median |",
        "|---|---|---|---|---|---|",
    ]
    for side in SIDES:
        found = [r for r in results if r["side"] == side]
        if found:
            scores = [r["accuracy"] for r in found]
            # Of the last thirty steps, which are most of the last epoch's decay.
            ends = [statistics.mean(r["losses"][-3:]) for r in found if "losses" in r] or [float("nan")]
            lines.append(
                f"| {side} | {len(found)} | {statistics.mean(scores):.4f} ({min(scores):.4f} to {max(scores):.4f}) "
                f"| {statistics.mean(ends):.4f} ({min(ends):.4f} to {max(ends):.4f}) "
                f"| {statistics.median(r['train_s'] for r in found):.1f} "
                f"| {statistics.median(r['samples_per_s'] for r in found):.1f} |"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--output", type=Path, required=True, help="folder of results.jsonl and table.md")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--model", help="model folder; default: the packaged MiniLM-L6")
    parser.add_argument("--max-length", type=int, default=128)
    parser.add_argument("--epochs", type=float, default=1.0)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--sides", nargs="+", choices=tuple(SIDES), default=["trainer", "brimful"])
    parser.add_argument("--together", action="store_true", help="all seeds of a side in one process")
    parser.add_argument("--one", nargs="+", metavar="SIDE SEED ...", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    train, test = corpus(arguments.output)
    if arguments.model is None:
        from brimful.data.readers.packaged import minilm

        arguments.model = str(minilm())
    if arguments.one:
        side, shape = arguments.one[0], (arguments.max_length, arguments.epochs)
        for seed in map(int, arguments.one[1:]):
            row = SIDES[side](arguments.model, train, test, arguments.device, seed, *shape)
            print("ROW " + json.dumps({"side": side, "seed": seed, "device": arguments.device, **row}), flush=True)
        return
    path = arguments.output / "results.jsonl"
    results = rows_of(path) if path.exists() else []
    groups = [arguments.seeds] if arguments.together else [[seed] for seed in arguments.seeds]
    for group in groups:
        for side in arguments.sides:
            left = [s for s in group if not any(r["side"] == side and r["seed"] == s for r in results)]
            if not left:
                continue
            command = [sys.executable, __file__, "--output", str(arguments.output), "--device", arguments.device]
            command += ["--model", arguments.model, "--max-length", str(arguments.max_length)]
            command += ["--epochs", str(arguments.epochs), "--one", side, *map(str, left)]
            done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"HF_HUB_OFFLINE": "1"})
            found = [line for line in done.stdout.splitlines() if line.startswith("ROW ")]
            if len(found) < len(left):
                print(f"{side}, seeds {left}: failed\n{done.stderr[-3000:]}", file=sys.stderr)
            results += [json.loads(line.removeprefix("ROW ")) for line in found]
            path.write_text("".join(json.dumps(row) + "\n" for row in results), "utf-8")
            print("\n".join(found), flush=True)
    (arguments.output / "table.md").write_text(table(results) + "\n", "utf-8")
    print(table(results))


if __name__ == "__main__":
    main()

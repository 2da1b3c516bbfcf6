"""Gradient checkpointing: a step's time and memory with it and without, here and in transformers' Trainer.

    python benchmarks/checkpointing/run.py --output benchmarks/checkpointing/DATE-GPU --budget-s 580

BERT-large with random weights, rows of 512 random tokens, batch 32, bf16, AdamW, dropout on: as much work in each row
as in any other. Each setting is a process of its own, and none is measured again that is in the raw log. Needs one
NVIDIA GPU, or --smoke for a tiny model on a CPU.
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

#: Activations that leave 2.2 GB of the 12.6 GB that 16,384 tokens keep to host memory, four layers' of 24, and 1.6 and
#: 1.1 GB, three and two layers': a link of 48 GB/s takes 45, 34 and 23 ms each way, beside 24 ms of a forward pass and
#: 48 of a backward pass.
_OFFLOADED = {
    f"offload, {layers} layers": {"gradient_checkpointing": "offload", "activation_memory": most, "token_budget": 16384}
    for layers, most in (("two", "11500MB"), ("three", "11100MB"), ("four", "10500MB"))
}
#: Limits in --smoke, of what one micro-batch of the tiny model keeps.
_SMOKE = {"6500MB": "2500KB", "10500MB": "3700KB", "11100MB": "3700KB", "11500MB": "3950KB"}
#: Half of what 16,384 tokens keep.
_LIMITED = {"gradient_checkpointing": "selective", "activation_memory": "6500MB"}
ROWS = (
    *(Row(side="brimful", name=name, settings={"gradient_checkpointing": name}) for name in ("none", "full")),
    Row(side="brimful", name="selective", settings=_LIMITED | {"token_budget": 16384}),
    Row(side="brimful", name="offload", settings={"gradient_checkpointing": "offload"}),
    *(Row(side="brimful", name=name, settings=settings) for name, settings in _OFFLOADED.items()),
    Row(side="trainer", name="none"),
    Row(side="trainer", name="full", settings={"gradient_checkpointing": True}),
    Row(side="brimful", name="selective, micro-batches as it likes", settings=_LIMITED),
    Row(side="brimful", name="least", settings={"gradient_checkpointing": "selective"}),
    Row(side="brimful", name="every-2", settings={"gradient_checkpointing": "every-2"}),
    Row(side="trainer", name="none, compiled", settings={"torch_compile": True}),
    Row(side="trainer", name="full, compiled", settings={"gradient_checkpointing": True, "torch_compile": True}),
)
_BATCH = 32


def model_of(smoke: bool) -> Any:
    import torch
    from transformers import AutoModelForSequenceClassification, BertConfig

    torch.manual_seed(0)
    large = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
    tiny = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 64}
    config = BertConfig(num_labels=2, **(tiny if smoke else large))
    return AutoModelForSequenceClassification.from_config(config).train()


def rows_of(smoke: bool, count: int) -> list[dict[str, Any]]:
    import numpy as np

    draw, length = np.random.default_rng(0), 16 if smoke else 512
    return [{"input_ids": draw.integers(1000, 30000, length), "labels": int(draw.integers(2))} for _ in range(count)]


def measure(plan: dict[str, Any]) -> dict[str, Any]:
    """One row, in this process."""
    import torch

    smoke, settings = plan["smoke"], plan["settings"]
    blocks = Blocks(warm_up=8, count=5, steps=8, rows=4 if smoke else _BATCH)
    rows = rows_of(smoke, 2 * blocks.rows)
    if plan["side"] == "brimful":
        own = {"device": "cpu", "precision": "fp32", "execution": "eager"} if smoke else {
            "device": "cuda", "precision": "bf16", "execution": "compiled"}  # fmt: skip
        options = {"learning_rate": 1e-5, "seed": 1, **own, **settings}
        if smoke and "activation_memory" in options:
            options["activation_memory"] = _SMOKE[options["activation_memory"]]
        return with_peaks(our_steps(model_of(smoke), rows, blocks, smoke, **options), smoke)
    data = [{key: torch.as_tensor(value) for key, value in row.items()} for row in rows]
    asked = {
        "per_device_train_batch_size": blocks.rows, "bf16": not smoke, "tf32": True if not smoke else None,
        "gradient_checkpointing_kwargs": {"use_reentrant": False}, "optim": "adamw_torch_fused",
        **(settings if not smoke else {k: v for k, v in settings.items() if k != "torch_compile"}),
    }  # fmt: skip
    return with_peaks(trainer_steps(model_of(smoke), data, blocks, smoke, **asked), smoke)


def main(arguments: Namespace) -> None:
    """Measure what is left."""
    if arguments.one:
        print_rows([measure(json.loads(arguments.one))])
    else:
        run_rows(arguments, __file__, ROWS, lambda row: 50.0)


if __name__ == "__main__":
    main(parser_of(__doc__ or "", [row.key for row in ROWS], timeout_s=300.0).parse_args())

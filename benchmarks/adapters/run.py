"""LoRA on a decoder of 1.2 billion parameters, and all of its weights: here and in transformers' Trainer with peft.

    python benchmarks/adapters/run.py --output benchmarks/adapters/DATE-GPU --budget-s 580

Llama's shape of 1B with random weights, texts of 20 to 500 tokens, effective batch 32, rank 8 on queries and values,
bf16, AdamW. Each row is a process of its own, and none is measured again that is in the raw log; rates are medians of
blocks after the first steps. "LoRA" is what `brimful train` chooses by itself. Trainer runs with fp32 weights under
autocast, as ours are trained, and with bf16 weights. Needs one NVIDIA GPU, or --smoke for a tiny model on a CPU.
"""

from __future__ import annotations

import json
import shutil
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))

from resumable import default_inputs, parser_of, print_rows
from sides import Blocks, Row, command_steps, run_rows, trainer_steps, with_peaks

ROWS = (
    Row(side="brimful", name="LoRA"),
    *(Row(side="trainer", name=f"{dtype} weights", settings={"weights": dtype}) for dtype in ("bf16", "fp32")),
    Row(side="brimful", name="all weights", settings={"all": True}),
    Row(side="trainer", name="all weights", settings={"weights": "fp32", "all": True}),
    *(Row(side="brimful", name=name, settings={"execution": name}) for name in ("captured", "compiled")),
)
#: Ours capture a graph for each size of batch in the first two epochs, of 60 steps; they are told of at an epoch's end.
_OURS = Blocks(warm_up=120, count=3, steps=60, rows=32)
_THEIRS = Blocks(warm_up=20, count=8, steps=5, rows=32)
_SMOKE = Blocks(warm_up=4, count=2, steps=2, rows=4)
_NUM_ROWS = 60 * 32
_LARGE = {"hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32, "intermediate_size": 8192}
_TINY = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}


def make(folder: Path, smoke: bool) -> None:
    """A base model with random weights, its tokenizer of one token a word, and rows."""
    import numpy as np
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoModelForSequenceClassification, LlamaConfig, PreTrainedTokenizerFast

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"num_key_value_heads": 2 if smoke else 8, "vocab_size": 2000 if smoke else 128256}
    sizes |= _TINY if smoke else _LARGE
    config = LlamaConfig(num_labels=2, pad_token_id=0, bos_token_id=1, eos_token_id=2, **sizes)
    with torch.device("cpu" if smoke else "cuda"):
        model = AutoModelForSequenceClassification.from_config(config)
    model.to(torch.bfloat16).save_pretrained(folder / "base")
    vocabulary = {"[PAD]": 0, "<s>": 1, "</s>": 2, "[UNK]": 3} | {f"w{number}": number for number in range(4, 2000)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(folder / "base")
    draw = np.random.default_rng(0)
    lengths = np.clip(draw.lognormal(5.0, 0.7, _NUM_ROWS), 20, 500).astype(int) // (16 if smoke else 1) + 1
    with (folder / "rows.jsonl").open("w") as file:
        for number, length in enumerate(lengths):
            text = " ".join(f"w{each}" for each in draw.integers(4, 2000, length))
            file.write(json.dumps({"text": text, "label": ("no", "yes")[number % 2]}) + "\n")


def measure(plan: dict[str, Any], folder: Path) -> dict[str, Any]:
    """One row, in this process."""
    smoke = plan["smoke"]
    if not (folder / "rows.jsonl").exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        make(folder, smoke)
    ours = plan["side"] == "brimful"  # in a process of their own: the driver knows what they take
    return with_peaks((_brimful if ours else _trainer)(plan["settings"], folder, smoke), smoke or ours)


def _brimful(settings: dict[str, Any], folder: Path, smoke: bool) -> dict[str, Any]:
    adapter: dict[str, Any] = {} if settings.get("all") else {"peft": "lora", "lora-r": 8}
    execution = {} if smoke else {name: value for name, value in settings.items() if name == "execution"}
    return command_steps(folder, _SMOKE if smoke else _OURS, smoke, **adapter, **execution)


def _trainer(settings: dict[str, Any], folder: Path, smoke: bool) -> dict[str, Any]:
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForSequenceClassification, AutoTokenizer, DataCollatorWithPadding

    tokenizer = AutoTokenizer.from_pretrained(folder / "base")
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    data = [{"input_ids": tokenizer(row["text"])["input_ids"], "labels": int(row["label"] == "yes")} for row in rows]
    dtype = torch.bfloat16 if settings["weights"] == "bf16" else torch.float32
    model = AutoModelForSequenceClassification.from_pretrained(folder / "base", num_labels=2, dtype=dtype)
    if not settings.get("all"):
        model = get_peft_model(model, LoraConfig(task_type="SEQ_CLS", r=8))
    blocks = _SMOKE if smoke else _THEIRS
    asked = {"per_device_train_batch_size": blocks.rows, "bf16": not smoke, "optim": "adamw_torch_fused"}
    return trainer_steps(model, data, blocks, smoke, collator=DataCollatorWithPadding(tokenizer), **asked)


def main(arguments: Namespace) -> None:
    """Measure what is left."""
    arguments.inputs = arguments.inputs or default_inputs("adapters", smoke=arguments.smoke)
    if arguments.one:
        print_rows([measure(json.loads(arguments.one), arguments.inputs)])
    else:
        run_rows(arguments, __file__, ROWS, lambda row: 120.0)


if __name__ == "__main__":
    main(parser_of(__doc__ or "", [row.key for row in ROWS], timeout_s=400.0).parse_args())

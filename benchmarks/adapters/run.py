"""LoRA on a decoder of 1.2 billion parameters: rates and memory, here and in transformers' Trainer with peft.

    python benchmarks/adapters/run.py --output benchmarks/adapters/DATE-GPU

Llama's shape of 1B with random weights, texts of 20 to 500 tokens, effective batch 32, rank 8 on queries and values,
bf16, AdamW. Each row is a process of its own; rates are medians of log lines after the first ones. Trainer runs with
fp32 weights under autocast, as ours are trained, and with bf16 weights. Needs one NVIDIA GPU, or --smoke for a tiny
model on a CPU.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))

ROWS = (("brimful", "captured"), ("brimful", "compiled"), ("trainer", "fp32 weights"), ("trainer", "bf16 weights"))
_WARM_UP, _STEPS, _BATCH, _EVERY = 20, 60, 32, 5
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
    lengths = np.clip(draw.lognormal(5.0, 0.7, _STEPS * _BATCH), 20, 500).astype(int) // (16 if smoke else 1) + 1
    with (folder / "rows.jsonl").open("w") as file:
        for number, length in enumerate(lengths):
            text = " ".join(f"w{each}" for each in draw.integers(4, 2000, length))
            file.write(json.dumps({"text": text, "label": ("no", "yes")[number % 2]}) + "\n")


def measure(side: str, setting: str, folder: Path, smoke: bool) -> dict[str, Any]:
    found = (_brimful if side == "brimful" else _trainer)(setting, folder, smoke)
    found |= {"side": side, "settings": setting, "samples_per_s": median(found["rates"])}
    if not smoke:
        import torch

        found |= {
            "peak_allocated_bytes": torch.cuda.max_memory_allocated(),
            "peak_reserved_bytes": torch.cuda.max_memory_reserved(),
            "gpu": torch.cuda.get_device_name(),
            "torch": torch.__version__,
        }
    return found


def _brimful(setting: str, folder: Path, smoke: bool) -> dict[str, Any]:
    import brimful

    output = Path(tempfile.mkdtemp(dir=folder)) / "run"
    run = brimful.train(
        folder / "rows.jsonl", model=folder / "base", output=output, peft="lora", lora_r=8, max_steps=_STEPS,
        batch_size=_BATCH, eval_split=0.0, logging_steps=_EVERY, precision="fp32" if smoke else "bf16",
        execution="eager" if smoke else setting, device="cpu" if smoke else "cuda", save_steps=_STEPS,
    )  # fmt: skip
    events = [json.loads(line) for line in (output / "events.jsonl").read_text().splitlines()]
    steps = [event for event in events if event["kind"] == "step" and event["step"] > _WARM_UP]
    levers = {lever.name: lever.value for lever in run.recipe.levers}
    return {"rates": [event["samples_per_s"] for event in steps], "loss": steps[-1]["loss"], "recipe": levers}


def _trainer(setting: str, folder: Path, smoke: bool) -> dict[str, Any]:
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import (
        AutoModelForSequenceClassification,
        AutoTokenizer,
        DataCollatorWithPadding,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )

    marks: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, arguments: Any, state: Any, control: Any, **others: Any) -> None:
            if state.global_step >= _WARM_UP and state.global_step % _EVERY == 0:
                if not smoke:
                    torch.cuda.synchronize()
                marks.append(time.perf_counter())

    tokenizer = AutoTokenizer.from_pretrained(folder / "base")
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    data = [{"input_ids": tokenizer(row["text"])["input_ids"], "labels": int(row["label"] == "yes")} for row in rows]
    dtype = torch.bfloat16 if setting == "bf16 weights" else torch.float32
    model = AutoModelForSequenceClassification.from_pretrained(folder / "base", num_labels=2, dtype=dtype)
    model = get_peft_model(model, LoraConfig(task_type="SEQ_CLS", r=8))
    with tempfile.TemporaryDirectory() as output:
        arguments = TrainingArguments(
            output_dir=output, per_device_train_batch_size=_BATCH, max_steps=_STEPS, bf16=not smoke, use_cpu=smoke,
            optim="adamw_torch_fused", logging_strategy="no", logging_nan_inf_filter=False, disable_tqdm=True,
            report_to="none", save_strategy="no", dataloader_pin_memory=not smoke,
        )  # fmt: skip
        collator = DataCollatorWithPadding(tokenizer)
        Trainer(model=model, args=arguments, train_dataset=data, data_collator=collator, callbacks=[Clock()]).train()
    return {"rates": [_EVERY * _BATCH / (b - a) for a, b in pairwise(marks)]}


def main() -> None:
    parser = argparse.ArgumentParser(description="LoRA on a decoder, beside Trainer and peft.")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--smoke", action="store_true", help="a tiny model on a CPU")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        side, setting, folder = json.loads(arguments.one)
        print("ROW " + json.dumps(measure(side, setting, Path(folder), arguments.smoke)))
        return
    from provenance import commit_here, host_here

    arguments.output.mkdir(parents=True, exist_ok=True)
    results = []
    with tempfile.TemporaryDirectory() as folder:
        make(Path(folder), arguments.smoke)
        for side, setting in ROWS[:: 2 if arguments.smoke else 1]:
            command = [sys.executable, __file__, "--one", json.dumps([side, setting, folder])]
            command += ["--smoke"] if arguments.smoke else []
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            rows = [json.loads(line[4:]) for line in done.stdout.splitlines() if line.startswith("ROW ")]
            result = {"side": side, "settings": setting} | (rows[0] if rows else {"error": done.stderr.strip()[-800:]})
            results.append(result | {"commit": commit_here(), "host": host_here()})
            said = result.get("error", "")[-300:] or f"{result['samples_per_s']:.1f} samples/s"
            print(side, setting, said, result.get("peak_allocated_bytes"), flush=True)
            (arguments.output / "results.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()

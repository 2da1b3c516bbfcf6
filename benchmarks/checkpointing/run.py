"""Gradient checkpointing: a step's time and memory with it and without, here and in transformers' Trainer.

    python benchmarks/checkpointing/run.py --output benchmarks/checkpointing/DATE-GPU

BERT-large with random weights, rows of 512 random tokens, batch 32, bf16, AdamW, dropout on: as much work in each row
as in any other. Each setting is a process of its own. Needs one NVIDIA GPU, or --smoke for a tiny model on a CPU.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))

SIDES = {
    "brimful": ("none", "every-2", "full"),
    "trainer": ("none", "full", "none, compiled", "full, compiled"),
}
_WARM_UP, _ROUNDS, _STEPS = 8, 5, 8


def model_of(smoke: bool) -> Any:
    import torch
    from transformers import AutoModelForSequenceClassification, BertConfig

    torch.manual_seed(0)
    large = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
    tiny = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    config = BertConfig(num_labels=2, **(tiny if smoke else large))
    return AutoModelForSequenceClassification.from_config(config).train()


def rows_of(smoke: bool, count: int) -> list[dict[str, Any]]:
    import numpy as np

    draw, length = np.random.default_rng(0), 16 if smoke else 512
    return [{"input_ids": draw.integers(1000, 30000, length), "labels": int(draw.integers(2))} for _ in range(count)]


def rates(seconds: list[float], size: int) -> list[float]:
    return sorted(_STEPS * size / each for each in seconds)


def measure(side: str, setting: str, size: int, smoke: bool) -> dict[str, Any]:
    import torch

    device = "cpu" if smoke else "cuda"
    found = (_brimful if side == "brimful" else _trainer)(setting, size, smoke, device)
    found |= {"side": side, "setting": setting, "samples_per_s": median(found["rates"]), "settings": setting}
    if not smoke:
        found |= {
            "peak_allocated_bytes": torch.cuda.max_memory_allocated(),
            "peak_reserved_bytes": torch.cuda.max_memory_reserved(),
            "gpu": torch.cuda.get_device_name(),
            "torch": torch.__version__,
        }
    return found


def _wait(smoke: bool) -> None:
    import torch

    if not smoke:
        torch.cuda.synchronize()


def _brimful(setting: str, size: int, smoke: bool, device: str) -> dict[str, Any]:
    import brimful

    step = brimful.Step(
        model_of(smoke), num_steps=1000, batch_size=size, lengths=[16 if smoke else 512] * size, device=device,
        precision="fp32" if smoke else "bf16", execution="eager" if smoke else "compiled", learning_rate=1e-5,
        gradient_checkpointing=setting, seed=1,
    )  # fmt: skip
    batches = [step.batch(rows_of(smoke, size)) for _ in range(_WARM_UP + _ROUNDS * _STEPS)]
    losses = [step.run(batch).read().loss for batch in batches[:_WARM_UP]]
    seconds = []
    for start in range(_WARM_UP, len(batches), _STEPS):
        _wait(smoke)
        began = time.perf_counter()
        for batch in batches[start : start + _STEPS]:
            pending = step.run(batch)
        pending.read()
        _wait(smoke)
        seconds.append(time.perf_counter() - began)
    return {"rates": rates(seconds, size), "losses": losses}


def _trainer(setting: str, size: int, smoke: bool, device: str) -> dict[str, Any]:
    import torch
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Clock(TrainerCallback):
        def __init__(self) -> None:
            self.marks: list[float] = []

        def on_step_end(self, arguments: Any, state: Any, control: Any, **others: Any) -> None:
            if state.global_step >= _WARM_UP and (state.global_step - _WARM_UP) % _STEPS == 0:
                _wait(smoke)
                self.marks.append(time.perf_counter())

    steps = _WARM_UP + _ROUNDS * _STEPS
    rows = [{key: torch.as_tensor(value) for key, value in row.items()} for row in rows_of(smoke, size)] * steps
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder, per_device_train_batch_size=size, max_steps=steps, bf16=not smoke,
            tf32=True if not smoke else None, use_cpu=smoke, gradient_checkpointing=setting.startswith("full"),
            gradient_checkpointing_kwargs={"use_reentrant": False}, optim="adamw_torch_fused", logging_strategy="no",
            torch_compile="compiled" in setting, logging_nan_inf_filter=False, disable_tqdm=True, report_to="none",
            save_strategy="no", dataloader_pin_memory=not smoke,
        )  # fmt: skip
        Trainer(model=model_of(smoke), args=arguments, train_dataset=rows, callbacks=[clock]).train()
    return {"rates": rates([b - a for a, b in zip(clock.marks, clock.marks[1:], strict=False)], size)}


def main() -> None:
    parser = argparse.ArgumentParser(description="Gradient checkpointing beside Trainer's.")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--smoke", action="store_true", help="a tiny model on a CPU")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        side, setting = json.loads(arguments.one)
        print("ROW " + json.dumps(measure(side, setting, arguments.batch_size, arguments.smoke)))
        return
    from provenance import commit_here, host_here

    arguments.output.mkdir(parents=True, exist_ok=True)
    results = []
    for side, settings in SIDES.items():
        for setting in settings:
            command = [sys.executable, __file__, "--one", json.dumps([side, setting])]
            command += ["--batch-size", str(arguments.batch_size), *(["--smoke"] if arguments.smoke else [])]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            rows = [json.loads(line[4:]) for line in done.stdout.splitlines() if line.startswith("ROW ")]
            result = {"side": side, "setting": setting} | (rows[0] if rows else {"error": done.stderr.strip()[-800:]})
            results.append(result | {"commit": commit_here(), "host": host_here()})
            said = result.get("error", "")[-300:] or f"{result['samples_per_s']:.1f} samples/s"
            print(side, setting, said, result.get("peak_allocated_bytes"), flush=True)
            (arguments.output / "results.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()

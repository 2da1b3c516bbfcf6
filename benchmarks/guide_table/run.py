"""The table of Hugging Face's guide to memory and speed on one GPU: nine rows by Trainer, and ours, by `brimful bench`.

    python benchmarks/guide_table/run.py --output benchmarks/guide_table/DATE-GPU --budget-s 580

BERT-large with random weights, 512 sequences of 512 random tokens, effective batch 4, as in the guide. Finished rows
are not measured again: call it until none is left. Needs one NVIDIA GPU and nothing from a network; 8-bit Adam needs
bitsandbytes. --rows lean: ours in the least memory, beside Trainer's plain row; a later call without it adds the rest.
--warmup-steps 12 --steps 6: Trainer's nine rows and as many of ours in one call of ten minutes.
--smoke: a tiny model on a CPU.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))

from shapes import load_tokenizer, save_model


def model_folder(inputs: Path, *, smoke: bool) -> Path:
    """The guide's model: bert-large-uncased's shape, its weights and its head drawn; made once."""
    folder = inputs / ("tiny" if smoke else "bert-large")
    if not (folder / "config.json").exists():
        inputs.mkdir(parents=True, exist_ok=True)
        save_model(folder, "large", load_tokenizer(None, smoke=smoke), _classifier, smoke=smoke)
    return folder


def _classifier(config: Any) -> Any:
    from transformers import AutoModelForSequenceClassification

    return AutoModelForSequenceClassification.from_config(config)


def command_of(
    model: Path, output: Path, rows: str, budget_s: float, *, warm_up: int, block: int, smoke: bool
) -> list[str]:
    """The command that measures the rows. warm_up, block: steps of each."""
    steps = {"shape": "512x512", "warmup-steps": warm_up, "repeats": 5, "steps": block}
    if smoke:
        steps = {"shape": "16x16", "warmup-steps": 2, "repeats": 2, "steps": 1, "device": "cpu"}
    asked = {"rows": rows, "batch-size": 4, "budget-s": budget_s, "output": output, **steps}
    flags = [word for name, value in asked.items() for word in (f"--{name}", str(value))]
    return [sys.executable, "-m", "brimful", "bench", str(model), *flags]


def flat(bench: dict[str, Any]) -> list[dict[str, Any]]:
    """Return each measured row of a bench with its figures beside one another, in bytes and samples/s."""
    gpu, found = bench["workload"]["device"], list[dict[str, Any]]()
    for each in bench["rows"]:
        if (measured := each["measured"]) is None:
            continue
        peaks = measured["peak_bytes"]
        found.append(
            {
                "row": each["row"]["name"],
                "side": each["row"]["side"],
                "samples_per_s": measured["samples_per_s"],
                "peak_allocated_bytes": peaks["allocated"],
                "peak_reserved_bytes": peaks["reserved"],
                "nvml_bytes": measured["nvml_bytes"],
                "nvml_training_bytes": peaks["nvml"],
                "loss": measured["loss"],
                "settings": each["row"]["settings"],
                "gpu": gpu,
            }
        )
    return found


def main() -> int:
    """Measure what is left; the exit code of the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="folder of the bench")
    parser.add_argument("--rows", default="guide", help="as of brimful bench: lean for ours in the least memory alone")
    parser.add_argument("--budget-s", type=float, default=0.0, help="seconds for this call; 0: no limit")
    parser.add_argument("--warmup-steps", type=int, default=24, help="steps that are not timed; default: 24")
    parser.add_argument("--steps", type=int, default=20, help="of each of five blocks; default: 20")
    parser.add_argument("--inputs", type=Path, help="folder for the model; default: in the temporary folder")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes on a CPU, to test this script")
    asked = parser.parse_args()
    inputs = asked.inputs or Path(tempfile.gettempdir()) / "brimful-benchmark-guide-table"
    model = model_folder(inputs, smoke=asked.smoke)
    steps = {"warm_up": asked.warmup_steps, "block": asked.steps}
    code = subprocess.call(command_of(model, asked.output, asked.rows, asked.budget_s, **steps, smoke=asked.smoke))
    if (asked.output / "results.json").exists():
        found = flat(json.loads((asked.output / "results.json").read_text("utf-8")))
        (asked.output / "flat.json").write_text(json.dumps(found, indent=1), "utf-8")
    return code


if __name__ == "__main__":
    sys.exit(main())

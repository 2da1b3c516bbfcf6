"""Accuracy with each lever beside the plain run: which of them change what is learned by more than seeds do.

    python benchmarks/lever_quality/run.py --output benchmarks/lever_quality/DATE-GPU --budget-s 580

MiniLM-L6 on BBC News and on tweets (from Python packages), `brimful train` with its defaults but for one lever, seeds 1
to 5. Each lever is a process, with all seeds of one corpus; none is measured again that is in the raw log. table.md has
the mean accuracy of each lever, its difference from the plain run by seed, and the 95 % interval of that difference.
Runs on a GPU or a CPU; --limit, --max-length and --max-steps make runs shorter, --smoke takes 200 rows and two seeds.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
from argparse import Namespace
from pathlib import Path
from statistics import mean, stdev
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))

from resumable import default_inputs, parser_of, print_rows, write_texts
from sides import Row, run_rows

CORPORA = ("bbc", "tweets")
_FREED = {"optimizer_in_backward": True, "late_clipping": True}
LEVERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "fp32": {"precision": "fp32"},
    "tf32": {"precision": "tf32"},
    "fp16": {"precision": "fp16"},
    "split by tokens": {"token_budget": 1024},
    "recomputed": {"gradient_checkpointing": "full"},
    "activations offloaded": {"gradient_checkpointing": "offload"},
    "states offloaded": {"optimizer_offload": True},
    "clipped late, updated in backward": _FREED,
    "states in bf16": {"optimizer_state_dtype": "bf16"},
    "states in 8 bits": {"optimizer_state_dtype": "8bit"},
    "weights in bf16": {"weight_dtype": "bf16"},
    "weights and states in bf16, in backward": {"weight_dtype": "bf16", "optimizer_state_dtype": "bf16", **_FREED},
    "adafactor": {"optim": "adafactor"},
    "adamw_bnb_8bit": {"optim": "adamw_bnb_8bit"},
    "adamw_torch_8bit": {"optim": "adamw_torch_8bit"},
    "adamw_torch_4bit": {"optim": "adamw_torch_4bit"},
    "lion_32bit": {"optim": "lion_32bit", "learning_rate": 2e-5},
    "schedule_free_adamw": {"optim": "schedule_free_adamw"},
    "lora": {"peft": "lora"},
    "head only": {"freeze": "all-but-head"},
    "embeddings frozen": {"freeze": "embeddings"},
    "every other layer recomputed": {"gradient_checkpointing": "every-2"},
    "selective": {"gradient_checkpointing": "selective"},
    "weights streamed": {"stream_weights": "host"},
    "fp8": {"precision": "fp8"},
}
NAMES = [f"{corpus}: {name}" for corpus in CORPORA for name in LEVERS]
SEEDS = (1, 2, 3, 4, 5)
#: Options that make runs shorter.
_SHORTER = ("limit", "max_length", "max_steps")
#: Two-sided 95 % points of Student's t, by degrees of freedom.
_T95 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776}


def rows_of(shorter: dict[str, int | None]) -> list[Row]:
    """A row for each corpus and lever. shorter: options of all runs; None for their defaults."""
    given = {name: value for name, value in shorter.items() if value is not None}
    return [
        Row(side=corpus, name=name, settings=given | settings)
        for corpus in CORPORA
        for name, settings in LEVERS.items()
    ]


def measure(plan: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Accuracy of each seed, and what a run takes."""
    import torch
    from shapes import packaged_rows

    import brimful
    from brimful.data.readers.packaged import minilm

    smoke = plan["smoke"]
    data = folder / f"{plan['side']}.jsonl"
    if not data.exists():
        folder.mkdir(parents=True, exist_ok=True)
        lines = [json.dumps(row) for row in packaged_rows(plan["side"])]
        write_texts(folder, {data.name: "\n".join(lines)})
    found: dict[str, Any] = {"accuracy": [], "rates": [], "seeds": list(SEEDS[:2] if smoke else SEEDS)}
    half = torch.cuda.is_available() or "weight_dtype" in plan["settings"]
    asked: dict[str, Any] = {"precision": "bf16" if half else "fp32", "max_length": 128}
    if smoke:
        asked |= {"limit": 200, "max_steps": 6, "max_length": 32}
    for seed in found["seeds"]:
        with tempfile.TemporaryDirectory() as kept:
            output = Path(kept) / "run"
            run = brimful.train(data, model=minilm(), output=output, seed=seed, **asked | plan["settings"])
        found["accuracy"].append(run.metrics["accuracy"])
        found["rates"].append(run.samples_per_s or 0.0)
        classes = {lever.arithmetic for lever in run.recipe.levers}
        found["arithmetic"] = next((each for each in ("training", "rounding") if each in classes), "exact")
    return found | {"samples_per_s": mean(found["rates"])}


def table(results: list[dict[str, Any]]) -> str:
    """Mean accuracies, and differences from the plain run with their intervals, seed by seed."""
    lines = ["| corpus | lever | class | accuracy | difference from plain (95 %) |", "|---|---|---|---|---|"]
    plain = {found["side"]: found["accuracy"] for found in results if found["row"] == "plain" and found["ok"]}
    for found in results:
        if not found["ok"] or found["side"] not in plain:
            continue
        pairs = zip(found["accuracy"], plain[found["side"]], strict=False)
        differences = [100 * (one - other) for one, other in pairs]
        said = ""
        if found["row"] != "plain" and len(differences) > 1:
            half = _T95[len(differences) - 1] * stdev(differences) / math.sqrt(len(differences))
            said = f"{mean(differences):+.2f} ± {half:.2f} points"
            said += " **shifted**" if abs(mean(differences)) > half else ""
        accuracy = f"{100 * mean(found['accuracy']):.2f} %"
        lines.append(f"| {found['side']} | {found['row']} | {found['arithmetic']} | {accuracy} | {said} |")
    return "\n".join(lines)


def main(arguments: Namespace) -> None:
    """Measure what is left, and write the table."""
    arguments.inputs = arguments.inputs or default_inputs("lever-quality", smoke=arguments.smoke)
    if arguments.one:
        print_rows([measure(json.loads(arguments.one), arguments.inputs)])
        return
    shorter = {name: getattr(arguments, name) for name in _SHORTER}
    text = table(run_rows(arguments, __file__, rows_of(shorter), lambda row: 90.0))
    write_texts(arguments.output, {"table.md": text})
    print(text)


def _arguments() -> Namespace:
    parser = parser_of(__doc__ or "", NAMES, timeout_s=500.0)
    for name in _SHORTER:
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, help="as of brimful train")
    return parser.parse_args()


if __name__ == "__main__":
    main(_arguments())

"""A decoder of 1.2 billion parameters, all of them trained, on one GPU and in parts of two: here and by Trainer.

    python benchmarks/several_gpus/in_parts.py --output benchmarks/several_gpus/DATE-GPU-in-parts --budget-s 580

Needs two NVIDIA GPUs and nothing from a network; ZeRO-3 needs DeepSpeed. Rows of 32 texts a GPU, bf16, AdamW. Each row
is a process of its own, or one of two; what is in the raw log is not measured again: call it until nothing is left.
"""

from __future__ import annotations

import json
import os
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))

from resumable import default_inputs, parser_of, print_rows, script_of, write_texts
from sides import Blocks, Row, command_steps, run_rows, trainer_steps, with_peaks

#: Ours compile kernels and capture graphs in the first steps, as new sizes come. Steps are told of two steps late,
#: but at the end of an epoch, of 30 or 60 steps: blocks are of whole epochs.
_OURS = Blocks(warm_up=120, count=3, steps=60, rows=32)
_THEIRS = Blocks(warm_up=20, count=5, steps=20, rows=32)
#: With updates in host memory, which take seconds.
_ON_HOST = Blocks(warm_up=6, count=5, steps=3, rows=32)
_SMOKE = Blocks(warm_up=4, count=2, steps=2, rows=4)
_WRAPPED = {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
_FSDP2 = {"version": 2, **_WRAPPED}
_ZERO = {
    "zero_optimization": {"stage": 3, "overlap_comm": True},
    "bf16": {"enabled": True},
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "train_batch_size": "auto",
    "gradient_clipping": "auto",
}
_OFFLOADED = {"optimizer-offload": True}
_WORK = "decoder of 1.2 billion"
ROWS = (
    Row(side="brimful", name="one GPU", settings={"gpus": 1}),
    *(
        Row(side="brimful", name=name, settings={"gpus": 2, "sharding": name})
        for name in ("parameters", "deepspeed", "states", "none", "gradients")
    ),
    Row(side="brimful", name="weights together", settings={"gpus": 2, "tensor-parallel": 2}),
    *(
        Row(side="brimful", name=f"{name}, in host memory", settings={"gpus": 2, "sharding": name, **_OFFLOADED})
        for name in ("parameters", "deepspeed")
    ),
    *(
        Row(side="brimful", name=name, settings={"gpus": 2, "sharding": "parameters", "execution": name})
        for name in ("fused", "captured", "compiled")
    ),
    Row(
        side="brimful",
        name="compiled, sent",
        settings={"gpus": 2, "sharding": "parameters", "execution": "compiled", "no-peer-copies": True},
    ),
    Row(side="brimful", name="compiled, four", settings={"gpus": 4, "sharding": "parameters", "execution": "compiled"}),
    Row(side="trainer", name="one GPU", settings={"gpus": 1}),
    Row(side="trainer", name="one GPU, compiled", settings={"gpus": 1, "torch_compile": True}),
    Row(
        side="trainer",
        name="FSDP2",
        settings={"gpus": 2, "fsdp": "full_shard auto_wrap", "fsdp_config": _FSDP2},
    ),
    Row(
        side="trainer",
        name="FSDP2, in host memory",
        settings={"gpus": 2, "fsdp": "full_shard auto_wrap offload", "fsdp_config": _FSDP2},
    ),
    Row(side="trainer", name="ZeRO-3", settings={"gpus": 2, "deepspeed": _ZERO}),
    Row(side="trainer", name="DDP", settings={"gpus": 2, "ddp_find_unused_parameters": False}),
)


def _blocks(settings: dict[str, Any], usual: Blocks, smoke: bool) -> Blocks:
    """Steps of a row: fewer where it keeps optimizer states in host memory."""
    on_host = "optimizer-offload" in settings or "offload" in settings.get("fsdp", "")
    return _SMOKE if smoke else _ON_HOST if on_host else usual


def ours(settings: dict[str, Any], folder: Path, smoke: bool) -> dict[str, Any]:
    """`brimful train` as a user calls it."""
    flags = {name: value for name, value in settings.items() if name != "gpus"}
    return command_steps(folder, _blocks(settings, _OURS, smoke), smoke, gpus=settings["gpus"], **flags)


def theirs(settings: dict[str, Any], folder: Path, smoke: bool) -> dict[str, Any]:
    """Trainer in this process, one of as many as there are GPUs."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer, DataCollatorWithPadding

    asked = {name: value for name, value in settings.items() if name != "gpus"}
    tokenizer = AutoTokenizer.from_pretrained(folder / "base")
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    data = [{"input_ids": tokenizer(row["text"])["input_ids"], "labels": int(row["label"] == "yes")} for row in rows]
    blocks = _blocks(settings, _THEIRS, smoke)
    arguments = {
        "per_device_train_batch_size": blocks.rows, "bf16": not smoke, "tf32": None if smoke else True,
        "optim": "adamw_torch_fused", "dataloader_num_workers": 0 if smoke else 4,
        **({"ddp_backend": "gloo"} if smoke and settings["gpus"] > 1 else {}), **asked,
    }  # fmt: skip
    model = AutoModelForSequenceClassification.from_pretrained(folder / "base", num_labels=2, dtype="float32")
    found = trainer_steps(model, data, blocks, smoke, collator=DataCollatorWithPadding(tokenizer), **arguments)
    return found | {"rates": [settings["gpus"] * rate for rate in found["rates"]]}


def one(arguments: Namespace) -> int:
    """Measure one row, in as many processes as it asks for; the first one prints it."""
    from brimful.cli.launch import launch, watch_launcher

    plan = json.loads(arguments.one)
    settings, smoke, folder = plan["settings"], plan["smoke"], arguments.inputs
    if plan["side"] == "trainer" and settings["gpus"] > 1 and "RANK" not in os.environ:
        return launch([sys.executable, *sys.argv], settings["gpus"])
    if plan["side"] == "trainer" and settings["gpus"] == 1:  # Trainer would take all that it sees
        os.environ["CUDA_VISIBLE_DEVICES"] = "" if smoke else os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    watch_launcher()
    found = (ours if plan["side"] == "brimful" else theirs)(settings, folder, smoke)
    if os.environ.get("RANK", "0") == "0":
        print_rows([with_peaks(found | {"work": _WORK}, smoke or plan["side"] == "brimful")])
    return 0


def table(results: list[dict[str, Any]]) -> str:
    """Samples/s, times one GPU's of the same side, and the driver's bytes of the first GPU."""
    alone = {found["side"]: found["samples_per_s"] for found in results if found["row"] == "one GPU" and found["ok"]}
    lines = ["| side | in parts by | GPUs | samples/s | times one GPU | first GPU |", "|---|---|---|---|---|---|"]
    for found in results:
        if not found["ok"]:
            lines.append(f"| {found['side']} | {found['row']} | {found['settings']['gpus']} | failed | | |")
            continue
        rate, first = found["samples_per_s"], alone.get(found["side"])
        gained = f"{rate / first:.2f}" if first else ""
        memory = "" if found["nvml_bytes"] is None else f"{found['nvml_bytes'] / 1e9:.1f} GB"
        lines.append(
            f"| {found['side']} | {found['row']} | {found['settings']['gpus']} | {rate:.1f} | {gained} | {memory} |"
        )
    return "\n".join(lines)


def main() -> int:
    """Measure what is left, and write the table."""
    arguments = parser_of((__doc__ or "").splitlines()[0], [row.key for row in ROWS], timeout_s=200.0).parse_args()
    arguments.inputs = arguments.inputs or default_inputs("in-parts", smoke=arguments.smoke)
    if arguments.one:
        return one(arguments)
    if not (arguments.inputs / "rows.jsonl").exists():
        arguments.inputs.mkdir(parents=True, exist_ok=True)
        script_of("adapters").make(arguments.inputs, arguments.smoke)
    text = table(run_rows(arguments, __file__, ROWS, lambda row: 60.0))
    write_texts(arguments.output, {"table.md": text})
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Figures of Hugging Face's guide to one GPU, to set measured rows beside.

Source: "Efficient Training on a Single GPU", documentation of transformers 4.20.1, huggingface.co/docs/transformers:
BERT-large, sequences of 512 random tokens, batches of 4, Trainer, a V100 with 16 GB.
"""

from __future__ import annotations

from dataclasses import dataclass

from brimful.core.bench import Row

MACHINE = "a V100 with 16 GB, BERT-large, batches of 4 sequences of 512 tokens, transformers 4.20"


@dataclass(frozen=True)
class Claim:
    """Speed and memory that the guide shows for a row, in samples a second and megabytes by NVML."""

    samples_per_s: float
    megabytes: float


#: By the name of Trainer's row.
CLAIMS = {
    "plain": Claim(8.86, 14949),
    "accumulation": Claim(7.75, 8681),
    "accumulation, checkpointing": Claim(5.99, 6775),
    "fp16": Claim(18.64, 13939),
    "fp16, accumulation, checkpointing": Claim(10.09, 7275),
    "Adafactor": Claim(7.96, 12295),
    "all, Adafactor": Claim(9.06, 4847),
    "8-bit Adam": Claim(9.15, 13085),
    "all, 8-bit Adam": Claim(10.35, 5363),
}


#: Settings of the guide's rows, in our words, and those rows.
_OF = {
    frozenset(): "plain",
    frozenset({"accumulation"}): "accumulation",
    frozenset({"accumulation", "checkpointing"}): "accumulation, checkpointing",
    frozenset({"fp16"}): "fp16",
    frozenset({"fp16", "accumulation", "checkpointing"}): "fp16, accumulation, checkpointing",
    frozenset({"adafactor"}): "Adafactor",
    frozenset({"fp16", "accumulation", "checkpointing", "adafactor"}): "all, Adafactor",
    frozenset({"adamw_bnb_8bit"}): "8-bit Adam",
    frozenset({"fp16", "accumulation", "checkpointing", "adamw_bnb_8bit"}): "all, 8-bit Adam",
}
#: Rows of the guide that differ by one lever alone: the one with it, and the one without.
_LEVERS = {
    "accumulation": ("accumulation", "plain"),
    "checkpointing": ("accumulation, checkpointing", "accumulation"),
    "fp16": ("fp16", "plain"),
    "adafactor": ("Adafactor", "plain"),
    "adamw_bnb_8bit": ("8-bit Adam", "plain"),
}


def claim_of(row: Row, base: Row) -> tuple[float, float] | None:
    """Speed and memory of a row over those of another, as the guide has them; None where it says nothing of them.

    Rows of both sides are told by their settings. Beside other settings that both have, as bf16, the guide's claim is
    that of the one lever between them.
    """
    ours, theirs = _settings(row), _settings(base)
    if ours == theirs:
        return None
    names = _OF.get(ours), _OF.get(theirs)
    if None in names:
        names = _LEVERS.get(next(iter(ours - theirs)), (None, None)) if _adds_one(ours, theirs) else (None, None)
    one, other = (CLAIMS.get(name or "") for name in names)
    if one is None or other is None:
        return None
    return one.samples_per_s / other.samples_per_s, one.megabytes / other.megabytes


def _adds_one(row: frozenset[str], base: frozenset[str]) -> bool:
    return base < row and len(row - base) == 1


#: Settings by which a row is as the guide's without them: our rows on a GPU are captured.
_AS_WITHOUT = {"execution": ("auto", "captured"), "precision": ("auto", "fp32"), "gradient_checkpointing": ("none",)}
_SPLIT = ("per_device_train_batch_size", "gradient_accumulation_steps", "per_device_batch_size", "token_budget")


def _settings(row: Row) -> frozenset[str]:
    """Settings of a row of either side: the guide's by one word each, others as they are."""
    found = set[str]()
    for name, value in row.settings.items():
        if name == "gradient_checkpointing_kwargs" or value in _AS_WITHOUT.get(name, ()):
            continue
        if name in _SPLIT:
            found.add("accumulation")
        elif name == "gradient_checkpointing" and value in (True, "full"):
            found.add("checkpointing")
        elif name in ("fp16", "bf16", "tf32") and value is True:
            found.add(name)
        elif name in ("precision", "optim"):
            found.add(str(value))
        else:
            found.add(f"{name}={value}")
    return frozenset(found)

"""Figures of Hugging Face's guide to one GPU, to set measured rows beside.

Source: "Efficient Training on a Single GPU", documentation of transformers 4.20.1, huggingface.co/docs/transformers:
BERT-large, sequences of 512 random tokens, batches of 4, Trainer, a V100 with 16 GB.
"""

from __future__ import annotations

from dataclasses import dataclass

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


#: Rows that differ by one lever alone, by a name that a row of ours or of Trainer's may have: the guide's row with the
#: lever, and the one without it.
_LEVERS = {
    "accumulation": ("accumulation", "plain"),
    "split in four": ("accumulation", "plain"),
    "checkpointing": ("accumulation, checkpointing", "accumulation"),
    "fp16": ("fp16", "plain"),
    "Adafactor": ("Adafactor", "plain"),
    "8-bit Adam": ("8-bit Adam", "plain"),
}


def claim_of(name: str, base: str) -> tuple[float, float] | None:
    """Speed and memory of a row over those of another, as the guide has them; None where it says nothing of them.

    Rows of one name are the same settings on two sides, and the guide has one.
    """
    if name == base:
        return None
    if name not in CLAIMS or base not in CLAIMS:
        name, base = _LEVERS.get(name.removeprefix(f"{base}, "), ("", ""))
    row, other = CLAIMS.get(name), CLAIMS.get(base)
    if row is None or other is None:
        return None
    return row.samples_per_s / other.samples_per_s, row.megabytes / other.megabytes

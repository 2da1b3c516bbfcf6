"""Records of classifications, made by hand."""

from __future__ import annotations

import dataclasses
from typing import Any

from brimful.core.classification import CONFIDENCE_BINS, LENGTH_ENDS, AnswerEquivalence, Classification, Counts, Stage
from brimful.core.records import Gpu, LabelSpace, Lever, Machine, PeakMemory, Recipe

ANSWER_EQUIVALENCE = AnswerEquivalence(
    num_rows=256,
    precision="bf16",
    tolerance=0.02,
    agreement=255 / 256,
    largest_difference=0.0031,
    num_near_ties=3,
    num_flips=1,
    num_unexplained=0,
    passed=True,
)
NAMES = ("positive", "neutral", "negative")
LENGTHS = (61_250, 287_400, 412_000, 160_050, 52_300, 20_800, 5_700, 500)
CONFIDENCES = (0, 0, 0, 0, 0, 0, 0, 900, 4_100, 9_200, 13_800, 17_000, 22_500, 28_000, 39_000, 55_000, 81_000, 132_000,
               220_500, 376_999)  # fmt: skip
RECIPE = Recipe(
    device="NVIDIA H200",
    levers=(
        Lever(name="precision", value="bf16", arithmetic="rounding", reason="fastest on this GPU"),
        Lever(name="packing", value="packed", arithmetic="exact", reason="equal on this model, to 2e-6 in fp32"),
        Lever(name="token_budget", value="16384", arithmetic="exact", reason="the GPU is full from 12,288 tokens on"),
        Lever(name="attention", value="flash", arithmetic="exact", reason="fastest of 3 that were measured here"),
        Lever(name="execution", value="captured", arithmetic="exact", reason="one graph replaces 149 launches"),
    ),
)
RECORD = Classification(
    model="run/model",
    data="data/tweets.parquet",
    output="labelled.parquet",
    command="brimful classify run/model data/tweets.parquet --output labelled.parquet --report report.html",
    options={"model": "run/model", "data": "data/tweets.parquet", "verify": 256, "max_length": None, "resume": False},
    labels=LabelSpace(task="single_label", names=NAMES, values={name: i for i, name in enumerate(NAMES)}),
    recipe=RECIPE,
    machine=Machine(
        cpu="Intel Xeon Platinum 8480C",
        num_cores=16,
        memory_bytes=128 << 30,
        gpus=(Gpu(name="NVIDIA H200", total_bytes=139 << 30, compute_capability=(9, 0)),),
        versions={"brimful": "0.1.0", "python": "3.11.7", "torch": "2.13.0", "transformers": "5.23.0"},
    ),
    counts=Counts(
        num_rows=1_000_000,
        num_tokens=24_100_000,
        num_truncated=34,
        labels={"positive": 512_345, "neutral": 310_220, "negative": 177_434},
        num_empty=1,
        lengths=LENGTHS + (0,) * (len(LENGTH_ENDS) + 1 - len(LENGTHS)),
        confidences=CONFIDENCES,
    ),
    equivalence=ANSWER_EQUIVALENCE,
    start_s=6.1,
    wall_s=15.4,
    texts_per_s=64_935.1,
    tokens_per_s=1_564_935.0,
    mfu=0.412,
    stages=(
        Stage(name="read", busy_s=1.3),
        Stage(name="tokenise", busy_s=11.9),
        Stage(name="compute", busy_s=15.1),
        Stage(name="write", busy_s=2.2),
    ),
    limit="compute",
    peak_bytes=PeakMemory(allocated=3 << 30, reserved=4 << 30, nvml=5 << 30),
)
assert len(CONFIDENCES) == CONFIDENCE_BINS


def changed(**changes: Any) -> Classification:
    """RECORD with other fields; `counts` is a mapping of the counts's fields that change."""
    if isinstance(changes.get("counts"), dict):
        changes["counts"] = dataclasses.replace(RECORD.counts, **changes["counts"])
    return dataclasses.replace(RECORD, **changes)

"""A profile of a GPU step, made by hand."""

from __future__ import annotations

import dataclasses
from typing import Any

from brimful.core.profile import Kernel, Limits, Part, PartName, Profile, Rates, StepTime, Work
from brimful.core.records import Gpu, Lever, Machine, PeakMemory, Recipe

SECONDS: dict[PartName, float] = {
    "contractions": 0.005,
    "attention": 0.001,
    "normalisation": 0.0005,
    "element-wise": 0.0005,
    "optimizer": 0.0015,
    "embedding": 0.0,
    "copies": 0.0005,
    "other": 0.0005,
    "idle": 0.0005,
}


def parts(seconds: dict[PartName, float]) -> tuple[Part, ...]:
    whole = sum(seconds.values())
    return tuple(
        Part(name=name, seconds=value, share=value / whole, count=0 if name == "idle" else 3)
        for name, value in seconds.items()
    )


def execution(value: str, reason: str) -> Recipe:
    levers = (
        Lever(name="precision", value="bf16", arithmetic="rounding", reason="fastest"),
        Lever(name="execution", value=value, arithmetic="exact", reason=reason),
    )
    return Recipe(device="NVIDIA H200", levers=levers)


PROFILE = Profile(
    model="bert-base-uncased",
    options={"seed": 1},
    recipe=execution("captured", "asked for"),
    machine=Machine(cpu=None, num_cores=16, memory_bytes=None, gpus=(Gpu(name="NVIDIA H200"),)),
    packed=True,
    packed_reason="equal",
    steps=20,
    time=StepTime(
        mean_s=0.01,
        median_s=0.0099,
        fastest_s=0.009,
        slowest_s=0.012,
        recorded_s=0.011,
        host_s=0.001,
        input_wait_s=0.0,
    ),
    parts=parts(SECONDS),
    stretch=1.0,
    kernels=(
        Kernel(name="nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNN", part="contractions", seconds=0.005, count=150),
        Kernel(name="nobody_knows_me", part="other", seconds=0.0005, count=1),
    ),
    num_kernels=151.0,
    num_launches=2.0,
    work=Work(
        samples=32,
        tokens=900,
        computed_tokens=1000,
        micro_batches=1,
        product_flops=2e12,
        attention_flops=1e11,
        useful_flops=1.9e12,
        optimizer_bytes=3e9,
    ),
    limits=Limits(
        matmul_flops_per_s=700e12,
        model_matmul_flops_per_s=450e12,
        copy_bytes_per_s=4e12,
        datasheet_flops_per_s=989.5e12,
    ),
    rates=Rates(
        samples_per_s=3200,
        tokens_per_s=90000,
        fill=0.9,
        contraction_flops_per_s=400e12,
        attention_flops_per_s=100e12,
        optimizer_bytes_per_s=2e12,
        mfu=0.27,
        datasheet_mfu=0.19,
    ),
    peak_bytes=PeakMemory(allocated=1 << 30, reserved=2 << 30, nvml=None),
)


def changed(seconds: dict[PartName, float] | None = None, **changes: Any) -> Profile:
    """PROFILE with other seconds of some parts, and other fields."""
    if seconds is not None:
        changes["parts"] = parts(SECONDS | seconds)
    return dataclasses.replace(PROFILE, **changes)

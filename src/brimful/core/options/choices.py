"""Values of options that are one of a few."""

from __future__ import annotations

from typing import Literal

TaskChoice = Literal["auto", "single_label", "multi_label", "regression"]
MissingLabels = Literal["error", "drop", "none"]
PrecisionChoice = Literal["auto", "fp32", "tf32", "bf16", "fp16", "fp8"]
DeviceChoice = Literal["auto", "cpu", "cuda"]
ShardingChoice = Literal["auto", "none", "states", "gradients", "parameters", "deepspeed"]
LauncherChoice = Literal["none", "ray"]
ExecutionChoice = Literal["auto", "eager", "captured", "compiled"]
TrainingExecution = Literal["auto", "eager", "fused", "captured", "compiled"]
AllocatorChoice = Literal["default", "expandable"]
OptimizerChoice = Literal[
    "adamw_torch_fused", "adamw_torch", "sgd", "adafactor", "adagrad", "rmsprop", "adamw_torch_8bit",
    "adamw_torch_4bit", "adamw_8bit", "adamw_bnb_8bit", "paged_adamw_32bit", "paged_adamw_8bit", "lion_32bit",
    "lion_8bit", "paged_lion_32bit", "paged_lion_8bit", "ademamix", "ademamix_8bit", "paged_ademamix_32bit",
    "paged_ademamix_8bit", "rmsprop_bnb", "rmsprop_bnb_8bit", "rmsprop_bnb_32bit", "schedule_free_adamw",
    "schedule_free_radam", "schedule_free_sgd"
]  # fmt: skip
ScheduleChoice = Literal[
    "linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup", "inverse_sqrt"
]

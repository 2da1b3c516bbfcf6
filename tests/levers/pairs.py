"""Every lever as options of a run, and how far a run with it may be from the plain step."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from brimful.core.records import Recipe
from tolerances import PAIR_OF_LEVERS

#: What all runs have: clipping off, as an update within the backward pass has none.
PLAIN: dict[str, Any] = {"max_grad_norm": 0.0, "packing": "off", "precision": "fp32", "weight_decay": 0.01}
LEVERS: dict[str, dict[str, Any]] = {
    "packed": {"packing": "auto"},
    "split by tokens": {"token_budget": 64},
    "split by rows": {"per_device_batch_size": 2, "gradient_accumulation_steps": 3},
    "bf16": {"precision": "bf16"},
    "fp16": {"precision": "fp16"},
    "recomputed": {"gradient_checkpointing": "full"},
    "every other recomputed": {"gradient_checkpointing": "every-2"},
    "recomputed within a limit": {"gradient_checkpointing": "selective", "activation_memory": "1MB"},
    "activations offloaded": {"gradient_checkpointing": "offload"},
    "states offloaded": {"optimizer_offload": True},
    "updated in backward": {"optimizer_in_backward": True},
    "clipped late": {"optimizer_in_backward": True, "late_clipping": True, "max_grad_norm": 1.0},
    "states in bf16": {"optimizer_state_dtype": "bf16"},
    "states in 8 bits": {"optimizer_state_dtype": "8bit"},
    "weights in bf16": {"weight_dtype": "bf16", "precision": "bf16"},
    "weights streamed": {"stream_weights": "host"},
    "weights streamed from a file": {"stream_weights": "disk"},
    "frozen in part": {"freeze": "embeddings,layers 0-0"},
    "low rank": {"peft": "lora"},
    "adafactor": {"optim": "adafactor"},
    "schedule-free": {"optim": "schedule_free_adamw"},
    "sgd": {"optim": "sgd"},
}
#: Options that change what the plain step learns, which has them, too.
_LEARNS = ("optim", "freeze", "peft", "max_grad_norm", "late_clipping")
#: Options with which a part of the weights is in no checkpoint.
FREEZING = frozenset({"freeze", "peft"})
STREAMED = ("weights streamed", "weights streamed from a file")
#: Pairs that are refused, and a part of the reason.
REFUSED = {
    frozenset(pair): reason
    for reason, pairs in {
        "is for AdamW": itertools.product(
            ("adafactor", "schedule-free", "sgd"),
            (
                "states offloaded",
                "updated in backward",
                "clipped late",
                "states in bf16",
                "states in 8 bits",
                "weights in bf16",
                *STREAMED,
            ),
        ),
        "computes every layer again": itertools.product(
            ("every other recomputed", "recomputed within a limit", "activations offloaded"), STREAMED
        ),
        "overflows are known only at the end": [("fp16", "updated in backward"), ("fp16", "clipped late")],
        "--peft and --freeze are both given": [("frozen in part", "low rank")],
    }.items()
    for pair in pairs
}


def pairs(levers: Mapping[str, dict[str, Any]] = LEVERS) -> Iterator[tuple[str, str]]:
    """Pairs of levers that do not set the same option to two values."""
    for one, other in itertools.combinations(levers, 2):
        first, second = levers[one], levers[other]
        if all(first[key] == second[key] for key in first.keys() & second.keys()):
            yield one, other


def learning(asked: Mapping[str, Any]) -> dict[str, Any]:
    """Options of the plain step that learns the same. Clipping by a norm that is a step late is of updates in the
    backward pass alone."""
    names = (*_LEARNS, "optimizer_in_backward") if "late_clipping" in asked else _LEARNS
    return {name: asked[name] for name in names if name in asked}


def tolerances_of(recipe: Recipe) -> tuple[float, float]:
    """Those of the least exact lever in a recipe."""
    return max(PAIR_OF_LEVERS[lever.arithmetic] for lever in recipe.levers)

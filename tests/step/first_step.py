"""A first step of fused layers whose kernels are compiled for an H200 and launched on nothing: any machine can do it.

Prints JSON: kernels launched while they were compiled together, those whose compilation failed there, with the reason,
those compiled in the step after, those launched, and graphs that dynamo traced by then and after the step.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from brimful.kernels import precompile
from brimful.kernels.attention.dispatch import triton_attention
from brimful.levers.compiled_layers import compile_layers
from brimful.levers.optimizer import Optimizer
from brimful.models.fusion.recording import Recorded
from brimful.models.packed import packed_forward
from brimful.models.packed.packed_forward import PackedForm, PackedModel
from brimful.step.precision import Precision
from brimful.step.step import Step, make_schedule
from step.test_step import ROWS, TASK
from tiny import VOCABULARY

launched: list[str] = []


class Utils:
    def load_binary(self, *_: Any) -> tuple[int, ...]:
        return 0, 0, 0, 0, 1024

    def get_device_properties(self, _: int) -> dict[str, int]:
        return {"max_shared_mem": 232_448}


class Driver:
    """An H200 as Triton sees it."""

    utils = Utils()

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _: int) -> int:
        return 0

    def launcher_cls(self, _: Any, metadata: Any) -> Any:
        return lambda *_: launched.append(metadata.name)


def main() -> None:
    driver.set_active(Driver())
    patch = pytest.MonkeyPatch()
    patch.setattr(packed_forward, "choose_attention", lambda *_: triton_attention)
    config = BertConfig(
        vocab_size=VOCABULARY, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128,
        num_labels=3,
    )  # fmt: skip
    packed = PackedModel(BertForSequenceClassification(config).train(), PackedForm(pooling="first", first_position=0))
    recorded, record = list[Any](), Recorded._record
    patch.setattr(Recorded, "_record", lambda self, *given: recorded.append(self) or record(self, *given))
    compile_layers(packed, fused=True, note=pytest.fail)
    precision = Precision(value="bf16", device=torch.device("cpu"), reason="a test")
    update = Optimizer(value="adamw_torch_fused", fused=True).update(
        packed.model, make_schedule("linear", 1e-3, 10, 0), precision, max_grad_norm=1.0
    )
    step = Step(packed, TASK, update, precision, seed=0)
    batch = ROWS.batch(0)
    failed: list[str] = []
    patch.setattr(precompile, "_compile", lambda asked: _compile(asked, failed))
    step.compile_kernels(batch)
    before, made = list(launched), [len(recorded)]
    compiled: list[str] = []
    knobs.runtime.jit_post_compile_hook = lambda **told: compiled.append(told["fn"].name)
    step.run(batch)
    made.append(len(recorded))
    found = {
        "before": before,
        "failed": failed,
        "compiled": compiled,
        "launched": sorted(set(launched)),
        "recorded": made,
    }
    print(json.dumps(found))


def _compile(asked: Any, failed: list[str]) -> None:
    """As `precompile` does, which says nothing of what fails: it is compiled where it is launched."""
    function, specialization = asked
    try:
        function.preload(specialization).run  # noqa: B018
    except Exception as error:
        failed.append(f"{function.__name__}: {error!r}")


if __name__ == "__main__":
    main()

"""Launch of a step by the host.

    eager     one kernel after another
    captured  as CUDA graphs: cheap, and it always pays
    compiled  captured, with layers on fused kernels, ours or torch.compile's: takes seconds, and pays in long runs

One trace serves all layers and all token budgets: layers are the same code with other parameters, and the number of
tokens is a symbol.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from brimful.core.errors import OptionError
from brimful.core.options import ExecutionChoice
from brimful.core.records import Arithmetic, Lever
from brimful.levers.lever import Cost, Verdict
from brimful.models.model_stats import embeddings_of, layers_of, matmul_parameters
from brimful.models.packed.packed_forward import Execution, PackedExecution

#: Cold seconds that compiling a layer costs where torch's compiler does it, and the share of a step's device time that
#: it saves: BERT-base on an H200, torch 2.11 (benchmarks/profile). Fused kernels cost less and save more.
_COMPILE_S, _SAVED = 10.0, 0.25
#: Cold seconds of fused kernels forward only (benchmarks/classification).
_COMPILE_FORWARD_S = 4.0
#: Operations per second that a step reaches, to guess how long a run will take.
_REACHED = 250e12
#: Compiled forms of one layer's code in a process.
_MOST_COMPILED = 64


@dataclass(frozen=True, kw_only=True)
class ExecutionMode:
    """Launch mode of the steps of a run."""

    value: str
    reason: str
    source: str = "torch.compile, torch.cuda.CUDAGraph"

    @property
    def arithmetic(self) -> Arithmetic:
        """`exact`: fused kernels round less often than separate ones."""
        return "exact"

    @property
    def captured(self) -> bool:
        """True if steps are replayed as graphs."""
        return self.value in ("captured", "compiled")

    @property
    def compiled(self) -> bool:
        """True if layers are compiled."""
        return self.value == "compiled"

    def supports(self) -> Verdict:
        """Always true: `choose_execution` has checked it."""
        return Verdict(ok=True, because=self.reason)

    def cost(self, num_parameters: int) -> Cost:
        """A captured step keeps one set of gradients in the graphs' pool beside the eager one's."""
        return Cost(resident_bytes=4 * num_parameters if self.captured else 0)

    def lever(self) -> Lever:
        """Its line in the recipe."""
        return Lever(name="execution", value=self.value, arithmetic="exact", reason=self.reason)

    def apply(
        self, execution: Execution, *, fused: bool, note: Callable[[str], None], forward_only: bool = False
    ) -> None:
        """Compiles the model's layers in place, if that was chosen. Compilation itself waits for the first step.

        fused: whether layers can be fused around the attention that they will be given. Then, where the head reads the
        first token only, the last layer leaves out what it does not read. note: hears of layers that turn out not to
        compile. forward_only: for a model that is only read.
        """
        model = execution.model
        layers = layers_of(model)
        if not self.compiled or layers is None:
            return
        if isinstance(execution, PackedExecution):
            execution.run_whole()  # one trace for all layers
        # Imported where it is needed: Triton comes with torch for GPUs, and is missing beside torch for CPUs.
        from brimful.models.fusion import embedding_backend, layer_backend
        from brimful.models.fusion.last_layer import ShorteningBackend

        # Every model that a process compiles counts against the limit, which is made for one that compiles often.
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _MOST_COMPILED)
        own = _own_parameters(layers)
        fusible = own or forward_only
        backend: Any = partial(layer_backend, note=note) if fusible else "inductor"
        if own and fused and isinstance(execution, PackedExecution) and execution.form.pooling == "first":
            backend = execution.last = ShorteningBackend(layers[-1], note)
        for layer in layers:
            layer.compile(dynamic=True, backend=backend)
        embeddings = embeddings_of(model)
        if embeddings is not None:
            embeddings.compile(dynamic=True, backend=partial(embedding_backend, before_fused=fusible and fused))


def _own_parameters(layers: Iterable[nn.Module]) -> bool:
    """True if no parameter is in two layers: gradients of one that is meet before the update."""
    found = [id(parameter) for layer in layers for parameter in layer.parameters()]
    return len(found) == len(set(found))


def choose_execution(
    asked: ExecutionChoice, device: torch.device, model: Any, *, num_tokens: int, packed: bool, fixed: str | None,
    float8: bool = False, compile_s: float = _COMPILE_S,
) -> ExecutionMode:  # fmt: skip
    """The mode asked for; for `auto` the fastest that works here and pays.

    num_tokens: of the whole run. fixed: None where shapes repeat from batch to batch, else why they do not.
    float8: whether products in fp8 were asked for, which are those of compiled layers. compile_s: what compiling takes.
    Raises: OptionError for a mode that does not work here.
    """
    refused = _refusal(device, packed=packed, fixed=fixed)
    if refused is not None:
        if asked not in ("auto", "eager"):
            raise OptionError(f"--execution {asked} does not work here: {refused}", hint="leave it out")
        return ExecutionMode(value="eager", reason="asked for" if asked == "eager" else refused)
    layers = layers_of(model)
    if asked == "compiled" and layers is None:
        raise OptionError(
            "--execution compiled does not work here: the model has no list of layers of its own", hint="use captured"
        )
    if asked != "auto":
        return ExecutionMode(value=asked, reason="asked for")
    if float8 and layers is not None:
        return ExecutionMode(value="compiled", reason="products in fp8 are those of fused layers")
    saved_s = _SAVED * 6 * matmul_parameters(model) * num_tokens / _REACHED
    if layers is None or saved_s < compile_s:
        reason = f"one launch a step; compiling would save about {saved_s:.0f} s of this run and take {compile_s:.0f} s"
        return ExecutionMode(value="captured", reason=reason)
    return ExecutionMode(value="compiled", reason="one launch a step, with element-wise work fused by layer")


def choose_forward(
    asked: ExecutionChoice, device: torch.device, model: Any, *, num_tokens: int, packed: bool, fixed: str | None
) -> ExecutionMode:
    """The same for a forward pass over `num_tokens`.

    Raises: OptionError for a mode that does not work here.
    """
    third = num_tokens // 3  # a step is three passes
    return choose_execution(
        asked, device, model, num_tokens=third, packed=packed, fixed=fixed, compile_s=_COMPILE_FORWARD_S
    )


def _refusal(device: torch.device, *, packed: bool, fixed: str | None) -> str | None:
    if device.type != "cuda":
        return f"graphs and fused kernels are for GPUs, and this runs on {device.type}"
    if not packed:
        return "padded batches have too many shapes"
    return fixed

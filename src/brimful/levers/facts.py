"""Facts that levers are chosen by: attention kernels that a model would be given, and what its equivalence check found.

For training in half precision on a GPU, kernels that can do it are timed, forward and backward with the model's heads,
windows, causality and dropout, on sequences as long as the data's. Ours stays unless another is faster by a margin:
layers are fused with ours alone. cuDNN's variable-length kernel and FlexAttention are no candidates: both passes of
variable lengths together they are faster nowhere on an H200 (benchmarks/attention), and torch 2.11 fails in cuDNN's
backward pass.

Classification does not measure: answers must be the same bytes wherever a run is resumed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from brimful.core.options.train import TrainOptions
from brimful.kernels.attention.dispatch import candidates, choose_attention, grouped_attention, length_class
from brimful.kernels.attention.pattern import Heads, Pattern, RelativeBias
from brimful.levers.lever import Assembly, Verdict
from brimful.measurement.attention import attention_seconds
from brimful.models.model_stats import window_of
from brimful.models.packed.equivalence import Equivalence, check_equivalence
from brimful.models.packed.family_forms import farthest_bucket
from brimful.step.precision import Precision

_SHORT_NAMES = {"flash_attention": "FlashAttention-2", "triton_attention": "ours"}

#: Another kernel must be faster than ours by this factor: layers that it is in cannot be fused, which costs as much.
MARGIN = 1.25


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The name of the kernel to take, and in words how long each takes."""

    fastest: str
    said: str


@dataclass(frozen=True, kw_only=True)
class AttentionKernels:
    """The kernels of one model in one precision, by function name, those of full layers and of windowed ones.

    typical_length: mean length of the sequences to come. measured: None where nothing was.
    """

    functions: tuple[str, ...]
    typical_length: int
    measured: Measured | None = None

    @property
    def fastest(self) -> str | None:
        """The kernel measured to be the fastest, by function name."""
        return None if self.measured is None else self.measured.fastest

    @property
    def fused(self) -> bool:
        """True where layers can be fused around them: around ours alone."""
        return set(self.functions) <= {"triton_attention", "relative_attention"}

    @property
    def variable_length(self) -> Verdict:
        """Verdict on reading packed rows as they are: then shapes repeat from batch to batch."""
        if grouped_attention.__name__ in self.functions:
            return Verdict(ok=False, because="attention works on groups of rows whose shapes change with every batch")
        return Verdict(ok=True, because="attention of variable lengths")


def kernels_of(assembly: Assembly) -> AttentionKernels:
    """Return the kernels that an assembly's layers would be given in packed rows.

    Those of training are timed; answers must be the same bytes wherever a classification is resumed. Layers that are
    recomputed are given ours: others draw masks by the place in torch's random stream. So are those that are fused
    because that was asked for.
    """
    model, precision, length = assembly.model, assembly.precision, assembly.typical_length
    told = assembly.attention
    if told is not None:
        measured = Measured(fastest=told, said="as in the first process") if told else None
    elif not (assembly.training and assembly.packing_wanted):
        measured = None
    elif recomputes(assembly.options):  # type: ignore[arg-type]
        measured = Measured(fastest="triton_attention", said="it draws the masks of a recomputed layer again")
    elif assembly.options.execution == "fused":
        measured = Measured(fastest="triton_attention", said="layers are fused around it")
    else:
        measured = measure_attention(model, precision, length)
    return choose_kernels(model.config, precision, length, measured)


def recomputes(options: TrainOptions) -> bool:
    """Return whether layers may be computed again in the backward pass."""
    return options.stream_weights != "none" or options.gradient_checkpointing not in ("none", "offload")


def warn_on_cpu(assembly: Assembly, asked: str) -> None:
    """Warn that what was asked for moves memory to the host, where that is the device itself."""
    if assembly.device.type == "cpu":
        assembly.warn(f"{asked} saves nothing on a CPU, whose memory is the host's, and takes more of it: leave it out")


def equivalence_of(assembly: Assembly) -> Equivalence:
    """Return what the check finds for the model on its device, in its precision, with its attention kernels."""
    kernels = assembly.fact(kernels_of)
    found = check_equivalence(
        assembly.model,
        max_length=assembly.max_length,
        device=assembly.device,
        precision=assembly.precision.value,
        typical_length=kernels.typical_length,
        attention=kernels.fastest,
        cache=assembly.cache,
    )
    return found.for_training() if assembly.training else found


def choose_kernels(
    config: Any, precision: Precision, typical_length: int, measured: Measured | None = None
) -> AttentionKernels:
    """Return the kernels that layers of this configuration are given."""
    head_dim = _heads(config).size
    wanted = None if measured is None else measured.fastest
    functions = tuple(
        choose_attention(precision.device, precision.dtype, pattern, head_dim, typical_length, wanted).__name__
        for pattern in (_pattern(config, window=window) for window in _windows(config))
    )
    return AttentionKernels(functions=functions, typical_length=typical_length, measured=measured)


def measure_attention(model: nn.Module, precision: Precision, typical_length: int) -> Measured | None:
    """Return the fastest kernel for training this model here; None without a choice, or if none could be timed."""
    config: Any = model.config
    heads, device, dtype = _heads(config), precision.device, precision.dtype
    said = [module.is_causal for module in model.modules() if isinstance(getattr(module, "is_causal", None), bool)]
    causal, dropout = bool(said) and all(said), _dropout(config)
    patterns = [_pattern(config, window=window, causal=causal, dropout=dropout) for window in _windows(config)]
    found = candidates(device, dtype, patterns[0], heads.size)
    if dtype.itemsize != 2 or len(found) == 1:
        return None
    number = length_class(typical_length)
    timed = [attention_seconds(found, device, dtype, pattern, heads, number) for pattern in patterns]
    names = [each.__name__ for each in found if all(each.__name__ in times for times in timed)]
    seconds = {name: sum(times[name] for times in timed) for name in names}
    if not seconds:
        return None
    ours = found[0].__name__
    fastest = min(seconds, key=lambda name: seconds[name] * (1.0 if name == ours else MARGIN))
    times = ", ".join(f"{value * 1e3:.3g} ms by {_SHORT_NAMES.get(name, name)}" for name, value in seconds.items())
    what = "a full and a windowed layer's" if len(patterns) > 1 else "a layer's"
    return Measured(fastest=fastest, said=f"{what} forward and backward, timed here: {times}")


def _heads(config: Any) -> Heads:
    queries = getattr(config, "num_attention_heads", None) or 1  # FNet has none, and no use for a kernel
    given = (getattr(config, name, None) for name in ("head_dim", "attention_head_size"))
    size = next((d for d in given if d), getattr(config, "hidden_size", 64) // queries)
    return Heads(queries=queries, keys=getattr(config, "num_key_value_heads", None) or queries, size=size)


def _windows(config: Any) -> list[int | None]:
    """Of the kinds of layers that there may be: none, and the configuration's if it has one."""
    window = window_of(config)
    return [None] if window is None else [None, window]


def _pattern(config: Any, *, window: int | None = None, causal: bool = False, dropout: float = 0.0) -> Pattern:
    return Pattern(
        scale=1.0,
        causal=causal,
        window=window,
        softcap=getattr(config, "attn_logit_softcapping", None),
        dropout=dropout,
        relative=None if farthest_bucket(config) is None else RelativeBias(bucket_W=torch.empty(0)),
    )


def _dropout(config: Any) -> float:
    names = ("attention_probs_dropout_prob", "attention_dropout", "attn_pdrop")
    return float(next((p for p in (getattr(config, name, None) for name in names) if p is not None), 0.0))

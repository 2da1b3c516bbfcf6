"""Attention kernels of a packed run: which ones the layers will get, and whether they want padded rows besides.

In half precision on a GPU, those that can do it are timed, forward and backward with the model's heads, window and
dropout, on sequences as long as the data's, and the seconds kept in the user's cache folder. Ours stays unless another
is faster by a margin: layers are fused with ours alone. cuDNN's variable-length kernel is no candidate, because its
backward graph fails in torch 2.11, nor is FlexAttention, whose masks depend on each batch's lengths.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from brimful.core.cache import cache_path, read_cached, write_cached
from brimful.core.records import Arithmetic, Lever
from brimful.kernels.attention import (
    LENGTH_CLASSES,
    Attention,
    Case,
    Pattern,
    RelativeBias,
    candidates,
    choose_attention,
    grouped_attention,
    length_class,
    prefer,
)
from brimful.kernels.layout import PackedShape, Segments, make_segments, map_tensors
from brimful.measurement.limits import median_seconds
from brimful.models.relative import farthest_bucket
from brimful.techniques.precision import Precision
from brimful.techniques.technique import Cost, Verdict

_NAMES = {
    "grouped_attention": "torch's sdpa on groups of similar length",
    "flash_attention": "FlashAttention-2, variable length",
    "efficient_attention": "torch's memory-efficient kernel, variable length",
    "triton_attention": "our Triton kernel, variable length",
    "relative_attention": "our Triton kernel, variable length with a bias by distance",
}
_SHORT_NAMES = {"flash_attention": "FlashAttention-2", "triton_attention": "ours"}


#: Tokens that kernels are timed on: enough for the device to take longer than the host does to launch.
_TIMED_TOKENS = 32_768
#: Seconds that timing one kernel may take.
_WITHIN_S = 0.05
#: Another kernel must be faster than ours by this factor: layers that it is in cannot be fused, which costs as much.
MARGIN = 1.25
#: Raised when the kernels change, so that old timings are not believed.
_REVISION = 1


@dataclass(frozen=True, kw_only=True)
class AttentionKernels:
    """The kernels of one model in one precision, by function name, those of full layers and of windowed ones.

    typical_length: mean length of the sequences to come. timings: what was measured, in words.
    """

    functions: tuple[str, ...]
    typical_length: int
    timings: str = ""
    source: str = "Dao 2023, arXiv 2307.08691; Rabe and Staats 2021, arXiv 2112.05682"

    @property
    def arithmetic(self) -> Arithmetic:
        """`exact`: equal up to the order of sums, in the precision of the run."""
        return "exact"

    @property
    def needs_groups(self) -> bool:
        """Whether segments must come as padded rows too; their shapes then change with every batch."""
        return grouped_attention.__name__ in self.functions

    @property
    def unfixed(self) -> str | None:
        """Why shapes do not repeat from batch to batch, None if they do."""
        return "attention works on groups of rows whose shapes change with every batch" if self.needs_groups else None

    def supports(self) -> Verdict:
        """The choice made sure that they do."""
        return Verdict(ok=True, because="chosen by device, precision, pattern and length")

    def cost(self, num_parameters: int) -> Cost:
        """Nothing that grows with the parameters."""
        return Cost()

    def lever(self) -> Lever:
        """Its line in the recipe."""
        names = dict.fromkeys(_NAMES[name] for name in self.functions)
        reason = f"for sequences of {self.typical_length} tokens in the mean{self.timings and '; ' + self.timings}"
        return Lever(name="attention", value="; ".join(names), arithmetic="exact", reason=reason)


def padded_lever(model: Any) -> Lever:
    """The line of a model on padded rows, which keeps its own attention."""
    own = str(model.config._attn_implementation)
    return Lever(name="attention", value=own, arithmetic="exact", reason="Hugging Face's own, on padded rows")


def choose_kernels(config: Any, precision: Precision, typical_length: int, *, training: bool) -> AttentionKernels:
    """The kernels that layers of this configuration will be given: in half precision on a GPU the fastest, by timing.

    training: whether gradients are wanted, and the dropout that the configuration has. From here on the process takes
    these kernels for sequences of such lengths.
    """
    num_heads = getattr(config, "num_attention_heads", None) or 1  # FNet has none, and no use for a kernel
    given = (getattr(config, name, None) for name in ("head_dim", "attention_head_size"))
    head_dim = next((d for d in given if d), getattr(config, "hidden_size", 64) // num_heads)
    windows = [getattr(config, name, None) for name in ("sliding_window", "local_attention")]
    window = next((w for w in windows if isinstance(w, int)), None)
    relative = None if farthest_bucket(config) is None else RelativeBias(bucket_W=torch.empty(0))
    chosen, told = [], []
    for each in dict.fromkeys((None, window)):
        pattern = Pattern(
            scale=head_dim**-0.5,
            window=each,
            softcap=getattr(config, "attn_logit_softcapping", None),
            dropout=_dropout(config) if training else 0.0,
            relative=relative,
        )
        heads = Heads(number=num_heads, size=head_dim)
        if precision.dtype.itemsize == 2 and len(candidates(precision.device, precision.dtype, pattern, head_dim)) > 1:
            told.append(_measure(precision, pattern, heads, typical_length, training=training))
        chosen.append(choose_attention(precision.device, precision.dtype, pattern, head_dim, typical_length))
    return AttentionKernels(
        functions=tuple(function.__name__ for function in chosen),
        typical_length=typical_length,
        timings=", windowed ".join(filter(None, told)),
    )


def _dropout(config: Any) -> float:
    names = ("attention_probs_dropout_prob", "attention_dropout")
    found = next((p for p in (getattr(config, name, None) for name in names) if p is not None), 0.0)
    return float(found)


class Heads(NamedTuple):
    """Of queries, keys and values: how many, and their numbers."""

    number: int
    size: int


def _measure(precision: Precision, pattern: Pattern, heads: Heads, typical_length: int, *, training: bool) -> str:
    """Has the process prefer the fastest kernel, and says how they compare; nothing, where none could be timed."""
    found = candidates(precision.device, precision.dtype, pattern, heads.size)
    number = length_class(typical_length)
    seconds = known_seconds(precision, pattern, heads, number, training=training)
    timed = [each for each in found if seconds.get(each.__name__)]
    if not timed:
        return ""
    best = min(timed, key=lambda each: seconds[each.__name__] * (1.0 if each is found[0] else MARGIN))
    prefer(Case(precision.dtype, heads.size, pattern.window is not None, number), best)
    return ", ".join(f"{seconds[each.__name__] * 1e3:.2f} ms by {_SHORT_NAMES[each.__name__]}" for each in timed)


def known_seconds(
    precision: Precision, pattern: Pattern, heads: Heads, number: int, *, training: bool
) -> dict[str, float]:
    """Seconds of each kernel that can do it, by its name, for lengths of a class; from the cache where they are known.

    One that fails, for memory for one, is not there.
    """
    device = precision.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    versions = [torch.__version__, torch.version.cuda, _REVISION]
    asked = [precision.value, list(heads), pattern.window, pattern.dropout > 0, training, number]
    path = cache_path("attention", [name, versions, asked])
    known = None if path is None else read_cached(path)
    if known is not None and all(isinstance(each, float) for each in known.values()):
        return known
    seconds = {}
    for attend in candidates(device, precision.dtype, pattern, heads.size):
        with contextlib.suppress(RuntimeError):
            seconds[attend.__name__] = time_attention(attend, precision, pattern, heads, number, training=training)
    if path is not None and seconds:
        write_cached(path, seconds)
    return seconds


def time_attention(
    attend: Attention, precision: Precision, pattern: Pattern, heads: Heads, number: int, *, training: bool,
) -> float:  # fmt: skip
    """Seconds of a forward pass, and of the backward pass if `training`, over sequences of one length of a class."""
    edges = (0, *LENGTH_CLASSES, 2 * LENGTH_CLASSES[-1])
    length = (edges[number] + edges[number + 1]) // 2
    count = max(1, _TIMED_TOKENS // length)
    shape = PackedShape(num_tokens=count * length, num_slots=count, max_length=length, typical_length=length)
    segments: Segments = map_tensors(make_segments([length] * count, shape), lambda x: x.to(precision.device))
    random = torch.Generator(precision.device).manual_seed(0)
    qkv = torch.randn(
        count * length, 3, heads.number, heads.size, device=precision.device, generator=random
    ).to(precision.dtype).requires_grad_(training)  # fmt: skip

    def call() -> None:
        q, k, v = qkv.transpose(0, 2).unbind(1)
        out = attend(q, k, v, segments, pattern)
        if training:
            torch.autograd.grad(out, qkv, out.detach())

    with torch.set_grad_enabled(training):
        return median_seconds(precision.device, call, within_s=_WITHIN_S, replayed=False)

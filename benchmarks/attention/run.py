"""Our variable-length attention against others, by length of the sequences.

    python benchmarks/attention/run.py [--against flash cudnn flex] [--heads 12]

Both passes apart, each as a CUDA graph of ten calls, median of ten replays, microseconds a call; random data, 32
sequences, bf16, heads of 64, with and without dropout. The choice in `choose_attention` rests on it. cudnn needs
nvidia-cudnn-frontend; flex knows no dropout, and is timed with masks that are there already, its backward pass as both
less a forward one.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from brimful.kernels.attention import varlen
from brimful.kernels.rng import row_seeds

HEAD_DIM, LONGEST = 64, 512
#: Mean and spread of 32 lengths, and the bounds that they are cut at.
LENGTHS = {
    "BBC News": (430, 140, 90, 512),
    "dense": (512, 0, 512, 512),
    "paragraphs": (100, 40, 10, 300),
    "half pages": (200, 80, 10, 512),
    "tweets": (33, 12, 4, 80),
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One packed row. packed: (T, 3, H, D) queries, keys and values; gradient: (T, H, D) of the output."""

    lengths: np.ndarray
    dropout: float
    packed: Tensor
    gradient: Tensor

    @classmethod
    def draw(cls, lengths: np.ndarray, heads: int, dropout: float) -> Case:
        shape, like = (int(lengths.sum()), heads, HEAD_DIM), {"device": "cuda", "dtype": torch.bfloat16}
        packed = torch.randn(shape[0], 3, *shape[1:], **like)
        return cls(lengths=lengths, dropout=dropout, packed=packed, gradient=torch.randn(shape, **like))

    @property
    def scale(self) -> float:
        return HEAD_DIM**-0.5

    @property
    def ends(self) -> np.ndarray:
        return np.cumsum(self.lengths)


@dataclass(frozen=True, kw_only=True)
class Passes:
    """A kernel's passes as calls without arguments, and what they made: (T, H, D) and (T, 3, H, D).

    together: the two passes are one call, `backward`.
    """

    forward: Callable[[], object]
    backward: Callable[[], object]
    out: Tensor
    gradients: Tensor
    together: bool = False


def ours(case: Case) -> Passes:
    tokens, typical = len(case.packed), round(float(case.lengths.mean()))
    offsets = torch.tensor([0, *case.ends, tokens], dtype=torch.int32, device="cuda")  # as packed rows have it: a tail
    q, k, v = case.packed.transpose(0, 2).unbind(1)
    gradient = case.gradient.transpose(0, 1)
    seed = row_seeds(torch.tensor(123, device="cuda"), q.shape[1])
    settings = (LONGEST, typical, case.scale, False, 0, 0.0, case.dropout)
    out, lse, keys = varlen.attend(q, k, v, offsets, seed, *settings)

    def backward() -> Tensor:
        return varlen.attend_backward(gradient, q, k, v, out, lse, keys, offsets, *settings)

    return Passes(
        forward=lambda: varlen.attend(q, k, v, offsets, seed, *settings),
        backward=backward,
        out=out.transpose(0, 1),
        gradients=backward(),
    )


def flash(case: Case) -> Passes:
    """torch's FlashAttention-2."""
    offsets = torch.tensor([0, *case.ends], dtype=torch.int32, device="cuda")
    rows, longest = case.packed.unbind(1), int(case.lengths.max())
    bounds = (offsets, offsets, longest, longest, case.dropout, False)

    def forward() -> Any:
        return torch.ops.aten._flash_attention_forward(*rows, *bounds, False)

    out, lse, *states = forward()

    def backward() -> Any:
        return torch.ops.aten._flash_attention_backward(case.gradient, *rows, out, lse, *bounds, *states[:2])

    return Passes(forward=forward, backward=backward, out=out, gradients=torch.stack(backward(), 1))


def cudnn(case: Case) -> Passes:
    """cuDNN's, through its frontend: torch's own operator takes the size of heads for the longest length, and fails.

    Its statistics are those of padded rows here, which is the faster way.
    """
    from cudnn_attention import RaggedAttention

    tokens, _, heads, _ = case.packed.shape
    lengths = torch.tensor(case.lengths, dtype=torch.int32, device="cuda")
    kernel = RaggedAttention(len(lengths), heads, LONGEST, HEAD_DIM, tokens, case.dropout)
    starts = torch.tensor([0, *case.ends], device="cuda")
    out, found = torch.zeros_like(case.gradient), torch.zeros_like(case.packed)
    given = kernel.tensors(case.packed, case.gradient, out, found, lengths, starts)
    kernel.forward(given)
    kernel.backward(given)
    return Passes(
        forward=lambda: kernel.forward(given), backward=lambda: kernel.backward(given), out=out, gradients=found
    )


def flex(case: Case) -> Passes:
    """torch's FlexAttention."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    tokens = len(case.packed)
    text_T = torch.arange(len(case.lengths), device="cuda").repeat_interleave(torch.tensor(case.lengths, device="cuda"))
    mask = create_block_mask(lambda b, h, q, k: text_T[q] == text_T[k], None, None, tokens, tokens, device="cuda")
    q, k, v = (x.transpose(0, 1)[None].detach().requires_grad_() for x in case.packed.unbind(1))
    compiled = torch.compile(flex_attention, dynamic=False)

    def forward() -> Any:
        with torch.no_grad():
            return compiled(q, k, v, block_mask=mask)

    def both() -> tuple[Tensor, ...]:
        return torch.autograd.grad(compiled(q, k, v, block_mask=mask), (q, k, v), case.gradient.transpose(0, 1)[None])

    gradients = torch.stack([x[0].transpose(0, 1) for x in both()], 1)
    return Passes(forward=forward, backward=both, out=forward()[0].transpose(0, 1), gradients=gradients, together=True)


OTHERS = {"flash": flash, "cudnn": cudnn, "flex": flex}


def microseconds(call: Callable[[], object]) -> float:
    side_stream = torch.cuda.Stream()
    side_stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side_stream):
        call()
        call()
    torch.cuda.current_stream().wait_stream(side_stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(10):
            call()
    graph.replay()
    times = []
    for _ in range(10):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(100 * start.elapsed_time(end))
    return float(np.median(times))


def times_of(passes: Passes) -> tuple[float, float]:
    """Forward and backward."""
    forward, backward = microseconds(passes.forward), microseconds(passes.backward)
    return forward, backward - forward if passes.together else backward


def apart(found: Tensor, expected: Tensor) -> float:
    assert found.shape == expected.shape, (found.shape, expected.shape)
    return float((found.float() - expected.float()).norm() / expected.float().norm())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--against", nargs="+", choices=OTHERS, default=["flash"])
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--lengths", nargs="+", choices=LENGTHS, default=list(LENGTHS))
    arguments = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, bf16, {arguments.heads} heads of {HEAD_DIM}\n")
    print("| lengths, mean | tokens | dropout | kernel | forward, us | backward, us | to ours | apart from ours |")
    print("|---|---|---|---|---|---|---|---|")
    random = np.random.default_rng(0)
    for name, (mean, spread, shortest, longest) in LENGTHS.items():
        lengths = np.clip(random.normal(mean, spread, 32), shortest, longest).astype(int)
        for dropout in (0.1, 0.0) if name in arguments.lengths else ():
            case = Case.draw(lengths, arguments.heads, dropout)
            us = ours(case)
            our_times = times_of(us)
            start = f"| {name}, {lengths.mean():.0f} | {lengths.sum()} | {dropout}"
            print(f"{start} | ours | {our_times[0]:.1f} | {our_times[1]:.1f} | | |", flush=True)
            for other in arguments.against:
                if other == "flex" and dropout:
                    continue
                them = OTHERS[other](case)
                times = times_of(them)
                errors = (apart(them.out, us.out), apart(them.gradients, us.gradients))
                said = "other masks" if dropout else f"{errors[0]:.4f}, {errors[1]:.4f}"
                ratio = sum(times) / sum(our_times)
                print(f"{start} | {other} | {times[0]:.1f} | {times[1]:.1f} | {ratio:.2f} | {said} |", flush=True)


if __name__ == "__main__":
    main()

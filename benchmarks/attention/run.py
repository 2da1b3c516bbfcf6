"""Our variable-length attention against torch's FlashAttention-2, forward and backward, by length of the sequences.

    python benchmarks/attention/run.py > benchmarks/attention/h200.md

Both in CUDA graphs of ten calls, 30 replays, median microseconds a call and the 5th to 95th percentile;
random data, 32 sequences, bf16, heads of 64 and 32, dropout 0.1. The choice in `choose_attention` rests on it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from brimful.kernels.attention import Attention, Pattern, flash_attention, triton_attention
from brimful.kernels.layout import PackedShape, make_segments, map_tensors

LENGTHS = {
    "tweets": (36, 14),
    "paragraphs": (100, 30),
    "half pages": (200, 60),
    "BBC News": (430, 90),
    "dense": (512, 0),
}


def microseconds(call: Callable[[], object]) -> tuple[float, float, float]:
    """5th percentile, median and 95th percentile."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(10):
            call()
    graph.replay()
    times = []
    for _ in range(30):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(100 * start.elapsed_time(end))
    low, median, high = np.percentile(times, [5, 50, 95])
    return float(low), float(median), float(high)


def both_passes(attend: Attention, lengths: list[int], heads: int, head_dim: int) -> tuple[float, float, float]:
    tokens = -(-sum(lengths) // 64) * 64
    shape = PackedShape(num_tokens=tokens, num_slots=len(lengths), max_length=512)
    segments = map_tensors(make_segments(lengths, shape), lambda tensor: tensor.cuda())
    rows = [torch.randn(tokens, heads, head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
    q, k, v = (x.transpose(0, 1).requires_grad_(True) for x in rows[:3])
    gradient = rows[3].transpose(0, 1)
    pattern = Pattern(scale=head_dim**-0.5, dropout=0.1)
    return microseconds(lambda: torch.autograd.grad(attend(q, k, v, segments, pattern), (q, k, v), gradient))


def main() -> None:
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, microseconds forward + backward\n")
    print("| lengths | tokens | heads x dim | FlashAttention-2 (5 to 95 %) | ours (5 to 95 %) | ratio |")
    print("|---|---|---|---|---|---|")
    random = np.random.default_rng(0)
    for name, (mean, spread) in LENGTHS.items():
        lengths = np.clip(random.normal(mean, spread, 32).astype(int), 3, 512).tolist()
        for heads, head_dim in ((12, 64), (12, 32)):
            flash = both_passes(flash_attention, lengths, heads, head_dim)
            ours = both_passes(triton_attention, lengths, heads, head_dim)
            cells = [f"{median:.0f} ({low:.0f} to {high:.0f})" for low, median, high in (flash, ours)]
            ratio = f"{flash[1] / ours[1]:.2f}"
            print(f"| {name} | {sum(lengths)} | {heads} x {head_dim} | {cells[0]} | {cells[1]} | {ratio} |", flush=True)


if __name__ == "__main__":
    main()

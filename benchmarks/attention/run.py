"""Our variable-length attention against torch's FlashAttention-2, by length of the sequences.

    python benchmarks/attention/run.py

Both passes apart, each as a CUDA graph of ten calls, median of ten replays, microseconds a call; random data, 32
sequences, bf16, 12 heads of 64, with and without dropout. The choice in `choose_attention` rests on it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from brimful.kernels import varlen

HEADS, HEAD_DIM, LONGEST = 12, 64, 512
#: Mean and spread of 32 lengths, and the bounds that they are cut at.
LENGTHS = {
    "BBC News": (430, 140, 90, 512),
    "dense": (512, 0, 512, 512),
    "paragraphs": (100, 40, 10, 300),
    "half pages": (200, 80, 10, 512),
    "tweets": (33, 12, 4, 80),
}


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


def four_times(lengths: np.ndarray, dropout: float) -> list[float]:
    """Ours forward and backward, FlashAttention-2 forward and backward."""
    tokens, longest, typical = int(lengths.sum()), int(lengths.max()), round(float(lengths.mean()))
    ends = np.cumsum(lengths)
    flash_offsets = torch.tensor([0, *ends], dtype=torch.int32, device="cuda")
    our_offsets = torch.tensor([0, *ends, tokens], dtype=torch.int32, device="cuda")  # as packed rows have it: a tail
    packed = torch.randn(tokens, 3, HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    q, k, v = packed.transpose(0, 2).unbind(1)
    gradient = torch.randn(tokens, HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16).transpose(0, 1)
    seed = torch.tensor(123, device="cuda")
    settings = (LONGEST, typical, HEAD_DIM**-0.5, False, 0, 0.0, dropout)
    out, lse, keys = varlen.attend(q, k, v, our_offsets, seed, *settings)
    rows = [each.transpose(0, 1) for each in (q, k, v)]
    bounds = (flash_offsets, flash_offsets, longest, longest, dropout, False)
    flash = torch.ops.aten._flash_attention_forward(*rows, *bounds, False)
    return [
        microseconds(lambda: varlen.attend(q, k, v, our_offsets, seed, *settings)),
        microseconds(lambda: varlen.attend_backward(gradient, q, k, v, out, lse, keys, our_offsets, *settings)),
        microseconds(lambda: torch.ops.aten._flash_attention_forward(*rows, *bounds, False)),
        microseconds(
            lambda: torch.ops.aten._flash_attention_backward(
                gradient.transpose(0, 1), *rows, flash[0], flash[1], *bounds, flash[2], flash[3]
            )
        ),
    ]


def main() -> None:
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, bf16, {HEADS} heads of {HEAD_DIM}, microseconds\n"
    )
    print("| lengths, mean | tokens | dropout | ours forward | ours backward | FA-2 forward | FA-2 backward | ratio |")
    print("|---|---|---|---|---|---|---|---|")
    random = np.random.default_rng(0)
    for name, (mean, spread, shortest, longest) in LENGTHS.items():
        lengths = np.clip(random.normal(mean, spread, 32), shortest, longest).astype(int)
        for dropout in (0.1, 0.0):
            times = four_times(lengths, dropout)
            cells = " | ".join(f"{each:.1f}" for each in times)
            ratio = (times[2] + times[3]) / (times[0] + times[1])
            print(f"| {name}, {lengths.mean():.0f} | {lengths.sum()} | {dropout} | {cells} | {ratio:.2f} |", flush=True)


if __name__ == "__main__":
    main()

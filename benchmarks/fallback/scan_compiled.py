"""One selective scan as transformers compiles Jamba's: torch's associative scan, forward and backward, by length.

    python benchmarks/fallback/scan_compiled.py [--lengths 32 128 512] [--rows 32] [--width 1024] [--state 16]

Prints a JSON line a length: seconds of the first pass, milliseconds of the median one, and the peak of GPU memory. A
step of the Trainer of `run.py` does at least two of these (four layers, two of them scan). Passes are timed in a turn
of their own where other processes share the GPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

import torch
import turns
from provenance import commit_here, host_here
from torch._higher_order_ops.associative_scan import associative_scan


def combine(
    left: tuple[torch.Tensor, torch.Tensor], right: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Two neighbouring stretches of a linear recurrence as one."""
    return left[0] * right[0], right[0] * left[1] + right[1]


def scan(decay: torch.Tensor, inputs: torch.Tensor, read: torch.Tensor) -> torch.Tensor:
    """States after each position, read. decay, inputs: rows x width x length x state; read: rows x length x state."""
    mode = "pointwise" if decay.is_cuda else "generic"
    _, states = associative_scan(combine, (decay, inputs), dim=2, combine_mode=mode)
    return torch.matmul(states.transpose(1, 2), read.unsqueeze(-1)).squeeze(-1)


def measure(length: int, arguments: argparse.Namespace) -> dict[str, float | str]:
    """Seconds to compile, milliseconds and peak memory of a pass at this length, or the error that ended it."""
    torch._dynamo.reset()
    generator = torch.Generator("cuda").manual_seed(0)
    shape = (arguments.rows, arguments.width, length, arguments.state)
    decay = torch.rand(shape, device="cuda", generator=generator).mul_(0.2).add_(0.8).requires_grad_()
    inputs = torch.randn(shape, device="cuda", generator=generator).requires_grad_()
    read = torch.randn(arguments.rows, length, arguments.state, device="cuda", generator=generator)
    compiled = torch.compile(scan)
    torch.cuda.reset_peak_memory_stats()

    def seconds() -> float:
        torch.cuda.synchronize()
        began = time.perf_counter()
        compiled(decay, inputs, read).square().sum().backward()
        torch.cuda.synchronize()
        return time.perf_counter() - began

    try:
        first = seconds()
        turns.take()
        passes = [seconds() for _ in range(12)][2:]
    except Exception as failure:
        return {"length": length, "error": f"{type(failure).__name__}: {failure}"[:300]}
    finally:
        turns.give()
    found = {"median_ms": statistics.median(passes), "lowest_ms": min(passes), "highest_ms": max(passes)}
    peak = torch.cuda.max_memory_allocated() / 2**30
    return {"length": length, "first_s": round(first, 1), "peak_gib": round(peak, 1)} | {
        name: round(value * 1e3, 2) for name, value in found.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=[32, 128, 512])
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--state", type=int, default=16)
    arguments = parser.parse_args()
    facts = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "commit": commit_here()}
    print(json.dumps(facts | {"host": host_here()} | vars(arguments)), flush=True)
    for length in arguments.lengths:
        print(json.dumps(measure(length, arguments)), flush=True)


if __name__ == "__main__":
    main()

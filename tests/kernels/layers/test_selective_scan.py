"""The selective scan against transformers' loop over positions, and its kernels against the loop on a CPU.

On the CPU by Triton's interpreter; `tests/gpu/test_layers_on_gpu.py` has what GPUs run.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.jamba.modeling_jamba import mamba_selective_scan

from brimful.kernels.layers import selective_scan as scans
from brimful.kernels.layers.selective_scan import selective_scan
from kernels.layers.scan_gradients import CLOSE, check_gradients, difference

#: Half precision rounds what is given out.
ROUNDED = {torch.float32: CLOSE, torch.bfloat16: 4e-3, torch.float16: 5e-4}
NAMES = ("u", "delta", "A", "B", "C")


def numbers(shape: tuple[int, int, int, int], dtype: torch.dtype, device: str = "cpu") -> dict[str, Tensor]:
    """Of rows, channels, positions and states. B and C lie as a projection of all of a position leaves them."""
    rows, width, length, states = shape
    random = torch.Generator().manual_seed(0)

    def drawn(*size: int) -> Tensor:
        return torch.randn(size, generator=random).to(device)

    projected = drawn(rows, length, 3 + 2 * states).to(dtype)
    return {
        "u": drawn(rows, width, length).to(dtype),
        "delta": F.softplus(drawn(rows, length, width)).transpose(1, 2),
        "A": -torch.exp(drawn(width, states)),
        "B": projected[..., 3 : 3 + states].transpose(1, 2),
        "C": projected[..., 3 + states :].transpose(1, 2),
    }


def check_kernels(shape: tuple[int, int, int, int], dtype: torch.dtype, device: str) -> None:
    """Both kernels against the loop on the CPU, on the same numbers."""
    from brimful.kernels.layers.selective_scan_kernels import scan_backward, scan_forward

    given = numbers(shape, dtype, device)
    here = [given[name].cpu() for name in NAMES]
    states = scans._states(*here[:4])
    expected = (states @ scans._by_position(here[4])[..., None]).squeeze(-1).permute(1, 2, 0)
    found = scan_forward(*given.values())
    assert found.dtype == dtype
    assert difference(found, expected) < ROUNDED[dtype]
    gradient = torch.randn(shape[0], shape[2], shape[1], generator=torch.Generator().manual_seed(1)).transpose(1, 2)
    wanted = scans._backward(gradient, *here, states)
    again = [scan_backward(gradient.to(device), *given.values()) for _ in range(2)]
    for name, own, other, each in zip(NAMES, *again, wanted, strict=True):
        assert difference(own, each) < ROUNDED[own.dtype], name
        assert torch.equal(own, other)


def check_kept(step: float, device: str) -> None:
    from brimful.kernels.layers.selective_scan_kernels import scan_backward

    numbers_of_state = 16
    given = numbers((1, 2, 9, numbers_of_state), torch.float32)
    given["delta"] = step * (0.9 + 0.2 * given["delta"] / given["delta"].max())
    given["A"] = -torch.arange(1.0, numbers_of_state + 1).expand(2, -1)
    gradient = torch.randn(1, 2, 9, generator=torch.Generator().manual_seed(1))
    exact = [x.double() for x in given.values()]
    expected = scans._backward(gradient.double(), *exact, scans._states(*exact[:4]))[2]
    found = scan_backward(gradient.to(device), *(x.to(device) for x in given.values()))[2]
    apart = (found.double().cpu() - expected).norm(dim=0) / expected.norm(dim=0)
    assert apart.max() < 1e-4  # of an exponent of -80: 80 roundings


@pytest.mark.parametrize(
    ("shape", "dtype"), [((2, 5, 7, 3), torch.float32), ((1, 70, 33, 2), torch.float32), ((2, 3, 17, 2), torch.float16)]
)
def test_kernels(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    """Positions that fill no tile, and more channels than one has."""
    pytest.importorskip("triton")
    check_kernels(shape, dtype, "cpu")


@pytest.mark.parametrize("step", [1.0, 2.0, 5.0])
def test_kernels_where_little_of_a_state_is_kept(step: float) -> None:
    """The gradient of each number of A by itself: of the 16 of a state, exp(-step) to exp(-16 step) are kept."""
    pytest.importorskip("triton")
    check_kept(step, "cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("around", [True, False])
def test_as_transformers_loop(around: bool, dtype: torch.dtype) -> None:
    """With what is added and multiplied around it, and without."""
    given = numbers((3, 10, 21, 4), dtype)
    rest = (
        {"D": torch.randn(10), "z": torch.randn(3, 10, 21).to(dtype), "delta_bias": torch.randn(10)} if around else {}
    )
    mine, theirs = ({name: x.clone().requires_grad_() for name, x in (given | rest).items()} for _ in range(2))
    first = [mine[name] for name in NAMES]
    found = selective_scan(
        *first, D_D=mine.get("D"), z_BDL=mine.get("z"), bias_D=mine.get("delta_bias"), softplus=around
    )
    others = {name: theirs[name] for name in rest}
    expected = mamba_selective_scan(*(theirs[name] for name in NAMES), **others, delta_softplus=around)
    assert found.dtype == (expected.dtype if around else dtype)
    assert difference(found, expected) < ROUNDED[dtype]
    check_gradients(found, expected, mine, theirs, close=4 * ROUNDED[dtype])


def test_the_gradient_is_that_of_differences() -> None:
    given = {name: x.double().requires_grad_() for name, x in numbers((2, 3, 4, 2), torch.float32).items()}
    assert torch.autograd.gradcheck(scans._Scan.apply, tuple(given.values()))


def test_products_are_not_rounded_by_autocast() -> None:
    given = list(numbers((2, 6, 9, 4), torch.float32).values())
    plain = selective_scan(*given)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(selective_scan(*given), plain)


class _Counted(TorchDispatchMode):
    """Counts operators."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return function(*args, **(kwargs or {}))


def test_a_trace_counts_no_positions() -> None:
    """On tensors without numbers the shapes are there, after as many operators whatever the length."""
    counts = []
    for length in (5, 50):
        given = [x.to("meta").requires_grad_() for x in numbers((2, 6, length, 4), torch.bfloat16).values()]
        with _Counted() as counted:
            found = selective_scan(*given)
            found.sum().backward()
        assert found.shape == given[0].shape
        assert [(x.grad.shape, x.grad.dtype) for x in given if x.grad is not None] == [
            (x.shape, x.dtype) for x in given
        ]
        counts.append(counted.count)
    assert counts[0] == counts[1]

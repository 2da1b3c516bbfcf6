"""AdamW of one part beside torch's."""

from __future__ import annotations

import pytest
import torch

part_adamw = pytest.importorskip("brimful.kernels.optimizers.part_adamw")


@pytest.mark.parametrize("size", [7, 1024, 3001])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_steps_are_torchs(size: int, decay: float) -> None:
    check_steps("cpu", size, decay, (0.8, 0.95))


def check_steps(device: str, size: int, decay: float, betas: tuple[float, float]) -> None:
    """Of gradients with a scale, also where a part begins at no multiple of 16 bytes; skipped ones change nothing."""
    torch.manual_seed(0)
    whole = torch.randn(size + 6, device=device)
    expected = torch.nn.Parameter(whole[1 : size + 1].clone())
    reference = torch.optim.AdamW([expected], lr=1e-2, betas=betas, eps=1e-6, weight_decay=decay)
    behind, own = whole[size + 1 :].clone(), whole[1 : size + 1]
    moments = (torch.zeros(size, device=device), torch.zeros(size, device=device))
    scale, rate = torch.tensor(16.0, device=device), torch.tensor(1e-2, device=device)
    for number in range(1, 6):
        gradient = torch.randn(size, device=device)
        skipped = torch.tensor(float(number == 3), device=device)
        before = [each.clone() for each in (own, *moments)]
        steps = torch.tensor(float(number - (number >= 3)), device=device)
        part_adamw.update_part(
            own, gradient * scale, moments, steps=steps, rate=rate, scale=scale, skipped=skipped, decay=decay,
            betas=betas, epsilon=1e-6,
        )  # fmt: skip
        if number == 3:
            assert all(torch.equal(one, other) for one, other in zip(before, (own, *moments), strict=True))
            continue
        expected.grad = gradient
        reference.step()
        torch.testing.assert_close(own, expected.detach(), rtol=2e-6, atol=2e-7)
        first, second = (reference.state[expected][name] for name in ("exp_avg", "exp_avg_sq"))
        torch.testing.assert_close(moments[0], first, rtol=2e-6, atol=2e-7)
        torch.testing.assert_close(moments[1], second, rtol=2e-6, atol=1e-6 * (1 - betas[1]))
    assert torch.equal(whole[size + 1 :], behind)

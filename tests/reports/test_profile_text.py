"""A profile as a table: every part, kernels that no rule knows by name, rates beside their limits."""

from __future__ import annotations

import dataclasses

from brimful.core.profile import Kernel
from brimful.reports.profile_text import profile_text
from profiles import PROFILE


def test_the_table() -> None:
    lines = profile_text(PROFILE).splitlines()
    assert lines[0] == "One step  10.00 ms on NVIDIA H200: packed, captured, bf16"
    assert "  contractions       5.000   50.0 %         3" in lines
    assert "  idle               0.500    5.0 %" in lines
    assert any(line.startswith("  MFU, real tokens  27.0 %") and "700 TFLOP/s" in line for line in lines)
    assert any("19.0 %" in line and "990 TFLOP/s: dense, by the datasheet" in line for line in lines)
    assert any("50.0 % of the 4 TB/s of a copy" in line for line in lines)
    assert any("2 launches for 151 kernels" in line for line in lines)
    assert all(len(line) <= 120 for line in lines)


def test_kernels_that_no_rule_knows_are_always_shown() -> None:
    many = tuple(Kernel(name=f"nvjet_{i}", part="contractions", seconds=0.001 - i * 1e-6, count=1) for i in range(40))
    profile = dataclasses.replace(PROFILE, kernels=(*many, *PROFILE.kernels[1:]))
    text = profile_text(profile)
    assert "nobody_knows_me" in text
    assert "nvjet_14" in text
    assert "nvjet_15" not in text
    assert "25 more" in text


def test_what_is_unknown_is_said_to_be() -> None:
    limits = dataclasses.replace(PROFILE.limits, model_matmul_flops_per_s=None, datasheet_flops_per_s=None)
    rates = dataclasses.replace(PROFILE.rates, mfu=None, datasheet_mfu=None, contraction_flops_per_s=None)
    text = profile_text(dataclasses.replace(PROFILE, limits=limits, rates=rates))
    assert "MFU, real tokens  unknown" in text
    assert "datasheet" not in text


def test_a_kernels_name_obeys_no_terminal() -> None:
    kernel = Kernel(name="nvjet\x1b[31m\n", part="contractions", seconds=0.005, count=1)
    assert "\x1b" not in profile_text(dataclasses.replace(PROFILE, kernels=(kernel,)))

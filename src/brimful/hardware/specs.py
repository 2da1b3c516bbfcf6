"""Peak FLOP/s from datasheets: dense products, without sparsity."""

from __future__ import annotations

from collections.abc import Mapping

#: Operations per second by the name that torch gives the GPU, then by precision.
#: H100 SXM and PCIe: nvidia.com/en-us/data-center/h100. H200 (SXM): nvidia.com/en-us/data-center/h200.
#: A100: nvidia.com/en-us/data-center/a100.
_HOPPER_SXM = {"bf16": 989.5e12, "fp16": 989.5e12, "tf32": 494.5e12, "fp32": 67e12}
_AMPERE = {"bf16": 312e12, "fp16": 312e12, "tf32": 156e12, "fp32": 19.5e12}
_DENSE: Mapping[str, Mapping[str, float]] = {
    "NVIDIA H200": _HOPPER_SXM,
    "NVIDIA H100 80GB HBM3": _HOPPER_SXM,
    "NVIDIA H100 PCIe": {"bf16": 756.5e12, "fp16": 756.5e12, "tf32": 378e12, "fp32": 51e12},
    "NVIDIA A100-SXM4-40GB": _AMPERE,
    "NVIDIA A100-SXM4-80GB": _AMPERE,
    "NVIDIA A100-PCIE-40GB": _AMPERE,
    "NVIDIA A100 80GB PCIe": _AMPERE,
}


def datasheet_flops_per_s(gpu: str, precision: str) -> float | None:
    """Dense operations per second of a GPU in a precision; None for one that is not in the table."""
    return _DENSE.get(gpu, {}).get(precision)

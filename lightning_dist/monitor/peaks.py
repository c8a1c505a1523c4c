"""What devices can do at most, in floating point operations a second, as their makers say; dense, not sparse.

Sources: NVIDIA's data sheets of B200 (HGX), H200, H100 (SXM, PCIe, NVL), A100, L40S, L4, V100 and T4, without sparsity.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Peak(NamedTuple):
    """Of one kind of device.

    Attributes:
        half: Matrices in fp16 or bf16.
        tf32: Matrices in fp32 rounded to tf32; ``None``: it has none.
        single: fp32.
    """

    half: float
    tf32: float | None
    single: float


# The first name that is a part of a device's counts, so what is longer comes first.
PEAKS: Mapping[str, Peak] = {
    "B200": Peak(2250e12, 1125e12, 75e12),
    "H200": Peak(989.4e12, 494.7e12, 67e12),
    "H100 PCIe": Peak(756e12, 378e12, 51e12),
    "H100 NVL": Peak(835e12, 417.5e12, 60e12),
    "H100": Peak(989.4e12, 494.7e12, 67e12),
    "A100": Peak(312e12, 156e12, 19.5e12),
    "L40S": Peak(362e12, 183e12, 91.6e12),
    "L4": Peak(121e12, 60e12, 30.3e12),
    "V100": Peak(125e12, None, 15.7e12),
    "T4": Peak(65e12, None, 8.1e12),
}


def peak_flops(device: str, precision: str, *, tf32: bool) -> float | None:
    """What a device can do at most in a precision; ``None``: it is not in the table, or has no such arithmetic.

    Args:
        device: Its name, as the driver says it: ``"NVIDIA A100-SXM4-80GB"``.
        precision: As Lightning names it: ``"bf16-mixed"``, ``"32-true"``, ...
        tf32: Whether products of fp32 matrices may be rounded to tf32.
    """
    words = device.replace("-", " ").replace("GB200", "B200").split()
    said = f" {' '.join(words)} "
    peak = next((peak for name, peak in PEAKS.items() if f" {name} " in said), None)
    if peak is None:
        return None
    if precision.startswith(("16", "bf16")):
        return peak.half
    if precision.startswith("32"):
        return peak.tf32 if tf32 and peak.tf32 is not None else peak.single
    return None

"""Which peak a device has, by the name that its driver gives it."""

from __future__ import annotations

import pytest

from lightning_dist.monitor.peaks import peak_flops


@pytest.mark.parametrize(
    ("device", "precision", "tf32", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16-mixed", False, 989.4e12),
        ("NVIDIA H100 PCIe", "bf16-true", False, 756e12),
        ("NVIDIA A100-SXM4-80GB", "16-mixed", False, 312e12),
        ("NVIDIA A100-SXM4-80GB", "32-true", True, 156e12),
        ("NVIDIA A100-SXM4-80GB", "32-true", False, 19.5e12),
        ("Tesla V100-SXM2-16GB", "32-true", True, 15.7e12),
        ("NVIDIA L40S", "bf16", False, 362e12),
        ("NVIDIA L4", "bf16", False, 121e12),
        ("NVIDIA GB200", "bf16", False, 2250e12),
        ("NVIDIA A100-SXM4-80GB", "64-true", True, None),
        ("NVIDIA L400", "bf16", False, None),
        ("cpu", "32-true", False, None),
    ],
)
def test_peaks(device: str, precision: str, tf32: bool, expected: float | None) -> None:
    assert peak_flops(device, precision, tf32=tf32) == expected

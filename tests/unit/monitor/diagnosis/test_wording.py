"""Figures in sentences have three figures, and no exponent."""

from __future__ import annotations

import pytest

from lightning_dist.monitor.diagnosis import wording


@pytest.mark.parametrize(
    ("value_s", "said"),
    [
        (0.0, "0 ms"),
        (0.00052, "0.52 ms"),
        (0.034, "34 ms"),
        (0.9996, "1 s"),
        (1.234, "1.23 s"),
        (119.9, "120 s"),
        (1850.0, "30.8 min"),
        (40_000.0, "11.1 h"),
        (1e7, "2778 h"),
    ],
)
def test_seconds(value_s: float, said: str) -> None:
    assert wording.seconds(value_s) == said


@pytest.mark.parametrize(
    ("value_bytes", "said"),
    [(5.0, "5 bytes"), (999_600.0, "1 MB"), (27.4e6, "27.4 MB"), (999.4e9, "999 GB"), (1.5e12, "1.5 TB")],
)
def test_size(value_bytes: float, said: str) -> None:
    assert wording.size(value_bytes) == said


@pytest.mark.parametrize(
    ("bytes_per_s", "said"),
    [(25e6, "200 Mbit/s"), (124.99e6, "1 Gbit/s"), (12.5e9, "100 Gbit/s"), (1.25e11, "1 Tbit/s")],
)
def test_rate(bytes_per_s: float, said: str) -> None:
    assert wording.rate(bytes_per_s) == said

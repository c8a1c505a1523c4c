"""The formulas, with numbers worked by hand."""

from __future__ import annotations

import math

import pytest

from lightning_dist import laws

RATE_400_MBIT = 400e6 / 8


def test_ring_volume() -> None:
    assert laws.ring_all_reduce_bytes(100.0, 4) == 150.0
    assert laws.ring_all_reduce_bytes(100.0, 1) == 0.0
    assert laws.ring_reduce_scatter_bytes(100.0, 4) == 75.0


@pytest.mark.parametrize(
    ("hosts", "ranks_per_host", "contiguous", "cyclic"),
    [(2, 2, 1.5, 3.0), (2, 4, 1.75, 7.0), (4, 2, 7 / 6, 7 / 3), (2, 1, 1.0, 1.0), (1, 4, 1.0, 1.0)],
)
def test_gain_of_hierarchy(hosts: int, ranks_per_host: int, contiguous: float, cyclic: float) -> None:
    ranks = hosts * ranks_per_host
    assert laws.hierarchical_gain(ranks, hosts) == pytest.approx(contiguous)
    assert laws.hierarchical_gain(ranks, hosts, leaving_edges=ranks_per_host) == pytest.approx(cyclic)


def test_link_counters_show_headers_too() -> None:
    """1.57, 3.14 and 1.04-1.05 times the gradients were read off the links of 2 hosts x 2 ranks."""
    assert laws.tcp_wire_bytes(laws.flat_bytes_per_host(1.0, 4)) == pytest.approx(1.57, abs=0.005)
    assert laws.tcp_wire_bytes(laws.flat_bytes_per_host(1.0, 4, leaving_edges=2)) == pytest.approx(3.14, abs=0.005)
    assert laws.tcp_wire_bytes(laws.hierarchical_bytes_per_host(1.0, 2)) == pytest.approx(1.046, abs=0.001)


def test_wire_limit_of_108_megabytes() -> None:
    """2 hosts at 400 Mbit/s: 2.16 s of payload, 2.26 s with headers."""
    sent = laws.hierarchical_bytes_per_host(108e6, 2)
    assert laws.transfer_time_s(sent, RATE_400_MBIT) == pytest.approx(2.16)
    assert laws.transfer_time_s(laws.tcp_wire_bytes(sent), RATE_400_MBIT) == pytest.approx(2.26, abs=0.01)


def test_latency_counts_once_a_message() -> None:
    assert laws.transfer_time_s(50e6, RATE_400_MBIT, latency_s=0.25, messages=2) == 1.5
    # 4 ranks: 6 rounds of 0.5 s, and 1.5 x 100 MB over 50 MB/s
    assert laws.ring_all_reduce_time_s(100e6, 4, RATE_400_MBIT, latency_s=0.5) == pytest.approx(6.0)


def test_amdahl() -> None:
    assert laws.amdahl_speedup(0.95, 20) == pytest.approx(10.256, abs=0.001)
    assert laws.amdahl_speedup(1.0, 8) == 8.0
    assert laws.amdahl_speedup(0.0, 8) == 1.0


def test_amdahl_of_ten_per_cent_serial_work() -> None:
    """9.3 times on 128 workers, 10 times at most."""
    assert laws.amdahl_speedup(0.9, 128) == pytest.approx(9.3, abs=0.05)
    assert laws.amdahl_limit(0.9) == pytest.approx(10)
    assert laws.amdahl_speedup(0.9, 10**9) < laws.amdahl_limit(0.9)
    assert laws.amdahl_limit(0.0) == 1.0
    assert laws.amdahl_limit(1.0) == math.inf


def test_gradients_of_70_billion_parameters() -> None:
    """140 GB in bf16; a rank sends 280 GB, which at 100 Gbit/s a direction take 22.4 s, and 11.2 s one way."""
    gradient_bytes, many, rate = 70e9 * 2, 100_000, 100e9 / 8
    assert gradient_bytes == 140e9
    assert laws.ring_all_reduce_bytes(gradient_bytes, many) == pytest.approx(280e9, rel=1e-4)
    assert laws.ring_all_reduce_time_s(gradient_bytes, many, rate) == pytest.approx(22.4, rel=1e-4)
    assert laws.ring_reduce_scatter_time_s(gradient_bytes, many, rate) == pytest.approx(11.2, rel=1e-4)
    assert laws.ring_reduce_scatter_time_s(100e6, 4, RATE_400_MBIT, latency_s=0.5) == pytest.approx(3.0)


def test_bubble() -> None:
    assert laws.pipeline_bubble(8, 4) == pytest.approx(0.64, abs=0.005)
    assert laws.pipeline_bubble(8, 28) == pytest.approx(0.20, abs=0.005)
    assert laws.pipeline_bubble(1, 1) == 0.0


def test_failures_of_100_cards() -> None:
    """1e-4 a card and hour: 21 % a day, 100 hours between failures."""
    assert laws.failure_probability(1e-4, 100, 24) == pytest.approx(0.21, abs=0.005)
    assert laws.failure_probability(1e-4, 100, 24) == pytest.approx(1 - (1 - 1e-4) ** 2400, rel=1e-12)
    assert laws.failure_probability(0.0, 100, 24) == 0.0
    assert laws.failure_probability(1.0, 1, 1) == 1.0
    assert laws.failure_probability(1.0, 1, 0) == 0.0
    assert laws.time_between_failures_s(1e-4, 100) == pytest.approx(100 * 3600)
    assert laws.time_between_failures_s(0.0, 100) == math.inf


def test_small_failure_rates_keep_their_digits() -> None:
    assert laws.failure_probability(1e-18, 1, 1) == pytest.approx(1e-18, rel=1e-12)


def test_impossible_values_are_refused() -> None:
    with pytest.raises(ValueError, match="ranks must be at least 1"):
        laws.ring_all_reduce_bytes(1.0, 0)
    with pytest.raises(ValueError, match="rate_bytes_per_s"):
        laws.transfer_time_s(1.0, 0.0)
    with pytest.raises(ValueError, match="between 0 and 1"):
        laws.amdahl_speedup(1.5, 2)
    with pytest.raises(ValueError, match="workers"):
        laws.amdahl_speedup(0.5, 0)
    with pytest.raises(ValueError, match="rate_per_hour is between 0 and 1, got 2"):
        laws.failure_probability(2, 1, 1)
    with pytest.raises(ValueError, match="units must be at least 1"):
        laws.time_between_failures_s(0.1, 0)
    with pytest.raises(ValueError, match="hours must not be negative"):
        laws.failure_probability(0.1, 1, -1)
    with pytest.raises(ValueError, match="mtu_bytes"):
        laws.tcp_wire_bytes(1.0, mtu_bytes=52)


def test_interval_between_checkpoints() -> None:
    # A save of 50 s, a failure every 10,000 s: Young sqrt(2 * 50 * 10000) = 1000.
    assert laws.young_interval_s(50, 10_000) == 1000
    assert laws.daly_interval_s(50, 10_000) == pytest.approx(1000 * (1 + 0.05 / 3 + 0.0025 / 9) - 50)
    assert laws.daly_interval_s(300, 100) == 100
    with pytest.raises(ValueError, match="must be positive, got 0 and 1"):
        laws.young_interval_s(0, 1)
    with pytest.raises(ValueError, match="must be positive, got nan and 1"):
        laws.daly_interval_s(math.nan, 1)


@pytest.mark.parametrize("save_cost_s", [1.0, 20.0, 200.0])
def test_no_interval_loses_less_than_dalys(save_cost_s: float) -> None:
    mean_s = 5000.0
    best_s = laws.daly_interval_s(save_cost_s, mean_s)
    least = laws.lost_time_share(best_s, save_cost_s, mean_s)
    around = [laws.lost_time_share(best_s * factor, save_cost_s, mean_s) for factor in (0.5, 0.8, 1.25, 2.0)]
    assert 0 < least < min(around)
    # To first order half an interval is lost a failure, and a save an interval.
    assert least == pytest.approx(save_cost_s / best_s + best_s / 2 / mean_s, rel=0.2)
    assert laws.lost_time_share(best_s, save_cost_s, mean_s, restart_s=100) > least
    assert laws.lost_time_share(1e9, save_cost_s, mean_s) == 1.0

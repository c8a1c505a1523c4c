"""Settings that do nothing are named, with what to write instead; all others pass in silence."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_dist.capabilities import without_effect
from lightning_dist.config import ProbeConfig, SyncConfig, TopologyConfig

SWITCHES = {"x": ["a"], "y": ["b"]}


@pytest.mark.parametrize(
    ("sync", "topology", "num_hosts", "device", "named"),
    [
        ({}, {"tiers": "flat"}, 2, "cpu", "sync.algorithm=hierarchical"),
        ({"wire_dtype": "bf16"}, {}, 1, "cpu", "sync.wire_dtype=bf16"),
        ({}, {"tiers": "two_tier", "switches": SWITCHES}, 2, "cpu", "topology.switches"),
        ({}, {"probe": ProbeConfig(refresh=True)}, 2, "cpu", "topology.probe.refresh"),
        ({"shared_memory": "off"}, {}, 2, "cuda", "sync.shared_memory"),
    ],
)
def test_a_setting_without_effect_is_named(
    sync: dict[str, Any], topology: dict[str, Any], num_hosts: int, device: str, named: str
) -> None:
    (said,) = without_effect(SyncConfig(**sync), TopologyConfig(**topology), num_hosts=num_hosts, device_type=device)
    assert said.startswith(named)
    assert "no effect" in said


@pytest.mark.parametrize(
    ("sync", "topology", "num_hosts"),
    [
        ({}, {}, 1),
        ({"wire_dtype": "bf16"}, {}, 2),
        ({"algorithm": "flat"}, {"tiers": "flat"}, 2),
        ({"shared_memory": "off"}, {}, 2),
        ({}, {"tiers": "three_tier", "switches": SWITCHES}, 2),
        ({}, {"probe": ProbeConfig(enabled=True, refresh=True)}, 2),
    ],
)
def test_what_works_is_not_warned_of(sync: dict[str, Any], topology: dict[str, Any], num_hosts: int) -> None:
    assert without_effect(SyncConfig(**sync), TopologyConfig(**topology), num_hosts=num_hosts, device_type="cpu") == ()

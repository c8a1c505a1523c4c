"""What ranks that are asked to stop may leave to memory."""

from __future__ import annotations

import pytest

from lightning_dist.stopping import Asked, memory_outlives
from lightning_dist.topology.spec import Cluster


@pytest.mark.parametrize(
    ("hosts", "replica", "asked", "is_enough"),
    [
        (1, "memory", Asked(ordered=(0, 1)), True),
        (1, "buddy", Asked(ordered=(0, 1)), True),
        (1, "off", Asked(ordered=(0, 1)), False),
        (1, "memory", Asked(signalled=(1,)), False),
        (1, "memory", Asked(ordered=(0, 1), departing=(0, 1)), False),  # nobody else has it
        (1, "buddy", Asked(ordered=(0, 1), departing=(1,)), False),
        (2, "memory", Asked(ordered=(0, 1, 2, 3)), False),
        (2, "buddy", Asked(ordered=(0, 1, 2, 3)), True),
        (2, "buddy", Asked(ordered=(0, 1, 2, 3), departing=(0, 1)), True),
        (2, "buddy", Asked(ordered=(0, 1, 2, 3), departing=(1, 2)), False),  # both hosts
        (3, "buddy", Asked(ordered=(4, 5), departing=(2, 4)), False),  # they may be each other's
        (2, "buddy", Asked(signalled=(0,), ordered=(2, 3)), False),
    ],
)
def test_memory_is_enough_where_another_host_has_it(hosts: int, replica: str, asked: Asked, is_enough: bool) -> None:
    assert memory_outlives(asked, replica, Cluster.uniform(hosts, 2)) == is_enough

"""All checks of a host, in the order in which they run."""

from __future__ import annotations

from collections.abc import Callable

from lightning_dist.elastic.health.accelerators import check_accelerators
from lightning_dist.elastic.health.compute import check_compute
from lightning_dist.elastic.health.disk import check_disk
from lightning_dist.elastic.health.findings import Outcome
from lightning_dist.elastic.health.link import check_link
from lightning_dist.elastic.health.memory import check_memory
from lightning_dist.elastic.health.request import Request

CHECKS: dict[str, Callable[[Request], Outcome]] = {
    "memory": check_memory,
    "compute": check_compute,
    "disk": check_disk,
    "link": check_link,
    "accelerators": check_accelerators,
}

"""Which sources there are, and which of them this machine has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from lightning_dist.errors import UnmeasurableError
from lightning_dist.monitor.sampling import gpu, network, rdma, tcp
from lightning_dist.monitor.sampling.cpu import CpuSource
from lightning_dist.monitor.sampling.memory import MemorySource
from lightning_dist.monitor.sampling.processes import RankProcesses
from lightning_dist.monitor.sampling.reads import ReadSource
from lightning_dist.monitor.sampling.source import Source


class Opened(NamedTuple):
    """What can be measured, and what cannot.

    Attributes:
        sources: By what they read.
        unavailable: Metric -> why there is none of it.
        facts: For :attr:`~lightning_dist.monitor.record.RankHeader.facts`.
    """

    sources: Mapping[str, Source]
    unavailable: Mapping[str, str]
    facts: Mapping[str, Any]


def open_sources(device: torch.device, *, steps: Callable[[], int], reads_host: bool) -> Opened:
    """Open all that this machine has; whatever goes wrong with one is its reason to be unavailable.

    Args:
        device: What the rank trains on.
        steps: How many steps there were by now.
        reads_host: Whether this rank reads what is the host's: one rank of each does.
    """
    processes = RankProcesses()
    openers: dict[str, tuple[tuple[str, ...], Callable[[], Source]]] = {
        "CPU": (CpuSource.metrics, lambda: CpuSource(processes)),
        "GPU": (gpu.METRICS, lambda: gpu.GpuSource(device)),
        "memory": (MemorySource.metrics, MemorySource),
        "reads": (ReadSource.metrics, lambda: ReadSource(processes)),
    }
    if reads_host:
        openers |= {
            "TCP": (tcp.TcpSource.metrics, lambda: tcp.TcpSource(steps)),
            "network": (network.NetworkSource.metrics, network.NetworkSource),
            "RDMA": (rdma.RdmaSource.metrics, rdma.RdmaSource),
        }
    sources: dict[str, Source] = {}
    unavailable: dict[str, str] = {}
    facts: dict[str, Any] = {}
    for name, (metrics, opener) in openers.items():
        try:
            source = sources[name] = opener()
        except UnmeasurableError as error:
            unavailable |= dict.fromkeys(metrics, str(error))
        except Exception as error:
            unavailable |= dict.fromkeys(metrics, f"{type(error).__name__}: {error}")
        else:
            unavailable |= getattr(source, "unavailable", {})
            facts |= getattr(source, "facts", {})
    return Opened(sources, unavailable, facts)

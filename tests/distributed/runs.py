"""What tests run on ranks to use the communication layer without Lightning."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from lightning_dist import build
from lightning_dist.comm.collectives import FaultPoint
from lightning_dist.comm.hierarchical import HierarchicalAllReduce
from lightning_dist.config import SyncConfig, TopologyConfig, from_mapping
from lightning_dist.events import EventStream
from tests.support.tasks import RankContext


@contextlib.contextmanager
def opened(
    context: RankContext,
    sync: dict[str, Any] | None = None,
    topology: dict[str, Any] | None = None,
    fault_point: FaultPoint | None = None,
) -> Iterator[tuple[build.RunContext, HierarchicalAllReduce]]:
    """A run and its all-reduce, closed at the end."""
    events = EventStream(rank=context.rank)
    config = from_mapping("sync", {"timeout_s": 20.0, **(sync or {})}, SyncConfig)
    with contextlib.ExitStack() as stack:
        run = build.open_run(
            TopologyConfig(**(topology or {})),
            config,
            events=events,
            device=torch.device("cpu"),
            fault_point=fault_point,
        )
        stack.callback(run.close)
        all_reduce = build.open_gradient_all_reduce(run, config)
        stack.callback(all_reduce.close)
        yield run, all_reduce

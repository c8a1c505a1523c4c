"""Legs of successive buckets overlap each other and backward, seen by the order of events; no time is asserted."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from lightning_dist import build
from lightning_dist.config import ParallelConfig, SyncConfig
from lightning_dist.events import EventStream
from tests.distributed.runs import opened
from tests.support.cluster import NamespaceCluster
from tests.support.ranks import RankPool
from tests.support.tasks import RankContext

LEGS = ("reduce", "cross", "gather")
LAYERS, WIDTH, BATCH = 8, 512, 64


@dataclass(frozen=True)
class Span:
    """One leg of one chunk."""

    leg: str
    bucket: int
    chunk: int
    start_ns: int
    end_ns: int

    def overlaps(self, other: Span) -> bool:
        return self.start_ns < other.end_ns and other.start_ns < self.end_ns


def spans_of_a_backward(context: RankContext) -> tuple[list[Span], bool]:
    """The spans of a step with rebuilt buckets, and whether a bucket was done while backward had layers to go."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    sync = SyncConfig(timeout_s=30.0, bucket_bytes=4 * WIDTH * (WIDTH + 1), chunk_bytes=1 << 19)
    with opened(context, {"timeout_s": 30.0, "chunk_bytes": 1 << 19}) as (run, all_reduce):
        wrapped = build.wrap_data_parallel(model, all_reduce, run=run, parallel=ParallelConfig(), sync=sync, extra={})
        inputs = torch.randn(BATCH, WIDTH, requires_grad=True)
        # Backward stands still before its last layer until a bucket has come back: only overlap lets it go on.
        done_before_end: list[bool] = []

        def wait_for_a_bucket(module: nn.Module, gradient: object) -> None:
            end = time.monotonic() + 20
            while not (arrived := _has_gathered(run.events)) and time.monotonic() < end:
                time.sleep(0.005)
            done_before_end.append(arrived)

        for step in range(2):  # in the first the reducer has one bucket for all
            if step == 1:
                model[0].register_full_backward_pre_hook(wait_for_a_bucket)
            wrapped.zero_grad()
            loss = wrapped(inputs).square().mean()
            context.barrier()
            run.events.clear()
            loss.backward()
        spans = [
            Span(
                event.attributes["leg"],
                event.attributes["bucket"],
                event.attributes["chunk"],
                event.start_ns,
                event.end_ns,
            )
            for event in run.events.snapshot()
            if "bucket" in event.attributes
        ]
        context.barrier()
    return spans, done_before_end[-1]


def _has_gathered(events: EventStream) -> bool:
    return any(e.attributes.get("leg") == "gather" and "bucket" in e.attributes for e in events.snapshot())


def test_legs_overlap_each_other_and_backward(
    make_cluster: Callable[..., NamespaceCluster], make_pool: Callable[..., RankPool]
) -> None:
    layout = {"a": [0, 1], "b": [2, 3]}
    pool = make_pool(make_cluster(2, rate_mbit=200), layout)
    seen: list[tuple[list[Span], bool]] = pool.run(spans_of_a_backward, deadline_s=60)
    orders = []
    for spans, done_before_end in seen:
        by_leg = {leg: [span for span in spans if span.leg == leg] for leg in LEGS}
        order = [[(s.bucket, s.chunk) for s in sorted(by_leg[leg], key=lambda s: s.start_ns)] for leg in LEGS]
        assert order[0] == order[1] == order[2] == sorted(order[0]), "each lane takes chunks in the order of submission"
        orders.append(order)
        buckets = {bucket for bucket, _ in order[0]}
        assert len(buckets) >= LAYERS - 1
        crossing_while_gathering = [
            (cross.bucket, gather.bucket)
            for cross in by_leg["cross"]
            for gather in by_leg["gather"]
            if cross.bucket == gather.bucket + 1 and cross.overlaps(gather)
        ]
        assert crossing_while_gathering, "bucket k crosses hosts while bucket k-1 is gathered"
        reducing_while_crossing = [
            reduce
            for reduce in by_leg["reduce"]
            for cross in by_leg["cross"]
            if cross.bucket < reduce.bucket and cross.overlaps(reduce)
        ]
        assert reducing_while_crossing, "bucket k is reduced in the host while one before it crosses"
        assert done_before_end, "a bucket is back from the network while backward runs"
    assert all(order == orders[0] for order in orders), "all ranks take the buckets in the same order"

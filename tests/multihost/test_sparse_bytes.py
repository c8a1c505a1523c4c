"""Bytes of sparse gradients on each host's link, by the kernel: of a large table a batch uses few rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from lightning_dist import build
from lightning_dist.config import SyncConfig, from_mapping
from lightning_dist.gradsync.parameter_server.placement import Placement
from lightning_dist.laws import hierarchical_bytes_per_host, row_exchange_bytes_per_host
from tests.distributed.runs import opened
from tests.multihost.traffic import Sent, assert_sent, least_step, sent_bytes
from tests.support.cluster import NamespaceCluster
from tests.support.ranks import RankPool
from tests.support.tasks import RankContext

NUM_ROWS, WIDTH, BATCH = 1_000_000, 64, 4096
LAYOUT = {"a": [0, 1], "b": [2, 3]}
ROUNDS = 3


@dataclass(frozen=True)
class Counted:
    """What a host sent for one average.

    Attributes:
        host: Its name.
        rows: By our exchange.
        reducer: By the backend's own all-reduce of sparse tensors, which is DDP's.
        ids: What the rank looked up.
    """

    host: str
    rows: Sent
    reducer: Sent
    ids: torch.Tensor


def zipf_ids(rank: int) -> torch.Tensor:
    """[BATCH]: id k is drawn with probability ~ 1 / (k + 1), as words are."""
    generator = torch.Generator().manual_seed(rank)
    uniform = torch.rand(BATCH, generator=generator, dtype=torch.float64)
    return (torch.exp(uniform * torch.log(torch.tensor(NUM_ROWS + 1.0))) - 1).long()


def gradient_of(ids: torch.Tensor) -> torch.Tensor:
    values = torch.ones(len(ids), WIDTH)
    return torch.sparse_coo_tensor(ids[None], values, (NUM_ROWS, WIDTH), check_invariants=True)


def count(context: RankContext) -> Counted:
    table = nn.Embedding(NUM_ROWS, WIDTH, sparse=True, device="meta")
    ids = zipf_ids(context.rank)

    def marks_of(average: Callable[[torch.Tensor], object]) -> list[Sent]:
        marks = []
        average(gradient_of(ids))  # opens connections
        for _ in range(ROUNDS + 1):
            context.barrier()
            marks.append(sent_bytes())
            context.barrier()
            average(gradient_of(ids))
        return marks

    with opened(context) as (run, all_reduce):
        config = from_mapping("sync", {"timeout_s": 20.0}, SyncConfig)
        sparse = build.open_sparse_average(run, table, all_reduce, sync=config, announce=lambda _: None)
        assert sparse is not None
        try:
            rows = least_step(marks_of(lambda gradient: sparse.start(gradient, table.weight).wait()))
        finally:
            sparse.close()
        reducer = least_step(marks_of(lambda gradient: dist.all_reduce(gradient.coalesce())))
    return Counted(context.host, rows, reducer, ids)


def test_only_rows_cross(make_cluster: Callable[..., NamespaceCluster], make_pool: Callable[..., RankPool]) -> None:
    cluster = make_cluster(len(LAYOUT), rate_mbit=400)
    seen: list[Counted] = make_pool(cluster, LAYOUT).run(count, deadline_s=60)
    union = torch.cat([counted.ids for counted in seen]).unique().numel()
    dense_bytes = hierarchical_bytes_per_host(NUM_ROWS * WIDTH * 4, len(LAYOUT))
    for host, members in LAYOUT.items():
        rows = torch.cat([seen[rank].ids for rank in members]).unique().numel()
        (of_host, *_) = [counted for counted in seen if counted.host == host]
        print(f"{host}: {rows} rows, {union} on all hosts; reducer {of_host.reducer}")
        assert_sent(of_host.rows, row_exchange_bytes_per_host(rows, union, WIDTH * 4 + 4, len(LAYOUT)))
        assert of_host.rows.most * 20 < dense_bytes
        assert of_host.rows.most < of_host.reducer.least


SERVED_ROWS = 100_000


def count_served(context: RankContext) -> tuple[str, Sent, torch.Tensor]:
    """(host, what it sent in a step, this rank's ids) of a table that is dealt to the ranks."""
    torch.manual_seed(0)
    module = nn.ModuleDict({"table": nn.Embedding(SERVED_ROWS, WIDTH, sparse=True)})
    config = from_mapping("sync", {"timeout_s": 20.0, "sparse": {"exchange": "parameter_server"}}, SyncConfig)
    ids = zipf_ids(context.rank) % SERVED_ROWS
    marks = []
    with opened(context) as (run, _):
        service = build.open_tables(run, module, config)
        assert service is not None
        try:
            for _ in range(ROUNDS + 1):
                context.barrier()
                marks.append(sent_bytes())
                context.barrier()
                module["table"](ids).sum().backward()
                service.tables.exchange()
            context.barrier()
            service.release(failed=False)
        finally:
            service.close()
    return context.host, least_step(marks), ids


def test_look_ups_and_gradients_cross_where_rows_are_elsewhere(
    make_cluster: Callable[..., NamespaceCluster], make_pool: Callable[..., RankPool]
) -> None:
    """A host asks for rows by 8 bytes each, and gives rows of 256 and gradients with their numbers."""
    cluster = make_cluster(len(LAYOUT), rate_mbit=400)
    seen = make_pool(cluster, LAYOUT).run(count_served, deadline_s=60)
    placement = Placement.of(SERVED_ROWS, len(seen))
    host_of_rank = [host for host, _, _ in seen]
    payload = dict.fromkeys(LAYOUT, 0)
    for host, _, ids in seen:
        for server in placement.server_of(ids.unique()).tolist():
            if host_of_rank[server] != host:
                payload[host] += 8 + WIDTH * 4 + 4
                payload[host_of_rank[server]] += WIDTH * 4
    for host, members in LAYOUT.items():
        assert_sent(seen[members[0]][1], payload[host])

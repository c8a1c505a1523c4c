"""A link that drops packets, seen by the monitor on the host that sends again, and on no other."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from lightning_dist.monitor.sampling.network import NetworkSource
from lightning_dist.monitor.sampling.source import Source
from lightning_dist.monitor.sampling.tcp import TcpSource
from tests.support.cluster import NamespaceCluster
from tests.support.ranks import RankPool
from tests.support.tasks import RankContext

NUMEL = 250_000


def send_to_the_other(context: RankContext) -> dict[str, float]:
    """Rank 0 sends 1 MB to rank 1; what its host's counters gained, as the sources tell."""
    tensor = torch.ones(NUMEL)
    context.barrier()
    started_ns = time.monotonic_ns()
    sources: list[Source] = [TcpSource(lambda: 0), NetworkSource()]
    for source in sources:
        assert list(source.read(started_ns)) == []
    dist.send(tensor, 1) if context.rank == 0 else dist.recv(tensor, 0)
    context.barrier()
    ended_ns = time.monotonic_ns()
    elapsed_s = (ended_ns - started_ns) / 1e9
    return {each.metric: each.value * elapsed_s for source in sources for each in source.read(ended_ns)}


def test_what_a_link_drops_is_counted_by_the_host_that_sends_it_again(
    make_cluster: Callable[..., NamespaceCluster], make_pool: Callable[..., RankPool]
) -> None:
    cluster = make_cluster(2)
    cluster["a"].set_rate(50, queue_bytes=100_000)  # fewer packets than TCP has under way
    pool = make_pool(cluster, {"a": [0], "b": [1]})
    before = {name: host.retransmits() for name, host in cluster.hosts.items()}
    sender, receiver = pool.run(send_to_the_other)
    after = {name: host.retransmits() for name, host in cluster.hosts.items()}
    assert 10 <= round(sender["tcp_retransmits"]) <= after["a"] - before["a"]
    assert round(receiver["tcp_retransmits"]) <= after["b"] - before["b"]
    assert sender["tcp_retransmits"] > 10 * receiver["tcp_retransmits"]
    assert sender["tcp_sent_segments"] > receiver["tcp_sent_segments"] / 10
    assert sender["network_sent"] > 4 * NUMEL
    assert receiver["network_received"] > 4 * NUMEL
    assert receiver["network_sent"] < NUMEL

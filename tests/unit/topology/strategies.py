"""Clusters for property tests: any number of hosts of any size, in any order of ranks, with or without switches."""

from __future__ import annotations

from hypothesis import strategies as st

from lightning_dist.topology.spec import Cluster


@st.composite
def clusters(draw: st.DrawFn, *, max_hosts: int = 6, max_ranks_per_host: int = 5, switches: bool = True) -> Cluster:
    sizes = draw(st.lists(st.integers(1, max_ranks_per_host), min_size=1, max_size=max_hosts))
    placed = draw(st.permutations([f"h{host}" for host, size in enumerate(sizes) for _ in range(size)]))
    switch_of_host = {}
    if switches and draw(st.booleans()):
        switch_of_host = {f"h{host}": f"s{draw(st.integers(0, 2))}" for host in range(len(sizes))}
    return Cluster(tuple(placed), switch_of_host)

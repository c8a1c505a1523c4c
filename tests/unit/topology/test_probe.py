"""Measuring links, and keeping what was measured. Ranks are threads, each with its own Gloo group."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import cast

import pytest
import torch.distributed as dist
from hypothesis import given

from lightning_dist.config import ProbeConfig
from lightning_dist.errors import CollectiveTimeoutError, TopologyError
from lightning_dist.topology.probe import (
    LARGEST_PAYLOAD_BYTES,
    cache_path,
    link_from,
    next_payload,
    probe,
    probe_pairs,
    read_cache,
    write_cache,
)
from lightning_dist.topology.spec import Cluster, Link, Tier
from tests.unit.topology.strategies import clusters

LINKS = {Tier.HOST: Link(1e9, 1e-5), Tier.WORLD: Link(2.5e7, 2e-4)}


@given(clusters())
def test_a_pair_stands_for_each_tier(cluster: Cluster) -> None:
    pairs = probe_pairs(cluster)
    assert tuple(pairs) == cluster.tiers
    assert all(cluster.tier_of(pair) is tier for tier, pair in pairs.items())
    assert bool(pairs) == (cluster.world_size > 1)


def test_payloads_grow_as_long_as_there_is_time() -> None:
    assert next_payload(1000, taken_s=0.1, left_s=0.5) == 4000
    assert next_payload(1000, taken_s=0.1, left_s=0.3) is None
    assert next_payload(LARGEST_PAYLOAD_BYTES, taken_s=0.0, left_s=1.0) is None


def test_latency_is_taken_off_before_the_bandwidth() -> None:
    assert link_from(1000, taken_s=1.5, trip_s=0.5) == Link(1000.0, 0.25)
    assert link_from(1000, taken_s=0.5, trip_s=0.5) == Link(2000.0, 0.25)


def gloo(store: dist.Store, rank: int, size: int) -> dist.ProcessGroup:
    return cast(dist.ProcessGroup, dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=30)))


def run(cluster: Cluster, config: ProbeConfig) -> list[Cluster]:
    store = dist.HashStore()

    def one(rank: int) -> Cluster:
        group = gloo(store, rank, cluster.world_size)
        return probe(cluster, config=config, rank=rank, group=group, environ={})

    with ThreadPoolExecutor(cluster.world_size) as pool:
        return list(pool.map(one, range(cluster.world_size)))


def test_all_ranks_get_the_same_links_and_rank_zero_keeps_them(tmp_path: Path) -> None:
    cluster = Cluster.parse("2+1")
    config = ProbeConfig(enabled=True, budget_s=0.1, cache_dir=str(tmp_path / "new"))
    first = run(cluster, config)
    assert set(first[0].links) == {Tier.HOST, Tier.WORLD}
    assert first == [first[0]] * 3
    assert [path.suffix for path in (tmp_path / "new").iterdir()] == [".json"]
    assert run(cluster, config) == first  # from the cache: measured figures would differ
    again = run(cluster, ProbeConfig(enabled=True, budget_s=0.1, cache_dir=config.cache_dir, refresh=True))
    assert again[0].links != first[0].links


def test_off_means_off(tmp_path: Path) -> None:
    cluster = Cluster.parse("1")
    group = gloo(dist.HashStore(), 0, 1)
    assert probe(cluster, config=ProbeConfig(cache_dir=str(tmp_path)), rank=0, group=group, environ={}) is cluster
    assert not list(tmp_path.iterdir())


def test_a_group_of_another_size_is_refused() -> None:
    group = gloo(dist.HashStore(), 0, 1)
    with pytest.raises(TopologyError, match="group has 1 ranks, the cluster 2"):
        probe(Cluster.parse("2"), config=ProbeConfig(enabled=True), rank=0, group=group, environ={})


def test_a_silent_peer_ends_in_a_deadline(tmp_path: Path) -> None:
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as pool:
        groups = list(pool.map(lambda rank: gloo(store, rank, 2), range(2)))
    config = ProbeConfig(enabled=True, cache_dir=str(tmp_path))
    with pytest.raises(CollectiveTimeoutError, match=r"waited 0\.3 s for all ranks"):
        probe(Cluster.parse("2"), config=config, rank=0, group=groups[0], environ={}, timeout_s=0.3)


def test_the_cache_is_for_one_cluster_and_interface(tmp_path: Path) -> None:
    config = ProbeConfig(cache_dir=str(tmp_path))

    def path(notation: str, **environ: str) -> Path:
        return cache_path(Cluster.parse(notation), config=config, environ=environ)

    assert path("2x2") == path("2x2:cyclic")  # the same hosts and sizes
    others = {path("2x2"), path("2x3"), path("3x2"), path("2x1x2"), path("2x2", GLOO_SOCKET_IFNAME="eth1")}
    assert len(others) == 5


def test_the_cache_lives_in_the_users_cache_folder() -> None:
    cluster = Cluster.parse("2x2")
    config = ProbeConfig()
    assert cache_path(cluster, config=config, environ={"XDG_CACHE_HOME": "/x"}).parent == Path("/x/lightning_dist")
    assert cache_path(cluster, config=config, environ={}).parent == Path.home() / ".cache" / "lightning_dist"


def test_what_was_written_is_read(tmp_path: Path) -> None:
    cluster = Cluster.parse("2x2")
    path = tmp_path / "links.json"
    assert read_cache(path, cluster, {}) is None
    write_cache(path, cluster, LINKS, {})
    assert read_cache(path, cluster, {}) == LINKS
    assert [p.name for p in tmp_path.iterdir()] == ["links.json"]


def test_a_torn_or_foreign_file_is_skipped_with_a_warning(tmp_path: Path) -> None:
    cluster = Cluster.parse("2x2")
    path = tmp_path / "links.json"
    write_cache(path, cluster, LINKS, {})
    whole = path.read_text()
    for text in (whole[: len(whole) // 2], "", "[]", json.dumps({"format": 0}), whole.replace("host1", "host9")):
        path.write_text(text)
        with pytest.warns(UserWarning, match="measured again"):
            assert read_cache(path, cluster, {}) is None


def test_a_folder_that_cannot_be_written_is_only_a_warning(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.warns(UserWarning, match="cannot be kept"):
        write_cache(tmp_path / "file" / "links.json", Cluster.parse("2x2"), LINKS, {})

"""What ``hierdist topology`` and the probe find between real hosts."""

from __future__ import annotations

import contextlib
import io
import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from lightning_dist.cli import main
from lightning_dist.config import ProbeConfig
from lightning_dist.topology.spec import Tier
from tests.distributed.runs import opened
from tests.support.cluster import NamespaceCluster
from tests.support.ranks import RankPool
from tests.support.tasks import RankContext

RATE_MBIT = 200


def probe(context: RankContext, cache_dir: str) -> dict[str, float]:
    start_s = time.monotonic()
    with opened(context, topology={"probe": ProbeConfig(enabled=True, cache_dir=cache_dir)}) as (run, _):
        took_s = time.monotonic() - start_s
        links = run.cluster.links
        found = {tier.value: links[tier].bandwidth_bytes_per_s or 0.0 for tier in (Tier.HOST, Tier.WORLD)}
        return {**found, "took_s": took_s}


def test_the_probe_tells_the_link_from_the_inside_of_a_host(
    make_cluster: Callable[..., NamespaceCluster], make_pool: Callable[..., RankPool], tmp_path: Path
) -> None:
    pool = make_pool(make_cluster(2, rate_mbit=RATE_MBIT), {"a": [0, 1], "b": [2, 3]})
    measured = pool.run(probe, args=(str(tmp_path),))
    rate_bytes_per_s = RATE_MBIT * 1e6 / 8
    for seen in measured:
        assert 0.6 * rate_bytes_per_s < seen["world"] < 1.3 * rate_bytes_per_s
        assert seen["host"] > 2 * seen["world"]
        assert seen["world"] == measured[0]["world"], "all ranks get the same figures"
    assert list(tmp_path.iterdir()), "what was measured is kept"


def run_command(context: RankContext, cache_dir: str) -> str:
    """What ``hierdist topology`` prints on this rank."""
    printed = io.StringIO()
    arguments = ["topology", "--probe", "--cache-dir", cache_dir, "--gradient-mb", "100", "--json"]
    with contextlib.redirect_stdout(printed):
        assert main(arguments) == 0
    return printed.getvalue()


def test_hierdist_topology_between_hosts(
    make_cluster: Callable[..., NamespaceCluster], make_pool: Callable[..., RankPool], tmp_path: Path
) -> None:
    pool = make_pool(make_cluster(2, rate_mbit=RATE_MBIT), {"a": [0, 2], "b": [1, 3]})
    printed = pool.run(run_command, args=(str(tmp_path),), init_group=False, fresh=True)
    assert printed[1:] == ["", "", ""]
    report = json.loads(printed[0])
    assert [host["ranks"] for host in report["hosts"]] == [[0, 2], [1, 3]]
    assert {host["hierarchical_bytes"] for host in report["hosts"]} == {100e6}
    assert {host["flat_bytes"] for host in report["hosts"]} == {300e6}
    assert report["placement"]["ratio"] == pytest.approx(2.0)

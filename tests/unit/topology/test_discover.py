"""Who says on which host a process is, and what the ranks make of it together."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given

from lightning_dist.config import TopologyConfig
from lightning_dist.errors import CollectiveTimeoutError, HierDistError, TopologyError
from lightning_dist.topology.discover import (
    Discovery,
    Machine,
    Source,
    apply_tiers,
    discover,
    discover_cluster,
    host_identities,
    host_identity,
    hosts_from_reports,
)
from lightning_dist.topology.spec import Cluster
from tests.unit.topology.strategies import clusters


def machine(hostname: str = "box", boot_id: str = "boot", namespace: str = "net:[1]") -> Machine:
    return Machine(lambda: hostname, lambda: boot_id, lambda: namespace)


@pytest.mark.parametrize(
    ("environ", "configured", "name", "source"),
    [
        ({"HIERDIST_HOST": "b", "SLURMD_NODENAME": "c"}, "a", "a", Source.CONFIG),
        ({"HIERDIST_HOST": "b", "SLURMD_NODENAME": "c", "GROUP_RANK": "0"}, None, "b", Source.VARIABLE),
        ({"SLURMD_NODENAME": "c", "SLURM_NODEID": "1", "GROUP_RANK": "0"}, None, "c", Source.SLURM),
        ({"SLURM_NODEID": "1", "NODE_RANK": "0"}, None, "node1", Source.SLURM),
        ({"GROUP_RANK": "3", "NODE_RANK": "0", "TORCHELASTIC_RUN_ID": "x"}, None, "node3", Source.LAUNCHER),
        ({"GROUP_RANK": "3", "NODE_RANK": "0"}, None, "node0", Source.LAUNCHER),
        ({"GROUP_RANK": "3"}, None, "node3", Source.LAUNCHER),
        ({"HIERDIST_HOST": ""}, None, "boot:net:[1]", Source.MACHINE),
        ({}, None, "boot:net:[1]", Source.MACHINE),
    ],
)
def test_first_hit_wins(environ: dict[str, str], configured: str | None, name: str, source: Source) -> None:
    identity = host_identity(environ, configured=configured, machine=machine())
    assert (identity.name, identity.source) == (name, source)


def test_the_real_machine_has_an_identity() -> None:
    identity = host_identity({})
    assert identity.source is Source.MACHINE
    assert identity.label
    assert identity == host_identity({})


def report(environ: dict[str, str], *, configured: str | None = None, on: Machine | None = None) -> dict[str, Any]:
    on = on or machine()
    identities = host_identities(environ, configured=configured, machine=on)
    return {"boot_id": on.boot_id(), "identities": [[i.name, i.source.value, i.label] for i in identities]}


def test_hostnames_are_the_names_where_they_differ() -> None:
    reports = [report({"GROUP_RANK": str(node)}, on=machine(f"box{node}", f"boot{node}")) for node in (0, 0, 1)]
    assert hosts_from_reports(reports) == (["box0", "box0", "box1"], [Source.LAUNCHER] * 3)


def test_namespaces_of_one_machine_are_told_apart() -> None:
    by_launcher = [report({"GROUP_RANK": str(node)}) for node in (0, 1, 0)]
    assert hosts_from_reports(by_launcher)[0] == ["node0", "node1", "node0"]
    by_namespace = [report({}, on=machine(namespace=f"net:[{i}]")) for i in (7, 3, 7)]
    assert hosts_from_reports(by_namespace)[0] == ["box#0", "box#1", "box#0"]


def test_machines_with_one_hostname_are_told_apart() -> None:
    reports = [report({}, on=machine(boot_id=boot)) for boot in ("x", "y")]
    assert hosts_from_reports(reports)[0] == ["box#0", "box#1"]


def test_a_source_that_some_ranks_lack_is_not_mixed_with_another() -> None:
    reports = [report({}), report({"NODE_RANK": "0"})]
    assert hosts_from_reports(reports) == (["box", "box"], [Source.MACHINE] * 2)


def test_explicit_names_count_for_the_ranks_that_have_them() -> None:
    reports = [report({}, configured="a"), report({"HIERDIST_HOST": "b"}), report({"GROUP_RANK": "0"})]
    hosts, sources = hosts_from_reports(reports)
    assert hosts == ["a", "b", "box"]
    assert sources == [Source.CONFIG, Source.VARIABLE, Source.LAUNCHER]


def test_variables_copied_to_other_machines_are_not_believed() -> None:
    environ = {"SLURMD_NODENAME": "n1"}
    reports = [report(environ, on=machine(f"n{i}", f"boot{i}")) for i in (1, 2)]
    with pytest.warns(UserWarning, match="slurm variables call different machines 'n1'"):
        hosts, sources = hosts_from_reports(reports)
    assert hosts == ["n1", "n2"]
    assert sources == [Source.MACHINE] * 2


def test_a_label_that_is_anothers_name_is_not_used() -> None:
    reports = [report({}, configured="box"), report({"GROUP_RANK": "0"})]
    hosts, _ = hosts_from_reports(reports)
    assert len(set(hosts)) == 2


def test_a_report_of_another_version_is_refused() -> None:
    with pytest.raises(TopologyError, match="same version"):
        hosts_from_reports([{"boot_id": "x", "identities": [["a", "horoscope", "a"]]}])


@given(clusters(switches=False))
def test_any_placement_is_found_again(cluster: Cluster) -> None:
    machines = {host: machine(boot_id=host) for host in cluster.hosts}
    hosts, _ = hosts_from_reports([report({}, on=machines[host]) for host in cluster.host_of_rank])
    found = Cluster(tuple(hosts))
    assert [found.ranks_of_host(host) for host in found.hosts] == [cluster.ranks_of_host(h) for h in cluster.hosts]


# -- the exchange: ranks are threads, each with its own environment, on one store --------------------------------------


def run_ranks(world_size: int, work: Callable[[int], Discovery]) -> list[Discovery | HierDistError]:
    def one(rank: int) -> Discovery | HierDistError:
        try:
            return work(rank)
        except HierDistError as error:
            return error

    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(one, range(world_size)))


def discover_all(
    config: TopologyConfig,
    environs: Sequence[dict[str, str]],
    *,
    store: dist.Store | None = None,
    timeout_s: float = 20.0,
    absent: Sequence[int] = (),
) -> list[Discovery | HierDistError]:
    store = store or dist.HashStore()
    ranks = [rank for rank in range(len(environs)) if rank not in absent]
    return run_ranks(
        len(ranks),
        lambda index: discover(
            config,
            rank=ranks[index],
            world_size=len(environs),
            store=store,
            environ=environs[ranks[index]],
            timeout_s=timeout_s,
            machine=machine(),
        ),
    )


def test_all_ranks_find_the_same_cluster() -> None:
    environs = [{"HIERDIST_HOST": host} for host in ("a", "b", "a", "b")]
    found = discover_all(TopologyConfig(), environs)
    assert found == [Discovery(Cluster(("a", "b", "a", "b")), (Source.VARIABLE,) * 4)] * 4


def test_a_second_discovery_on_a_store_does_not_read_the_first() -> None:
    store = dist.HashStore()
    discover_all(TopologyConfig(), [{"HIERDIST_HOST": "a"}] * 2, store=store)
    found = discover_all(TopologyConfig(), [{"HIERDIST_HOST": host} for host in "xy"], store=store)
    assert all(isinstance(one, Discovery) and one.cluster.hosts == ("x", "y") for one in found)


def test_it_works_over_a_file(tmp_path: Any) -> None:
    stores = [dist.FileStore(str(tmp_path / "store"), 2) for _ in range(2)]
    found = run_ranks(
        2,
        lambda rank: discover(
            TopologyConfig(),
            rank=rank,
            world_size=2,
            store=stores[rank],
            environ={"GROUP_RANK": str(rank)},
            timeout_s=20,
        ),
    )
    assert all(isinstance(one, Discovery) and one.cluster.hosts == ("node0", "node1") for one in found)


def test_only_json_goes_through_the_store() -> None:
    store = dist.HashStore()
    discover_all(TopologyConfig(), [{}], store=store)
    answer = json.loads(store.get("hierdist/topology/1/answer"))
    assert answer == {"hosts": ["box"], "sources": ["machine"]}


def test_ranks_that_do_not_report_are_named_on_all_others() -> None:
    found = discover_all(TopologyConfig(), [{}] * 4, timeout_s=0.5, absent=(1, 3))
    assert all(isinstance(error, CollectiveTimeoutError) for error in found)
    assert all("from rank 1, 3 of 4" in str(error) for error in found)


def test_a_missing_rank_zero_is_named() -> None:
    (error,) = discover_all(TopologyConfig(), [{}] * 2, timeout_s=0.2, absent=(0,))
    assert isinstance(error, CollectiveTimeoutError)
    assert "rank 1 waited 0.2 s for rank 0" in str(error)


def test_a_stated_placement_is_that_of_all_ranks() -> None:
    found = discover_all(TopologyConfig(hosts={"a": [0, 2], "b": [1]}), [{"HIERDIST_HOST": "c"}] * 3)
    assert found == [Discovery(Cluster(("a", "b", "a")), (Source.CONFIG,) * 3)] * 3


@pytest.mark.parametrize(
    ("other", "said"), [({"a": [0], "b": [1, 2]}, r"\{'a': \[0\], 'b': \[1, 2\]\}"), (None, "not set")], ids=str
)
def test_ranks_that_were_told_other_placements_say_so(other: Any, said: str) -> None:
    store, hosts = dist.HashStore(), [{"a": [0, 2], "b": [1]}, {"a": [0, 2], "b": [1]}, other]
    found = run_ranks(
        3,
        lambda rank: discover_cluster(
            TopologyConfig(hosts=hosts[rank]), rank=rank, world_size=3, store=store, environ={}, timeout_s=20
        ),
    )
    for error in found:
        assert isinstance(error, TopologyError)
        assert re.search(
            rf"topology.hosts is \{{'a': \[0, 2\], 'b': \[1\]\}} on rank 0 and {said} on rank 2: give all ranks",
            str(error),
        )


@pytest.mark.parametrize(
    ("config", "world_size", "message"),
    [
        (TopologyConfig(hosts={"a": [0, 1]}), 3, "lists 2 ranks, but 3 run"),
        (TopologyConfig(hosts={"a": [0, 0]}), 2, "rank 0 is listed twice"),
        (TopologyConfig(hosts={"a": [0, 2]}), 2, "missing: 1, out of range: 2"),
        (TopologyConfig(hosts={"a": [0], "b": [1]}, host="b"), 2, "topology.host says rank 0 is on 'b'"),
        (TopologyConfig(hosts={"a": [0], "b": [1]}, switches={"s": ["a", "c"]}), 2, "hold no rank: c; hosts are: a, b"),
    ],
)
def test_a_wrong_placement_is_refused(config: TopologyConfig, world_size: int, message: str) -> None:
    error = discover_all(config, [{}] * world_size, timeout_s=0.5)[0]
    assert isinstance(error, TopologyError)
    assert message in str(error)


def test_a_rank_beyond_the_world_is_refused() -> None:
    with pytest.raises(TopologyError, match="rank 2 is out of range"):
        discover(TopologyConfig(), rank=2, world_size=2, store=dist.HashStore(), environ={}, timeout_s=1)


def test_tiers() -> None:
    cluster = Cluster.parse("2x2")
    switches = {"s": ["host0"], "t": ["host1"]}
    assert apply_tiers(cluster, TopologyConfig()) == cluster
    assert apply_tiers(cluster, TopologyConfig(tiers="flat")).num_hosts == 4
    assert apply_tiers(cluster, TopologyConfig(switches=switches)).switches == ("s", "t")
    assert apply_tiers(cluster, TopologyConfig(tiers="three_tier", switches=switches)).switches == ("s", "t")
    assert apply_tiers(Cluster.parse("2x1x2"), TopologyConfig()).switches == ("switch0", "switch1")
    assert apply_tiers(Cluster.parse("2x1x2"), TopologyConfig(tiers="two_tier")) == cluster
    with pytest.warns(UserWarning, match=r"topology\.switches has no effect with topology\.tiers=two_tier"):
        apply_tiers(cluster, TopologyConfig(tiers="two_tier", switches=switches))

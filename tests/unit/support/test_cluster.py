"""Clusters of network namespaces: they carry collectives, count bytes, and leave nothing."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.support.cluster import NamespaceCluster, namespaces_of, remove_stale_namespaces
from tests.support.fresh import run_script
from tests.support.placement import PLACEMENTS
from tests.support.processes import pid_lives
from tests.support.ranks import Died, RankContext, RankPool, RanksFailed

pytestmark = pytest.mark.multihost

MakeCluster = Callable[..., NamespaceCluster]
MakePool = Callable[..., RankPool]
MIB = 1 << 20
WAIT = "import signal; print('ready', flush=True); signal.pause()"
SHOW = """
import json, os
names = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE NODE_RANK GROUP_RANK MASTER_ADDR GLOO_SOCKET_IFNAME".split()
devices, network = sorted(os.listdir("/sys/class/net")), os.stat("/proc/self/ns/net").st_ino
print(json.dumps([[os.environ[name] for name in names], devices, network, os.environ["MASTER_PORT"]]))
"""


def sum_ones(context: RankContext, numel: int) -> float:
    values = torch.ones(numel)
    dist.all_reduce(values)
    assert bool((values == context.world_size).all())
    return float(values[0])


def network_of(context: RankContext) -> tuple[int, list[str]]:
    return os.stat("/proc/self/ns/net").st_ino, sorted(os.listdir("/sys/class/net"))


def wait_for_ever(context: RankContext) -> None:
    signal.pause()


def kill_own(context: RankContext) -> str:
    """Not in a barrier: there a rank may wait for one that has already failed."""
    token = torch.ones(1)
    if context.rank == 3:
        for peer in range(3):  # before they say so, they may still be connecting, which would fail
            dist.recv(token, src=peer)
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        dist.send(token, dst=3)
        dist.recv(token, src=3)
    except RuntimeError:
        return "saw it"
    return "saw nothing"


@pytest.mark.parametrize(
    ("placement", "ring_share"), [("2+2", 1.0), ("3+1", 1.0), ("cyclic", 2.0)], ids=["contiguous", "uneven", "cyclic"]
)
def test_all_reduce_crosses_the_links_with_a_rings_bytes(
    make_cluster: MakeCluster, make_pool: MakePool, placement: str, ring_share: float
) -> None:
    cluster = make_cluster(2, rate_mbit=400)
    pool = make_pool(cluster, PLACEMENTS[placement])
    assert pool.run(sum_ones, args=(1,)) == [4.0] * 4
    counts = [cluster.tx_bytes()]
    for _ in range(3):
        assert pool.run(sum_ones, args=(2 * MIB,)) == [4.0] * 4
        counts.append(cluster.tx_bytes())
    size_bytes, num_ranks = 8 * MIB, 4
    expected = ring_share * 2 * size_bytes * (num_ranks - 1) / num_ranks
    for host in cluster.hosts:
        sent = [after[host] - before[host] for before, after in itertools.pairwise(counts)]
        assert all(count >= expected for count in sent), f"host {host}: nothing can be missing"
        # 5% of headers and acknowledgements, and the connections; a busy kernel acknowledges more, and sends again
        assert min(sent) <= 1.08 * expected, f"host {host}"
    assert cluster["a"].rx_bytes() > expected


def test_ranks_of_a_pool_live_on_their_hosts(make_cluster: MakeCluster, make_pool: MakePool) -> None:
    pool = make_pool(make_cluster(2), PLACEMENTS["cyclic"])
    networks = pool.run(network_of)
    assert networks[:2] == networks[2:]
    assert networks[0][0] != networks[1][0]
    assert networks[0][1] == ["eth0", "lo"]


def test_a_script_gets_a_launchers_variables(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(2)
    results = cluster.run(["-c", SHOW], placement={"a": [0, 2], "b": [1, 3]}, deadline_s=30)
    shown = [json.loads(result.check().stdout) for result in results]
    address = cluster["a"].address
    assert [variables for variables, *_ in shown] == [
        ["0", "4", "0", "2", "0", "0", address, "eth0"],
        ["1", "4", "0", "2", "1", "1", address, "eth0"],
        ["2", "4", "1", "2", "0", "0", address, "eth0"],
        ["3", "4", "1", "2", "1", "1", address, "eth0"],
    ]
    assert len({port for *_, port in shown}) == 1
    assert shown[0][2] == shown[2][2] != shown[1][2] == shown[3][2]
    assert shown[0][1] == ["eth0", "lo"]


def test_a_process_a_host_launches_its_own_ranks(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(2)
    script = "import os; print(os.environ['NODE_RANK'], 'RANK' in os.environ, os.environ['MASTER_ADDR'])"
    with cluster.start_on_hosts(["-c", script]) as mains:
        results = mains.wait(deadline_s=30)
    assert [result.check().stdout.split()[:2] for result in results] == [["0", "False"], ["1", "False"]]


def test_ranks_are_killed_by_signal(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(2)
    with cluster.start(["-c", WAIT], placement={"a": [0], "b": [1]}) as ranks:
        for rank in range(2):
            ranks.wait_for_output(rank, "ready", deadline_s=30)
        assert cluster["a"].pids() == [ranks.pids[0]]
        ranks.kill(1)
        assert ranks.wait(deadline_s=30, ranks=[1])[0].returncode == -signal.SIGKILL


def test_a_killed_rank_is_seen_across_hosts(make_cluster: MakeCluster, make_pool: MakePool) -> None:
    pool = make_pool(make_cluster(2), PLACEMENTS["2+2"])
    assert pool.run(kill_own, may_die=[3]) == ["saw it"] * 3 + [Died(-signal.SIGKILL)]
    assert pool.run(sum_ones, args=(1,)) == [4.0] * 4


def test_a_pulled_cable_carries_nothing(make_cluster: MakeCluster, make_pool: MakePool) -> None:
    cluster = make_cluster(2)
    pool = make_pool(cluster, PLACEMENTS["1+1"])
    cluster["b"].set_link(up=False)
    with pytest.raises(RanksFailed):
        pool.run(sum_ones, args=(1,), deadline_s=2.0)
    cluster["b"].set_link(up=True)
    assert pool.run(sum_ones, args=(1,)) == [2.0] * 2


def test_the_rate_can_be_changed_and_taken_off(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(1, rate_mbit=200)

    def shape() -> str:
        command = ["tc", "-n", cluster["a"].netns, "qdisc", "show", "dev", "eth0"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    assert "rate 200Mbit" in shape()
    cluster.set_rate(50)
    assert "rate 50Mbit" in shape()
    cluster.set_rate(None)
    assert "tbf" not in shape()
    cluster.set_rate(None)


def test_nothing_is_left_when_the_body_raises(make_pool: MakePool) -> None:
    pids: list[int] = []

    def body() -> None:
        with NamespaceCluster(2) as cluster:
            pids.extend(cluster.start(["-c", WAIT], placement={"a": [0], "b": [1]}).pids)
            pool = make_pool(cluster, PLACEMENTS["1+1"])
            pool.run(sum_ones, args=(1,))
            pids.extend(pool.pids)
            assert len(namespaces_of(os.getpid())) == 3
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        body()
    assert namespaces_of(os.getpid()) == []
    assert len(pids) == 4
    assert not any(map(pid_lives, pids))


def test_namespaces_of_a_killed_process_are_removed(tmp_path: Path) -> None:
    """By whoever comes first: another lane of tests may make a cluster just now."""
    script = tmp_path / "killed.py"
    script.write_text(
        "import os, signal\n"
        "from tests.support.cluster import NamespaceCluster, namespaces_of\n"
        "cluster = NamespaceCluster(1)\n"
        "print(os.getpid(), len(namespaces_of(os.getpid())), flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    pid, count = map(int, run_script(script).stdout.split())
    assert count == 2
    remove_stale_namespaces()
    assert namespaces_of(pid) == []


def test_namespaces_go_when_the_interpreter_exits(tmp_path: Path) -> None:
    script = tmp_path / "exits.py"
    script.write_text(
        "import os\n"
        "from tests.support.cluster import NamespaceCluster\n"
        "cluster = NamespaceCluster(1)\n"
        "print(os.getpid())\n"
    )
    assert namespaces_of(int(run_script(script).check().stdout)) == []


def test_wrong_names_are_refused_with_the_right_ones(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(2)
    with pytest.raises(KeyError, match="the hosts are a, b"):
        cluster["c"]
    with pytest.raises(ValueError, match="num_hosts is between 1 and 26"):
        NamespaceCluster(0)

"""``hierdist launch`` on several hosts: ranks and hosts are lost, the one that leads among them, and come back."""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.cluster import NamespaceCluster
from tests.support.fresh import FreshRanks
from tests.support.processes import REPO_ROOT

PORT = 29400
SCRIPTS = REPO_ROOT / "tests" / "faults" / "scripts"
SECRET = {"HIERDIST_SECRET": "of the tests, and of nobody else"}
DEADLINE_S = 100.0

MakeCluster = Callable[..., NamespaceCluster]


def start(
    cluster: NamespaceCluster, script: list[str], *options: str, hosts: str = "ab", cwd: Path | None = None
) -> FreshRanks:
    """An agent on each of the hosts; the first two of the cluster may lead."""
    endpoints = ",".join(f"{cluster[name].address}:{PORT}" for name in "ab")
    commands = {
        name: [
            *["-m", "lightning_dist.cli", "launch", "--hosts=1:2", f"--host={name}", "--ranks-per-host=2"],
            *[f"--rendezvous={endpoints}", *options, "--", sys.executable, *script],
        ]
        for name in hosts
    }
    return cluster.start_on_hosts(commands, hosts=hosts, env=SECRET, cwd=cwd)


def test_it_goes_on_without_a_rank_and_without_the_host_that_leads(make_cluster: MakeCluster) -> None:
    plan = "1:3:kill,2:0:wait,2:1:wait,2:2:wait,2:3:wait"
    cluster = make_cluster(2)
    with start(cluster, [str(SCRIPTS / "elastic.py"), plan]) as hosts:
        for host in range(2):
            hosts.wait_for_output(host, "round 2, rank ", deadline_s=DEADLINE_S)
            assert hosts.output(host).count("round 1, rank ") == 2
        for host in range(2):
            printed = hosts.wait_for_output(host, "waits with child", deadline_s=DEADLINE_S)
            assert re.search(r"round 2, rank \d of 4", printed), "a host that is there takes part again"
        hosts.kill(0)  # it leads: its endpoint is the first
        _, second = hosts.wait(deadline_s=DEADLINE_S)
        second.check()
        done = re.findall(r"\[b:(\d)\] round 3, rank \1 of 2", second.stdout)
        assert sorted(done) == ["0", "1"]
        assert hosts.survivors(within_s=5) == []


@pytest.mark.timeout(240)
def test_a_slow_host_is_reported_and_nothing_is_ended(make_cluster: MakeCluster, tmp_path: Path) -> None:
    cluster = make_cluster(2)
    with start(cluster, [str(SCRIPTS / "slow_host.py")], cwd=tmp_path) as hosts:
        hosts.wait_for_output(0, "host b is slow: its own work takes ", deadline_s=DEADLINE_S)
        (tmp_path / "enough").touch()
        results = [result.check() for result in hosts.wait(deadline_s=DEADLINE_S)]
    printed = "".join(result.output for result in results)
    assert "they wait for it, training goes on" in printed
    assert "host a is slow" not in printed
    done = re.findall(r"rank (\d) of 4 is done in round 1", printed)
    assert sorted(done) == ["0", "1", "2", "3"]


@pytest.mark.sweep
@pytest.mark.timeout(300)
def test_processes_stay_on_all_hosts(make_cluster: MakeCluster, tmp_path: Path) -> None:
    """All but the rank that was killed; with ``elastic.in_place``."""
    cluster = make_cluster(2)
    with start(cluster, [str(SCRIPTS / "staying.py"), str(tmp_path), "1:3:3"]) as hosts:
        results = [result.check() for result in hosts.wait(deadline_s=DEADLINE_S)]
    printed = "".join(result.output for result in results)
    began = re.findall(r"round (\d+), rank (\d+), pid (\d+), after step (\d+)", printed)
    pids = {(int(number), int(rank)): pid for number, rank, pid, _ in began}
    assert set(pids) == {(number, rank) for number in (1, 2) for rank in range(4)}
    assert [pids[1, rank] == pids[2, rank] for rank in range(4)] == [True, True, True, False], printed
    assert {step for number, *_, step in began if number == "2"} == {"2"}
    assert len(set(re.findall(r"ends with (\w+)", printed))) == 1


@pytest.mark.sweep
@pytest.mark.timeout(300)
def test_a_host_that_is_preempted_loses_no_step(make_cluster: MakeCluster, tmp_path: Path) -> None:
    cluster = make_cluster(2)
    script = [
        *[str(SCRIPTS / "elastic_example.py"), "model=gpt-tiny", "data=synthetic", "trainer=debug", "monitor=off"],
        *["trainer.detect_anomaly=false", "trainer.max_steps=100000", "sample_bytes=0", "elastic=degrade"],
        *["checkpoint=async_sharded", "checkpoint.every_n_steps=1000", "name=preempted"],
    ]
    with start(cluster, script, "--run=preempted", cwd=tmp_path) as hosts:
        hosts.wait_for_output(0, "step 12 of 4 ranks", deadline_s=DEADLINE_S)
        hosts.kill(1, signal.SIGTERM)
        (left,) = hosts.wait(ranks=[1], deadline_s=DEADLINE_S)
        assert left.returncode == 143
        hosts.wait_for_output(0, "of 2 ranks", deadline_s=DEADLINE_S)
        (tmp_path / "enough").touch()
        (result,) = hosts.wait(ranks=[0], deadline_s=DEADLINE_S)
        result.check()
        done = [int(step) for step in re.findall(r"step (\d+) of 4 ranks", result.stdout)]
        again = [int(step) for step in re.findall(r"step (\d+) of 2 ranks", result.stdout)]
        assert done == list(range(1, done[-1] + 1))
        assert again[0] == done[-1] + 1, result.output


@pytest.mark.sweep
@pytest.mark.parametrize("interrupted", ["a", "b"], ids=["leader", "other"])
def test_an_interruption_on_one_host_ends_the_run_on_all(make_cluster: MakeCluster, interrupted: str) -> None:
    cluster = make_cluster(2)
    with start(cluster, [str(SCRIPTS / "elastic.py"), "1:0:wait,1:1:wait,1:2:wait,1:3:wait"]) as hosts:
        for host in range(2):
            hosts.wait_for_output(host, "waits with child", deadline_s=DEADLINE_S)
        hosts.kill("ab".index(interrupted), signal.SIGINT)
        results = hosts.wait(deadline_s=30)
        assert [result.returncode for result in results] == [130, 130]
        assert "round 2, rank" not in results[0].output + results[1].output
        assert hosts.survivors(within_s=5) == []

"""Rows of a parameter server on two hosts outlive a rank, a server and a host: they come from memory elsewhere."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.faults.scripts.served_hosts import HIT_AT, STEPS, ids_of, new_table
from tests.support.cluster import NamespaceCluster
from tests.support.processes import REPO_ROOT

PORT = 29400
SCRIPT = REPO_ROOT / "tests" / "faults" / "scripts" / "served_hosts.py"
SECRET = {"HIERDIST_SECRET": "of the tests, and of nobody else"}
DEADLINE_S = 150.0
SNAPSHOT = HIT_AT - 1  # each second step has one


def sum_in_one_process() -> float:
    table = new_table()
    optimizer = torch.optim.Adagrad(table.parameters(), lr=0.1)
    with torch.sparse.check_sparse_tensor_invariants(enable=False):  # said, so that torch does not warn of it
        for step in range(STEPS):
            optimizer.zero_grad()
            table(ids_of(step)).square().mean().backward()
            optimizer.step()
    return float(table.weight.detach().double().sum())


CASES = [("ranks", "rank", 4), ("ranks", "host", 2), ("processes", "server", 4), ("processes", "host", 2)]


@pytest.mark.sweep
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("servers", "whom", "then"), CASES)
def test_rows_come_back_from_memory(
    make_cluster: Callable[..., NamespaceCluster], tmp_path: Path, servers: str, whom: str, then: int
) -> None:
    cluster = make_cluster(2)
    endpoints = ",".join(f"{host.address}:{PORT}" for host in cluster.hosts.values())
    commands = {
        name: [
            *["-m", "lightning_dist.cli", "launch", "--hosts=1:2", f"--host={name}", "--ranks-per-host=2"],
            *[f"--rendezvous={endpoints}", "--run=rows", "--", sys.executable, SCRIPT],
            *[tmp_path / "checkpoints", servers, whom],
        ]
        for name in cluster.hosts
    }
    with cluster.start_on_hosts(commands, env=SECRET, cwd=tmp_path) as hosts:
        if whom == "host":
            hosts.wait_for_output(1, "waits to be hit", deadline_s=DEADLINE_S)
            hosts.kill(1)
        results = hosts.wait(deadline_s=DEADLINE_S)
        assert hosts.survivors(within_s=10) == []
    printed = "".join(result.output for result in results)
    began = re.findall(r"rank \d of (\d) begins at step (\d+)", printed)
    assert sorted(began) == sorted([("4", "0")] * 4 + [(str(then), str(SNAPSHOT))] * then), printed
    sums = [float(each) for each in re.findall(r"ends, sum (\S+)", printed)]
    assert len(sums) == then, printed
    assert sums == pytest.approx([sum_in_one_process()] * then, abs=1e-3)
    assert len(set(sums)) == 1

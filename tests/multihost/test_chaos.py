"""Each kind of fault hits the example under ``hierdist launch`` on two hosts: the run goes on, to its last step."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_dist.elastic.chaos.folder import ChaosFolder
from lightning_dist.elastic.chaos.plan import Plan, make_fault
from tests.support.cluster import NamespaceCluster
from tests.support.processes import REPO_ROOT
from tests.support.sweeps import sampled

PORT = 29400
SCRIPT = REPO_ROOT / "tests" / "faults" / "scripts" / "elastic_example.py"
SECRET = "of the tests, and of nobody else"
STEPS = 60
HELD_STEP = 40  # one host alone waits for the other before it, where it is to come back
DEADLINE_S = 280.0
KILLED = 137

EXAMPLE = [
    *["model=gpt-tiny", "data=synthetic", "trainer=debug", "monitor=off", "trainer.detect_anomaly=false"],
    *["sample_bytes=0", "name=hit", "elastic=degrade"],
    *["checkpoint=async_sharded", "checkpoint.every_n_steps=10"],
    *["checkpoint.replica=buddy", "checkpoint.memory_every_n_steps=2"],
]
LINK = {"interface": "eth0"}


def fault(kind: str, *, rank: int = 1, step: int = 20, **options: Any) -> dict[str, Any]:
    return {"kind": kind, "rank": rank, "step": step, **options}


# Faults, the sorted exit statuses of both hosts, and whether a host is lost that comes back.
CASES: dict[str, tuple[list[dict[str, Any]], list[int], bool]] = {
    "killed and cut off": ([fault("kill", step=10), fault("cut", **LINK, seconds=5)], [0, 0], False),
    "ranks": ([fault("exception", rank=0, step=20), fault("oom", step=30)], [0, 0], False),
    "cut in": ([fault("cut", **LINK, direction="in", seconds=5)], [0, 0], False),
    "cut out": ([fault("cut", **LINK, direction="out", seconds=5)], [0, 0], False),
    "exit": ([fault("exit", code=9)], [0, 0], False),
    "stop": ([fault("stop")], [0, 0], False),
    "full disk": ([fault("enospc", rank=0)], [0, 0], False),
    "torn": ([fault("torn", place="memory"), fault("torn", place="storage"), fault("kill")], [0, 0], False),
    "keeper": ([fault("keeper"), fault("kill")], [0, 0], False),
    "slow": (
        [fault("slow_host", seconds=2), fault("slow_link", **LINK, rate_mbit=2, seconds=2, step=40)],
        [0, 0],
        False,
    ),
    "store": ([fault("store")], [0, KILLED], False),
    "agent": ([fault("agent", seconds=1)], [0, 0], True),
    "host": ([fault("host")], [0, KILLED], False),
    "host comes back": ([fault("host", seconds=1)], [0, 0], True),
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("faults", "statuses", "returns"), sampled(CASES, always=["killed and cut off"]))
def test_a_run_that_is_hit_comes_to_its_last_step(
    make_cluster: Callable[..., NamespaceCluster],
    tmp_path: Path,
    faults: list[dict[str, Any]],
    statuses: list[int],
    returns: bool,
) -> None:
    cluster = make_cluster(2)
    plan = Plan(tuple(make_fault(**each) for each in faults))
    (tmp_path / "plan.yaml").write_text(plan.to_yaml())
    endpoints = ",".join(f"{host.address}:{PORT}" for host in cluster.hosts.values())
    commands = {
        name: [
            *["-m", "lightning_dist.cli", "chaos", "--plan", tmp_path / "plan.yaml", "--record", tmp_path / "chaos"],
            *["--host", name, "--", sys.executable, "-m", "lightning_dist.cli", "launch", "--hosts=1:2"],
            *[f"--host={name}", f"--rendezvous={endpoints}", f"--fence={tmp_path / 'fence'}", "--run=hit"],
            *[f"--record={tmp_path / 'record'}", "--", sys.executable, SCRIPT, *EXAMPLE, f"trainer.max_steps={STEPS}"],
            f"elastic.hang_floor_s={DEADLINE_S if returns else 8}",
        ]
        for name in cluster.hosts
    }
    (tmp_path / "fence").mkdir()
    if returns:  # it is waited for however long it takes: that is no hang
        (tmp_path / "hold_at").write_text(f"{HELD_STEP} 2")
    with cluster.start_on_hosts(commands, env={"HIERDIST_SECRET": SECRET}, cwd=tmp_path) as hosts:
        results = hosts.wait(deadline_s=DEADLINE_S)
    printed = "\n".join(result.output for result in results)
    record = ChaosFolder(tmp_path / "chaos").record()
    assert sorted(result.returncode for result in results) == statuses, printed
    injected = sorted(line["fault"] for line in record if line["what"] == "injected")
    assert injected == list(range(len(faults))), record
    assert all(line["left_behind"] == [] for line in record if line["what"] == "ended"), record
    assert f"step {STEPS} of " in printed
    if returns:
        assert f"step {STEPS} of 2 ranks" in printed

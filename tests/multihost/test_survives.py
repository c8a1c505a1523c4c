"""The example under ``hierdist launch``: something is lost, it goes on, and its numbers are as if nothing had been."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.support.cluster import NamespaceCluster
from tests.support.fresh import FreshRanks
from tests.support.ledger import RECORD_BYTES, check_epochs, read_steps, write_text
from tests.support.processes import REPO_ROOT

PORT = 29400
SCRIPT = REPO_ROOT / "tests" / "faults" / "scripts" / "elastic_example.py"
SECRET = {"HIERDIST_SECRET": "of the tests, and of nobody else"}
DEADLINE_S = 150.0
SAMPLES = 336  # 28 steps of 12: 4 ranks x 3, 3 x 2 x 2, 2 x 3 x 2
FAULT_AFTER, HELD_AT, STEPS = 12, 35, 45
EVEN, UNEVEN = {"a": 2, "b": 2}, {"a": 3, "b": 1}

MakeCluster = Callable[..., NamespaceCluster]


@dataclass(frozen=True)
class Drill:
    """What is trained where.

    Attributes:
        parallel: Overrides.
        ranks: Of each host.
        readers: So many ranks read the same samples.
    """

    parallel: tuple[str, ...]
    ranks: Mapping[str, int]
    readers: int = 1

    def start(self, cluster: NamespaceCluster, folder: Path, hosts: str = "ab") -> FreshRanks:
        """Agents; both hosts may lead, and "a" does if it is there."""
        folder.mkdir(exist_ok=True)
        (folder / "stop_at").write_text(str(STEPS))
        (folder / "hold_at").write_text(f"{HELD_AT} {sum(self.ranks.values())}")
        text = write_text(folder.parent / "text", SAMPLES)
        script = [
            *[str(SCRIPT), "model=gpt-tiny", "data=sharded", f"data.path={text}", f"data.seq_len={RECORD_BYTES}"],
            *["data.val_fraction=0", "data.batch_size=3", "data.lanes=12", "trainer=debug", "monitor=off"],
            *["trainer.limit_val_batches=0", "trainer.detect_anomaly=false", "trainer.max_steps=2000"],
            *["trainer.enable_progress_bar=false"],
            *["optimizer.eps=1e-3", "sample_bytes=0", "checkpoint=async_sharded", "checkpoint.every_n_steps=5"],
            *["name=survives", "elastic=degrade", "elastic.hang_floor_s=300", *self.parallel],
        ]
        endpoints = ",".join(f"{cluster[name].address}:{PORT}" for name in "ab")
        commands = {
            name: [
                *["-m", "lightning_dist.cli", "launch", "--hosts=1:2", f"--host={name}", f"--rendezvous={endpoints}"],
                *[f"--ranks-per-host={self.ranks[name]}", "--run=survives", f"--record={folder}"],
                *["--", sys.executable, *script],
            ]
            for name in hosts
        }
        return cluster.start_on_hosts(commands, hosts=hosts, env=SECRET, cwd=folder)

    def train_whole(self, cluster: NamespaceCluster, folder: Path) -> None:
        """A run in which nothing is lost."""
        with self.start(cluster, folder) as hosts:
            for result in hosts.wait(deadline_s=DEADLINE_S):
                result.check()


DRILLS = {
    **{name: Drill((f"parallel={name}",), EVEN) for name in ("ddp", "zero2", "zero3", "hsdp")},
    "pipeline": Drill(("parallel=pipeline", "parallel.pipeline.size=2"), EVEN, readers=2),
    **{f"uneven {name}": Drill((f"parallel={name}",), UNEVEN) for name in ("ddp", "zero3")},
}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("lost", "name"),
    [
        pytest.param(lost, name, marks=() if (lost, name) == ("leader", "zero3") else pytest.mark.sweep)
        for lost in ("rank", "host", "leader")
        for name in DRILLS
    ],
)
def test_the_example_survives(make_cluster: MakeCluster, tmp_path: Path, lost: str, name: str) -> None:
    """A lost host comes back, too: its agent is started again, and all four ranks go on together.

    What is left goes on until some later step, and waits for it there, so that each run has as many steps.
    """
    drill, cluster, folder = DRILLS[name], make_cluster(2), tmp_path / "run"
    with drill.start(cluster, folder) as hosts:
        hosts.wait_for_output(0, f"step {FAULT_AFTER} of 4 ranks", deadline_s=DEADLINE_S)
        if lost == "rank":
            pid = re.findall(r"\[b:\d\] pid (\d+)", hosts.output(1))[-1]
            os.kill(int(pid), signal.SIGKILL)
            hosts.wait_for_output(0, "round 2, after step ", deadline_s=DEADLINE_S)
            for result in hosts.wait(deadline_s=DEADLINE_S):
                result.check()
        else:
            victim = 0 if lost == "leader" else 1
            left = 1 - victim
            hosts.kill(victim)
            fewer = f" of {drill.ranks['ab'[left]]} ranks"
            hosts.wait_for_output(left, fewer, deadline_s=DEADLINE_S)
            with drill.start(cluster, folder, "ab"[victim]) as again:
                again.wait_for_output(0, "of 4 ranks", deadline_s=DEADLINE_S)
                (returned,) = again.wait(deadline_s=DEADLINE_S)
                returned.check()
            (result,) = hosts.wait(ranks=[left], deadline_s=DEADLINE_S)
            result.check()
    steps = read_steps(folder, readers=drill.readers)
    assert len(steps) == STEPS
    assert check_epochs(steps, SAMPLES) == STEPS * 12 // drill.readers // SAMPLES
    assert {step.ranks for step in steps.values()} == {4} if lost == "rank" else {4, drill.ranks["ab"[left]]}
    drill.train_whole(cluster, tmp_path / "whole")
    compare(folder, tmp_path / "whole", drill.readers)


@pytest.mark.sweep
@pytest.mark.timeout(600)
def test_a_pipeline_over_both_hosts_waits_for_the_one_that_is_lost(make_cluster: MakeCluster, tmp_path: Path) -> None:
    """Its stages do not fit the ranks that are left, so these are not started in vain."""
    drill = Drill(("parallel=pipeline", "parallel.pipeline.size=4"), EVEN, readers=4)
    cluster, folder = make_cluster(2), tmp_path / "run"
    with drill.start(cluster, folder) as hosts:
        hosts.wait_for_output(0, f"step {FAULT_AFTER} of 4 ranks", deadline_s=DEADLINE_S)
        hosts.kill(1)
        hosts.wait_for_output(0, "2 hosts of 2 ranks would fit", deadline_s=DEADLINE_S)
        with drill.start(cluster, folder, "b") as again:
            for result in (*again.wait(deadline_s=DEADLINE_S), *hosts.wait(ranks=[0], deadline_s=DEADLINE_S)):
                result.check()
            assert "round 2, after step " in hosts.output(0)
            assert "round 3" not in hosts.output(0)
    steps = read_steps(folder, readers=drill.readers)
    assert (len(steps), check_epochs(steps, SAMPLES)) == (STEPS, 0)  # one rank's batches, so 3 samples a step
    assert {step.ranks for step in steps.values()} == {4}


def compare(folder: Path, whole: Path, readers: int) -> None:
    """Samples, learning rates, losses and weights of a run with those of one in which nothing was lost.

    As long as there were as many ranks on the same places, they are equal; then sums are taken in another order.
    """
    got, expected = read_steps(folder, readers=readers), read_steps(whole, readers=readers)
    assert list(got) == list(expected)
    is_same = True
    for number, step in got.items():
        other = expected[number]
        assert step.samples == other.samples, f"step {number}"
        assert step.rate == other.rate, f"step {number}"
        is_same = is_same and step.seats == other.seats
        if is_same:
            assert all(other.losses[rank][: len(losses)] == losses for rank, losses in step.losses.items()), number
    weights, others = (torch.load(each / "weights.pt", weights_only=True) for each in (folder, whole))
    assert weights.keys() == others.keys()
    errors = {name: float((weights[name] - others[name]).abs().max()) for name in others}
    print(f"{len(got)} steps; weights differ by {max(errors.values()):.2g}")
    assert max(errors.values()) <= (0 if is_same else 1e-6), errors

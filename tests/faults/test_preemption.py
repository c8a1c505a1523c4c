"""A scheduler wants its machines back: signals to whole processes, with loader workers alive, and how these end."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from lightning_dist.checkpoint import catalog
from lightning_dist.checkpoint.storage import open_folder
from tests.support.fresh import Command, FreshRanks, FreshResult
from tests.support.processes import free_port
from tests.support.sweeps import sampled

pytestmark = pytest.mark.timeout(240)

SCRIPT = Path(__file__).parent / "scripts" / "preempted.py"
ROOT = Path(__file__).parents[2]
START_S, STOP_S = 90, 60

Send = Callable[[FreshRanks, int], None]


def to_one(ranks: FreshRanks, number: int) -> None:
    os.kill(ranks.pids[1], number)


def to_all(ranks: FreshRanks, number: int) -> None:
    """As schedulers and terminals do: each process of the job gets it, loader workers too."""
    for pid in ranks.pids:
        os.killpg(pid, number)


def started(folder: Path, *options: str, context: str = "fork", start: int = 1) -> FreshRanks:
    """Two ranks, as a launcher of a named run starts them."""
    environment = {"HIERDIST_RUN": "run", "HIERDIST_ROUND": str(start), "PYTHONPATH": str(ROOT)}
    return FreshRanks.local([str(SCRIPT), str(folder), context, *options], world_size=2, env=environment)


def wait_for(ranks: FreshRanks, text: str) -> None:
    for rank in range(len(ranks.pids)):
        ranks.wait_for_output(rank, text, deadline_s=START_S)


def begun(ranks: FreshRanks) -> int:
    """The step that all begin with."""
    wait_for(ranks, "under way")
    (step,) = {re.findall(r"begins at (\d+)", ranks.output(rank))[0] for rank in range(len(ranks.pids))}
    return int(step)


def ended(ranks: FreshRanks) -> list[FreshResult]:
    results = ranks.wait(deadline_s=STOP_S)
    assert ranks.survivors(within_s=10) == [], "loader workers end with their rank"
    return results


def saved(folder: Path) -> int:
    """The step of the only checkpoint in a folder; it is whole."""
    (found,) = catalog.survey(open_folder(folder))
    assert found.checkpoint is not None
    return int(re.findall(r"step=(\d+)", found.name)[0])


STOPS = {
    "all": (to_all, "fork"),
    "one rank": (to_one, "fork"),
    "all, workers spawned": (to_all, "spawn"),
}


@pytest.mark.parametrize(("send", "context"), sampled(STOPS, always=["all"]))
def test_sigterm_saves_and_ends_with_0(tmp_path: Path, send: Send, context: str) -> None:
    with started(tmp_path, context=context) as ranks:
        assert begun(ranks) == 0
        send(ranks, signal.SIGTERM)
        results = ended(ranks)
    assert [result.returncode for result in results] == [0, 0], results[0].output
    assert saved(tmp_path / "checkpoints") > 5
    assert "hierdist: stops after step" in results[0].output


@pytest.mark.sweep
def test_the_next_start_goes_on_there(tmp_path: Path) -> None:
    with started(tmp_path) as ranks:
        begun(ranks)
        to_all(ranks, signal.SIGTERM)
        ended(ranks)
    step = saved(tmp_path / "checkpoints")
    with started(tmp_path, start=2) as ranks:
        assert begun(ranks) == step


def test_a_second_signal_ends_at_once(tmp_path: Path) -> None:
    """In a step that does not end, nothing can be saved."""
    with started(tmp_path, "STUCK") as ranks:
        wait_for(ranks, "stuck")
        deadline, pause = time.monotonic() + STOP_S, threading.Event()
        while not all(_has_ended(pid) for pid in ranks.pids):
            assert time.monotonic() < deadline, ranks.output(0)
            for pid in ranks.pids:
                if not _has_ended(pid):
                    os.kill(pid, signal.SIGTERM)
            pause.wait(0.2)  # what comes at once is the same signal, passed on by others
        results = ended(ranks)
    assert [result.returncode for result in results] == [-signal.SIGTERM, -signal.SIGTERM], results[0].output


def _has_ended(pid: int) -> bool:
    """Without taking its status from who waits for it."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


@pytest.mark.parametrize("send", [to_all, pytest.param(to_one, marks=pytest.mark.sweep)])
def test_sigint_leaves_no_process(tmp_path: Path, send: Send) -> None:
    with started(tmp_path) as ranks:
        begun(ranks)
        send(ranks, signal.SIGINT)
        results = ended(ranks)
    assert all(result.returncode != 0 for result in results), results[0].output


SCONTROL = """#!/bin/sh
echo "$@" >> {folder}/scontrol.log
"""


def slurm_job(folder: Path, *, restarts: int) -> FreshRanks:
    """Two tasks with srun's variables, and an scontrol that only writes down what it is asked."""
    tools = folder / "bin"
    tools.mkdir(exist_ok=True)
    (tools / "scontrol").write_text(SCONTROL.format(folder=folder))
    (tools / "scontrol").chmod(0o755)
    common: Mapping[str, str] = {
        "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_JOB_NAME": "train",
        "SLURM_JOB_ID": "7",
        "SLURM_RESTART_COUNT": str(restarts),
        "SLURM_NODELIST": "127.0.0.1",
        "SLURM_NODEID": "0",
        "MASTER_PORT": str(free_port()),
        "PATH": f"{tools}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
    }
    argv = [str(SCRIPT), str(folder), "fork"]
    return FreshRanks([Command(argv, {**common, "SLURM_PROCID": task, "SLURM_LOCALID": task}) for task in "01"])


@pytest.mark.parametrize("goes_on", [False, pytest.param(True, marks=pytest.mark.sweep)])
def test_slurms_signal_saves_and_queues_the_job_again(tmp_path: Path, goes_on: bool) -> None:
    """``#SBATCH --signal=USR1@60``: to all processes of the job, a while before its time is over."""
    log = tmp_path / "scontrol.log"
    with slurm_job(tmp_path, restarts=0) as ranks:
        begun(ranks)
        to_all(ranks, signal.SIGUSR1)
        ranks.wait_for_output(0, "Requeued SLURM job: 7", deadline_s=STOP_S)
    assert log.read_text() == "requeue 7\n", "once"
    (path,) = tmp_path.glob("hpc_ckpt_*")
    catalog.open_checkpoint(open_folder(path), full=True)
    if goes_on:
        with slurm_job(tmp_path, restarts=1) as ranks:
            assert begun(ranks) > 5

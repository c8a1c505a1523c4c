"""What the launcher decides without starting a rank; and the bond between a child and its parent."""

from __future__ import annotations

import os
import pickle
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from hydra import compose, initialize
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import setup_globals
from omegaconf import DictConfig, OmegaConf

from lightning_dist import launch, parent_watch
from lightning_dist.errors import LaunchError
from lightning_dist.hydra_job import current_job
from lightning_dist.launch import check_environment

WATCH = Path(parent_watch.__file__)


@pytest.mark.parametrize(
    ("environ", "devices", "nodes"),
    [
        ({}, 8, 4),
        ({"WORLD_SIZE": "3"}, 2, 1),  # left over; without LOCAL_RANK nobody has started anything
        ({"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "0"}, 2, 2),
        ({"SLURM_NTASKS": "8", "SLURM_NTASKS_PER_NODE": "4", "SLURM_JOB_NAME": "train"}, 4, 2),
        ({"SLURM_NTASKS": "1", "SLURM_JOB_NAME": "bash"}, 4, 1),  # an interactive shell
        ({"LOCAL_RANK": "1", "WORLD_SIZE": "4"}, 2, 2),
        ({"LOCAL_RANK": "0", "HIERDIST_WORLD_SIZE": "2"}, 2, 1),
    ],
)
def test_what_fits_is_accepted(environ: dict[str, str], devices: int, nodes: int) -> None:
    check_environment(devices, nodes, environ)


@pytest.mark.parametrize(
    ("environ", "devices", "nodes", "says"),
    [
        (
            {"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"},
            3,
            1,
            "torchrun has started 4 ranks (WORLD_SIZE=4, 2 on this host), but the Trainer asks for devices=3 x "
            "num_nodes=1 = 3 ranks. Write Trainer(devices=2, num_nodes=2), or start torchrun with --nnodes=1 "
            "--nproc-per-node=3.",
        ),
        (
            {"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "1"},
            4,
            1,
            "Write Trainer(devices=1, num_nodes=4)",
        ),
        ({"SLURM_NTASKS": "8", "SLURM_NTASKS_PER_NODE": "4"}, 4, 1, "--nodes=1 --ntasks-per-node=4"),
        ({"LOCAL_RANK": "0", "WORLD_SIZE": "2"}, 4, 1, "set WORLD_SIZE=4, or unset LOCAL_RANK and WORLD_SIZE"),
        ({"LOCAL_RANK": "0", "HIERDIST_WORLD_SIZE": "2"}, 1, 1, "the same devices and num_nodes"),
        ({"LOCAL_RANK": "0", "WORLD_SIZE": "two"}, 2, 1, "WORLD_SIZE='two' in the environment is not a number"),
    ],
)
def test_what_does_not_fit_is_refused_with_advice(environ: dict[str, str], devices: int, nodes: int, says: str) -> None:
    with pytest.raises(LaunchError, match=re.escape(says)):
        check_environment(devices, nodes, environ)


@pytest.fixture
def hydra_job() -> Any:
    """Make a job as Hydra would set it up; returns the task's config."""

    def make(task: dict[str, Any], *, chdir: bool = False) -> DictConfig:
        with initialize(config_path=None, version_base="1.3"):
            config = compose(None, return_hydra_config=True)
        OmegaConf.set_struct(config, False)
        OmegaConf.set_readonly(config.hydra, False)
        config.hydra.runtime.output_dir = "/runs/1"
        config.hydra.runtime.cwd = "/home/me"
        config.hydra.job.chdir = chdir
        config.hydra.job.name = "app"
        config.merge_with(OmegaConf.create(task))
        HydraConfig.instance().set_config(config)
        return OmegaConf.create(task)

    setup_globals()
    yield make
    HydraConfig.instance().cfg = None


def test_without_hydra_there_is_no_job() -> None:
    assert current_job() is None


def test_values_that_differ_between_processes_are_fixed(hydra_job: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_PLACE", "here")
    task = hydra_job(
        {
            "moment": "${now:%f}",
            "folder": "${hydra:runtime.output_dir}/x",
            "place": "${oc.env:SECRET_PLACE}",
            "lr": 1,
            "twice": "${lr}",
            "nested": [{"name": "run-${now:%f}"}],
            "late": "${oc.select:lr}",
            "escaped": r"\${now:%f}",
            "missing": "???",
            "odd": "a=b c%d # 'x' \"y\", {z} ü",
        }
    )
    job = current_job(task)
    assert job is not None
    config = pickle.loads(job.pickled(rank=1))
    assert config.moment == task.moment
    assert config.nested[0].name == task.nested[0].name
    assert config.folder == "/runs/1/x"
    assert OmegaConf.to_container(config, resolve=False)["place"] == "here"  # type: ignore[call-overload,index]
    config.lr = 2
    assert config.twice == 2  # interpolations among values stay
    assert config.escaped == "${now:%f}"
    assert OmegaConf.is_missing(config, "missing")
    assert config.odd == task.odd


def test_each_rank_has_its_own_log_file(hydra_job: Any) -> None:
    hydra_job({})
    job = current_job()
    assert job is not None
    config = pickle.loads(job.pickled(rank=3))
    assert config.hydra.job_logging.handlers.file.filename == "/runs/1/app.rank3.log"
    assert config.hydra.job.name == "app"


@pytest.mark.parametrize(("chdir", "cwd"), [(False, "/home/me"), (True, "/runs/1")])
def test_a_rank_starts_where_the_job_runs(hydra_job: Any, chdir: bool, cwd: str) -> None:
    hydra_job({}, chdir=chdir)
    job = current_job()
    assert job is not None
    assert job.cwd == cwd
    assert job.command("/dev/fd/7")[-2:] == ["--experimental-rerun", "/dev/fd/7"]


def test_a_config_that_cannot_travel_is_refused(hydra_job: Any) -> None:
    hydra_job({})
    root = HydraConfig.get()._get_parent()  # type: ignore[attr-defined]
    root._set_flag("allow_objects", True)
    root.thing = lambda: None
    job = current_job()
    assert job is not None
    with pytest.raises(LaunchError, match="keep plain values in the config"):
        job.pickled(rank=1)


def test_ending_a_job_that_started_nothing_changes_nothing() -> None:
    before = dict(os.environ)
    assert launch.end_job() == 0
    launch.attach()
    assert dict(os.environ) == before


def test_job_passes_results_and_errors_on() -> None:
    assert launch.job(lambda config: config.x)(OmegaConf.create({"x": 1})) == 1

    @launch.job
    def fails(config: DictConfig) -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        fails(OmegaConf.create())


# -- the bond --------------------------------------------------------------------------------------------------------
# These run parent_watch.py alone, which imports nothing of ours, so that no test waits for torch.

PARENT = """
import importlib.util, os, subprocess, sys, time
spec = importlib.util.spec_from_file_location("watch", sys.argv[1])
watch = importlib.util.module_from_spec(spec); spec.loader.exec_module(watch)
mode = sys.argv[2]
read_fd, write_fd = os.pipe()
environment = {**os.environ, watch.PIPE_VARIABLE: watch.describe_pipe(read_fd)}
command = watch.bound_command([sys.executable, "-c", sys.argv[3], sys.argv[1], mode])
fds = () if mode == "closed" else (read_fd,)
child = subprocess.Popen(command, env=environment, pass_fds=fds, stdout=subprocess.PIPE, text=True)
os.close(read_fd)
print(child.pid, child.stdout.readline().strip(), flush=True)
time.sleep(60)
"""

CHILD = """
import importlib.util, os, sys, time, multiprocessing
spec = importlib.util.spec_from_file_location("watch", sys.argv[1])
watch = importlib.util.module_from_spec(spec); spec.loader.exec_module(watch)
worker = 0
if sys.argv[2] != "importing":
    watch.watch_parent()
    assert watch.PIPE_VARIABLE not in os.environ
    watch.watch_parent()
if sys.argv[2] == "worker":
    process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,), daemon=True)
    process.start()
    worker = process.pid
print(worker, flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("mode", ["importing", "watching", "closed", "worker"])
def test_a_child_ends_when_its_parent_is_killed(mode: str) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(WATCH), mode, CHILD],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    assert parent.stderr is not None
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    processes = [psutil.Process(pid) for pid in pids if pid]
    try:
        parent.send_signal(signal.SIGKILL)
        parent.wait()
        end = time.monotonic() + 2
        while any(_is_alive(process) for process in processes) and time.monotonic() < end:
            time.sleep(0.01)
        assert not [process for process in processes if _is_alive(process)]
    finally:
        for process in processes:
            if _is_alive(process):
                process.kill()
        parent.stdout.close()
        parent.stderr.close()


def test_a_process_that_was_not_launched_watches_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(parent_watch.PIPE_VARIABLE, raising=False)
    parent_watch.watch_parent()
    # Of another parent, which a program in between inherited; nobody is their own.
    monkeypatch.setenv(parent_watch.PIPE_VARIABLE, f"{os.getpid()}:0:0:0")
    parent_watch.watch_parent()


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False

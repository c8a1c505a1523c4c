"""Every way to start: by name, by script, torchrun, SLURM, spawn and fork; and how a run ends if a rank raises."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from lightning.pytorch.strategies import StrategyRegistry

from lightning_dist import HierDistStrategy
from tests.support.fresh import FreshRanks, FreshResult, run_script
from tests.support.processes import free_port

SCRIPT = Path(__file__).parent / "scripts" / "train.py"
STARTS = {"hierdist": "popen", "hierdist_spawn": "spawn", "hierdist_fork": "fork", "hierdist_notebook": "fork"}


@pytest.mark.parametrize("unused", ["", "_find_unused_parameters_true", "_find_unused_parameters_false"])
@pytest.mark.parametrize("name", STARTS)
def test_names_mirror_those_of_ddp(name: str, unused: str) -> None:
    ddp = name.replace("hierdist", "ddp") + unused
    assert ddp in StrategyRegistry
    strategy = StrategyRegistry.get(name + unused)
    assert isinstance(strategy, HierDistStrategy)
    assert strategy.start_method == STARTS[name]
    assert strategy.parallel_config.find_unused_parameters is (unused == "_find_unused_parameters_true")


def ends_of(output: str) -> dict[int, str]:
    """Rank -> what it ended with."""
    return {int(rank): rest for rank, rest in re.findall(r"rank (\d+) (of .*)", output)}


@pytest.fixture(scope="module")
def by_script() -> FreshResult:
    return run_script([SCRIPT], deadline_s=60).check()


def test_plain_script(by_script: FreshResult) -> None:
    ends = ends_of(by_script.stdout)
    assert sorted(ends) == [0, 1]
    assert ends[0] == ends[1]
    assert ends[0].startswith("of 2 HierDistStrategy")


@pytest.mark.parametrize("name", ["hierdist_spawn", "hierdist_fork", "hierdist_notebook_find_unused_parameters_true"])
def test_spawn_and_fork_train_alike(by_script: FreshResult, name: str) -> None:
    """The weights come back to the main process."""
    result = run_script([SCRIPT, "--strategy", name], deadline_s=60).check()
    ends = ends_of(result.stdout)
    assert ends == ends_of(by_script.stdout)
    assert f"main of rank 0 has {ends[0].split()[-1]} after 8 steps" in result.stdout


def test_ddp_ends_with_the_same_weights(by_script: FreshResult) -> None:
    result = run_script([SCRIPT, "--strategy", "ddp"], deadline_s=60).check()
    assert ends_of(result.stdout.replace("DDPStrategy", "HierDistStrategy")) == ends_of(by_script.stdout)


def test_torchrun(by_script: FreshResult) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--master-port", str(free_port())]
    result = run_script([*command, str(SCRIPT)], deadline_s=90).check()
    assert ends_of(result.stdout) == ends_of(by_script.stdout)


def test_slurm_variables(by_script: FreshResult) -> None:
    common = {
        "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": "1",
        "SLURM_JOB_NAME": "train",
        "SLURM_JOB_ID": str(free_port()),
        "SLURM_NODELIST": "127.0.0.1",
    }
    each = [
        {**common, "SLURM_PROCID": str(r), "SLURM_LOCALID": "0", "SLURM_NODEID": str(r), "RANK": "", "LOCAL_RANK": ""}
        for r in (0, 1)
    ]
    arguments = [SCRIPT, "--devices", "1", "--nodes", "2"]
    with FreshRanks.local(arguments, placement={"a": [0], "b": [1]}, env_per_rank=each) as ranks:
        results = [result.check() for result in ranks.wait(deadline_s=60)]
    assert ends_of("".join(result.stdout for result in results)) == ends_of(by_script.stdout)


@pytest.mark.parametrize(
    ("phase", "rank", "devices", "strategy"),
    [
        ("setup", 1, 2, "hierdist"),
        ("training", 0, 2, "hierdist"),
        ("training", 2, 3, "hierdist"),
        ("validation", 1, 2, "hierdist"),
        ("training", 1, 2, "hierdist_spawn"),
    ],
)
def test_a_rank_that_raises_ends_all(phase: str, rank: int, devices: int, strategy: str) -> None:
    arguments = ["--fail", phase, "--rank", str(rank), "--devices", str(devices), "--strategy", strategy]
    result = run_script([SCRIPT, *arguments], deadline_s=40)
    assert result.returncode != 0
    assert not result.survivors
    assert f"ValueError: no luck in {phase}" in result.output
    assert "Traceback" in result.output
    others = [int(r) for r in re.findall(r"rank (\d+) \(host [^)]*\): ", result.output)]
    if strategy == "hierdist":
        assert set(others) == set(range(devices)) - {rank}, "each other rank raises an error of its own"
        assert f"rank {rank} (host" in result.output
        assert f"no luck in {phase}" in "".join(re.findall(r"Error: rank \d+ \(host.*", result.output))

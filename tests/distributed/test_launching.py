"""Every way to start: by name, by script, torchrun, SLURM, spawn and fork; and how a run ends if a rank raises."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
from lightning.pytorch.strategies import StrategyRegistry

from lightning_dist import HierDistStrategy
from tests.support.fresh import Command, FreshRanks, FreshResult, run_script
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
    return run_script([SCRIPT], deadline_s=100).check()


def test_plain_script(by_script: FreshResult) -> None:
    ends = ends_of(by_script.stdout)
    assert sorted(ends) == [0, 1]
    assert ends[0] == ends[1]
    assert ends[0].startswith("of 2 HierDistStrategy")


@pytest.mark.parametrize("name", ["hierdist_spawn", "hierdist_fork_find_unused_parameters_true"])
def test_spawn_and_fork_train_alike(by_script: FreshResult, name: str) -> None:
    """The weights come back to the main process."""
    result = run_script([SCRIPT, "--strategy", name], deadline_s=100).check()
    ends = ends_of(result.stdout)
    assert ends == ends_of(by_script.stdout)
    assert f"main of rank 0 has {ends[0].split()[-1]}" in result.stdout


@pytest.mark.parametrize(
    ("first", "how", "second"),
    [
        ("hierdist", "fails", "hierdist_zero2_fork"),
        pytest.param("hierdist", "ends", "hierdist_spawn", marks=pytest.mark.sweep),
        pytest.param("ddp", "ends", "hierdist_fork", marks=pytest.mark.sweep),
    ],
)
def test_ranks_start_anew_after_a_fit_on_one(first: str, how: str, second: str) -> None:
    """Forked ranks took the group of that fit for theirs, and waited for ever."""
    printed = run_script([SCRIPT.with_name("one_then_two.py"), first, how, second], deadline_s=100).check().stdout
    assert ("caught the user's own" in printed) is (how == "fails")
    ended = re.findall(r"rank (\d of \d) has trained", printed)
    assert sorted(ended) == ["0 of 2", "1 of 2"] if how == "fails" else ["0 of 1", "0 of 2", "1 of 2"]


def test_torchrun(by_script: FreshResult) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--master-port", str(free_port())]
    result = run_script([*command, str(SCRIPT)], deadline_s=100).check()
    assert ends_of(result.stdout) == ends_of(by_script.stdout)


def test_slurm_variables(by_script: FreshResult) -> None:
    common = {
        "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_JOB_NAME": "train",
        "SLURM_JOB_ID": str(free_port()),
        "SLURM_NODELIST": "127.0.0.1",
        "SLURM_NODEID": "0",
        "MASTER_PORT": str(free_port()),
    }
    tasks = [Command([SCRIPT], {**common, "SLURM_PROCID": task, "SLURM_LOCALID": task}) for task in ("0", "1")]
    with FreshRanks(tasks) as ranks:
        results = [result.check() for result in ranks.wait(deadline_s=100)]
    assert ends_of("".join(result.stdout for result in results)) == ends_of(by_script.stdout)


def test_sigterm_on_a_started_rank_stops_all() -> None:
    result = run_script([SCRIPT, "--fail", "sigterm", "--rank", "1"], deadline_s=100).check()  # exit status 0, as ddp's
    stops = dict(re.findall(r"rank (\d+) stops at (\d+) by SIGTERMException", result.stdout))
    assert stops == {"0": "3", "1": "3"}
    assert not ends_of(result.stdout)


def test_a_rank_that_does_not_end_is_killed_and_the_run_has_failed() -> None:
    result = run_script([SCRIPT.with_name("late.py")], deadline_s=100)
    assert result.returncode == 128 + 9
    assert "rank 1 still runs 1 s after rank 0 ended; it is killed" in result.stderr


CLI_TRAINER = [
    "--trainer.accelerator=cpu",
    "--trainer.devices=2",
    "--trainer.max_epochs=2",
    "--trainer.logger=false",
    "--trainer.enable_checkpointing=false",
    "--trainer.enable_progress_bar=false",
]


@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param(["--trainer.strategy=hierdist"], marks=pytest.mark.sweep),
        ["--trainer.strategy=lightning_dist.HierDistStrategy", "--trainer.strategy.sync=flat"],
    ],
    ids=["name", "class"],
)
def test_lightning_cli(by_script: FreshResult, strategy: list[str]) -> None:
    pytest.importorskip("jsonargparse")
    script = SCRIPT.with_name("cli.py")
    root = {"PYTHONPATH": os.pathsep.join([str(SCRIPT.parents[3]), os.environ.get("PYTHONPATH", "")])}
    result = run_script([script, "fit", *strategy, *CLI_TRAINER], env=root, deadline_s=100).check()
    assert ends_of(result.stdout) == ends_of(by_script.stdout)


@pytest.mark.parametrize(
    ("phase", "rank", "devices"),
    [
        ("setup", 1, 2),
        ("training", 0, 2),
        pytest.param("validation", 2, 3, marks=pytest.mark.sweep),
    ],
)
def test_a_rank_that_raises_ends_all(phase: str, rank: int, devices: int) -> None:
    arguments = ["--fail", phase, "--rank", str(rank), "--devices", str(devices)]
    result = run_script([SCRIPT, *arguments], deadline_s=100)
    assert result.returncode != 0
    assert not result.survivors
    assert f"ValueError: no luck in {phase}" in result.output
    assert "Traceback" in result.output
    errors = dict(re.findall(r"Error: rank (\d+) (\(host .*)", result.output))
    assert {int(other) for other in errors} == set(range(devices)) - {rank}, "each other rank has an error of its own"
    for error in errors.values():
        assert re.search(rf"rank {rank} \(host [^)]*\) .*no luck in {phase}", error)

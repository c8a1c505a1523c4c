"""Ranks that the script starts itself: every way to begin and to end, plain and under Hydra."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.fresh import Command, FreshRanks, run_script
from tests.support.processes import free_port

APPS = Path(__file__).parent / "apps"
DEADLINE_S = 150  # a start takes seconds; on a busy machine many


def seen(folder: Path) -> list[dict[str, Any]]:
    """What the ranks wrote down, by rank."""
    return [json.loads(file.read_text(encoding="utf-8")) for file in sorted(folder.glob("rank*.json"))]


def run(mode: str, folder: Path) -> Any:
    return run_script([APPS / "script.py", mode, folder], deadline_s=DEADLINE_S)


@pytest.fixture(scope="module")
def three_trainers(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """How a script with three Trainers ended, of which the last wants another number of devices; and its folder."""
    folder = tmp_path_factory.mktemp("three-trainers")
    return run("three-trainers", folder), folder


def test_a_second_trainer_finds_the_ranks_of_the_first(three_trainers: tuple[Any, Path]) -> None:
    folder = three_trainers[1]
    first, second = seen(folder / "0"), seen(folder / "1")
    assert [facts["world_size"] for facts in first] == [2, 2]
    assert [facts["pid"] for facts in first] == [facts["pid"] for facts in second]


def test_another_number_of_devices_is_refused_in_the_same_script(three_trainers: tuple[Any, Path]) -> None:
    result = three_trainers[0]
    assert result.returncode == 1
    assert "an earlier Trainer of this script has started 2 ranks" in result.stderr
    assert not result.survivors


@pytest.mark.sweep  # tests/distributed/test_launching.py has ranks that raise, and asks for more
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_raises_ends_all_with_its_traceback(rank: int, tmp_path: Path) -> None:
    result = run(f"fail-rank-{rank}", tmp_path)
    assert result.returncode == 1
    assert f"ValueError: planned failure of rank {rank}" in result.stderr
    assert "Traceback" in result.stderr
    assert not result.survivors


def test_a_rank_that_fails_after_training_fails_the_run(tmp_path: Path) -> None:
    result = run("fails-after", tmp_path)
    assert result.returncode == 7
    assert "rank 1 ended with exit code 7" in result.stderr
    assert not result.survivors


def test_a_main_process_that_notices_nothing_is_ended_too(tmp_path: Path) -> None:
    result = run("stuck-main", tmp_path)
    assert result.returncode == 5
    assert "rank 1 ended with exit code 5" in result.stderr
    assert "rank 0 has not noticed within 5 s" in result.stderr
    assert not result.survivors


@pytest.mark.parametrize("mode", ["forever", "slow-import"])
def test_killing_the_main_process_leaves_no_process(mode: str, tmp_path: Path) -> None:
    with FreshRanks([Command([APPS / "script.py", mode, tmp_path])]) as main:
        end = time.monotonic() + DEADLINE_S
        mark = tmp_path / ("step3" if mode == "forever" else "pid1")  # while it trains; while the child imports
        while not mark.exists():
            assert time.monotonic() < end, main.output(0)
            time.sleep(0.02)
        main.kill(0)
        main.wait(deadline_s=5)
        assert not main.survivors(within_s=2.0)


SWEPT = ["a=b c, 50% #1", "it's"]
ODD = ['say "x", {y}', "ü/[1, 2]"]


@pytest.mark.parametrize("app", [pytest.param("plain_app.py", marks=pytest.mark.sweep), "job_app.py"])
def test_each_job_of_a_sweep_has_its_own_ranks_folder_and_values(app: str, tmp_path: Path) -> None:
    values = ",".join("'" + value.replace("'", r"\'") + "'" for value in SWEPT)
    run_script([APPS / app, "-m", f"text={values}"], cwd=tmp_path, deadline_s=DEADLINE_S).check()
    sweeps = list((tmp_path / "sweep").iterdir())
    assert len(sweeps) == 1
    assert sorted(path.name for path in sweeps[0].iterdir()) == ["0", "1", "multirun.yaml"]
    pids = set()
    for number, value in enumerate(SWEPT):
        folder = sweeps[0] / str(number)
        ranks = seen(folder)
        assert [facts["world_size"] for facts in ranks] == [2, 2]
        configs = [facts["config"] for facts in ranks]
        if app == "plain_app.py":  # without `launch.job` the task's own later `${now:}` is not known; see the docs
            for config in configs:
                del config["moment"]
        assert configs[0] == configs[1]
        assert configs[0]["text"] == configs[0]["follows"] == value + "!"
        assert configs[0]["folder"] == str(folder)
        pids.add(ranks[1]["pid"])
    assert len(pids) == 2
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("value", [ODD[0], *(pytest.param(value, marks=pytest.mark.sweep) for value in ODD[1:])])
def test_a_single_job_has_one_folder_and_keeps_its_values(value: str, tmp_path: Path) -> None:
    quoted = "'" + value.replace("'", r"\'") + "'"
    run_script(
        [APPS / "job_app.py", f"text={quoted}", "hydra.job.chdir=true"], cwd=tmp_path, deadline_s=DEADLINE_S
    ).check()
    folders = list((tmp_path / "out").iterdir())
    assert len(folders) == 1
    first, second = seen(folders[0])
    assert first["config"] == second["config"]
    assert first["config"]["text"] == value + "!"


@pytest.mark.parametrize("app", [pytest.param("plain_app.py", marks=pytest.mark.sweep), "job_app.py"])
def test_a_failed_job_fails_the_sweep_and_leaves_nothing(app: str, tmp_path: Path) -> None:
    result = run_script([APPS / app, "-m", "fail=true,false"], cwd=tmp_path, deadline_s=DEADLINE_S)
    assert result.returncode == 1
    assert "ValueError: planned failure of rank 1" in result.stderr
    assert not result.survivors
    (sweep,) = (tmp_path / "sweep").iterdir()
    assert len(seen(sweep / "1")) == 2  # the second job ran, on ranks of its own


def test_two_nodes_started_by_hand_start_their_own_ranks(tmp_path: Path) -> None:
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    argv = [APPS / "script.py", "two-nodes", tmp_path]
    with FreshRanks(Command(argv, {**meeting, "NODE_RANK": str(node)}) for node in range(2)) as nodes:
        for result in nodes.wait(deadline_s=DEADLINE_S):
            result.check()
    assert [facts["world_size"] for facts in seen(tmp_path)] == [4, 4, 4, 4]

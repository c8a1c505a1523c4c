"""Ranks of which one is killed under ``hierdist launch``: the other's process stays for the next round."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.fresh import FreshResult, run_script

SCRIPT = str(Path(__file__).parent / "scripts" / "staying.py")
DEADLINE_S = 120.0


class Began(NamedTuple):
    pid: int
    after_step: int
    files: int
    threads: int


def launch(folder: Path, plan: str, *options: str, logs: bool = False) -> FreshResult:
    command = ["-m", "lightning_dist.cli", "launch", "--host=h", "--ranks-per-host=2"]
    if logs:
        command.append(f"--logs={folder / 'logs'}")
    return run_script(
        [*command, "--", sys.executable, SCRIPT, str(folder), plan, *options], deadline_s=DEADLINE_S
    ).check()


def began(result: FreshResult) -> dict[tuple[int, int], Began]:
    """By round and rank."""
    line = r"round (\d+), rank (\d+), pid (\d+), after step (\d+), (\d+) files, (\d+) threads"
    found = [tuple(map(int, each)) for each in re.findall(line, result.stdout)]
    return {(number, rank): Began(*rest) for number, rank, *rest in found}


def weights(result: FreshResult) -> set[str]:
    found = re.findall(r"rank \d ends with (\w+)", result.stdout)
    assert len(found) == 2, result.output
    return set(found)


def test_the_other_ranks_process_stays_and_the_numbers_too(tmp_path: Path) -> None:
    """Rank 0 twice, then it is killed itself; the loaders have workers all the while."""
    result = launch(tmp_path / "a", "1:1:3,2:1:5,3:0:7", logs=True)
    found = began(result)
    assert {place: each.after_step for place, each in found.items()} == {
        (number, rank): (0, 2, 4, 6)[number - 1] for number in (1, 2, 3, 4) for rank in (0, 1)
    }
    zero, one = ([found[number, rank].pid for number in (1, 2, 3, 4)] for rank in (0, 1))
    assert zero[0] == zero[1] == zero[2] != zero[3], result.stderr
    assert one[2] == one[3], result.stderr
    assert len({*zero, *one}) == 5
    assert found[3, 0].files <= found[2, 0].files
    assert found[3, 0].threads <= found[2, 0].threads
    for number in (1, 2, 3, 4):
        assert f"round {number}, rank 0" in (tmp_path / f"a/logs/round-000{number}/rank-00000.log").read_text()
    assert weights(result) == weights(launch(tmp_path / "b", ""))


def test_a_script_that_does_not_run_twice_in_a_process_gets_another_one(tmp_path: Path) -> None:
    result = launch(tmp_path, "1:1:5", "--once")
    found = began(result)
    assert set(found) == {(number, rank) for number in (1, 2) for rank in (0, 1)}, "nobody was started once more"
    assert len({each.pid for each in found.values()}) == 4
    assert "could not go on (exit code 1: ValueError: runs once in a process)" in result.stderr
    assert len(weights(result)) == 1


@pytest.mark.sweep
@pytest.mark.parametrize("mode", ["zero1", "zero2", "zero3"])
def test_sharded_ranks(tmp_path: Path, mode: str) -> None:
    result = launch(tmp_path / "a", "1:1:5,2:0:7", f"--parallel={mode}")
    found = began(result)
    assert found[1, 0].pid == found[2, 0].pid
    assert found[2, 1].pid == found[3, 1].pid
    assert weights(result) == weights(launch(tmp_path / "b", "", f"--parallel={mode}"))


@pytest.mark.sweep
def test_who_does_not_ask_for_it_gets_new_processes(tmp_path: Path) -> None:
    result = launch(tmp_path, "1:1:5", "--new")
    assert len({each.pid for each in began(result).values()}) == 4
    assert "goes on in its process" not in result.stderr

"""``hierdist launch`` on one host, with ranks that fail: real agents, templates and ranks."""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.support.fresh import Command, FreshRanks, run_script

SCRIPT = str(Path(__file__).parent / "scripts" / "elastic.py")
DEADLINE_S = 60.0


def launch(plan: str, *options: str, num_ranks: int = 2, host: str = "h") -> list[str]:
    command = ["-m", "lightning_dist.cli", "launch", "--host", host, f"--ranks-per-host={num_ranks}", *options]
    return [*command, "--", sys.executable, SCRIPT, plan]


def test_failed_ranks_are_started_again_from_the_template(tmp_path: Path) -> None:
    result = run_script(launch("1:1:kill,2:0:raise", f"--logs={tmp_path}"), deadline_s=DEADLINE_S).check()
    began = re.findall(r"^\[h:(\d)\] round (\d), rank (\d) of 2, pid (\d+), 1 thread$", result.stdout, re.MULTILINE)
    assert sorted((int(number), int(rank)) for _, number, rank, _ in began) == [
        (number, rank) for number in (1, 2, 3) for rank in (0, 1)
    ]
    assert all(name == rank for name, _, rank, _ in began)
    assert len({pid for *_, pid in began}) == 6
    assert re.findall(r"\[h:(\d)\] rank \1 is done", result.stdout).count("0") == 1
    error = [line for line in result.stderr.splitlines() if "ValueError: planned for round 2" in line]
    assert error
    assert error[0].startswith("[h:0] ")
    assert "runpy" not in result.stderr  # the traceback is the script's own
    logs = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.log"))
    assert logs == [f"round-000{number}/rank-0000{rank}.log" for number in (1, 2, 3) for rank in (0, 1)]
    assert (tmp_path / "round-0003" / "rank-00001.log").read_text().endswith("rank 1 is done\n")


def test_ranks_that_do_not_fit_the_layout_are_not_started_again() -> None:
    """The strategy has told its agent what fits, and no other host can come."""
    script = str(Path(SCRIPT).with_name("split.py"))
    command = ["-m", "lightning_dist.cli", "launch", "--host=h", "--ranks-per-host=1", "--", sys.executable, script]
    result = run_script(command, deadline_s=DEADLINE_S)
    assert (result.returncode, result.survivors) == (1, ())
    (end,) = [line for line in result.stderr.splitlines() if "ends with exit code 1" in line]
    assert "1 rank does not make pipelines of 2; write parallel=ddp" in end
    assert "parallel.pipeline.size=2 does not fit the ranks that are there (h: 1); " in end
    assert "ranks in all must be a multiple of 2, so 2 hosts of 1 rank would fit" in end


@pytest.mark.timeout(240)
@pytest.mark.parametrize("how", ["heartbeat", pytest.param("sharded", marks=pytest.mark.sweep)])
def test_lightnings_ddp_goes_on_with_a_callback_of_ours(tmp_path: Path, how: str) -> None:
    script = str(Path(SCRIPT).with_name("killed_once.py"))
    launched = ["-m", "lightning_dist.cli", "launch", "--host=h", "--ranks-per-host=2", "--", sys.executable, script]
    ended = run_script([*launched, str(tmp_path), how], deadline_s=200).check()
    begun = re.findall(r"start (\d) begins at (\d+)", ended.stdout)
    assert sorted(begun) == [("0", "0"), ("0", "0"), ("1", "4"), ("1", "4")]
    assert "start 2 of this run goes on after step 4" in ended.output
    assert ended.stdout.count("ended at 8") == 2


@pytest.mark.sweep
def test_the_last_failure_is_the_exit_code() -> None:
    result = run_script(launch("1:1:exit", "--elastic=off"), deadline_s=DEADLINE_S)
    assert (result.returncode, result.survivors) == (7, ())
    assert "round 2" not in result.stdout
    assert "exit code 7" in result.stderr


def waiting(ranks: FreshRanks) -> list[int]:
    """Process ids of the ranks and of their children, once all wait."""
    for rank in (0, 1):
        ranks.wait_for_output(0, f"[h:{rank}] waits with child", deadline_s=DEADLINE_S)
    return [int(pid) for pid in re.findall(r"(?:pid|child) (\d+)", ranks.output(0))]


@pytest.mark.parametrize(
    ("signum", "code"),
    [
        (signal.SIGKILL, -signal.SIGKILL),
        pytest.param(signal.SIGTERM, 143, marks=pytest.mark.sweep),
        pytest.param(signal.SIGINT, 130, marks=pytest.mark.sweep),
    ],
    ids=["kill", "terminate", "interrupt"],
)
def test_nothing_is_left_of_an_agent_that_is_ended(signum: signal.Signals, code: int) -> None:
    with FreshRanks([Command(launch("1:0:wait,1:1:wait"))]) as ranks:
        pids = waiting(ranks)
        assert len(pids) == 4
        assert {"rank0", "rank1"} <= {Path(f"/proc/{pid}/comm").read_text().strip() for pid in pids}
        ranks.kill(0, signum)
        (result,) = ranks.wait(deadline_s=20)
        assert result.returncode == code
        assert ranks.survivors(within_s=5) == []


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("program", "expected"),
    [
        (["-m", "this"], "Beautiful is better than ugly."),
        ([sys.executable, "-O", "-c", "import os; print('rank', os.environ['RANK'], __debug__)"], "rank 0 False"),
        (["sh", "-c", "echo rank $RANK; exit $RANK"], "rank 1"),
    ],
    ids=["module", "other python", "program"],
)
def test_other_programs(program: list[str], expected: str) -> None:
    command = ["-m", "lightning_dist.cli", "launch", "--ranks-per-host=2", "--elastic=off", "--no-prefix"]
    result = run_script([*command, "--", *program], deadline_s=DEADLINE_S)
    assert expected in result.stdout.splitlines()
    assert result.returncode == (1 if "sh" in program else 0)
    assert result.survivors == ()


@pytest.mark.parametrize(
    ("arguments", "advice"),
    [
        (["--hosts=2", "--", SCRIPT], "needs --rendezvous"),
        (["--hosts=3:1", "--", SCRIPT], "write 1:3"),
        (["--ranks-per-host=0", "--", SCRIPT], "must be at least 1, got 0"),
        (["--rendezvous=a", "--", SCRIPT], "no host:port"),
        ([], "there is no command to run"),
        (["--", "absent.py"], "'absent.py' does not exist"),
        (["--hosts=2", "--rendezvous=127.0.0.1:29999", "--", SCRIPT], "several hosts need a secret"),
        (["--fence=/tmp/x", "--", SCRIPT], "--run NAME"),
        ([f"--record={SCRIPT}", "--", SCRIPT], "name another folder"),
    ],
)
def test_mistakes_are_refused_before_anything_starts(
    arguments: list[str],
    advice: str,
    command_line: Callable[[list[str]], tuple[int, str]],
) -> None:
    code, said = command_line(["launch", *arguments])
    assert code == 2
    assert advice in said


@pytest.fixture
def command_line(capsys: pytest.CaptureFixture[str]) -> Callable[[list[str]], tuple[int, str]]:
    from lightning_dist.cli import main

    def run(arguments: list[str]) -> tuple[int, str]:
        code = main(arguments)
        return code, capsys.readouterr().err

    return run


@pytest.mark.sweep
def test_ranks_die_with_the_template_and_start_again_from_another() -> None:
    with FreshRanks([Command(launch("1:0:wait,1:1:wait"))]) as ranks:
        rank, *_ = waiting(ranks)
        template = psutil.Process(rank).parent()
        assert template is not None
        template.kill()
        (result,) = ranks.wait(deadline_s=DEADLINE_S)
        assert result.returncode == 0
        assert result.stdout.count("round 2, rank ") == 2
        assert ranks.survivors(within_s=5) == []


@pytest.mark.sweep
def test_a_module_that_cannot_be_imported_is_named() -> None:
    result = run_script(launch("", "--preload=no_such_module"), deadline_s=DEADLINE_S)
    assert result.returncode == 2
    assert "no_such_module cannot be imported: ModuleNotFoundError" in result.stderr
    assert result.survivors == ()

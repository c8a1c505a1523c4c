"""Fresh processes: output, deadlines, signals, and that nothing survives."""

from __future__ import annotations

import signal

import pytest

from tests.support.failures import RanksFailed
from tests.support.fresh import FreshRanks, run_script
from tests.support.processes import pid_lives

PRINT_SEAT = "import os; print(os.environ['RANK'], os.environ['WORLD_SIZE'], os.environ['HIERDIST_HOST'])"
WAIT = "import signal; print('ready', flush=True); signal.pause()"
ORPHAN = (
    "import subprocess, sys; print(subprocess.Popen(['sleep', '1000'], start_new_session=True).pid, flush=True); {then}"
)


def test_a_script_runs_as_a_user_runs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "7")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    result = run_script(
        ["-c", "import os, sys; print(os.environ.get('RANK')); print('no', file=sys.stderr); sys.exit(3)"]
    )
    assert (result.returncode, result.stdout, result.stderr) == (3, "None\n", "no\n")
    with pytest.raises(RanksFailed, match="exit code 3"):
        result.check()


def test_ranks_get_a_launchers_variables() -> None:
    with FreshRanks.local(["-c", PRINT_SEAT], placement={"a": [1], "b": [0]}) as ranks:
        results = ranks.wait(deadline_s=30)
    assert [result.check().stdout for result in results] == ["0 2 b\n", "1 2 a\n"]


def test_a_hang_ends_by_the_deadline_with_stacks() -> None:
    with pytest.raises(RanksFailed, match="did not end within 3 s") as caught:
        run_script(["-c", WAIT], deadline_s=3.0)
    assert "ready" in str(caught.value)
    assert 'File "<string>", line 1 in <module>' in str(caught.value)


def test_ranks_can_be_killed_and_stopped() -> None:
    with FreshRanks.local(["-c", WAIT], world_size=2) as ranks:
        for rank in range(2):
            ranks.wait_for_output(rank, "ready", deadline_s=30)
        ranks.stop(0)
        ranks.kill(1)
        (killed,) = ranks.wait(deadline_s=30, ranks=[1])
        assert killed.returncode == -signal.SIGKILL
        pids = ranks.pids
    assert not any(pid_lives(pid) for pid in pids)


def test_output_that_does_not_come_is_an_error() -> None:
    with (
        FreshRanks.local(["-c", "print('other')"], world_size=1) as ranks,
        pytest.raises(RanksFailed, match="exit code 0 before it printed 'ready'"),
    ):
        ranks.wait_for_output(0, "ready", deadline_s=30)


def test_a_process_left_by_a_script_is_found_and_killed() -> None:
    result = run_script(["-c", ORPHAN.format(then="sys.exit(0)")], settle_s=0.0)
    assert "sleep 1000" in result.survivors[0]
    with pytest.raises(RanksFailed, match="left processes"):
        result.check()
    assert not pid_lives(int(result.stdout))


def test_nothing_survives_an_error_in_the_body() -> None:
    pids: list[int] = []

    def body() -> None:
        with FreshRanks.local(["-c", ORPHAN.format(then="import signal; signal.pause()")], world_size=1) as ranks:
            pids.extend([int(ranks.wait_for_output(0, "\n", deadline_s=30)), *ranks.pids])
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        body()
    assert len(pids) == 2
    assert not any(map(pid_lives, pids))

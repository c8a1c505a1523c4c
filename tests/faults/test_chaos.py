"""Each kind of fault happens to real processes, at its rank and step, once, and what lasts is put right."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from lightning_dist.build.injections import KeptCheckpoints
from lightning_dist.elastic.chaos import conductor as conducting
from lightning_dist.elastic.chaos.command import LaunchedCommand
from lightning_dist.elastic.chaos.conductor import Conductor, Ending
from lightning_dist.elastic.chaos.folder import ChaosFolder
from lightning_dist.elastic.chaos.host import memory_limit
from lightning_dist.elastic.chaos.host.refusal import Refused
from lightning_dist.elastic.chaos.plan import Plan, make_fault
from tests.support.sweeps import sampled

SCRIPTS = Path(__file__).parent / "scripts"
STEPS = 30


class Run:
    """What became of a command that was hit."""

    def __init__(self, folder: ChaosFolder, ending: Ending, said: list[str]) -> None:
        self.folder, self.ending, self.said = folder, ending, said
        self.record = folder.record()

    def lines(self, what: str) -> list[dict[str, Any]]:
        return [line for line in self.record if line["what"] == what]

    def only(self, what: str) -> dict[str, Any]:
        (line,) = self.lines(what)
        return line


@pytest.fixture
def hit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Run]:
    """Run a command in a folder of its own, and hit it."""
    monkeypatch.chdir(tmp_path)

    def run(faults: Sequence[dict[str, Any]], command: Sequence[str] = (), **environ: str) -> Run:
        plan = Plan(tuple(make_fault(**{"rank": 0, "step": 10, **fault}) for fault in faults))
        folder = ChaosFolder(tmp_path / "chaos")
        folder.make(plan)
        command = command or [sys.executable, str(SCRIPTS / "chaos_rank.py"), "0", str(STEPS)]
        launched = LaunchedCommand(command, folder=str(folder.path), host="here", environ={**os.environ, **environ})
        said: list[str] = []
        conductor = Conductor(folder, launched, host="here", kept=KeptCheckpoints(), say=said.append)
        deadline = threading.Timer(60.0, launched.kill_all)
        deadline.start()
        try:
            return Run(folder, conductor.run(), said)
        finally:
            deadline.cancel()
            deadline.join()

    return run


def launcher(num_ranks: int = 2, num_steps: int = STEPS) -> list[str]:
    return [sys.executable, str(SCRIPTS / "chaos_launcher.py"), str(num_ranks), str(num_steps)]


def steps(rank: int = 0) -> list[int]:
    return [int(step) for step in Path(f"steps.{rank}").read_text().split()]


ENDS: dict[str, tuple[dict[str, Any], int]] = {
    "kill": ({"kind": "kill"}, 128 + signal.SIGKILL),
    "exit": ({"kind": "exit", "code": 77}, 77),
    "exception": ({"kind": "exception"}, 1),
    "signal": ({"kind": "signal", "signal": "SIGTERM"}, 5),
    "agent": ({"kind": "agent"}, 128 + signal.SIGKILL),
    "host": ({"kind": "host"}, 128 + signal.SIGKILL),
}


@pytest.mark.parametrize(("fault", "status"), sampled(ENDS, always=["exit", "signal", "host"]))
def test_a_rank_ends_as_it_was_to(hit: Callable[..., Run], fault: dict[str, Any], status: int) -> None:
    run = hit([fault])
    assert run.ending == Ending(status, (), ())
    line = run.only("injected")
    assert (line["kind"], line["rank"], line["step"], line["host"]) == (fault["kind"], 0, 10, "here")
    assert steps() == list(range(10))
    assert any(said.startswith(f"injected {fault['kind']}") and "at step 10 of rank 0" in said for said in run.said)


def test_a_fault_happens_once_also_after_restarts(hit: Callable[..., Run]) -> None:
    faults = [{"kind": "kill", "rank": 1}, {"kind": "exit", "rank": 1, "step": 20}, {"kind": "exception", "rank": 0}]
    run = hit(faults, launcher())
    assert run.ending == Ending(0, (), ())
    assert sorted((line["kind"], line["rank"], line["step"]) for line in run.lines("injected")) == [
        ("exception", 0, 10),
        ("exit", 1, 20),
        ("kill", 1, 10),
    ]
    assert steps(0) == steps(1) == list(range(STEPS))


def test_a_step_that_is_never_reached_is_said(hit: Callable[..., Run]) -> None:
    run = hit([{"kind": "kill", "rank": 1}, {"kind": "kill", "step": STEPS}])
    assert run.ending.status == 0
    assert [(fault.rank, fault.step) for fault in run.ending.not_reached] == [(1, 10), (0, STEPS)]


def test_a_stopped_rank_goes_on(hit: Callable[..., Run]) -> None:
    run = hit([{"kind": "stop", "seconds": 0.2}])
    assert run.ending == Ending(0, (), ())
    assert run.only("undone")["detail"] == "it goes on"
    assert run.only("undone")["time"] - run.only("injected")["time"] >= 0.15
    assert steps() == list(range(STEPS))


def test_a_slow_host_is_stopped_again_and_again_and_then_not(hit: Callable[..., Run]) -> None:
    run = hit([{"kind": "slow_host", "seconds": 0.5, "share": 0.9}], launcher(1, 400))
    assert run.ending == Ending(0, (), ())
    assert run.only("undone")["detail"] == "its ranks run as before"
    assert steps() == list(range(400))


def test_the_kernel_kills_a_rank_for_want_of_memory(hit: Callable[..., Run]) -> None:
    try:
        memory_limit._hierarchy()
    except Refused as refusal:
        pytest.skip(str(refusal))
    run = hit([{"kind": "oom"}], launcher(1))
    assert run.ending == Ending(0, (), ())
    assert steps() == list(range(STEPS))
    if run.lines("refused"):
        pytest.skip(run.only("refused")["detail"])
    assert run.only("undone")["detail"] == "the kernel killed 1 processes in it"
    assert "64 MiB more" in run.only("injected")["detail"]


def test_without_memory_groups_the_reason_is_said_and_the_rank_lives(
    hit: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> None:
        raise Refused("no memory groups here")

    monkeypatch.setattr(memory_limit, "_hierarchy", refuse)
    run = hit([{"kind": "oom"}])
    assert run.ending == Ending(0, (), ())
    assert run.only("refused")["detail"] == "no memory groups here"
    assert steps() == list(range(STEPS))


def test_an_agent_and_a_host_come_back(hit: Callable[..., Run]) -> None:
    run = hit([{"kind": "host", "seconds": 0.1}, {"kind": "agent", "step": 20, "seconds": 0.1}], launcher())
    assert run.ending.status == 0
    assert [line["detail"] for line in run.lines("undone")] == ["the command is started again"] * 2
    assert [line["kind"] for line in run.lines("injected")] == ["host", "agent"]
    assert steps()[-1] == STEPS - 1


def test_ranks_that_outlive_their_agent_are_found_and_killed(
    hit: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conducting, "LEFT_BEHIND_S", 0.2)
    run = hit([{"kind": "agent"}], launcher(2, 100_000))
    assert run.ending.status == 128 + signal.SIGKILL
    assert len(run.ending.left_behind) == 2
    assert all("chaos_rank.py" in process for process in run.ending.left_behind)
    assert run.only("ended")["left_behind"] == list(run.ending.left_behind)


def test_the_holder_of_the_store_is_killed(hit: Callable[..., Run]) -> None:
    code = (
        "import os, socket, subprocess, sys\n"
        "listening = socket.create_server(('127.0.0.1', 0))\n"
        "port = str(listening.getsockname()[1])\n"
        "os.environ.update(MASTER_ADDR='127.0.0.1', MASTER_PORT=port)\n"
        f"subprocess.run([sys.executable, {str(SCRIPTS / 'chaos_rank.py')!r}, '0', '{STEPS}'])\n"
    )
    run = hit([{"kind": "store", "seconds": 0.1}], [sys.executable, "-c", code])
    assert run.ending == Ending(0, (), ())
    assert run.only("undone")["detail"] == "the command is started again"
    assert "listening = socket.create_server" in run.only("injected")["detail"]


def test_without_a_store_the_reason_is_said(hit: Callable[..., Run]) -> None:
    run = hit([{"kind": "store"}], MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    assert run.ending.status == 0
    assert "nobody that may be seen listens on port 1" in run.only("refused")["detail"]


def test_the_newest_committed_checkpoint_on_disk_is_torn(hit: Callable[..., Run], tmp_path: Path) -> None:
    for age, name in enumerate(["old", "new", "unfinished"]):
        folder = tmp_path / "saved" / name
        folder.mkdir(parents=True)
        (folder / "small").write_bytes(b"1" * 10)
        (folder / "large").write_bytes(b"1" * 1000)
        if name != "unfinished":
            (folder / "COMMITTED").write_bytes(b"{}")
            os.utime(folder / "COMMITTED", (age, age))
    run = hit([{"kind": "torn"}, {"kind": "torn", "place": "memory"}], SAVES_TO=str(tmp_path / "saved"))
    assert run.ending.status == 0
    sizes = {name: (tmp_path / "saved" / name / "large").stat().st_size for name in ("old", "new", "unfinished")}
    assert sizes == {"old": 1000, "new": 500, "unfinished": 1000}
    assert "large has 500 of 1000 bytes" in run.only("injected")["detail"]
    assert "no process keeps checkpoints of" in run.only("refused")["detail"]


def test_a_run_that_saves_nowhere_is_told_what_to_write(hit: Callable[..., Run]) -> None:
    run = hit([{"kind": "torn"}, {"kind": "keeper"}])
    assert [line["detail"] for line in run.lines("refused")] == [
        "it is not known where the run saves to; write folder: FOLDER in the plan"
    ] * 2


def test_a_link_that_is_not_there_is_refused(hit: Callable[..., Run]) -> None:
    run = hit([{"kind": "cut", "interface": "nosuch0"}])
    assert run.ending.status == 0
    assert "nosuch0" in run.only("refused")["detail"]

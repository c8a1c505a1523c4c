"""``hierdist chaos``: what it prints, returns, passes on and refuses."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lightning_dist.cli import main
from lightning_dist.elastic.chaos.folder import VARIABLE, ChaosFolder
from lightning_dist.elastic.chaos.kinds import KINDS
from lightning_dist.elastic.chaos.plan import parse

RANK = str(Path(__file__).parent / "scripts" / "chaos_rank.py")
DEADLINE_S = 60.0


@pytest.fixture(autouse=True)
def in_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("plan.yaml").write_text("faults: [{kind: exit, rank: 0, step: 3, code: 7}, {kind: kill, rank: 5, step: 1}]")


def test_a_run_is_hit_and_its_end_is_said(capfd: pytest.CaptureFixture[str]) -> None:
    words = ["chaos", "--plan", "plan.yaml", "--record", "record", "--host", "a", "--", sys.executable, RANK, "0", "9"]
    assert main(words) == 7
    said = capfd.readouterr().err.splitlines()
    assert said == [
        "hierdist chaos: began on a",
        "hierdist chaos: injected exit code=7 at step 3 of rank 0 on a",
        "hierdist chaos: ended on a with 7",
        "hierdist chaos: not reached: kill at rank 5, step 1",
        "hierdist chaos: the command ended with 7; record: record/chaos.jsonl",
    ]
    assert main(words) == 0  # it goes on, and is not hit again
    assert "1 of the plan's faults have happened already" in capfd.readouterr().err


def test_the_command_has_the_host_s_name(capfd: pytest.CaptureFixture[str]) -> None:
    words = ["--", sys.executable, "-c", "import os; print(os.environ['HIERDIST_HOST'])"]
    assert main(["chaos", "--plan", "plan.yaml", "--host", "a", *words]) == 0
    assert capfd.readouterr().out == "a\n"


def test_a_folder_of_another_plan_is_refused(capfd: pytest.CaptureFixture[str]) -> None:
    words = ["--record", "record", "--", sys.executable, "-c", "0"]
    assert main(["chaos", "--plan", "plan.yaml", *words]) == 0
    Path("other.yaml").write_text("faults: []")
    assert main(["chaos", "--plan", "other.yaml", *words]) == 2
    assert "belongs to another plan; name another folder with --record" in capfd.readouterr().err


@contextlib.contextmanager
def asking_to_end(once: Callable[[], bool]) -> Iterator[None]:
    """Sends this process SIGTERM as soon as something is so."""

    def ask() -> None:
        end = time.monotonic() + DEADLINE_S
        while not once() and time.monotonic() < end:
            time.sleep(0.005)
        os.kill(os.getpid(), signal.SIGTERM)

    asking = threading.Thread(target=ask)
    before = signal.getsignal(signal.SIGTERM)
    asking.start()
    try:
        yield
    finally:
        asking.join()
    assert signal.getsignal(signal.SIGTERM) is before


def test_signals_are_passed_on() -> None:
    with asking_to_end(Path("steps.1").exists):
        assert main(["chaos", "--plan", "plan.yaml", "--", sys.executable, RANK, "1", "100000"]) == 5


def test_a_command_that_is_asked_to_end_while_it_is_down_is_not_started_again() -> None:
    Path("back.yaml").write_text("faults: [{kind: agent, rank: 0, step: 3, seconds: 600}]")
    record = ChaosFolder(Path("record").absolute())
    words = ["--record", "record", "--", sys.executable, RANK, "0", "9"]
    with asking_to_end(lambda: any(line["what"] == "injected" for line in record.record())):
        assert main(["chaos", "--plan", "back.yaml", *words]) == 128 + signal.SIGKILL


def test_a_drawn_plan_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "chaos",
        "--seed",
        "3",
        "--faults",
        "4",
        "--ranks",
        "2",
        "--steps",
        "50",
        "--kinds",
        "kill,exit",
        "--print",
    ]
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert {fault.kind for fault in parse(printed).faults} == {"kill", "exit"}
    assert main(words) == 0
    assert capsys.readouterr().out == printed


def test_kinds_are_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chaos", "--kinds-help"]) == 0
    said = capsys.readouterr().out
    assert all(f"  {name}" in said for name in KINDS)
    assert "rate_mbit (needed)" in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--plan", "plan.yaml"], "there is no command to launch"),
        (["--", "true"], "give either --plan FILE or --seed N"),
        (["--plan", "plan.yaml", "--seed", "1", "--", "true"], "give either --plan FILE or --seed N"),
        (["--seed", "1", "--steps", "9", "--", "true"], "--seed needs --ranks"),
        (["--plan", "none.yaml", "--", "true"], "none.yaml cannot be read"),
        (["--plan", "plan.yaml", "--", "no-such-program"], "no-such-program cannot be started"),
        (["--plan", "plan.yaml", "--record", "s3://a/b", "--", "true"], "is a URL"),
    ],
)
def test_mistakes_are_said(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chaos", *words]) == 2
    assert said in capsys.readouterr().err
    assert not Path("chaos").exists()


def test_chaos_in_chaos_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv(VARIABLE, "somewhere")
    assert main(["chaos", "--plan", "plan.yaml", "--", "true"]) == 2
    assert "launched by hierdist chaos already" in capsys.readouterr().err

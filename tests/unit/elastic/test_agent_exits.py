"""Why a rank has ended."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lightning_dist.elastic.agent.exits import Exit, MemoryKills, exit_of
from lightning_dist.elastic.chaos.host import memory_limit
from lightning_dist.elastic.chaos.host.processes import Process
from lightning_dist.elastic.chaos.host.refusal import Refused
from lightning_dist.elastic.policy.events import Cause


def ended(status: int, words: Path, *, short: Callable[[], bool] = lambda: False) -> Exit:
    return exit_of(1, status, words=words, was_short_of_memory=short)


def test_one_that_ended_well_is_no_failure(tmp_path: Path) -> None:
    assert ended(0, tmp_path / "words").cause is None


def test_its_last_words_are_told(tmp_path: Path) -> None:
    words = tmp_path / "words"
    words.write_text(json.dumps({"error": "ValueError: loss\nis nan", "last_collective": "all_reduce 7"}))
    said = "ValueError: loss is nan (last collective: all_reduce 7)"
    assert ended(1, words) == Exit(1, 1, Cause.EXIT, f"exit code 1: {said}", words=said)


@pytest.mark.parametrize("text", ["", "[1]", '{"error"', "{}"])
def test_words_that_cannot_be_read_are_no_failure_of_ours(tmp_path: Path, text: str) -> None:
    words = tmp_path / "words"
    words.write_text(text)
    assert ended(3, words).detail == "exit code 3"


def test_long_words_are_cut(tmp_path: Path) -> None:
    words = tmp_path / "words"
    words.write_text(json.dumps({"error": "ValueError: tensor(" + "0., " * 1_000_000}))
    detail = ended(1, words).detail
    assert detail.startswith("exit code 1: ValueError: tensor(0., ")
    assert len(detail) < 3000


def test_who_accuses_another_rank_is_not_to_blame(tmp_path: Path) -> None:
    words = tmp_path / "words"
    words.write_text(json.dumps({"error": "PeerLostError: rank 0 (host a) lost rank 3 (host b)"}))
    assert ended(1, words).is_consequence
    words.write_text(json.dumps({"error": "ValueError: no"}))
    assert not ended(1, words).is_consequence


def test_signals_have_names(tmp_path: Path) -> None:
    found = ended(-signal.SIGSEGV, tmp_path / "words")
    assert (found.cause, found.detail) == (Cause.SIGNAL, "killed by SIGSEGV")


def test_the_kernels_kill_for_memory_is_told_from_others(tmp_path: Path) -> None:
    counter = tmp_path / "memory.events"
    counter.write_text("low 0\noom 0\noom_kill 4\noom_group_kill 0\n")
    kills = MemoryKills([tmp_path / "absent", counter])

    def cause() -> Cause | None:
        return ended(-signal.SIGKILL, tmp_path / "words", short=kills.take).cause

    assert cause() is Cause.SIGNAL
    counter.write_text("low 0\noom 1\noom_kill 6\noom_group_kill 0\n")
    assert [cause() for _ in range(3)] == [Cause.OUT_OF_MEMORY, Cause.OUT_OF_MEMORY, Cause.SIGNAL]
    counter.write_text("low 0\noom 1\noom_kill 7\noom_group_kill 0\n")
    kills.forget()  # it was of another round
    assert cause() is Cause.SIGNAL


def test_this_machine_has_a_counter_of_kills() -> None:
    counters = MemoryKills()._counters
    assert counters
    assert all("oom_kill " in path.read_text() for path in counters)


def test_a_rank_that_the_kernel_has_killed_in_a_group_of_its_own_is_found(tmp_path: Path) -> None:
    kills = MemoryKills()
    greedy = "import sys; sys.stdin.readline(); bytearray(1 << 30)"
    with subprocess.Popen([sys.executable, "-c", greedy], stdin=subprocess.PIPE) as process:
        try:
            victim = Process.of(process.pid)
            assert victim is not None
            group = memory_limit.bound(victim)
        except Refused as refusal:
            process.kill()
            pytest.skip(str(refusal))
        try:
            process.communicate(b"\n", timeout=60)
            found = ended(process.returncode, tmp_path / "words", short=kills.take)
        finally:
            process.kill()
            process.wait()
            group.remove()
    assert found.cause is Cause.OUT_OF_MEMORY
    assert not kills.take()  # and what is gone with its group does no harm

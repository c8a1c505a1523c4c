"""What the hosts of one experiment say to each other, over loopback."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from lightning_dist.errors import ConfigError, LaunchError
from lightning_dist.experiment import hosts
from lightning_dist.experiment.arms import Experiment, RunName
from lightning_dist.experiment.hosts import FirstHost, OtherHost
from lightning_dist.experiment.store import Outcome

SECRET = b"a secret of a test, long enough"
EXPERIMENT = Experiment(a=("lr=0.1",), b=("lr=0.2",), command=("python", "train.py"), steps=4)
GOOD = Outcome(is_good=True, why="", seconds=1.0)
BAD = Outcome(is_good=False, why="it ended with status 1", seconds=1.0, last_words=("ValueError: no",))


@contextmanager
def first_host(other: Callable[[tuple[str, int]], Any], said: list[str]) -> Iterator[tuple[FirstHost, Any]]:
    """The first of two hosts, which have met; the other one's part runs in a thread."""
    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(20)
    with (
        ThreadPoolExecutor(1) as pool,
        FirstHost(listener, num_hosts=2, secret=SECRET, experiment=EXPERIMENT, say=said.append) as first,
    ):
        future = pool.submit(other, listener.getsockname())
        first.gather()
        yield first, future


def meet(address: tuple[str, int], *, secret: bytes = SECRET, experiment: Experiment = EXPERIMENT) -> OtherHost:
    connection = socket.create_connection(address, timeout=20)
    return OtherHost(connection, secret=secret, host="b", experiment=experiment)


def curve_of(folder: Path, text: str) -> Path:
    folder.mkdir()
    (folder / "curve-rank-00001.jsonl").write_text(text)
    return folder


def test_curves_of_the_other_host_come_to_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "_PIECE", 5)

    def other(address: tuple[str, int]) -> Any:
        with meet(address) as there:
            name = there.next_run()
            there.ended(GOOD, curve_of(tmp_path / "other", "twelve bytes"))
            return name, there.next_run()

    here = tmp_path / "here"
    here.mkdir()
    with first_host(other, []) as (first, future):
        first.begin(RunName("b", 3))
        assert first.end(GOOD, here) == GOOD
        first.over("safe here", 0)
        assert future.result(20) == (RunName("b", 3), ("safe here", 0))
    assert (here / "curve-rank-00001.jsonl").read_text() == "twelve bytes"


def test_a_failure_there_ends_the_run_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "GRACE_S", 0.0)
    has_ended = threading.Event()

    def other(address: tuple[str, int]) -> None:
        with meet(address) as there:
            there.next_run()
            there.ended(BAD, tmp_path / "nothing")
            has_ended.set()
            there.next_run()

    with first_host(other, []) as (first, _):
        first.begin(RunName("a", 0))
        assert first.watch() == "" or has_ended.is_set()
        assert has_ended.wait(20)
        while not (why := first.watch()):
            pass
        assert why == "on b it ended with status 1"
        seen = first.end(Outcome(is_good=False, why=why, seconds=1.0, last_words=("ended by SIGTERM",)), tmp_path)
        assert not seen.is_good
        assert seen.last_words == BAD.last_words
        first.over("", 3)


def test_a_failure_here_ends_the_run_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "GRACE_S", 0.0)

    def other(address: tuple[str, int]) -> str:
        with meet(address) as there:
            there.next_run()
            while not (why := there.watch()):
                pass
            there.ended(BAD, tmp_path / "nothing")
            there.next_run()
            return why

    with first_host(other, []) as (first, future):
        first.begin(RunName("a", 0))
        assert first.end(BAD, tmp_path) == BAD
        first.over("", 3)
        assert future.result(20) == "it has failed on another host"


def test_a_host_that_leaves_is_an_error(tmp_path: Path) -> None:
    def other(address: tuple[str, int]) -> None:
        with meet(address) as there:
            there.next_run()

    with first_host(other, []) as (first, _):
        first.begin(RunName("a", 0))
        with pytest.raises(LaunchError, match="host b has left"):
            first.end(GOOD, tmp_path)


def test_a_first_host_that_leaves_is_an_error() -> None:
    def other(address: tuple[str, int]) -> None:
        with meet(address) as there, pytest.raises(LaunchError, match="the first host has ended"):
            there.next_run()

    with first_host(other, []) as (_, future):
        pass
    assert future.result(20) is None


def test_strangers_and_other_experiments_are_turned_away() -> None:
    def other(address: tuple[str, int]) -> None:
        with pytest.raises(LaunchError, match="does not take this one"):
            meet(address, secret=b"another secret, just as long")
        steps = Experiment(a=("lr=0.1",), b=("lr=0.2",), command=("python", "train.py"), steps=5)
        with pytest.raises(ConfigError, match="steps is 5 on b, and 4 on the first host"):
            meet(address, experiment=steps)
        with meet(address) as there:
            there.next_run()

    said: list[str] = []
    with first_host(other, said) as (first, future):
        first.over("", 0)
        future.result(20)
    assert [line.partition(":")[0] for line in said] == [
        "127.0.0.1 is turned away",
        "127.0.0.1 is turned away",
        "b is here",
    ]

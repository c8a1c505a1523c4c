"""Which processes stay for the next round, and what is left of a script in one that does."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import pytest

from lightning_dist.elastic.agent.environment import rank_environment
from lightning_dist.elastic.agent.ground import Ground
from lightning_dist.elastic.agent.staying import is_same_place, next_file, send_on, wait_for_next
from lightning_dist.elastic.rounds import Round, Seat

A, B, C = (Seat(name, f"10.0.0.{number}", 2, 4000) for number, name in enumerate("abc"))


def environment(number: int, seats: tuple[Seat, ...], *, host: str = "b", port: int = 4000) -> dict[str, str]:
    found = Round(number=number, seats=seats, run="r")
    return rank_environment(
        {"HOME": "/h"}, round=found, host=host, local_rank=1, master=(seats[0].address, port), folder=Path("/agent")
    )


@pytest.mark.parametrize(
    ("seats", "stays"),
    [
        pytest.param((A, B), True, id="the same hosts"),
        pytest.param((C, B), True, id="another host in the place of one"),
        pytest.param((B, A), False, id="another rank"),
        pytest.param((A, B, C), False, id="more ranks"),
        pytest.param((B,), False, id="fewer ranks"),
    ],
)
def test_a_process_stays_where_nothing_but_the_round_is_another(seats: tuple[Seat, ...], stays: bool) -> None:
    assert is_same_place(environment(1, (A, B)), environment(2, seats, port=5000)) is stays


def test_a_process_that_waits_hears_the_next_rounds_variables_once(tmp_path: Path) -> None:
    assert wait_for_next(tmp_path, 1, timeout_s=0) is None
    send_on(tmp_path, 1, {"RANK": "1", "TEXT": "ä\n"})
    assert wait_for_next(tmp_path, 0, timeout_s=0) is None
    assert wait_for_next(tmp_path, 1, timeout_s=0) == {"RANK": "1", "TEXT": "ä\n"}
    assert not next_file(tmp_path, 1).exists()


@pytest.fixture
def ground() -> Ground:
    return Ground((signal.SIGUSR2,))


def test_what_a_script_has_changed_is_put_back(ground: Ground) -> None:
    before = (signal.getsignal(signal.SIGUSR2), sys.stdout, list(sys.path), list(warnings.filters), sys.excepthook)
    handlers = list(logging.getLogger().handlers)
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    with open(os.devnull, "w") as nowhere:
        sys.stdout = nowhere
        sys.path.append("/nowhere")
        warnings.simplefilter("ignore")
        sys.excepthook = lambda *_: None
        logging.getLogger().addHandler(logging.NullHandler())
        assert ground.restore() is None
    after = (signal.getsignal(signal.SIGUSR2), sys.stdout, list(sys.path), list(warnings.filters), sys.excepthook)
    assert after == before
    assert logging.getLogger().handlers == handlers


def test_a_process_with_something_of_the_script_in_it_does_not_stay(ground: Ground) -> None:
    ending = threading.Event()
    thread = threading.Thread(target=ending.wait, name="poller")
    thread.start()
    try:
        assert ground.restore() == "the thread 'poller' of the script still runs"
    finally:
        ending.set()
        thread.join()
    assert ground.restore() is None
    with subprocess.Popen([sys.executable, "-I", "-S", "-c", "input()"], stdin=subprocess.PIPE) as child:
        assert ground.restore() == f"the process {child.pid} that the script has started still runs"
        child.communicate(b"\n")
    assert ground.restore() is None


def test_threads_that_are_about_to_end_are_waited_for(ground: Ground) -> None:
    ending = threading.Event()
    thread = threading.Thread(target=ending.wait)
    thread.start()
    ending.set()
    assert ground.restore() is None
    assert not thread.is_alive()

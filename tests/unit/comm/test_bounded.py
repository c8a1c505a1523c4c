"""Waits for what may never come back; stores that do not are in tests/faults/test_lost_store.py."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable

import pytest
import torch.distributed as dist

from lightning_dist.comm.bounded import Bounded, own_connection
from lightning_dist.errors import PeerLostError


def test_a_result_and_an_error_come_through() -> None:
    assert Bounded(lambda: 3, name="three").result(5) == 3
    with pytest.raises(ZeroDivisionError):
        Bounded(lambda: 1 // 0, name="raises").result(5)
    assert not Bounded(lambda: 1 // 0, name="raises").succeeds(5)
    assert Bounded(lambda: None, name="nothing").succeeds(5)


def test_who_waits_can_give_up() -> None:
    end = threading.Event()
    waiting = Bounded(end.wait, name="waits")
    with pytest.raises(TimeoutError, match=r"0\.1 s"):
        waiting.result(0.1)
    assert waiting.is_running

    def look(waited_s: float) -> None:
        raise PeerLostError(f"after {waited_s:.0f} s")

    with pytest.raises(PeerLostError):
        waiting.result(20, look=look)
    end.set()
    assert waiting.result(5)


def test_what_succeeds_has_a_result_at_once() -> None:
    """Also between the moment in which the result is there, and the one in which its thread has ended."""
    there, end = threading.Event(), threading.Event()

    class EndsLate(Bounded[int]):
        def _run(self, action: Callable[[], int]) -> None:
            super()._run(action)
            there.set()
            end.wait(10)

    action = EndsLate(lambda: 3, name="ends late")
    assert there.wait(10)
    assert not action.succeeds(0), "result(0) would raise"
    end.set()
    assert action.succeeds(10)
    assert action.result(0) == 3


def test_a_connection_of_its_own_keeps_the_prefix() -> None:
    store = dist.HashStore()
    prefixed = dist.PrefixStore("some", store)
    own_connection(prefixed, 20).set("key", "value")
    assert prefixed.get("key") == b"value"
    assert not store.check(["key"])


def test_what_an_action_refers_to_goes_with_it() -> None:
    """Not at the next collection of garbage: it may be a connection."""

    class Owner:
        def __init__(self) -> None:
            self.done = Bounded(lambda: self is None, name="refers")  # to its owner, which refers to it

    owner = Owner()
    assert owner.done.result(5) is False
    gone = weakref.ref(owner)
    gc.disable()
    try:
        del owner
        assert gone() is None
    finally:
        gc.enable()

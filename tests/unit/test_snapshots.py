"""How long training is held until a snapshot is whole."""

from __future__ import annotations

from lightning_dist.snapshots import Patience


class Waits:
    """A clock, and snapshots that take a given time from when they are waited for."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.asked_s: list[float] = []
        self.patience = Patience(limit_s=2.0, share=0.1, clock=lambda: self.now_s)

    def wait(self, takes_s: float, *, after_s: float = 0.0) -> bool:
        self.now_s += after_s

        def ends_within(timeout_s: float) -> bool:
            self.asked_s.append(timeout_s)
            self.now_s += min(timeout_s, takes_s)
            return takes_s <= timeout_s

        return self.patience.wait(ends_within)


def test_what_is_waited_comes_back_with_time() -> None:
    waits = Waits()
    assert [waits.wait(1.5, after_s=10.0), waits.wait(0.5, after_s=5.0), waits.wait(0.0, after_s=100.0)] == [True] * 3
    assert waits.asked_s == [2.0, 1.0, 2.0]


def test_what_is_not_whole_in_time_is_not_waited_for_until_one_is() -> None:
    waits = Waits()
    assert not waits.wait(3.0)
    assert waits.patience.has_given_up
    assert not waits.wait(0.5, after_s=100.0)
    assert waits.wait(0.0, after_s=1.0)
    assert not waits.patience.has_given_up
    assert waits.wait(0.5, after_s=1.0)
    assert waits.asked_s == [2.0, 0.0, 0.0, 2.0]

"""Slow hosts and ranks: found by their own work, after a while, once."""

from __future__ import annotations

import math

import pytest

from lightning_dist.elastic.detect.slow import LOOKS, Slow, SlowRanks

WELL = {"a": (0.1, 0.1), "b": (0.1, 0.11)}


def looks(ranks: SlowRanks, own_s: dict[str, tuple[float, ...]], times: int) -> list[Slow]:
    return [slow for _ in range(times) for slow in ranks.look(own_s)]


@pytest.mark.parametrize(
    ("own_s", "found"),
    [
        (WELL, []),
        ({"a": (0.1, 0.1), "b": (0.3, 0.3)}, [Slow("b", None, 0.3, 0.1)]),
        ({"a": (0.1, 0.1), "b": (0.1, 0.4)}, [Slow("b", None, 0.25, 0.1)]),
        ({"a": (0.1, 0.1), "b": (0.1, 0.25)}, [Slow("b", 1, 0.25, 0.1)]),
        ({"a": (0.1, 0.3, 0.1, 0.1)}, [Slow("a", 1, 0.3, 0.1)]),
        ({"a": (0.1,)}, []),
        ({"a": (0.001, 0.001), "b": (0.009, 0.009)}, []),  # nobody's trouble
        ({"a": (0.1, math.nan), "b": (math.nan, math.nan)}, []),
        ({"a": (0.1, 0.1), "b": ()}, []),
    ],
)
def test_who_is_slow(own_s: dict[str, tuple[float, ...]], found: list[Slow]) -> None:
    assert looks(SlowRanks(2.0), own_s, LOOKS) == found


def test_it_takes_a_while_and_is_told_once() -> None:
    ranks, slow = SlowRanks(2.0), {**WELL, "b": (0.3, 0.3)}
    assert not looks(ranks, slow, LOOKS - 1)
    assert not looks(ranks, WELL, 1)
    assert not looks(ranks, slow, LOOKS - 1)
    assert len(looks(ranks, slow, 50)) == 1


def test_it_is_told_again_once_it_was_well() -> None:
    ranks, slow = SlowRanks(2.0), {**WELL, "b": (0.3, 0.3)}
    assert len(looks(ranks, slow, LOOKS)) == 1
    assert not looks(ranks, WELL, LOOKS)
    assert len(looks(ranks, slow, LOOKS)) == 1


def test_the_words_say_who_and_by_how_much() -> None:
    assert str(Slow("b", None, 0.3, 0.1)) == (
        "host b is slow: its own work takes 0.300 s a step, that of the others 0.100 s, 3.0 times as long; they wait "
        "for it, training goes on"
    )
    assert "local rank 1 on host b" in str(Slow("b", 1, 0.3, 0.0))

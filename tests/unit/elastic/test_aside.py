"""Calls that storage may hold up for ever do not hold up the loop, nor the end of the process."""

from __future__ import annotations

import asyncio
import threading

import pytest

from lightning_dist.elastic.leading.aside import aside
from lightning_dist.errors import LaunchError


def test_what_the_function_gives_or_raises_comes_back() -> None:
    def fail() -> None:
        raise ValueError("no")

    assert asyncio.run(aside(lambda: 5, timeout_s=30, what="five")) == 5
    with pytest.raises(ValueError, match="no"):
        asyncio.run(aside(fail, timeout_s=30, what="nothing"))


def test_one_that_does_not_come_back_is_given_up() -> None:
    over = threading.Event()
    try:
        with pytest.raises(LaunchError, match=r"the claim of round 2: storage has not answered for 0.01 s"):
            asyncio.run(aside(over.wait, timeout_s=0.01, what="the claim of round 2"))
    finally:
        over.set()

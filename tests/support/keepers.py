"""Keepers that a test starts, and that are gone at its end."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil

from lightning_dist.checkpoint.keeper import client
from lightning_dist.checkpoint.keeper.client import Keeper
from tests.support.processes import is_alive

LIMIT_BYTES = 64 << 20


def ended(process: psutil.Process) -> None:
    """Wait until it has; init may take seconds to fetch its exit code."""
    end_s = time.monotonic() + 20
    while is_alive(process):
        assert time.monotonic() < end_s, f"{process} does not end"
        time.sleep(0.01)


@contextlib.contextmanager
def keeping(*, limit_bytes: int = LIMIT_BYTES, idle_s: float = 60.0) -> Iterator[Keeper]:
    """A keeper, which is gone at the end."""
    name = uuid.uuid4().hex
    keeper = client.start(name, limit_bytes=limit_bytes, idle_s=idle_s)
    process = psutil.Process(keeper.about()["process"])
    try:
        yield keeper
    finally:
        if client.find(name) is not None:
            keeper.end()
        ended(process)


@contextlib.contextmanager
def ending_keepers(folder: Path) -> Iterator[None]:
    """At the end no keeper of the checkpoints in a folder is left on this machine."""
    try:
        yield
    finally:
        keeper = client.find(client.name_of(str(folder)))
        if keeper is not None:
            process = psutil.Process(keeper.about()["process"])
            keeper.end()
            ended(process)

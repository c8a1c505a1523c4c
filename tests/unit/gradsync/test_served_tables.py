"""Served tables over a client that holds gradients back: who makes more than may wait is held up, and that is seen."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn

from lightning_dist.gradsync.parameter_server import ServedTables
from lightning_dist.gradsync.parameter_server.client import RowClient
from lightning_dist.gradsync.parameter_server.outbox import Outbox
from lightning_dist.gradsync.parameter_server.shard import Shard

PENDING = 2


class SlowClient:
    """Takes no gradients until it is let; gives rows of zeros."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.steps: list[int] = []

    def push(self, gradients: Any, *, step: int) -> None:
        self.gate.wait()
        self.steps.append(step)

    def pull(self, wanted: Sequence[Any], *, version: int | None) -> list[torch.Tensor]:
        return [each.empty().zero_() for each in wanted]


def test_who_makes_more_gradients_than_may_wait_is_held_up_in_an_operation_of_its_own() -> None:
    client, operations = SlowClient(), list[str]()

    @contextmanager
    def operation(name: str) -> Iterator[None]:
        operations.append(name)
        if name == "room for gradients of rows":
            client.gate.set()
        yield

    module = nn.Embedding(4, 2, sparse=True)
    tables = ServedTables(
        {"words": module},
        rank=0,
        num_ranks=1,
        make_shard=lambda values, *_: Shard(values, num_ranks=1, timeout_s=10, alarm=lambda _: None, staleness=9),
        operation=operation,
        staleness=9,
        outbox=lambda name, capacity: Outbox(name, capacity=capacity, timeout_s=10, alarm=lambda _: None),
        max_pending=PENDING,
    )
    tables.connect(cast(RowClient, client))
    for step in range(PENDING + 1):
        assert "room for gradients of rows" not in operations, f"there is room for step {step}"
        module(torch.tensor([1, 1, 2])).sum().backward()
        tables.exchange()
    tables.close()
    assert operations.count("room for gradients of rows") == 1
    assert client.steps == list(range(PENDING + 1))
    assert module.weight.grad is None, "rows are stepped elsewhere"
    tables.release(None)

"""Ranks that ask for different operations; the ranks take turns in one process."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lightning_dist.comm.bounded import comes
from lightning_dist.comm.collectives import Collectives
from lightning_dist.comm.signatures import SignatureCheck, amount_of, tag_of
from lightning_dist.errors import CollectiveMismatchError, CollectiveTimeoutError
from lightning_dist.events import EventStream


class CountingStore:
    """A store that counts what is asked of it."""

    def __init__(self, store: dist.Store) -> None:
        self.store = store
        self.calls = 0

    def __getattr__(self, name: str) -> object:
        self.calls += 1
        return getattr(self.store, name)


def make_pair() -> tuple[SignatureCheck, SignatureCheck, CountingStore]:
    store = dist.HashStore()
    counting = CountingStore(store)
    checks = [
        SignatureCheck(
            counting if rank else store,  # type: ignore[arg-type]
            collectives=Collectives(events=EventStream(rank=rank), timeout_s=0.2, rank=rank, host_of_rank=["a", "b"]),
            ranks=[0, 1],
        )
        for rank in range(2)
    ]
    return checks[0], checks[1], counting


def asked_for(tensor: torch.Tensor, *, mean: bool) -> str:
    return f"the {'mean' if mean else 'sum'} of {amount_of(tensor)}"


def test_what_was_agreed_costs_nothing_when_it_comes_again() -> None:
    zero, one, store = make_pair()
    buckets = [torch.zeros(10), torch.zeros(20), torch.zeros(30)]
    for _ in range(2):  # the second step begins after the last bucket, which is new
        for bucket in buckets:
            zero.check(asked_for(bucket, mean=True), operation="all_reduce")
            one.check(asked_for(bucket, mean=True), operation="all_reduce")
    calls = store.calls
    for _ in range(5):
        for bucket in buckets:
            one.check(asked_for(bucket, mean=True), operation="all_reduce")
    assert store.calls == calls


@pytest.mark.parametrize(
    ("tensor", "mean"),
    [(torch.zeros(11), False), (torch.zeros(10, dtype=torch.int32), False), (torch.zeros(10), True)],
    ids=["size", "type", "operation"],
)
def test_a_difference_is_told_with_both_sides(tensor: torch.Tensor, mean: bool) -> None:
    zero, one, _ = make_pair()
    zero.check(asked_for(torch.zeros(10), mean=False), operation="all_reduce")
    with pytest.raises(
        CollectiveMismatchError, match=r"rank 1 \(host b\) asks for .* rank 0 \(host a\) for the sum of 10 x"
    ):
        one.check(asked_for(tensor, mean=mean), operation="all_reduce")


def test_another_order_of_known_operations_is_a_difference_too() -> None:
    zero, one, _ = make_pair()
    small, large = torch.zeros(1), torch.zeros(2)
    for tensor in (small, large):
        zero.check(asked_for(tensor, mean=True), operation="all_reduce")
        one.check(asked_for(tensor, mean=True), operation="all_reduce")
    zero.check(asked_for(small, mean=True), operation="all_reduce")
    with pytest.raises(CollectiveMismatchError):
        one.check(asked_for(large, mean=True), operation="all_reduce")


def test_rank_0_may_be_late_but_not_for_ever() -> None:
    _, one, _ = make_pair()
    with pytest.raises(CollectiveTimeoutError, match=r"rank 1 \(host b\): all_reduce on group 'signatures'"):
        one.check(asked_for(torch.zeros(1), mean=False), operation="all_reduce")


def test_shapes_may_differ_where_sizes_do_not() -> None:
    zero, one, _ = make_pair()
    zero.check(asked_for(torch.zeros(6), mean=True), operation="all_reduce")
    one.check(asked_for(torch.zeros(2, 3), mean=True), operation="all_reduce")


def agree_on(zero: SignatureCheck, one: SignatureCheck, *names: str) -> None:
    for name in names:
        zero.check(name, operation="all_gather")
        one.check(name, operation="all_gather")


def test_who_waits_long_finds_out_that_the_first_rank_asked_for_something_new() -> None:
    zero, one, _ = make_pair()
    agree_on(zero, one, "a", "b", "a")
    zero.check("a", operation="all_gather")  # new after a
    look = one.check("b", operation="all_gather")  # agreed after a
    with pytest.raises(CollectiveMismatchError, match=r"asks for b as operation 3 .* for a:"):
        look(3.0)


def test_the_first_rank_says_what_it_asked_for_when_it_waits_long() -> None:
    zero, one, _ = make_pair()
    agree_on(zero, one, "a", "b", "a")
    look = zero.check("b", operation="all_gather")  # agreed after a: it has not said so
    look(3.0)
    with pytest.raises(CollectiveMismatchError, match=r"asks for a as operation 3 .* for b:"):
        one.check("a", operation="all_gather")


def test_messages_of_different_operations_have_different_tags() -> None:
    assert tag_of("everybody's 10 x float32 of a") != tag_of("everybody's 10 x float32 of b")


@pytest.mark.parametrize("kind", ["hash", "file"])
def test_who_comes_late_is_waited_for_with_any_store(kind: str, tmp_path: Path) -> None:
    """A wait looks up now and then; what a store says when such a wait is over differs from kind to kind."""
    store: dist.Store = dist.HashStore() if kind == "hash" else dist.FileStore(str(tmp_path / "store"), 2)
    assert not comes(store, "key", 0.1)
    store.set("key", "value")
    assert comes(store, "key", 0.1)
    zero, one = (
        SignatureCheck(
            store,
            collectives=Collectives(events=EventStream(rank=rank), timeout_s=20, rank=rank, host_of_rank=["a", "b"]),
            ranks=[0, 1],
        )
        for rank in range(2)
    )
    late = threading.Timer(1.2, lambda: zero.check("a sum", operation="all_reduce"))
    late.start()
    one.check("a sum", operation="all_reduce")
    late.join()

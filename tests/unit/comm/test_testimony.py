"""Who is blamed for a failure: ranks are objects of one process that share a store."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

from lightning_dist.comm.testimony import Activity, Testimony

GRACE_S = 0.4


def where(rank: int) -> str:
    return f"rank {rank} (host {'ab'[rank // 2]})"


class GoneStore:
    """A store whose server has died."""

    def clone(self) -> GoneStore:
        return self

    def __getattr__(self, name: str) -> Any:
        def fail(*arguments: object) -> None:
            raise RuntimeError("Connection reset by peer")

        return fail


class HungStore:
    """A store whose server is stopped: no call returns, until :attr:`resumed`."""

    def __init__(self) -> None:
        self.resumed = threading.Event()

    def clone(self) -> HungStore:
        return self

    def __getattr__(self, name: str) -> Any:
        def hang(*arguments: object) -> None:
            self.resumed.wait(20)
            raise RuntimeError("Connection reset by peer")

        return hang


Make = Callable[..., list[Testimony]]


@pytest.fixture
def make() -> Iterator[Make]:
    """Testimonies of some ranks of a world; closed after the test."""
    made: list[Testimony] = []

    def of(
        ranks: list[int], world_size: int = 4, store: Any = None, grace_s: float = GRACE_S, **arguments: Any
    ) -> list[Testimony]:
        shared = dist.HashStore() if store is None else store
        found = [
            Testimony(
                shared,
                rank=rank,
                world_size=world_size,
                grace_s=grace_s,
                **{name: value[rank] if isinstance(value, dict) else value for name, value in arguments.items()},
            )
            for rank in ranks
        ]
        made.extend(found)
        return found

    yield of
    for testimony in made:
        testimony.close()
        testimony.close()


def test_who_does_not_answer_is_lost(make: Make) -> None:
    first, *_ = make([0, 2, 3])
    assert first.verdict("all_reduce: closed", where).startswith("Lost: rank 1 (host a) (no answer within 0.4 s")


def test_several_are_named(make: Make) -> None:
    (first,) = make([0])
    assert "Lost: rank 1 (host a), rank 2 (host b), rank 3 (host b)" in first.verdict("closed", where)


def test_a_rank_with_an_error_of_its_own_is_named_at_once(make: Make) -> None:
    first, second = make([0, 1])  # two more are missing, but that is a consequence
    second.post("OSError: the disk is full", own_fault=True)
    assert first.verdict("closed", where) == (
        "rank 1 (host a) ended with an error of its own: OSError: the disk is full."
    )


def test_a_rank_with_an_error_of_its_own_that_asks_first_names_itself(make: Make) -> None:
    """A lane of it failed by the error, and another by what that did to its peers."""
    first, second, *_ = make([0, 1, 2, 3])
    second.post("OSError: the disk is full", own_fault=True)
    expected = "rank 1 (host a) ended with an error of its own: OSError: the disk is full."
    assert second.verdict("all_reduce: closed", where) == expected
    assert first.verdict("closed", where) == expected


def test_who_is_alive_and_waits_for_nobody_is_waited_for(make: Make) -> None:
    activities = {rank: Activity() for rank in range(4)}
    first, *_ = make([0, 1, 2, 3], activity=activities)
    with activities[1].waiting("all_reduce on 'cross'"), activities[2].waiting("all_gather on 'gather'"):
        with activities[3].waiting("reduce_scatter on 'reduce'"):
            pass
        verdict = first.verdict("timeout", where)
    assert verdict.startswith("Waited for: rank 3 (host b) is at test_testimony.py:")
    assert "its last operation, reduce_scatter on 'reduce', ended 0." in verdict


def test_if_all_wait_nobody_is_blamed(make: Make) -> None:
    activities = {rank: Activity() for rank in range(2)}
    first, _ = make([0, 1], world_size=2, activity=activities)
    with activities[1].waiting("barrier"):
        assert first.verdict("timeout", where) == "All ranks are alive and report the failure or wait."


def test_the_first_verdict_is_everybodys(make: Make) -> None:
    first, third, fourth = make([0, 2, 3])
    with ThreadPoolExecutor(3) as threads:
        verdicts = set(threads.map(lambda testimony: testimony.verdict("closed", where), [first, third, fourth]))
    assert len(verdicts) == 1
    assert first.verdict("another lane", where) in verdicts


def test_who_is_released_does_not_wait_for_the_others(make: Make) -> None:
    activity, store = Activity(), dist.HashStore()
    (testimony,) = make([0], store=store, activity=activity, grace_s=60.0)
    with ThreadPoolExecutor(1) as threads:
        verdict = threads.submit(testimony.verdict, "peer closed", where)
        activity.release("the agent says so")
        assert verdict.result(timeout=30) == "the agent says so"
    assert testimony.verdict("again", where) == "the agent says so"
    assert not store.check(["verdict"])  # nobody is called lost who has not had the time to answer


def test_the_bell_is_an_alarm_for_those_who_wait(make: Make) -> None:
    first, second = make([0, 1], world_size=2)
    assert second.alarm(100.0) is None
    first.post("closed")
    end = threading.Event()
    for _ in range(200):
        if second.alarm(0.0) is not None:
            break
        end.wait(0.01)
    assert second.alarm(0.0) == "another rank reports a failure"


@pytest.mark.parametrize(
    ("holder", "expected"),
    [(0, "rank 0 (host a), which holds it, is dead, stopped or cut off"), (None, "the launcher that holds it")],
)
@pytest.mark.parametrize("store", [GoneStore, HungStore])
def test_a_store_that_does_not_answer_points_to_its_holder(
    make: Make, store: type[Any], holder: int | None, expected: str
) -> None:
    server = store()
    (third,) = make([2], store=server, holder=holder)
    assert expected in third.verdict("closed", where)
    third.close()  # does not wait for it
    if isinstance(server, HungStore):
        server.resumed.set()


def test_a_lost_store_is_an_alarm_only_for_long_waits(make: Make) -> None:
    (third,) = make([2], store=GoneStore())
    third._witness.join(20)
    assert third.alarm(GRACE_S) is None
    assert third.alarm(10 * GRACE_S) == "the store of the rendezvous is gone"


def test_closing_ends_the_witness(make: Make) -> None:
    (first,) = make([0], world_size=1)
    first.close()
    assert not first._witness.is_alive()


def test_a_forgotten_testimony_ends_its_witness_too(make: Make) -> None:
    testimony = Testimony(dist.HashStore(), rank=0, world_size=1, grace_s=GRACE_S)
    witness = testimony._witness
    del testimony
    witness.join(20)
    assert not witness.is_alive()

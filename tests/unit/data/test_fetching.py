"""Fetching ahead: in order, within bounds, and not in the way of what is asked for."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from lightning_dist.data.cache.fetching import FetchAhead
from lightning_dist.data.index.dataset_index import Chunk

DEADLINE_S = 30.0


def chunk(number: int, size_bytes: int = 10) -> Chunk:
    return Chunk(number, "a", 0, size_bytes, 1, None)


class Storage:
    """Fetches that end when they are told to."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._may_end: set[int] = set()
        self.begun: list[int] = []
        self.ended: list[int] = []

    def fetch(self, chunk: Chunk) -> None:
        with self._changed:
            self.begun.append(chunk.number)
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: chunk.number in self._may_end, DEADLINE_S)
            self.ended.append(chunk.number)
            self._changed.notify_all()

    def end(self, *numbers: int) -> None:
        with self._changed:
            self._may_end.update(numbers)
            self._changed.notify_all()

    def wait_begun(self, *numbers: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self.begun == list(numbers), DEADLINE_S), self.begun

    def wait_ended(self, *numbers: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: set(numbers) <= set(self.ended), DEADLINE_S), self.ended


@pytest.fixture
def storage() -> Storage:
    return Storage()


def ahead_of(storage: Storage, *, num_threads: int = 1, ahead_bytes: int = 30) -> FetchAhead:
    return FetchAhead(storage.fetch, num_threads=num_threads, ahead_bytes=ahead_bytes)


def test_in_order_and_no_further_than_allowed(storage: Storage) -> None:
    ahead = ahead_of(storage)
    ahead.expect(chunk(number) for number in range(9))
    storage.end(*range(9))
    storage.wait_ended(0, 1, 2)
    storage.wait_begun(0, 1, 2)
    ahead.asked(chunk(0))
    storage.wait_begun(0, 1, 2, 3)
    ahead.asked(chunk(2))
    ahead.asked(chunk(1))
    storage.wait_begun(0, 1, 2, 3, 4, 5)
    assert ahead.close(wait_s=DEADLINE_S) == []


def test_so_many_at_once_as_there_are_threads(storage: Storage) -> None:
    ahead = ahead_of(storage, num_threads=2, ahead_bytes=1000)
    ahead.expect([chunk(number) for number in range(3)])
    storage.wait_begun(0, 1)
    storage.end(1)
    storage.wait_begun(0, 1, 2)
    storage.end(0, 2)
    assert ahead.close(wait_s=DEADLINE_S) == []


def test_what_is_asked_for_before_is_left_out(storage: Storage) -> None:
    ahead = ahead_of(storage)
    storage.end(*range(9))
    ahead.expect([chunk(0, 30), chunk(1), chunk(2), chunk(3), chunk(4), chunk(1)])
    storage.wait_ended(0)
    ahead.asked(chunk(1))
    ahead.asked(chunk(2))
    ahead.asked(chunk(0))
    storage.wait_begun(0, 3, 4, 1)  # the second time that 1 is expected it was not asked for
    ahead.close(wait_s=DEADLINE_S)


def test_a_chunk_larger_than_the_bound_is_left_out(storage: Storage) -> None:
    ahead = ahead_of(storage)
    storage.end(*range(9))
    ahead.expect([chunk(0, 31), chunk(1, 30), chunk(2)])
    storage.wait_begun(1)
    ahead.close(wait_s=DEADLINE_S)


def test_a_new_expectation_replaces_the_old_one(storage: Storage) -> None:
    ahead = ahead_of(storage, ahead_bytes=20)
    ahead.expect([chunk(0), chunk(1), chunk(2)])
    storage.wait_begun(0)
    ahead.expect([chunk(5), chunk(0), chunk(6), chunk(7)])
    storage.end(*range(9))
    storage.wait_begun(0, 5, 0)  # the first 0 counts no more once it is there
    ahead.asked(chunk(5))
    storage.wait_begun(0, 5, 0, 6)
    ahead.close(wait_s=DEADLINE_S)


def test_what_is_asked_for_on_its_way_counts_no_more(storage: Storage) -> None:
    ahead = ahead_of(storage, num_threads=2, ahead_bytes=10)
    ahead.expect([chunk(0), chunk(1)])
    storage.wait_begun(0)
    ahead.asked(chunk(0))
    storage.wait_begun(0, 1)
    ahead.asked(chunk(1))
    ahead.expect([chunk(1), chunk(2)])
    storage.end(0)
    storage.wait_begun(0, 1, 2)
    storage.end(1, 2)
    ahead.close(wait_s=DEADLINE_S)


def test_nothing_begins_while_something_is_urgent(storage: Storage) -> None:
    ahead = ahead_of(storage)
    storage.end(*range(9))
    with ahead.urgent():
        ahead.expect([chunk(0)])
        with ahead.urgent():
            pass
        assert storage.begun == []
    storage.wait_begun(0)
    ahead.close(wait_s=DEADLINE_S)


def test_an_error_of_the_iterable_is_told_once(storage: Storage) -> None:
    def chunks() -> Iterator[Chunk]:
        yield chunk(0)
        raise KeyError("order")

    ahead = ahead_of(storage)
    storage.end(0)
    ahead.expect(chunks())
    storage.wait_ended(0)
    for _ in range(3000):
        if ahead._error is not None:
            break
        threading.Event().wait(0.01)
    with pytest.raises(KeyError, match="order"):
        ahead.asked(chunk(0))
    ahead.asked(chunk(0))
    ahead.close(wait_s=DEADLINE_S)


def test_without_threads_nothing_is_fetched_ahead(storage: Storage) -> None:
    before = set(threading.enumerate())
    ahead = ahead_of(storage, num_threads=0)
    ahead.expect([chunk(0)])
    assert set(threading.enumerate()) <= before
    ahead.close(wait_s=DEADLINE_S)


def test_threads_that_do_not_end_are_named(storage: Storage) -> None:
    ahead = ahead_of(storage)
    ahead.expect([chunk(0), chunk(1)])
    storage.wait_begun(0)
    assert ahead.close(wait_s=0.05) == ["hierdist-fetch-0"]
    storage.end(0)
    assert ahead.close(wait_s=DEADLINE_S) == []
    ahead.expect([chunk(2)])
    assert storage.begun == [0]

"""Permutations by key."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dist.data.index.dataset_index import Numbers
from lightning_dist.data.order import shuffling


def whole(size: int, base: int) -> Numbers:
    places = np.arange(size, dtype=np.int64)
    return shuffling.permuted(places, np.full(size, size), np.full(size, base, dtype=np.uint64))


@settings(deadline=None)
@given(size=st.integers(1, 3000), base=st.integers(0, 2**64 - 1))
def test_both_give_each_place_once(size: int, base: int) -> None:
    assert sorted(whole(size, base)) == list(range(size))
    assert sorted(shuffling.permutation(size, base)) == list(range(size))


@pytest.mark.parametrize("size", [10**9, 2**40 - 1, 2**62])
def test_places_of_a_set_that_is_never_listed(size: int) -> None:
    places = np.unique(np.random.default_rng(0).integers(0, size, 20_000))
    found = shuffling.permuted(places, np.full_like(places, size), np.full(len(places), 7, dtype=np.uint64))
    assert found.min() >= 0
    assert found.max() < size
    assert len(np.unique(found)) == len(places)
    assert abs(found.mean() / size - 0.5) < 0.02  # the mean of 20,000 even numbers has a deviation of 0.002


@settings(deadline=None, max_examples=30)
@given(sizes=st.lists(st.integers(1, 100), min_size=1, max_size=8))
def test_a_place_does_not_depend_on_those_beside_it(sizes: list[int]) -> None:
    words = shuffling.keys(3, np.arange(len(sizes)))
    together = shuffling.permuted(np.array([size // 2 for size in sizes]), np.array(sizes), words)
    alone = [whole(size, int(word))[size // 2] for size, word in zip(sizes, words, strict=True)]
    assert together.tolist() == alone


def test_all_permutations_of_few_places_come_about_equally_often() -> None:
    trials = 24_000
    words = np.repeat(shuffling.keys(0, np.arange(trials)), 4)
    found = shuffling.permuted(np.tile(np.arange(4), trials), np.full(4 * trials, 4), words).reshape(-1, 4)
    counts = {order: int((found == order).all(axis=1).sum()) for order in itertools.permutations(range(4))}
    assert sum(counts.values()) == trials
    assert min(counts.values()) > 800
    assert max(counts.values()) < 1200


def test_neither_neighbours_nor_places_are_correlated() -> None:
    size, trials = 4096, 50
    for orders in (
        [whole(size, shuffling.key(trial)) for trial in range(trials)],
        [shuffling.permutation(size, shuffling.key(trial)) for trial in range(trials)],
    ):
        for found in orders:  # a coefficient's deviation is 1/64
            assert abs(np.corrcoef(found[:-1], found[1:])[0, 1]) < 0.08
            assert abs(np.corrcoef(found, np.arange(size))[0, 1]) < 0.08
        same = sum(int((found == np.arange(size)).sum()) for found in orders)
        beside = sum(int((np.abs(np.diff(found)) == 1).sum()) for found in orders)
        assert 25 < same < 85  # one an order is expected
        assert 65 < beside < 145  # two an order


def test_keys_differ() -> None:
    lists = [(), (0,), (1,), (0, 0), (0, 1), (1, 0), (10,), (2**70,), (2**70 + 1,)]
    assert len({shuffling.key(*numbers) for numbers in lists}) == len(lists)
    assert len(np.unique(shuffling.keys(5, np.arange(100_000)))) == 100_000


def test_they_never_change() -> None:
    assert shuffling.key(1, 2, 3) == 3081874676955396121
    assert shuffling.keys(1, np.arange(2)).tolist() == [6238072747940578789, 10451216379200822465]
    assert shuffling.permutation(10, 1).tolist() == [9, 0, 5, 4, 8, 1, 2, 6, 7, 3]
    assert whole(10, 1).tolist() == [9, 0, 5, 3, 6, 1, 2, 4, 8, 7]

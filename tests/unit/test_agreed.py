"""Loaders that end together, with the exchange between ranks replaced by a list of answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from torch.utils.data import DataLoader, IterableDataset

from lightning_dist.data.loading.agreed import agreed_loader
from lightning_dist.errors import UnevenInputsError

Exchange = Callable[[int], list[int]]


def answers(*others: int) -> Exchange:
    """What the other rank says, call by call."""
    said = iter(others)
    return lambda number: [number, next(said)]


class Sized:
    """A custom loader that may lie about its length, and has a state."""

    def __init__(self, items: list[Any], length: int) -> None:
        self.items = items
        self.length = length
        self.loaded: Any = None

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[Any]:
        return iter(self.items)

    def state_dict(self) -> dict[str, int]:
        return {"at": 1}

    def load_state_dict(self, state: Any) -> None:
        self.loaded = state


class Stream(IterableDataset[Any]):
    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __iter__(self) -> Iterator[Any]:
        return iter(self.items)


def test_equal_lengths_cost_nothing() -> None:
    loader = Sized([1, 2, 3], 3)
    assert agreed_loader(loader, exchange=answers(3), on_uneven="stop") is loader


def test_known_lengths_are_cut() -> None:
    loader = agreed_loader(Sized([1, 2, 3], 3), exchange=answers(2), on_uneven="stop")
    assert len(loader) == 2
    assert list(loader) == [1, 2]
    assert list(loader) == [1, 2], "again in the next epoch"


def test_known_lengths_that_differ_are_an_error_if_asked() -> None:
    with pytest.raises(UnevenInputsError, match="rank 0: 3, rank 1: 2"):
        agreed_loader(Sized([1, 2, 3], 3), exchange=answers(2), on_uneven="error")


def test_a_length_that_was_a_lie_is_named() -> None:
    loader = agreed_loader(Sized([1], 3), exchange=answers(2), on_uneven="stop")
    with pytest.raises(UnevenInputsError, match="ended after 1 batches although its length is 3"):
        list(loader)


def test_unknown_lengths_are_asked_for_before_each_batch() -> None:
    #                                                     lengths, stated, then: has a batch, has one, has none
    loader = agreed_loader(Stream([1, 2, 3]), exchange=answers(-1, -1, 1, 1, 0), on_uneven="stop")
    assert not hasattr(loader, "__len__")
    assert list(loader) == [1, 2]


def test_the_end_of_another_rank_is_an_error_if_asked() -> None:
    loader = agreed_loader(Stream([1, 2, 3]), exchange=answers(-1, -1, 1, 0), on_uneven="error")
    with pytest.raises(UnevenInputsError, match="at least, \\(rank 0: 2, rank 1: 1\\)"):
        list(loader)


def test_a_common_end_is_no_error() -> None:
    loader = agreed_loader(Stream([1]), exchange=answers(-1, -1, 1, 0), on_uneven="error")
    assert list(loader) == [1]


def test_stated_lengths_of_iterables_are_kept_but_not_trusted() -> None:
    class Stating(Stream):
        def __len__(self) -> int:
            return 4

    loader = agreed_loader(
        DataLoader(Stating([1, 2]), batch_size=None), exchange=answers(-1, 3, 1, 1, 1), on_uneven="stop"
    )
    assert len(loader) == 3
    assert list(loader) == [1, 2], "this rank has no third"


@pytest.mark.parametrize("others", [(2,), (-1, -1)], ids=["cut", "asking"])
def test_state_is_the_loaders_own_where_it_has_one(others: tuple[int, ...]) -> None:
    inner = Sized([1, 2, 3], 3)
    loader = agreed_loader(inner, exchange=answers(*others), on_uneven="stop")
    assert loader.state_dict() == {"at": 1}
    loader.load_state_dict({"at": 2})
    assert inner.loaded == {"at": 2}
    stateless = agreed_loader(Stream([1]), exchange=answers(-1, -1), on_uneven="stop")
    assert not hasattr(stateless, "state_dict")


def test_everything_else_is_the_loaders() -> None:
    inner = DataLoader([1, 2, 3], batch_size=1)
    loader = agreed_loader(inner, exchange=answers(2), on_uneven="stop")
    assert loader.sampler is inner.sampler
    loader._iterator = "reset"
    assert inner._iterator == "reset"

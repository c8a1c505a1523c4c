"""The batch after the present one: for what can be brought near while the present one is trained on.

Lightning 2.6 takes a batch ahead only of loaders that do not know their length; that is how it learns of the last one.
Here it takes one ahead of all, but of loaders with a state of their own, which would be saved a batch too far.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.loops.fetchers import _DataFetcher, _PrefetchDataFetcher
from torch import Tensor, nn

from lightning_dist.data.loading.loader import ShardedLoader

RowsOfBatch = Callable[[Any], Mapping[str, Tensor]]


@dataclass(frozen=True)
class NextBatch:
    """What comes after the present batch, as the loader has given it."""

    batch: Any


class AheadFetcher(_PrefetchDataFetcher):
    """Has one batch more than was asked for."""

    def __iter__(self) -> AheadFetcher:
        """Begin anew."""
        _DataFetcher.__iter__(self)
        self._fill()
        return self

    def __next__(self) -> Any:
        """The present batch; the next one is taken as well, if there is one."""
        if not self.batches and not self.done:
            self._fill()
        if not self.batches:
            raise StopIteration
        batch = self.batches.pop(0)
        self._fill()
        return batch

    def _fill(self) -> None:
        if self.length is None or self.fetched < self.length:
            with contextlib.suppress(StopIteration):
                self.batches.append(_DataFetcher.__next__(self))
        self.done = not self.batches


def look_ahead(trainer: pl.Trainer) -> None:
    """Have a batch in hand before it is needed, from now on; where loaders allow it. Safe to call twice."""
    loop = trainer.fit_loop
    fetcher, combined = loop._data_fetcher, loop._combined_loader
    if type(fetcher) is not _PrefetchDataFetcher or combined is None or fetcher.length is None:
        return
    if any(_has_state_of_its_own(getattr(loader, "loader", loader)) for loader in combined.flattened):
        return
    ahead = AheadFetcher()
    vars(ahead).update(vars(fetcher))  # with its iterator: to make another would draw from random generators again
    loop._data_fetcher = ahead


def next_batch(trainer: pl.Trainer) -> NextBatch | None:
    """The batch after the present one; ``None``: there is none, or it is not known yet."""
    batches = getattr(trainer.fit_loop._data_fetcher, "batches", ())
    return NextBatch(batches[0][0]) if batches else None


def rows_of_batch(module: nn.Module) -> RowsOfBatch | None:
    """The module's own ``rows_of_batch``, if it has one."""
    found = getattr(module, "rows_of_batch", None)
    return found if callable(found) else None


def _has_state_of_its_own(loader: Any) -> bool:
    return hasattr(loader, "state_dict") and not isinstance(loader, ShardedLoader)

"""Loaders that somebody has to close who does not own them."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

from lightning_dist.data.loading.loader import ShardedLoader


class OpenLoaders:
    """Loaders, as long as others use them. Sent to another process, it is empty."""

    def __init__(self) -> None:
        self._loaders: weakref.WeakSet[ShardedLoader] = weakref.WeakSet()

    def add(self, loader: ShardedLoader) -> None:
        """One more; a second time is the same."""
        self._loaders.add(loader)

    def __iter__(self) -> Iterator[ShardedLoader]:
        """Those that are in use."""
        return iter(list(self._loaders))

    def close(self) -> None:
        """Close all of them. Safe to call twice."""
        for loader in self:
            loader.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return OpenLoaders, ()

"""A mode whose module may have tables that are dealt to the ranks, driven as a fit goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import lightning.pytorch as pl

from lightning_dist.modes.mode import Mode
from lightning_dist.modes.served import DealtTables


class ServingMode(Mode):
    """What becomes of dealt tables in a fit does not depend on what becomes of the rest of the model."""

    _tables: DealtTables | None = None
    _accumulates = False

    def _holding_back(self) -> AbstractContextManager[None]:
        """Inside, gradients of the rest of the model stay local."""
        raise NotImplementedError

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """A window of accumulation goes on, for the rest of the model and for tables."""
        self._accumulates = True
        try:
            with self._holding_back():
                yield
        finally:
            self._accumulates = False

    def begin_batch(self, batch_idx: int) -> None:
        """The step before is over, also one that was skipped."""
        self._publish()

    def begin_training(self, trainer: pl.Trainer) -> None:
        """Tables may look a batch ahead."""
        if self._tables is not None:
            self._tables.begin_training(trainer)

    def training_step(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The module's, with the rows at hand that it says it will need."""
        if self._tables is not None:
            self._tables.begin_step(self.module.trainer, args[0], is_last=not self._accumulates)
        return call(*args, **kwargs)

    def end_training(self) -> None:
        """So is the last step."""
        self._publish()

    def _publish(self) -> None:
        if self._tables is not None:
            self._tables.publish()

"""Sparse gradients of a model whose other parameters are sharded."""

from __future__ import annotations

from collections.abc import Callable

import torch

from lightning_dist.build.gradients import open_gradient_all_reduce, open_sparse_average
from lightning_dist.build.run import RunContext
from lightning_dist.build.tables import TableService
from lightning_dist.comm.hierarchical import HierarchicalAllReduce
from lightning_dist.config import SyncConfig
from lightning_dist.gradsync.sparse import SparseAverage, has_sparse_gradients
from lightning_dist.parallel.row_gradients import TablesBeside


class RowLinks:
    """What the rows of tables beside shards travel over.

    Args:
        all_reduce: The way of tables of which most rows have gradients.
        average: The way of rows; ``None`` where all tables are dealt.
        service: Of those that are dealt.
    """

    def __init__(
        self, all_reduce: HierarchicalAllReduce, average: SparseAverage | None, service: TableService | None
    ) -> None:
        self._all_reduce = all_reduce
        self._average = average
        dealt = frozenset[torch.Tensor]() if service is None else frozenset(service.tables.by_parameter)
        self.tables = TablesBeside(None if average is None else average.start, dealt)

    def abort(self, reason: str) -> None:
        """Free everyone who waits for this rank."""
        self._all_reduce.abort(reason)

    def close(self) -> None:
        """End lanes and groups. Safe to call twice."""
        if self._average is not None:
            self._average.close()
        self._all_reduce.close()


def open_row_links(
    run: RunContext,
    module: torch.nn.Module,
    *,
    sync: SyncConfig,
    announce: Callable[[str], None],
    service: TableService | None = None,
) -> RowLinks | None:
    """Lanes and groups for the module's sparse gradients, if it has any; every rank calls it.

    Args:
        run: Who sits where, and the seam.
        module: Whose gradients they are.
        sync: Options.
        announce: Says which way each table goes, and why.
        service: Of tables that are dealt to the ranks instead.
    """
    if not has_sparse_gradients(module):
        return None
    all_reduce = open_gradient_all_reduce(run, sync)
    average = open_sparse_average(run, module, all_reduce, sync=sync, announce=announce, tables=service)
    return RowLinks(all_reduce, average, service)

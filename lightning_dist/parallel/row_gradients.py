"""Sparse gradients beside shards: FSDP2 takes none, so their tables stay whole on each rank, and rows are averaged."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.futures import Future

from lightning_dist.errors import CombinationError

StartRows = Callable[[Tensor, Tensor], Future[Tensor]]
"""Begins to average a sparse gradient over all ranks, given it and its parameter; every rank calls it alike."""


@dataclass(frozen=True)
class TablesBeside:
    """Tables of a model that are not sharded with the rest of it.

    Attributes:
        start: How rows of their gradients are averaged; ``None`` where all are dealt.
        dealt: Those whose rows are dealt to ranks already; they are left alone.
    """

    start: StartRows | None = None
    dealt: frozenset[Tensor] = field(default_factory=frozenset)

    def whole(self, module: nn.Module) -> dict[str, nn.Parameter]:
        """Name -> parameter, of those that stay whole on each rank.

        Raises:
            CombinationError: One is also the parameter of a layer with dense gradients.
        """
        tables = {weight for m in module.modules() for weight in _table_of(m) if weight not in self.dealt}
        for name, inner in module.named_modules():
            if not _table_of(inner) and any(p in tables for p in inner.parameters(recurse=False)):
                raise CombinationError(
                    f"{name.removeprefix('module.')} shares its weight with an nn.Embedding(sparse=True), whose "
                    "gradient is then dense: write sparse=False"
                )
        return {name: parameter for name, parameter in module.named_parameters() if parameter in tables}


def _table_of(module: nn.Module) -> list[nn.Parameter]:
    if not isinstance(module, nn.Embedding | nn.EmbeddingBag) or not module.sparse:
        return []
    weight = module.weight
    assert isinstance(weight, nn.Parameter), "torch's stubs say less"
    return [weight]


def sparse_embeddings(module: nn.Module) -> list[nn.Module]:
    """The modules in it that give sparse gradients."""
    return [inner for inner in module.modules() if _table_of(inner)]


class RowGradients:
    """Averages the gradients of tables. Every rank makes it, and calls :meth:`average`, alike.

    Args:
        tables: Name -> parameter.
        start: Begins an average; ``None`` where there is no table.
    """

    def __init__(self, tables: Mapping[str, nn.Parameter], start: StartRows | None) -> None:
        self._tables = dict(tables)
        self._start = start

    @property
    def tables(self) -> dict[str, nn.Parameter]:
        """All of them, by name."""
        return dict(self._tables)

    def names(self) -> list[str]:
        """Of those that want gradients now."""
        return [name for name, table in self._tables.items() if table.requires_grad]

    def used(self) -> list[bool]:
        """Which of :meth:`names` have a gradient on this rank."""
        return [self._tables[name].grad is not None for name in self.names()]

    def average(self, wanted: Sequence[bool]) -> None:
        """Average those of :meth:`names` that are wanted; a rank that has none adds no rows.

        What has been averaged before, and is the same on all ranks, stays as it is in the mean.
        """
        chosen = [self._tables[name] for name, want in zip(self.names(), wanted, strict=True) if want]
        if not chosen:
            return
        assert self._start is not None, "there is somebody to average tables"
        futures = [self._start(_gradient_of(table), table) for table in chosen]
        for table, future in zip(chosen, futures, strict=True):
            table.grad = future.wait()


def _gradient_of(table: nn.Parameter) -> Tensor:
    if table.grad is not None:
        return table.grad
    no_ids = torch.empty(1, 0, dtype=torch.int64, device=table.device)
    return torch.sparse_coo_tensor(
        no_ids, table.new_empty(0, *table.shape[1:]), table.shape, is_coalesced=True, check_invariants=False
    )

"""Parameters of a sharded model that are not sharded: what FSDP2 does not take, and what others look after."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_dist.config import ParallelConfig
from lightning_dist.errors import CombinationError
from lightning_dist.parallel.children import Owners
from lightning_dist.parallel.row_gradients import RowGradients, TablesBeside


@dataclass(frozen=True)
class BesideShards:
    """Parameters that are not sharded, by name.

    Attributes:
        averaged: Whole on each rank, with dense gradients.
        by_rows: Whole on each rank, with sparse gradients, and who averages them.
        dealt: Of which this rank has rows; somebody else's.
    """

    averaged: Mapping[str, nn.Parameter]
    by_rows: RowGradients | None
    dealt: Mapping[str, nn.Parameter]

    @functools.cached_property
    def tables(self) -> dict[str, nn.Parameter]:
        """Those with sparse gradients."""
        return {**(self.by_rows.tables if self.by_rows is not None else {}), **self.dealt}

    @functools.cached_property
    def parameters(self) -> set[nn.Parameter]:
        """All of them."""
        return {*self.averaged.values(), *self.tables.values()}

    @property
    def description(self) -> str:
        """Which tables there are, in a line; empty where there is none."""
        names = [name.removeprefix("module.") for name in self.tables]
        return f"\n  beside the shards, with sparse gradients: {', '.join(names)}" if names else ""


def beside_shards(
    module: nn.Module, config: ParallelConfig, tables: TablesBeside | None, owners: Owners | None
) -> BesideShards:
    """What of a module is not to be sharded.

    Args:
        module: Whole.
        config: Mode and options.
        tables: What has sparse gradients; ``None``: nothing.
        owners: The modules that are sharded each for itself; ``None``: the module is sharded as one.

    Raises:
        CombinationError: A parameter that FSDP2 does not take is split; or a table is also a layer's.
    """
    named = dict(module.named_parameters())
    by_rows = {} if tables is None else tables.whole(module)
    dealt = {} if tables is None else {name: p for name, p in named.items() if p in tables.dealt}
    rest = {name: p for name, p in named.items() if name not in by_rows and name not in dealt}
    averaged = unshardable(rest)
    _refuse_split(averaged, config)
    if owners is not None:
        averaged |= {name: p for name, p in rest.items() if p in owners.whole}
        averaged = {name: p for name, p in averaged.items() if p not in owners.elsewhere}
    return BesideShards(averaged, None if tables is None else RowGradients(by_rows, tables.start), dealt)


def unshardable(named: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    """Of some parameters those that FSDP2 does not take: of one value, of none, or of a type few others have.

    A group of FSDP2 sums its gradients in one tensor, so its parameters must be of one type.
    """
    sizes: dict[torch.dtype, int] = {}
    for parameter in named.values():
        sizes[parameter.dtype] = sizes.get(parameter.dtype, 0) + parameter.numel()
    common = max(sizes, key=lambda dtype: sizes[dtype], default=None)
    return {name: p for name, p in named.items() if p.dim() == 0 or not p.numel() or p.dtype != common}


def _refuse_split(kept_whole: Mapping[str, nn.Parameter], config: ParallelConfig) -> None:
    """Refuse parameters that are to stay whole on each rank, and are split over ranks."""
    if wrong := [name for name, p in kept_whole.items() if isinstance(p, DTensor)]:
        raise CombinationError(
            f"{wrong[0].removeprefix('module.')} is split over ranks and of another type than most parameters, which "
            f"parallel.mode={config.mode} does not take; write 'replicate' for its layer in parallel.tensor.plan"
        )

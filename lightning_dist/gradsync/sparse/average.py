"""The average of sparse gradients over all ranks: rows merged in each host, exchanged between hosts, brought back.

An ``nn.Embedding(sparse=True)`` gives its reducer a bucket of its own that holds a sparse tensor. Its rows go through
three lanes with groups of their own, so that the order of a group's operations is that of the buckets and one table
crosses while the next is merged. A table of which most rows have gradients goes the way of dense gradients instead.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future

from lightning_dist.comm.account import Account, Origin
from lightning_dist.comm.collectives import Collectives, RankGroup
from lightning_dist.comm.groups import destroy, make_leg_group
from lightning_dist.comm.hierarchical import HierarchicalAllReduce
from lightning_dist.comm.lanes import ThreadPipeline
from lightning_dist.comm.signatures import SignatureCheck, WatchedFuture
from lightning_dist.errors import CombinationError
from lightning_dist.gradsync.sparse.choice import Limit
from lightning_dist.gradsync.sparse.legs import CrossRows, HostRows, Travel
from lightning_dist.gradsync.sparse.rows import Rows, Table, rows_of, to_sparse
from lightning_dist.topology import Cluster, hierarchy_of
from lightning_dist.topology.hierarchy import Leg as LegPlan

RowStep = Callable[[Travel], None]


def has_sparse_gradients(module: nn.Module, *, but: Container[Tensor] = ()) -> bool:
    """Whether the reducer will hand over sparse buckets for this module.

    Args:
        module: To be wrapped.
        but: Parameters that are kept from it.
    """
    return any(
        isinstance(m, nn.Embedding | nn.EmbeddingBag) and m.sparse and m.weight not in but for m in module.modules()
    )


def refuse_bounded_rows(module: nn.Module) -> None:
    """Refuse sparse embeddings with ``max_norm``: a forward writes into the rows that its rank has looked up.

    Raises:
        CombinationError: There is one.
    """
    for name, each in module.named_modules():
        if isinstance(each, nn.Embedding | nn.EmbeddingBag) and each.sparse and each.max_norm is not None:
            raise CombinationError(
                f"{name}: {type(each).__name__}(sparse=True, max_norm={each.max_norm}): forward shortens the rows that "
                "it looks up, on that rank only, so that ranks would come to have different tables; write "
                "max_norm=None, and bound rows where all ranks do it alike, say in on_train_epoch_end"
            )


@dataclass
class _Way:
    """What is known of one parameter.

    Attributes:
        limit: From which share of rows on it goes whole.
        share: Rows of the last average over all rows; alike on all ranks. ``None`` before the first.
        is_dense: Whether it went whole.
        announced: Whether it was said which way it goes: as rows, whole.
    """

    limit: Limit
    share: float | None = None
    is_dense: bool = False
    announced: set[bool] = field(default_factory=set)


class SparseAverage:
    """Averages sparse tensors over all ranks, in the order of submission; every rank makes it.

    Args:
        cluster: Who sits where; flattened for a flat exchange.
        collectives: The seam.
        store: Shared by all ranks, its keys used by nobody else.
        dense: The way of dense gradients.
        names: Parameter -> its name, for messages.
        limit: From which share of rows on a table goes whole.
        announce: Says on one rank which way a table goes.
    """

    def __init__(
        self,
        cluster: Cluster,
        collectives: Collectives,
        store: dist.Store,
        *,
        dense: HierarchicalAllReduce,
        names: Mapping[Tensor, str],
        limit: Callable[[Table], Limit],
        announce: Callable[[str], None],
    ) -> None:
        self._collectives = collectives
        self._world_size = cluster.world_size
        self._dense = dense
        self._names = names
        self._limit = limit
        self._announce = announce
        self._ways: dict[Tensor, _Way] = {}
        self._groups: list[RankGroup] = []
        steps = self._open_legs(cluster)
        self._steps = tuple(steps.values())
        self._pipeline = ThreadPipeline(list(steps)) if collectives.blocks_host else None
        self._signatures = SignatureCheck(store, collectives=collectives, ranks=range(cluster.world_size))

    def start(self, gradient: Tensor, parameter: Tensor) -> Future[Tensor]:
        """Begin to average a sparse COO tensor; every rank calls it in the same order, each with rows of its own.

        Args:
            gradient: With one sparse axis; it may hold a row several times, or none.
            parameter: Whose gradient it is.

        Returns:
            A future of the mean, coalesced: the rows that any rank had, the same bits on all ranks.
        """
        table = Table(tuple(gradient.shape), gradient.dtype)
        way = self._ways.get(parameter)
        if way is None:
            way = self._ways[parameter] = _Way(self._limit(table))
        way.is_dense = way.limit.is_dense(way.share or 0.0, was_dense=way.is_dense)
        self._say(parameter, way, table)
        if way.is_dense:
            return self._start_dense(gradient, table, way)
        return self._start_rows(gradient, table, way)

    def close(self, timeout_s: float = 5.0) -> None:
        """End the lanes and release the groups. Safe to call twice."""
        if self._pipeline is not None:
            self._pipeline.close(timeout_s)
        destroy(self._groups)
        self._groups = []

    # -- as rows ------------------------------------------------------------------------------------------------------

    def _start_rows(self, gradient: Tensor, table: Table, way: _Way) -> Future[Tensor]:
        self._signatures.check(f"rows of {table.shape} {table.dtype}", operation="all_reduce")
        rows = rows_of(gradient)
        if table.dtype is torch.float16:  # as a sum it could overflow
            rows = Rows(rows.indices, rows.values / self._world_size)
        travel = Travel(table, self._world_size, rows)

        def mean() -> Tensor:
            assert travel.held is not None, "every rank gets all rows at the end"
            way.share = travel.held.count / max(1, table.num_rows)
            return to_sparse(travel.held, table)

        if self._pipeline is None:  # enqueues on the caller's stream, and so in order
            for step in self._steps:
                step(travel)
            on_device: Future[Tensor] = Future(devices=[gradient.device])
            on_device.set_result(mean())
            return on_device
        future = WatchedFuture(self._collectives.events)
        self._pipeline.submit(
            [_bind(step, travel) for step in self._steps],
            done=lambda: future.set_result(mean()),
            failed=lambda error: _fail(future, error),
        )
        return future

    def _open_legs(self, cluster: Cluster) -> dict[str, RowStep]:
        """Lane -> its step, from the first to the last."""
        hierarchy = hierarchy_of(cluster)
        up: dict[str, RowStep] = {}
        down: dict[str, RowStep] = {}
        stride = 1
        for plan in hierarchy.inner:
            labels = [f"rows_{plan.tier.value}_{way}" for way in ("reduce", "gather")]
            groups = [self._group(plan, label) for label in labels]
            leg = HostRows(self._collectives, groups[0], groups[1], width=plan.width, stride=stride)
            up[labels[0]], down[labels[1]] = leg.reduce, leg.gather
            stride *= plan.width
        top = CrossRows(self._collectives, self._group(hierarchy.top, "rows_cross"), stride=stride)
        return {**up, "rows_cross": top.reduce, **dict(reversed(down.items()))}

    def _group(self, plan: LegPlan, label: str) -> RankGroup | None:
        timeout_s = self._collectives.timeout_s
        group = make_leg_group(plan, rank=self._collectives.rank, label=label, timeout_s=timeout_s)
        if group is not None:
            self._groups.append(group)
        return group

    # -- whole --------------------------------------------------------------------------------------------------------

    def _start_dense(self, gradient: Tensor, table: Table, way: _Way) -> Future[Tensor]:
        """Values and, beside them, which rows any rank had: lazy optimizers leave the others alone.

        Values cross as they are: a codec would give some to rows that nobody had.
        """
        rows = rows_of(gradient)
        whole = gradient.new_zeros(table.shape, layout=torch.strided)
        whole[rows.indices] = rows.values
        used = torch.zeros(table.num_rows, dtype=torch.bool, device=gradient.device)
        used[rows.indices] = True
        exact = Account(Origin("table", (), 1 / self._world_size), is_exact=True)
        both = [self._dense.start(whole, mean=True, account=exact), self._dense.start(used)]

        def mean(futures: Future[list[Future[Tensor]]]) -> Tensor:
            for future in futures.value():
                future.value()
            indices = used.nonzero()[:, 0]
            way.share = indices.numel() / max(1, table.num_rows)
            return to_sparse(Rows(indices, whole[indices]), table)

        return torch.futures.collect_all(both).then(mean)

    def _say(self, parameter: Tensor, way: _Way, table: Table) -> None:
        """Once for each way, when it is known how many rows there are."""
        if way.share is None or way.is_dense in way.announced:
            return
        way.announced.add(way.is_dense)
        shape = " x ".join(str(size) for size in table.shape)
        goes = "goes whole" if way.is_dense else "goes as rows"
        self._announce(
            f"hierdist: the gradient of {self._names.get(parameter, 'a parameter')} ({shape}) {goes}: "
            f"{way.share:.2%} of its rows were in the last one; whole is better from {way.limit.share:.0%} on, "
            f"by {way.limit.reason}"
        )


def _bind(step: RowStep, travel: Travel) -> Callable[[], None]:
    return lambda: step(travel)


def _fail(future: Future[Tensor], error: BaseException) -> None:
    future.set_exception(error)  # type: ignore[arg-type]  # annotated as Exception; any is carried

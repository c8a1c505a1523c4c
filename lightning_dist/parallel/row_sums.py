"""Gradients of sharded parameters whose matrices cross between hosts in another way than value by value.

Each rank of a host gets the mean over the host of some rows, exact; who averages rows over hosts gives the mean of any
(:class:`~lightning_dist.comm.row_blocks.RowAverage`), and each rank takes those of its shard. Where each host has all
shards, the rows that a rank averages are those of its shard; else successive shards are dealt to the ranks of a host.
"""

from __future__ import annotations

from collections.abc import Callable

from torch.nn import functional as F  # noqa: N812  # the name everybody uses

from lightning_dist.comm.feedback import Account, Feedback, Place
from lightning_dist.comm.hierarchical import HierarchicalAllReduce
from lightning_dist.comm.row_blocks import PlacedRows, RowAverage, RowBlock, Rows
from lightning_dist.comm.scattered import HierarchicalScatter
from lightning_dist.parallel.fsdp_groups import name_of, trained
from lightning_dist.parallel.lane_sums import Arrived, LaneSums
from lightning_dist.parallel.origins import origin_of_shard, origin_of_sum


class RowSums(LaneSums):
    """As :class:`LaneSums`, but for groups that have matrices.

    Args:
        scatter: As for :class:`LaneSums`.
        across: Likewise.
        in_host: Sums over the ranks of this host.
        average: Averages rows over hosts.
        world_size: Ranks of all hosts.
    """

    def __init__(
        self,
        scatter: HierarchicalScatter,
        across: HierarchicalAllReduce | None,
        *,
        in_host: HierarchicalScatter,
        average: RowAverage,
        world_size: int,
    ) -> None:
        super().__init__(scatter, across)
        self._in_host = in_host
        self._average = average
        self._world_size = world_size

    @property
    def feedback(self) -> Feedback | None:
        """See :class:`LaneSums`."""
        return self._average.feedback

    def start(self, arrived: Arrived) -> None:
        """Begin to sum what a group has."""
        if self._across is not None and not arrived.crosses:
            self._send(arrived)
            return
        of_sum, of_shard = self._entered(arrived)
        account, parameters = of_shard or of_sum, _placed_in(arrived)
        if account.is_exact or not self._average.wants(parameters):
            self._average.settle(account, of_sum.origin, arrived.given)
            self._send(arrived)
        elif of_shard is not None:
            self._start_shard(arrived, of_shard, parameters)
        else:
            self._start_shares(arrived, of_sum, parameters)

    def wait(self, most: int) -> None:
        """See :class:`LaneSums`; rows are waited for all together."""
        super().wait(most)
        if most == 0:
            self._average.finish()

    def forget(self) -> None:
        """See :class:`LaneSums`."""
        super().forget()
        self._average.forget()

    def _entered(self, arrived: Arrived) -> tuple[Account, Account | None]:
        """Of a group's gradients, to which what is filed is added, and of its shard where each host has all."""
        shards, replicas = len(self._scatter.members), 1 if self._across is None else self._across.world_size
        weight = (1 / shards if arrived.mean else 1.0) / replicas
        feedback, of_shard = self._average.feedback, None
        if self._across is not None:  # first: what is owed of a shard that is made of others now goes with the whole
            shard = origin_of_shard(arrived.group, arrived.key, shard=self._scatter.index, weight=1 / replicas)
            of_shard = feedback.enter(shard, None)
        whole = origin_of_sum(arrived.group, arrived.key, num_shards=shards, weight=weight)
        return feedback.enter(whole, arrived.given), of_shard

    def _start_shard(self, arrived: Arrived, account: Account, parameters: tuple[PlacedRows, ...]) -> None:
        """Of a mean in the host, this rank has its shard."""
        assert self._across is not None, "each host has all shards"
        output, index, weight = arrived.output, self._scatter.index, account.origin.weight

        def put(rows: Rows) -> None:
            output.copy_(rows(index).view_as(output))

        def then() -> None:
            arrived.add_carried()
            values = output.view(1, -1)
            place = Place("part", (0,), values.numel(), 1.0)
            self._average.start(RowBlock(values, index, parameters, weight, account, place), put)

        self._scatter_to(arrived, then)

    def _start_shares(self, arrived: Arrived, account: Account, parameters: tuple[PlacedRows, ...]) -> None:
        """Deal all shards to the ranks of the host, the last of which may have fewer, and zeros instead."""
        assert arrived.gradients is not None, "a rank that is alone sums nothing"
        output, ranks, shards = arrived.output, len(self._in_host.members), len(self._scatter.members)
        each = -(-shards // ranks)
        n = output.numel()
        gradients = arrived.gradients.view(-1)
        if ranks * each > shards:
            gradients = F.pad(gradients, (0, (ranks * each - shards) * n))
        values = gradients.new_empty(each, n)
        first = self._in_host.index * each
        starts = tuple((first + i) * n for i in range(each))
        block = RowBlock(
            values,
            first,
            parameters,
            ranks / self._world_size,
            account,
            Place("part", starts, shards * n, float(ranks)),
        )

        def put(rows: Rows) -> None:
            mean = rows(self._scatter.index).view_as(output)
            output.copy_(mean if arrived.mean else mean * shards)
            arrived.add_carried()

        self._pending.append(
            self._in_host.reduce_scatter(
                values, gradients, name=arrived.name, mean=True, then=_bound(self._average.start, block, put)
            )
        )


def _bound(
    start: Callable[[RowBlock, Callable[[Rows], None]], None], block: RowBlock, put: Callable[[Rows], None]
) -> Callable[[], None]:
    return lambda: start(block, put)


def _placed_in(arrived: Arrived) -> tuple[PlacedRows, ...]:
    placed, offset = [], 0
    for param in trained(arrived.group):
        padded = param.padded_sharded_param_size
        placed.append(PlacedRows(name_of(param), tuple(param._orig_size), offset, padded[0]))
        offset += padded.numel()
    return tuple(placed)

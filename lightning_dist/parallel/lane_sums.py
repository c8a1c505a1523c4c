"""How the gradients of sharded parameters become shards of their sum: over the lanes, and on to other replicas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.futures import Future

from lightning_dist.comm.feedback import Account, Feedback
from lightning_dist.comm.hierarchical import HierarchicalAllReduce
from lightning_dist.comm.legs import keep_for_current_stream
from lightning_dist.comm.scattered import HierarchicalScatter
from lightning_dist.parallel.fsdp_groups import ParamGroup, ShardedParam, name_of
from lightning_dist.parallel.origins import origin_of_shard, origin_of_sum, span_of_shard


@dataclass(frozen=True)
class Arrived:
    """A parameter group that has its gradients.

    Attributes:
        group: Which.
        number: Of the group.
        name: Of what it belongs to.
        output: [n], to be filled with this rank's shard of the sum; filled already if there are no ``gradients``.
        gradients: [group size x n].
        mean: Whether the mean is wanted and not the sum.
        carried: Parts of the output, and what is there already and is to be added to them.
        crosses: Whether the sum goes on to other replicas.
    """

    group: ParamGroup
    number: int
    name: str
    output: torch.Tensor
    gradients: torch.Tensor | None
    mean: bool
    carried: Sequence[tuple[torch.Tensor, torch.Tensor]]
    crosses: bool

    @property
    def key(self) -> str:
        """Of its tensors' accounts."""
        return f"{self.number} {self.name}"

    @property
    def given(self) -> torch.Tensor:
        """What this rank puts into the sum."""
        return self.output if self.gradients is None else self.gradients

    def add_carried(self) -> None:
        """Add what is there already."""
        for view, earlier in self.carried:
            keep_for_current_stream(earlier)
            view.add_(earlier)


class LaneSums:
    """Sums gradients of parameter groups into shards. Every rank makes it, and calls it in the same order.

    Args:
        scatter: Sums over the ranks that share the shards.
        across: Sums shards over the replicas of a shard; ``None`` where there is one.
    """

    def __init__(self, scatter: HierarchicalScatter, across: HierarchicalAllReduce | None) -> None:
        self._scatter = scatter
        self._across = across
        self._pending: list[Future[torch.Tensor]] = []
        self._crossing: list[Future[torch.Tensor]] = []

    @property
    def feedback(self) -> Feedback | None:
        """What is owed of what is sent; ``None``: nothing is lost on the way."""
        return self._scatter.feedback

    def start(self, arrived: Arrived) -> None:
        """Begin to sum what a group has."""
        self._send(arrived, *self._accounts(arrived))

    def wait(self, most: int) -> None:
        """Wait until at most so many sums are under way."""
        while len(self._pending) > most:
            self._pending.pop(0).wait()
        if most == 0:
            while self._crossing:
                self._crossing.pop(0).wait()

    def part(self) -> None:
        """From now on replicas train apart: sums stay with the ranks that share the shards."""
        self._across = None

    def forget(self) -> None:
        """Nobody waits for what is under way: a backward is over, or has failed."""
        self._pending.clear()
        self._crossing.clear()

    def give_back(self, param: ShardedParam, gradient: torch.Tensor, *, crossed: bool) -> None:
        """What became of a gradient that no rank had, and what was owed of it, is not applied: it is owed still.

        Args:
            param: Whose gradient it is.
            gradient: This rank's shard of it.
            crossed: Whether it is the mean of all replicas, else of this one.
        """
        if self.feedback is None:
            return
        span, across = span_of_shard(param, self._scatter.index), self._across
        mean = gradient.reshape(-1)[: span.length]
        if across is None or (crossed and across.is_first):
            self.feedback.give_back(name_of(param), span.low, mean)
        elif not crossed and self._scatter.encodes:
            self.feedback.give_back(name_of(param), span.low, mean / across.world_size)

    def _send(self, arrived: Arrived, of_sum: Account | None = None, of_shard: Account | None = None) -> None:
        def then() -> None:
            arrived.add_carried()
            if self._across is not None and arrived.crosses:
                self._crossing.append(self._across.start(arrived.output, mean=True, account=of_shard))

        self._scatter_to(arrived, then, of_sum)

    def _scatter_to(self, arrived: Arrived, then: Callable[[], None], account: Account | None = None) -> None:
        """Sum into the shard, then go on."""
        if arrived.gradients is None:
            then()
            return
        self._pending.append(
            self._scatter.reduce_scatter(
                arrived.output, arrived.gradients, name=arrived.name, mean=arrived.mean, then=then, account=account
            )
        )

    def _accounts(self, arrived: Arrived) -> tuple[Account | None, Account | None]:
        """Of a group's gradients and, where there are replicas, of its shard of their sum."""
        feedback, across = self.feedback, self._across
        in_host = self._scatter.encodes  # also where there are replicas
        stays = across is not None and not arrived.crosses and not in_host
        if feedback is None or stays:
            return None, None
        shards = len(self._scatter.members)
        replicas = 1 if across is None else across.world_size
        weight = (1 / shards if arrived.mean else 1.0) / replicas
        origin = origin_of_sum(arrived.group, arrived.key, num_shards=shards, weight=weight)
        whole = feedback.enter(origin, arrived.given)
        if across is None:
            return whole, None
        # Gradients stay in the host until they are summed; what is owed of the shard is filed with the whole.
        shard = origin_of_shard(arrived.group, arrived.key, shard=self._scatter.index, weight=1 / replicas)
        return whole if in_host else None, feedback.enter(shard, None) if arrived.crosses else None

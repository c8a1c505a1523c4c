"""Embeddings of a module whose tables are dealt to the ranks, each of which serves and trains the rows that it has.

The parameter stays the same object and holds this rank's rows; so the user's optimizer, learning rates and all, steps
each row where it is. ``forward`` looks up the rows of its ids, each once, wherever they are; their gradients wait until
the window's backward passes are over, then go to the servers, which take the mean over ranks.

The sequence of calls, on every rank: :meth:`ServedTables.step_by` once there are optimizers; for each step
:meth:`ServedTables.begin_step`, any number of forwards, as many as a rank likes, :meth:`ServedTables.exchange` when
gradients are complete, :meth:`ServedTables.publish` when the step is over; :meth:`ServedTables.drain` before values or
what optimizers keep for them are read.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Container, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_dist.gradsync.parameter_server.client import Ahead, RowClient, ServedTable, Wanted
from lightning_dist.gradsync.parameter_server.embeddings import Embedding, check_rows, forward_of
from lightning_dist.gradsync.parameter_server.outbox import Outbox
from lightning_dist.gradsync.parameter_server.placement import Placement
from lightning_dist.gradsync.parameter_server.shard import Shard
from lightning_dist.gradsync.parameter_server.stepping import (
    Options,
    group_of,
    options_of,
    refuse_wide_steps,
    twin_of,
)
from lightning_dist.gradsync.sparse.rows import Rows, Table, merged, to_sparse

RowsOfTables = Mapping[str, Tensor]
"""Name of an embedding -> ids that it will be asked for; any shape, any number of times."""


@dataclass
class _Used:
    """A table and what this rank has looked up since the last exchange.

    Attributes:
        module: Whose forward it serves.
        served: How it is dealt.
        options: What its optimizer's group says now; ``None`` where that is not to be told to servers.
        looked_up: (rows, their values with gradients) of each forward.
        gradients: Of backward passes that are over.
    """

    module: Embedding
    served: ServedTable
    options: Callable[[], Options] | None = None
    looked_up: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    gradients: list[Rows] = field(default_factory=list)

    def settle(self) -> None:
        """A backward is over: keep its gradients, and let go what it has looked up."""
        for rows, values in self.looked_up:
            if values.grad is not None:
                self.gradients.append(Rows(rows, values.grad))
        self.looked_up = []

    def take_gradients(self) -> tuple[ServedTable, Rows, Options]:
        """What has come together, merged, to be pushed."""
        no_values = self.module.weight.new_empty((0, *self.served.table.row_shape))
        empty = Rows(torch.empty(0, dtype=torch.int64), no_values)
        gradients, self.gradients = self.gradients, []
        return self.served, merged([empty, *gradients]), {} if self.options is None else self.options()


@dataclass(frozen=True)
class _Ready:
    """Rows of the present batch that are here already.

    Attributes:
        version: Which they are of.
        rows: Table's number -> (rows, their values).
    """

    version: int | None
    rows: Mapping[int, tuple[Tensor, Tensor]]


class ServedTables:
    """The served embeddings of a module; every rank makes it, and cuts the same tables.

    Args:
        embeddings: Name -> module, whole; the same on all ranks.
        rank: This one.
        num_ranks: All serve.
        make_shard: Makes of values, the table that they are a part of and its number a :class:`Shard`.
        operation: Opens the seam around what waits for other ranks, given its name.
        staleness: How many steps look-ups may be behind; ``None``: any number.
        outbox: Makes what pushes, and what pulls ahead, given a name and how many jobs may wait.
        max_pending: Steps whose gradients may wait to be sent.
    """

    def __init__(
        self,
        embeddings: Mapping[str, Embedding],
        *,
        rank: int,
        num_ranks: int,
        make_shard: Callable[[Tensor, Table, int], Shard],
        operation: Callable[[str], AbstractContextManager[None]],
        staleness: int | None,
        outbox: Callable[[str, int], Outbox],
        max_pending: int,
    ) -> None:
        self._operation = operation
        self._num_ranks = num_ranks
        self._staleness = staleness
        self._client: RowClient | None = None
        self._version = 0
        self._oldest = 0  # no look-up asks for an earlier version
        self._ready = _Ready(None, {})
        self._ahead: Future[Ahead] | None = None
        self._pushes = None if staleness == 0 else outbox("pushes of rows", max_pending)
        self._pulls = outbox("look-ups of rows ahead", 1)
        self._used: dict[str, _Used] = {}
        for number, (name, module) in enumerate(embeddings.items()):
            whole = module.weight.data
            placement = Placement.of(len(whole), num_ranks)
            module.weight.data = whole[placement.rows_of(rank)]
            table = Table(tuple(whole.shape), whole.dtype)
            served = ServedTable(number, table, placement, make_shard(module.weight.data, table, number))
            self._used[name] = used = _Used(module, served)
            look_up = functools.partial(self._look_up, used)
            module.forward = forward_of(module, len(whole), look_up)  # type: ignore[method-assign]  # until release

    @property
    def tables(self) -> dict[str, ServedTable]:
        """By name of the embedding."""
        return {name: used.served for name, used in self._used.items()}

    @property
    def by_parameter(self) -> dict[Tensor, ServedTable]:
        """The same by what is left of the weight."""
        return {used.module.weight: used.served for used in self._used.values()}

    @property
    def version(self) -> int:
        """The number of exchanges, each of which a step follows."""
        return self._version

    @property
    def step_themselves(self) -> bool:
        """Whether tables are stepped as gradients come, and not by the training loop."""
        return self._staleness != 0

    def connect(self, client: RowClient) -> None:
        """From now on rows of other ranks can be looked up."""
        self._client = client

    def step_by(self, optimizers: Sequence[torch.optim.Optimizer], *, prefetch: bool) -> None:
        """Let tables be stepped as these would.

        Args:
            optimizers: The user's; a table that none of them has stays as it is.
            prefetch: Whether rows will be looked up ahead.

        Raises:
            CombinationError: One changes other rows than those with gradients, and it must be known which.
        """
        for used in self._used.values():
            found = group_of(optimizers, used.module.weight)
            if found is None:
                if self.step_themselves:
                    used.served.own.step_by(lambda rows, options: None)
                continue
            optimizer, group = found
            options = functools.partial(_options_of, optimizer, group)
            if self.step_themselves:
                refuse_wide_steps(optimizer, options(), f"sync.parameter_server.staleness={self._staleness}")
                used.options = options
                used.served.own.step_by(twin_of(optimizer, used.module.weight, group))
            elif prefetch:
                refuse_wide_steps(optimizer, options(), "sync.parameter_server.prefetch=true and rows_of_batch")

    def publish(self, parameters: Container[Tensor] | None = None) -> None:
        """What steps were to be made has been made: others may look at this rank's rows.

        Args:
            parameters: Which tables these are true of; all, if not given.
        """
        if self.step_themselves:
            return
        for used in self._used.values():
            if parameters is None or used.module.weight in parameters:
                used.served.own.publish(self._version)

    # -- looking up ---------------------------------------------------------------------------------------------------

    def begin_step(self, present: RowsOfTables, following: RowsOfTables | None, *, is_last_of_window: bool) -> None:
        """Look up what the present batch needs, in one message a server; and begin with the batch that follows.

        Args:
            present: Of the present batch; forwards may look up others, too.
            following: Of the next batch; ``None``: unknown, or not to be looked up ahead.
            is_last_of_window: Whether gradients are exchanged between the two.
        """
        self.go_on()
        self.publish()
        version = self._version_to_see(ahead=0)
        wanted = self._wanted(present)
        assert self._client is not None, "it is connected before the first batch"
        with self._operation("look-up of rows"):
            values = self._from_ahead(wanted, version)
            if values is None:
                values = self._client.pull(wanted, version=version)
        self._ready = _Ready(
            version, {each.served.number: (each.rows, found) for each, found in zip(wanted, values, strict=True)}
        )
        if following is not None:
            expected = self._version_to_see(ahead=int(is_last_of_window))
            if self._staleness == 0:
                expected = version  # that to come cannot be had yet
            self._ahead = self._pulls.submit(functools.partial(self._pull_ahead, self._wanted(following), expected))

    def _from_ahead(self, wanted: Sequence[Wanted], version: int | None) -> list[Tensor] | None:
        """The rows that were looked up for this batch; ``None``: there are none."""
        assert self._client is not None
        future, self._ahead = self._ahead, None
        if future is None:
            return None
        ahead = self._pulls.result(future)
        is_earlier = version is not None and (ahead.version is None or ahead.version > version)
        is_same = len(ahead.wanted) == len(wanted) and all(
            one.served is other.served and torch.equal(one.rows, other.rows)
            for one, other in zip(ahead.wanted, wanted, strict=True)
        )
        return None if is_earlier or not is_same else self._client.settled(ahead, version=version)

    def _pull_ahead(self, wanted: Sequence[Wanted], version: int | None) -> Ahead:
        assert self._client is not None
        with self._operation("look-up of rows ahead"):
            return self._client.pull_ahead(wanted, version=version, is_early=self._staleness == 0)

    def _wanted(self, ids: RowsOfTables) -> list[Wanted]:
        wanted = []
        for name, used in self._used.items():
            if name in ids:
                rows = torch.unique(ids[name].to(torch.int64))
                check_rows(rows, used.served.table.num_rows)
                wanted.append(Wanted(used.served, rows))
        return wanted

    def _version_to_see(self, *, ahead: int, trains: bool = True) -> int | None:
        """Which a look-up is answered with, after so many more exchanges."""
        if self._staleness is None:
            return None
        version = self._version + ahead
        return max(self._oldest, version - self._staleness) if trains else version

    def _look_up(self, used: _Used, rows: Tensor) -> Tensor:
        """[n, width]: some rows, each once; in training as some steps ago, else as the last step has left them."""
        version = self._version_to_see(ahead=0, trains=used.module.training)
        values = self._from_ready(used.served, rows, version)
        if values is None:
            assert self._client is not None, "it is connected before the first batch"
            self.publish()
            with self._operation("look-up of rows"):
                (values,) = self._client.pull([Wanted(used.served, rows)], version=version)
        if torch.is_grad_enabled() and used.module.weight.requires_grad:
            values.requires_grad_()
            used.looked_up.append((rows, values))
        return values

    def _from_ready(self, served: ServedTable, rows: Tensor, version: int | None) -> Tensor | None:
        """Rows out of those that are here; what is not among them is looked up now."""
        known = self._ready.rows.get(served.number)
        if known is None or self._ready.version != version or not known[0].numel():
            return None
        here, values = known
        places = torch.searchsorted(here, rows).clamp_(max=here.numel() - 1)
        missing = here[places] != rows
        found = values[places]
        if missing.any():
            assert self._client is not None
            with self._operation("look-up of rows"):
                (found[missing],) = self._client.pull([Wanted(served, rows[missing])], version=version)
        return found

    # -- gradients ----------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """A backward is over whose gradients are not exchanged yet."""
        for used in self._used.values():
            used.settle()

    @torch.no_grad()
    def exchange(self) -> None:
        """Give the gradients to who has the rows; every rank calls it.

        Where the training loop makes the steps, this rank takes the mean of those of its rows: each parameter's
        ``grad`` is then sparse, with the rows that any rank has used.
        """
        assert self._client is not None, "it is connected before the first batch"
        self.go_on()
        self.publish()
        self.settle()
        self._ready = _Ready(None, {})
        gradients = [used.take_gradients() for used in self._used.values()]
        if self._pushes is None:
            with self._operation("exchange of rows"):
                self._client.push(gradients, step=self._version)
                self._collect()
        else:
            push = functools.partial(self._push, self._client, gradients, self._version)
            with ExitStack() as waiting:
                if self._pushes.is_full:
                    waiting.enter_context(self._operation("room for gradients of rows"))
                self._pushes.submit(push)
        self._version += 1

    def _push(self, client: RowClient, gradients: Sequence[tuple[ServedTable, Rows, Options]], step: int) -> None:
        with self._operation("push of rows"):
            client.push(gradients, step=step)

    def _collect(self) -> None:
        for used in self._used.values():
            total = used.served.own.collect()
            weight = used.module.weight
            mean = Rows(total.indices, total.values / self._num_ranks)
            weight.grad = to_sparse(mean, Table(tuple(weight.shape), weight.dtype))

    # -- reading, ending ----------------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Wait until all steps so far are in this rank's rows, and let later look-ups see them; every rank calls it.

        What is read now is of this step, and remains so until :meth:`begin_step` or :meth:`go_on`.
        """
        self.publish()
        if not self.step_themselves or self._oldest == self._version == 0:
            return
        with self._operation("wait for steps of rows"):
            for used in self._used.values():
                used.served.own.wait_for(self._version)
        self._oldest = self._version

    def forget(self) -> None:
        """Other values are about to be put into this rank's rows: what was looked up before is of no use."""
        self.drain()
        self._ready = _Ready(None, {})
        future, self._ahead = self._ahead, None
        if future is not None:
            self._pulls.result(future)

    def go_on(self) -> None:
        """Nobody reads any more. Safe to call twice."""
        if self.step_themselves:
            for used in self._used.values():
                used.served.own.go_on()

    def close(self) -> None:
        """End what pushes and pulls. Safe to call twice."""
        for box in (self._pushes, self._pulls):
            if box is not None:
                box.close()

    def release(self, whole: Mapping[str, Tensor] | None) -> None:
        """Make the embeddings plain again. Safe to call twice.

        Args:
            whole: Name -> the whole table; ``None`` if it could not be had: it is NaN then.
        """
        for name, used in self._used.items():
            weight = used.module.weight
            lost = weight.new_full((1,), torch.nan).expand(used.served.table.shape)
            weight.data = lost.clone() if whole is None else whole[name]
            weight.grad = None
            del used.module.forward
        self._used = {}


def _options_of(optimizer: torch.optim.Optimizer, group: int) -> Options:
    return options_of(optimizer.param_groups[group])

"""Tables dealt to the ranks: their servers, how these find each other, and whole tables from all ranks' rows."""

from __future__ import annotations

import contextlib
import functools
import hmac
import json
import os
import secrets
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_dist.build.run import RunContext
from lightning_dist.build.server_processes import TableProcesses
from lightning_dist.comm.collectives import RankGroup
from lightning_dist.comm.groups import destroy, make_group
from lightning_dist.config import ParameterServerConfig, SyncConfig
from lightning_dist.elastic.leading.secret import read_secret
from lightning_dist.errors import CombinationError
from lightning_dist.gradsync.parameter_server import ServedTables, tables_to_serve
from lightning_dist.gradsync.parameter_server.client import RowClient, ServedTable
from lightning_dist.gradsync.parameter_server.embeddings import Embedding
from lightning_dist.gradsync.parameter_server.outbox import Outbox
from lightning_dist.gradsync.parameter_server.requests import RowRequests
from lightning_dist.gradsync.parameter_server.server import RowServer, listening
from lightning_dist.gradsync.parameter_server.shard import Shard
from lightning_dist.gradsync.sparse.rows import Table
from lightning_dist.topology.addresses import own_address

_SECRET_BYTES = 32


class TableService:
    """The served tables of a module with their servers, from opening to :meth:`close`; every rank makes it.

    Args:
        run: Who sits where, and the seam.
        embeddings: Name -> module, whole; the same on all ranks.
        options: How look-ups and steps may drift apart.
        timeout_s: Deadline of each wait, in seconds.

    Attributes:
        tables: What the mode calls.
        group: All ranks, for what the main thread exchanges.
    """

    def __init__(
        self, run: RunContext, embeddings: Mapping[str, Embedding], options: ParameterServerConfig, *, timeout_s: float
    ) -> None:
        self._run = run
        ranks = tuple(range(run.cluster.world_size))
        tier = run.cluster.tier_of(ranks).value
        group = make_group(ranks, rank=run.rank, label="tables", tier=tier, timeout_s=timeout_s)
        assert group is not None, "every rank is in it"
        self.group: RankGroup = group
        self._processes: TableProcesses | None = None
        if options.servers == "processes":
            self._processes = TableProcesses(run, options, timeout_s=timeout_s, operation=self._operation)
        self.tables = ServedTables(
            embeddings,
            rank=run.rank,
            num_ranks=len(ranks),
            make_shard=functools.partial(self._shard_of, options=options, timeout_s=timeout_s),
            operation=self._operation,
            staleness=options.staleness,
            outbox=lambda name, capacity: Outbox(
                name, capacity=capacity, timeout_s=timeout_s, alarm=run.collectives.alarm
            ),
            max_pending=options.max_pending,
        )
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(destroy, [group])
            on_failure.callback(self.tables.close)
            on_failure.callback(self.tables.release, None)
            self._server, self._client = self._meet(timeout_s, on_failure)
            on_failure.pop_all()
        self.tables.connect(self._client)

    def hand_over(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Where tables are in processes of their own, have these optimizers' steps on them made there; once.

        Args:
            optimizers: The user's own, not what Lightning puts around them.
        """
        if self._processes is not None:
            tables = self.tables
            self._processes.hand_over(tables.by_parameter, optimizers, version=lambda: tables.version)

    def whole(self, served: ServedTable, local: Tensor, *, everywhere: bool = False) -> Tensor | None:
        """A whole tensor of all ranks' rows, with all steps so far; collective.

        Args:
            served: How it is dealt.
            local: [rows of this rank, ...]: the table's values, or of something that is kept beside them.
            everywhere: Whether every rank wants it; else rank 0 does, and the others get ``None``.
        """
        self.tables.drain()
        group = self.group
        takers = [rank for rank in range(group.size) if everywhere or rank == 0]
        takes = group.index in takers
        local = local.detach().contiguous()
        parts = {
            server: local.new_empty((len(served.placement.rows_of(server)), *local.shape[1:]))
            for server in range(group.size)
            if takes and server != group.index
        }
        sends = [(taker, local) for taker in takers if taker != group.index]
        self._run.collectives.start_exchange(sends, list(parts.items()), group, "all_gather").wait()
        if not takes:
            return None
        table = local.new_empty((served.table.num_rows, *local.shape[1:]))
        for server, part in {**parts, group.index: local}.items():
            table[served.placement.rows_of(server)] = part
        return table

    def release(self, *, failed: bool) -> None:
        """Make the embeddings whole again on each rank; collective unless ``failed``. Safe to call twice."""
        weights = {served.number: weight for weight, served in self.tables.by_parameter.items()}
        whole: dict[str, Tensor] = {}
        if not failed:
            for name, served in self.tables.tables.items():
                local = served.own.read() if served.own.is_elsewhere else weights[served.number]
                table = self.whole(served, local, everywhere=True)
                assert table is not None, "every rank takes it"
                whole[name] = table
        self.tables.release(None if failed else whole)

    def abort(self, reason: str) -> None:
        """Free who waits here for other ranks' gradients."""
        for served in self.tables.tables.values():
            served.own.end(reason)

    def close(self) -> None:
        """End the server, connections and the group. Safe to call twice."""
        self.abort("it was closed")
        self._client.close()
        self.tables.close()
        if self._processes is not None:
            self._processes.close()
        self._server.close()
        destroy([self.group])

    def _operation(self, name: str) -> AbstractContextManager[None]:
        return self._run.collectives.operation(name, self.group)

    def _shard_of(
        self, values: Tensor, table: Table, number: int, *, options: ParameterServerConfig, timeout_s: float
    ) -> Shard:
        if self._processes is not None:
            return self._processes.shard_of(values, table, number)
        return Shard(
            values,
            num_ranks=self._run.cluster.world_size,
            timeout_s=timeout_s,
            alarm=self._run.collectives.alarm,
            staleness=options.staleness,
        )

    def _meet(self, timeout_s: float, on_failure: contextlib.ExitStack) -> tuple[RowServer, RowClient]:
        """Serve, say where, and connect to all others. Who reads the store of the run finds the secret."""
        run, served = self._run, list(self.tables.tables.values())
        store = run.own_store("tables")
        secret = _agreed_secret(store, run.rank)
        address = own_address(os.environ)
        shards, tables = [each.own for each in served], [each.table for each in served]
        server = RowServer(listening(address), secret=secret, answers=lambda: RowRequests(shards, tables).answer)
        on_failure.callback(server.close)
        store.set(str(run.rank), json.dumps([address, server.port]))
        keys = [str(rank) for rank in range(run.cluster.world_size)]
        store.wait(keys, run.collectives.deadline)
        places = [json.loads(said) for said in store.multi_get(keys)]
        addresses = [(str(host), int(port)) for host, port in places]
        open_client = functools.partial(RowClient, rank=run.rank, secret=secret, timeout_s=timeout_s)
        if self._processes is None:
            return server, open_client(addresses)
        on_failure.callback(self._processes.close)
        pulls = self._processes.open(served, store=store, secret=secret, address=address)
        for weight in self.tables.by_parameter:
            weight.data = weight.data.new_empty((0, *weight.shape[1:]))
        names = self._processes.names
        return server, open_client(pulls, pushes=addresses, alarm=run.collectives.alarm, names=names)


def _agreed_secret(store: dist.Store, rank: int) -> bytes:
    """New for each run, and known to who reads its store; and who knows ``HIERDIST_SECRET``, where that is given."""
    if rank == 0:
        store.set("secret", secrets.token_hex(_SECRET_BYTES))
    made = bytes.fromhex(store.get("secret").decode())
    given = read_secret(os.environ)
    return made if given is None else hmac.digest(given, b"hierdist parameter server" + made, "sha256")


def open_tables(run: RunContext, module: nn.Module, sync: SyncConfig) -> TableService | None:
    """Deal the tables of a module to the ranks, as the options say; every rank calls it.

    Returns:
        ``None`` where there is none to be dealt, or one rank only.

    Raises:
        CombinationError: They are on other devices than the CPU.
    """
    above_bytes = sync.sparse.serves_above_bytes
    if above_bytes is None or run.cluster.world_size == 1:
        return None
    embeddings = tables_to_serve(module, above_bytes=above_bytes)
    if not embeddings:
        return None
    if run.device.type != "cpu":
        raise CombinationError(
            f"sync.sparse.exchange={sync.sparse.exchange} serves tables in host memory, and the model is on "
            f"{run.device.type}: write sync.sparse.exchange=rows"
        )
    with run.collectives.opening("opening the parameter server", run.world):
        return TableService(run, embeddings, sync.parameter_server, timeout_s=sync.timeout_s)


def describe_tables(service: TableService, sync: SyncConfig) -> str:
    """Which tables are dealt and why, in a line each."""
    lines = []
    for name, served in service.tables.tables.items():
        size_bytes = served.table.num_rows * served.table.row_bytes
        why = "sync.sparse.exchange=parameter_server"
        if sync.sparse.exchange == "auto":
            limit = sync.sparse.server_above_bytes
            why = f"{size_bytes / 1e6:,.1f} MB are more than sync.sparse.server_above_bytes={limit}"
        shape = " x ".join(map(str, served.table.shape))
        where = f"dealt to {served.placement.num_servers} ranks"
        if served.own.is_elsewhere:
            where += " and held by server processes of their hosts"
        lines.append(f"hierdist: the rows of {name}.weight ({shape}) are {where}: {why}")
    return "\n".join(lines)

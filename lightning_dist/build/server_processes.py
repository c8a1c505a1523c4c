"""Server processes of the hosts of a run: where they are, and how ranks come to them."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dist.build.run import RunContext
from lightning_dist.config import ParameterServerConfig
from lightning_dist.gradsync.parameter_server.client import Address, ServedTable
from lightning_dist.gradsync.parameter_server.processes.handover import Handover
from lightning_dist.gradsync.parameter_server.processes.homes import Home, homes_of
from lightning_dist.gradsync.parameter_server.processes.remote import Line, RemoteShard
from lightning_dist.gradsync.parameter_server.processes.task import Share, Task
from lightning_dist.gradsync.parameter_server.processes.watch import Death, Return, ServerProcess
from lightning_dist.gradsync.parameter_server.server import listening
from lightning_dist.gradsync.sparse.rows import Table

LOST, BACK = "tables.server_lost", "tables.server_back"
"""Names of instants: a server process has died, and serves again."""


class TableProcesses:
    """The server processes of a run as one rank sees them; the first rank of a host has its own to watch.

    The sequence of calls, on every rank: :meth:`open`; :meth:`hand_over` once there are optimizers; :meth:`close`.

    Args:
        run: Who sits where, and the seam.
        options: How many there are.
        timeout_s: Deadline of each wait, in seconds.
        operation: Opens the seam around what waits for a process, given its name.
    """

    def __init__(
        self,
        run: RunContext,
        options: ParameterServerConfig,
        *,
        timeout_s: float,
        operation: Callable[[str], AbstractContextManager[None]],
    ) -> None:
        self._run = run
        self._timeout_s = timeout_s
        self._operation = operation
        self._homes = homes_of(run.cluster.host_of_rank, per_host=options.servers_per_host, copies=1 + options.replicas)
        self._processes: list[ServerProcess] = []
        self._lines: list[Line] = []
        self._handover: Handover | None = None

    @property
    def names(self) -> list[str]:
        """Of the process that is asked for each rank's rows, for people."""
        return [str(homes[0]) for homes in self._homes]

    def shard_of(self, values: Tensor, table: Table, number: int) -> RemoteShard:
        """A table's shard of this rank, whose values go to its processes when they are opened.

        Args:
            values: [k, ...], of this rank.
            table: What they are a part of.
            number: Of the table.
        """
        return RemoteShard(
            values,
            table=table,
            number=number,
            num_ranks=self._run.cluster.world_size,
            timeout_s=self._timeout_s,
            alarm=self._run.collectives.alarm,
            operation=self._operation,
        )

    def open(self, served: Sequence[ServedTable], *, store: dist.Store, secret: bytes, address: str) -> list[Address]:
        """Start the processes, and send them this rank's rows; every rank calls it.

        Args:
            served: The tables, by number.
            store: Of the run, for this purpose.
            secret: Of the run's servers.
            address: Of this host on the cluster's network.

        Returns:
            Where each rank's rows are looked up.
        """
        run = self._run
        if run.cluster.rank_in_host(run.rank) == 0:
            self._start(served, store=store, secret=secret, address=address)
        places = self._places(store)
        own_lines = []
        for copy, home in enumerate(self._homes[run.rank]):
            line = Line(
                str(home),
                places[run.rank, copy],
                secret=secret,
                timeout_s=self._timeout_s,
                alarm=run.collectives.alarm,
            )
            own_lines.append(line)
        self._lines = own_lines
        for each in served:
            assert isinstance(each.own, RemoteShard), "as made by shard_of"
            each.own.open(own_lines)
        store.set(f"has rows/{run.rank}", "")
        ranks = range(run.cluster.world_size)
        store.wait([f"has rows/{rank}" for rank in ranks], run.collectives.deadline)
        return [places[rank, 0] for rank in ranks]

    def hand_over(
        self,
        tables: Mapping[Tensor, ServedTable],
        optimizers: Iterable[torch.optim.Optimizer],
        *,
        version: Callable[[], int],
    ) -> None:
        """Have optimizers' steps on tables made there.

        Args:
            tables: By what is left of the weight.
            optimizers: The user's own.
            version: The number of the present step.

        Raises:
            CombinationError: The processes do not have an optimizer of that class.
        """
        shards = {weight: served.own for weight, served in tables.items() if isinstance(served.own, RemoteShard)}
        self._handover = Handover(shards, version=version)
        for optimizer in optimizers:
            self._handover.attach(optimizer)
        for weight, shard in shards.items():
            weight.data = shard.values

    def close(self) -> None:
        """End the processes of this host. Safe to call twice."""
        if self._handover is not None:
            self._handover.release()
        for line in self._lines:
            line.close()
        processes, self._processes = self._processes, []
        for process in processes:
            process.close()

    def _start(self, served: Sequence[ServedTable], *, store: dist.Store, secret: bytes, address: str) -> None:
        """Those of this host: first their sockets, which all are told of, then the processes."""
        run = self._run
        host = run.cluster.host_of(run.rank)
        held: dict[Home, list[tuple[int, int]]] = {}  # (rank, copy) of each share
        for rank, homes in enumerate(self._homes):
            for copy, home in enumerate(homes):
                if home.host == host:
                    held.setdefault(home, []).append((rank, copy))
        with contextlib.ExitStack() as on_failure:
            listeners = {}
            for shares in held.values():
                for share in shares:
                    listeners[share] = on_failure.enter_context(listening(address))
            said = [[*share, address, each.getsockname()[1]] for share, each in listeners.items()]
            store.set(f"servers/{host}", json.dumps(said))
            places = self._places(store)
            for home, shares in held.items():
                task = Task(
                    tuple(each.table for each in served),
                    tuple(
                        Share(
                            rank,
                            tuple(len(each.placement.rows_of(rank)) for each in served),
                            listeners[rank, copy].fileno(),
                            places.get((rank, 1 - copy)),
                        )
                        for rank, copy in shares
                    ),
                    secret,
                    self._timeout_s,
                )
                own = [listeners[share] for share in shares]
                self._processes.append(ServerProcess(home, task, own, told=self._told))
            on_failure.pop_all()

    def _places(self, store: dist.Store) -> dict[tuple[int, int], Address]:
        """(rank, copy) -> where it is asked."""
        keys = [f"servers/{host}" for host in self._run.cluster.hosts]
        store.wait(keys, self._run.collectives.deadline)
        said = [each for text in store.multi_get(keys) for each in json.loads(text)]
        return {(int(rank), int(copy)): (str(address), int(port)) for rank, copy, address, port in said}

    def _told(self, what: Death | Return) -> None:
        """In a thread that watches a process."""
        if isinstance(what, Return):
            self._run.events.instant(BACK, server=str(what.home), seconds=what.seconds)
            _say(f"{what.home} serves again {what.seconds:.1f} s later, with the rows of its copy; no step is lost")
            return
        self._run.events.instant(LOST, server=str(what.home), how=what.how)
        then = "it is started again with the rows of its copy"
        if not what.restarts:
            without = (
                "cannot be read" if what.has_copy else "does not exist (sync.parameter_server.replicas=1 makes one)"
            )
            then = (
                f"a copy of its rows {without}, so the run ends; under hierdist launch it goes on from its newest "
                "checkpoint"
            )
        _say(f"{what.home} was lost, {what.how}: {then}")


def _say(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(f"hierdist: {text}\n")
        sys.stderr.flush()

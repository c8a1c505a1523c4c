"""A pool of ready ranks: functions run on several processes that have torch imported already.

Usage::

    def add(context, x):            # top level of a module; runs on every rank
        t = torch.tensor([float(context.rank + x)])
        torch.distributed.all_reduce(t)
        return t.item()

    with RankPool() as pool:
        assert pool.run(add, world_size=2, args=(1,)) == [3.0, 3.0]

What a rank raises is shown in the test, with the tracebacks of all ranks that failed; a hang ends by the deadline, with
the stacks of the ranks that hung. Ranks that failed are killed and replaced; those that did well are used again, after
they left their process groups and showed that no thread, child or descriptor is left.
"""

from __future__ import annotations

import contextlib
import pickle
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.support.failures import RankFailure, RanksFailed
from tests.support.forkserver import ForkServer, RankProcess
from tests.support.leaks import Exempt
from tests.support.placement import HostRanks, Placement
from tests.support.processes import free_port
from tests.support.tasks import Cleaned, CleanUp, FunctionReference, Outcome, RankContext, Task

__all__ = ["Died", "HostNetwork", "Placement", "RankContext", "RankPool", "RanksFailed"]

GRACE_AFTER_FAILURE_S = 15.0  # our ranks ask each other for 3 s; the rest is for a busy machine
CLEAN_UP_DEADLINE_S = 15.0


@dataclass(frozen=True)
class Died:
    """Result of a rank that was allowed to die, and did.

    Attributes:
        exit_code: Negative: the signal that ended it.
    """

    exit_code: int | None


@dataclass(frozen=True)
class HostNetwork:
    """How ranks of one host meet the others.

    Attributes:
        netns: Network namespace, if the host has one.
        address: Its address.
        environment: Variables for its ranks.
    """

    netns: str | None = None
    address: str = "127.0.0.1"
    environment: Mapping[str, str] = field(default_factory=dict)


class RankPool:
    """Ready ranks on one host, or on the hosts of a cluster.

    Args:
        server: Where ranks come from; without one the pool starts its own, which takes the seconds that importing
            torch takes.
        placement: Used by calls that give none.
        networks: Host name -> its network; hosts not in it are labels only (``HIERDIST_HOST``) on this machine.
    """

    def __init__(
        self,
        *,
        server: ForkServer | None = None,
        placement: Placement | HostRanks | None = None,
        networks: Mapping[str, HostNetwork] | None = None,
    ) -> None:
        self._server = server if server is not None else ForkServer()
        self._owns_server = server is None
        self._placement = None if placement is None else Placement.of(placement)
        self._networks = dict(networks or {})
        self._idle: list[RankProcess] = []

    def __enter__(self) -> RankPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def exempt(self) -> Exempt:
        """What in this process belongs to the pool; for leak checks."""
        return self._server.exempt + Exempt(descriptors=[rank.connection.fileno() for rank in self._idle])

    @property
    def pids(self) -> list[int]:
        """Processes of the idle ranks."""
        return [rank.pid for rank in self._idle]

    def run(
        self,
        function: Callable[..., Any],
        *,
        world_size: int | None = None,
        layout: Placement | HostRanks | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        deadline_s: float = 60.0,
        env: Mapping[str, str] | None = None,
        env_per_rank: Sequence[Mapping[str, str]] | None = None,
        init_group: bool = True,
        group_timeout_s: float | None = None,
        fresh: bool = False,
        may_die: Collection[int] = (),
        seed: int = 0,
    ) -> list[Any]:
        """Call ``function(context, *args, **kwargs)`` on every rank; the results by rank.

        Args:
            function: At the top level of an importable module.
            world_size: Number of ranks, all on one host; give either this or ``layout``.
            layout: Hosts and their ranks, e.g. ``[["a", [0, 1]], ["b", [2]]]``.
            args: Passed to all ranks, pickled.
            kwargs: Likewise.
            deadline_s: Time for the whole call, in seconds.
            env: Variables set on all ranks during the call.
            env_per_rank: Variables by rank.
            init_group: Make a default Gloo group first, by a file; MASTER_ADDR and MASTER_PORT are set in any case.
            group_timeout_s: Deadline of its collectives, in seconds; longer than the call's, if not given, so
                that a hang is shown where it is.
            fresh: Use new processes and kill them afterwards; for calls that break a group or the process.
            may_die: Ranks that may end during the call (their result is :class:`Died`); implies ``fresh``.
            seed: Seeds torch, numpy and random alike on all ranks.

        Raises:
            RanksFailed: A rank raised, died, hung or left something behind.
        """
        placement = self._place(world_size, layout)
        reference = FunctionReference.of(function)
        arguments = pickle.dumps((tuple(args), dict(kwargs or {})))
        fresh = fresh or bool(may_die)
        folder = Path(tempfile.mkdtemp(prefix="ranks-call-"))
        call = _Call(self._server, reference.name, deadline_s, frozenset(may_die))
        try:
            common = self._common_environment(placement)
            for seat in placement.seats():
                network = self._networks.get(seat.host, HostNetwork())
                environment = {**common, **seat.environment(), **network.environment}
                if network.netns is None:
                    environment["HIERDIST_HOST"] = seat.host
                environment.update(env or {})
                environment.update(env_per_rank[seat.rank] if env_per_rank is not None else {})
                timeout_s = (2 * deadline_s if group_timeout_s is None else group_timeout_s) if init_group else None
                call.tasks.append(
                    Task(reference, arguments, seat, placement, environment, folder, deadline_s, timeout_s, seed)
                )
                call.ranks.append(self._take(network, fresh=fresh))
            results = call.perform()
            if not fresh:
                call.clean_up()
                self._idle += call.ranks
                call.ranks = []
            return results
        finally:  # whoever is still in the call is not fit for another
            for rank in call.ranks:
                self._server.end(rank)
            shutil.rmtree(folder, ignore_errors=True)

    def close(self) -> None:
        """End all ranks. Safe twice."""
        ranks, self._idle = self._idle, []
        for rank in ranks:
            self._server.end(rank)
        if self._owns_server:
            self._server.close()

    def _place(self, world_size: int | None, layout: Placement | HostRanks | None) -> Placement:
        if world_size is not None and layout is not None:
            raise ValueError("give world_size or layout, not both")
        if world_size is not None:
            return Placement.of(world_size)
        if layout is None and self._placement is None:
            raise ValueError("give world_size=N or layout={host: [ranks]}")
        return Placement.of(layout if layout is not None else self._placement)  # type: ignore[arg-type]

    def _common_environment(self, placement: Placement) -> dict[str, str]:
        host = placement.seats()[0].host
        address = self._networks.get(host, HostNetwork()).address
        return {"MASTER_ADDR": address, "MASTER_PORT": str(free_port())}

    def _take(self, network: HostNetwork, *, fresh: bool) -> RankProcess:
        rank = None
        if not fresh:
            rank = next((idle for idle in self._idle if idle.netns == network.netns), None)
        if rank is None:
            rank = self._server.fork(netns=network.netns)
        else:
            self._idle.remove(rank)
        return rank


@dataclass
class _Call:
    """One call on its way."""

    server: ForkServer
    name: str
    deadline_s: float
    may_die: frozenset[int]
    tasks: list[Task] = field(default_factory=list)
    ranks: list[RankProcess] = field(default_factory=list)
    failures: list[RankFailure] = field(default_factory=list)

    def perform(self) -> list[Any]:
        for rank, task in zip(self.ranks, self.tasks, strict=True):
            rank.output_start = rank.output.stat().st_size
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # found dead below
                rank.connection.send_bytes(pickle.dumps(task))
        results: dict[int, Any] = {}
        for index, message in self._receive(self.deadline_s):
            if isinstance(message, Outcome) and message.value is not None:
                results[index] = pickle.loads(message.value)
            elif isinstance(message, Outcome):
                self._raised(index, message)
            elif index in self.may_die:
                results[index] = Died(self.server.status(self.ranks[index]))
            else:
                self._died(index)
        self._raise_failures(self.name)
        return [results[index] for index in range(len(self.ranks))]

    def clean_up(self) -> None:
        for rank in self.ranks:
            rank.connection.send_bytes(pickle.dumps(CleanUp()))
        for index, message in self._receive(CLEAN_UP_DEADLINE_S):
            if not isinstance(message, Cleaned):
                self._died(index)
            elif message.leaks:
                self._fail(index, "leaked", f"left {len(message.leaks)} behind", "\n".join(message.leaks))
        self._raise_failures(f"{self.name} (cleaning up after it)")

    def _receive(self, deadline_s: float) -> Any:
        """Yield (rank, message or ``None`` for a closed pipe) as they come; ranks that stay silent have failed."""
        end, grace_end = time.monotonic() + deadline_s, None
        pending: dict[Any, int] = {rank.connection: index for index, rank in enumerate(self.ranks)}
        while pending:
            if self.failures and grace_end is None:  # the others wait for a rank that is gone
                end = grace_end = min(end, time.monotonic() + GRACE_AFTER_FAILURE_S)
            ready = wait(list(pending), timeout=max(0.0, end - time.monotonic()))
            if not ready:
                why = f"within {deadline_s:g} s" if grace_end is None else "after another rank had failed"
                for index in sorted(pending.values()):
                    self._fail(index, "hung", f"no answer {why}", self.ranks[index].dump_stacks())
                return
            for connection in ready:
                index = pending.pop(connection)
                try:
                    message = pickle.loads(connection.recv_bytes())  # type: ignore[union-attr]
                except (EOFError, ConnectionResetError):
                    message = None
                yield index, message

    def _raised(self, index: int, outcome: Outcome) -> None:
        exception = None
        with contextlib.suppress(Exception):
            exception = pickle.loads(outcome.exception) if outcome.exception is not None else None
        self._fail(index, "raised", outcome.summary, outcome.traceback, exception)
        self.server.interrupt(self.ranks[index])  # its peers see closed connections, and need not wait

    def _died(self, index: int) -> None:
        code = self.server.status(self.ranks[index])
        how = f"exit code {code}"
        if code is not None and code < 0:
            how = f"killed by {signal.Signals(-code).name}"
        self._fail(index, "died", how)

    def _fail(
        self, index: int, kind: str, summary: str, details: str = "", exception: BaseException | None = None
    ) -> None:
        printed = self.ranks[index].printed()
        self.failures.append(RankFailure(index, kind, summary, details, printed, exception))

    def _raise_failures(self, what: str) -> None:
        if self.failures:
            raise RanksFailed(what, self.failures) from self.failures[0].exception

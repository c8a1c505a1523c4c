"""How tables whose rows are dealt to servers are looked up and trained."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_dist.config.checks import check_choice, check_count, check_flags
from lightning_dist.errors import CombinationError

SERVERS = ("ranks", "processes")

_ASYNCHRONOUS_STEPS_APART = 16


@dataclass(frozen=True)
class ParameterServerConfig:
    """Options of tables that ``sync.sparse.exchange`` deals to servers.

    Attributes:
        staleness: How many steps may be missing in what a look-up sees, at most 64. 0: none, training equals that with
            whole tables. Else a look-up of step t sees rows exactly as step t - ``staleness`` has left them, so ranks
            may drift apart by that many steps, and a run can be repeated. ``None``: whatever is there, gradients are
            applied one by one as they come, no run is like another, and ranks are at most 16 steps apart.
        prefetch: Whether a module that has ``rows_of_batch`` is asked for the rows of the next batch, which are then
            looked up beside the present step.
        servers: ``ranks`` (each rank serves and steps the rows that it has) or ``processes`` (each host has processes
            that do so for its ranks, which then hold no rows).
        servers_per_host: Of ``processes``: how many, at most one a rank.
        replicas: Of ``processes``: 1 keeps each row a second time, on another host, so that a process that dies is
            started again with its rows, and no step is lost. 0: the run ends then, and goes on from a checkpoint.
        max_pending: With a ``staleness`` other than 0: so many steps' gradients may wait on a rank to be sent; who
            makes more waits.
    """

    staleness: int | None = 0
    prefetch: bool = True
    servers: str = "ranks"
    servers_per_host: int = 1
    replicas: int = 0
    max_pending: int = 4

    @property
    def steps_apart(self) -> int:
        """By how many steps ranks may drift apart while they still hear each other's wish to stop."""
        return _ASYNCHRONOUS_STEPS_APART if self.staleness is None else max(1, self.staleness)

    def __post_init__(self) -> None:
        if self.staleness is not None:
            check_count("sync.parameter_server.staleness", self.staleness, low=0, high=64, unit="steps")
        check_count("sync.parameter_server.max_pending", self.max_pending, low=1, high=64, unit="steps")
        check_choice("sync.parameter_server.servers", self.servers, SERVERS)
        check_count("sync.parameter_server.servers_per_host", self.servers_per_host, low=1, high=64, unit="processes")
        check_count("sync.parameter_server.replicas", self.replicas, low=0, high=1, unit="copies")
        check_flags("sync.parameter_server", self)
        if self.servers == "processes" and self.staleness != 0:
            raise CombinationError(
                f"sync.parameter_server.servers=processes makes each step before the next look-up, and "
                f"sync.parameter_server.staleness={self.staleness} does not: write servers=ranks, or staleness=0"
            )

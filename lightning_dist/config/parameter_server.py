"""How tables whose rows are dealt to servers are looked up and trained."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_dist.config.checks import check_count, check_flags


@dataclass(frozen=True)
class ParameterServerConfig:
    """Options of tables that ``sync.sparse.exchange`` deals to servers.

    Attributes:
        staleness: How many steps may be missing in what a look-up sees, at most 64. 0: none, training equals that with
            whole tables. Else a look-up of step t sees rows exactly as step t - ``staleness`` has left them, so ranks
            may drift apart by that many steps, and a run can be repeated. ``None``: whatever is there, gradients are
            applied one by one as they come, and no run is like another.
        prefetch: Whether a module that has ``rows_of_batch`` is asked for the rows of the next batch, which are then
            looked up beside the present step.
        max_pending: With a ``staleness`` other than 0: so many steps' gradients may wait on a rank to be sent; who
            makes more waits.
    """

    staleness: int | None = 0
    prefetch: bool = True
    max_pending: int = 4

    @property
    def is_synchronous(self) -> bool:
        """Whether each step is made before the next look-up."""
        return self.staleness == 0

    def __post_init__(self) -> None:
        if self.staleness is not None:
            check_count("sync.parameter_server.staleness", self.staleness, low=0, high=64, unit="steps")
        check_count("sync.parameter_server.max_pending", self.max_pending, low=1, high=64, unit="steps")
        check_flags("sync.parameter_server", self)

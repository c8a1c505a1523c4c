"""On whom a failure is blamed: pure.

When one rank fails, the others fail as well, since they wait for it; whose failure is heard of first is chance. What
counts is the first that had a cause of its own. A host's loss is noticed seconds after its peers' errors, and a process
that was killed an instant later than theirs; both are causes of their own, so they go before errors. An abort is not: a
runtime ends its own process that way when a peer is gone.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_dist.elastic.policy.events import Cause

_OWN = frozenset({
    Cause.SIGNAL, Cause.OUT_OF_MEMORY, Cause.HANG, Cause.HOST_LOST, Cause.UNHEALTHY, Cause.PREEMPTED,
})  # fmt: skip
_ABORT = -signal.SIGABRT
_TEXTS = {
    Cause.EXIT: "ended with an error",
    Cause.SIGNAL: "was killed",
    Cause.OUT_OF_MEMORY: "was killed because memory ran out",
    Cause.HANG: "made no progress",
    Cause.HOST_LOST: "is lost",
    Cause.UNHEALTHY: "has failed its check",
    Cause.PREEMPTED: "was told to end",
    Cause.START: "did not come to its first step",
}
PREEMPTED_EXIT_CODE = 128 + signal.SIGTERM
"""Of a run that ends because its hosts were told to end, as a shell has it."""


@dataclass(frozen=True)
class Failure:
    """Something that ended a round before its time.

    Attributes:
        cause: Why.
        host: On which.
        rank: Global; ``None``: all of the host.
        detail: What was seen.
        exit_code: Of the process; negative: a signal's number.
        is_consequence: Another rank's failure is behind it.
    """

    cause: Cause
    host: str
    rank: int | None = None
    detail: str = ""
    exit_code: int | None = None
    is_consequence: bool = False


@dataclass(frozen=True)
class Blame:
    """What a round failed of.

    Attributes:
        cause: Why.
        host: Where it began.
        is_hosts_fault: It counts against that host: else it is the script's, or nobody's.
        ranks: Global ranks of that host which failed.
        detail: What was seen.
        exit_code: That the run has if it ends of this.
    """

    cause: Cause
    host: str
    is_hosts_fault: bool
    ranks: tuple[int, ...]
    detail: str
    exit_code: int

    @property
    def text(self) -> str:
        """For people: rank, host, cause."""
        ranks = f"rank{'s' if len(self.ranks) > 1 else ''} {', '.join(map(str, self.ranks))}" if self.ranks else ""
        who = f"{ranks} on host {self.host}" if ranks else f"host {self.host}"
        return f"{who} {_TEXTS[self.cause]}{f': {self.detail}' if self.detail else ''}"


def blame(failures: Sequence[Failure]) -> Blame | None:
    """What a round failed of; ``None`` if nothing failed.

    Args:
        failures: In the order in which they were heard of.
    """
    if not failures:
        return None
    own = [failure for failure in failures if not failure.is_consequence]
    first = min(own or failures, key=_is_weak)  # the first of several: min is stable
    alike = [failure for failure in own if failure.cause is first.cause]
    # The same error on several hosts is the script's.
    is_script = first.cause is Cause.EXIT and len({failure.host for failure in alike}) > 1
    ranks = {failure.rank for failure in (alike or failures) if failure.host == first.host}
    return Blame(
        cause=first.cause,
        host=first.host,
        is_hosts_fault=bool(own) and not is_script,
        ranks=tuple(sorted(rank for rank in ranks if rank is not None)),
        detail=first.detail,
        exit_code=_shell_code(first),
    )


def _is_weak(failure: Failure) -> bool:
    return failure.cause not in _OWN or (failure.cause is Cause.SIGNAL and failure.exit_code == _ABORT)


def _shell_code(failure: Failure) -> int:
    if failure.cause is Cause.PREEMPTED:
        return PREEMPTED_EXIT_CODE
    code = failure.exit_code or 1
    return 128 - code if code < 0 else code

"""What the leader hears, as values; :class:`~lightning_dist.elastic.policy.machine.Policy` reacts to each."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from lightning_dist.config.elastic import ElasticConfig
from lightning_dist.elastic.policy.sizes import Sizes


class Cause(str, enum.Enum):
    """Why a rank or a host is to be replaced."""

    EXIT = "exit"  # a process ended with an error
    SIGNAL = "signal"  # a process was killed
    OUT_OF_MEMORY = "out_of_memory"  # by the kernel
    HANG = "hang"  # no progress within its deadline
    HOST_LOST = "host_lost"  # its agent is gone, or silent
    UNHEALTHY = "unhealthy"  # it did not pass its check
    PREEMPTED = "preempted"  # it was told to end
    START = "start"  # a round did not come to its first step


@dataclass(frozen=True)
class HostReady:
    """A host is there, checked, and waits for a round.

    Attributes:
        num_ranks: It would run so many.
        store_port: Where its agent's store for the ranks of the next round is; 0: it has none.
    """

    host: str
    num_ranks: int
    store_port: int = 0


@dataclass(frozen=True)
class HostLost:
    """A host's agent is gone.

    Attributes:
        is_certain: Its process is known to be dead (the connection was closed); else it is silent, and may live on.
        silent_s: From its last sign of life until it counts as lost, in seconds.
    """

    host: str
    is_certain: bool
    detail: str = ""
    silent_s: float = 0.0


@dataclass(frozen=True)
class HostLeaves:
    """A host says that it is to end (preemption, SIGTERM to its agent)."""

    host: str
    detail: str = ""


@dataclass(frozen=True)
class HostUnhealthy:
    """A host has failed its check."""

    host: str
    detail: str


@dataclass(frozen=True)
class WorkerFailed:
    """A rank has ended with an error, was killed, or hangs.

    Attributes:
        round: In which; what belongs to an earlier one is old news.
        rank: Global.
        exit_code: Of its process; negative: a signal's number.
        is_consequence: Its last words, or what it waits for, name another rank: it is not to blame.
        silent_s: From its last sign of life, or its end, to the agent's telling, in seconds.
    """

    host: str
    round: int
    rank: int
    cause: Cause
    detail: str = ""
    exit_code: int | None = None
    is_consequence: bool = False
    silent_s: float = 0.0


@dataclass(frozen=True)
class RoundStopped:
    """A host has ended its ranks of a round, and would start others.

    Attributes:
        step: The newest that any of them has done in it; ``None``: unknown.
    """

    host: str
    round: int
    step: int | None = None


@dataclass(frozen=True)
class FirstStep:
    """All ranks of a host have done the first step of a round.

    Attributes:
        start_s: From the agent's hearing of the round until its ranks had met the others, in seconds.
        load_s: From then on until model, data and snapshot were there, in seconds.
        first_step_s: From then on until the step was done, in seconds.
    """

    host: str
    round: int
    step: int
    start_s: float | None = None
    load_s: float | None = None
    first_step_s: float | None = None


@dataclass(frozen=True)
class Snapshot:
    """A snapshot of a step is committed."""

    round: int
    step: int


@dataclass(frozen=True)
class Progress:
    """How a host gets on; told now and then, and old once there is a newer one.

    Attributes:
        step: Done by all its ranks.
        own_s: By local rank, seconds of the last step in which it waited for no other rank.
    """

    host: str
    round: int
    step: int
    own_s: tuple[float, ...]


@dataclass(frozen=True)
class RoundDone:
    """All ranks of a host have ended well."""

    host: str
    round: int


@dataclass(frozen=True)
class OptionsTold:
    """The script has said what its ``elastic`` options are."""

    options: ElasticConfig


@dataclass(frozen=True)
class SizesTold:
    """The script has said which hosts and ranks its layout fits."""

    sizes: Sizes


@dataclass(frozen=True)
class EndAsked:
    """Somebody wants the run to end (SIGINT, SIGTERM to the leader's group). Said twice, it ends at once.

    Attributes:
        exit_code: Of the run.
        at_snapshot: After a snapshot, if one can be made.
    """

    detail: str = ""
    exit_code: int = 1
    at_snapshot: bool = True


@dataclass(frozen=True)
class Tick:
    """Time has passed."""


Event = (
    HostReady
    | HostLost
    | HostLeaves
    | HostUnhealthy
    | WorkerFailed
    | RoundStopped
    | FirstStep
    | Snapshot
    | Progress
    | RoundDone
    | OptionsTold
    | SizesTold
    | EndAsked
    | Tick
)

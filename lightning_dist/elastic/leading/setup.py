"""What an agent's node is given: where leaders may be, who may take part, and how long things may take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lightning_dist.config.elastic import ElasticConfig
from lightning_dist.elastic.leading.channel import Pace
from lightning_dist.elastic.leading.endpoints import Endpoint
from lightning_dist.elastic.policy.situation import Waits


@dataclass(frozen=True)
class Setup:
    """See the module.

    Attributes:
        endpoints: In the order in which they lead.
        own: This host's index among them; ``None``: it never leads.
        secret: That all agents share.
        options: Until the script tells its own.
        min_hosts: No round has fewer.
        max_hosts: No round has more.
        pace: Of all connections.
        say: Tells people.
        join_s: How long to look for a leader at the start, in seconds.
        seek_s: How long to look for the next one, in seconds.
        first_s: At the start an endpoint waits so long for those before it, in seconds.
        waits: How long the policy waits for hosts.
        fence: Folder in which rounds are claimed; ``None``: they are not.
        record: Folder for incidents; ``None``: they are not written down.
    """

    endpoints: Sequence[Endpoint]
    own: int | None
    secret: bytes = field(repr=False)
    options: ElasticConfig
    min_hosts: int
    max_hosts: int
    pace: Pace
    say: Callable[[str], None]
    join_s: float
    seek_s: float
    first_s: float
    waits: Waits = field(default_factory=Waits)
    fence: Path | None = None
    record: Path | None = None

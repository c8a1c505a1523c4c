"""What the checks of a host are to look at."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Any

from lightning_dist.elastic.health.limits import HealthLimits


@dataclass(frozen=True)
class Peer:
    """Somebody on another host.

    Attributes:
        address: Name or address.
        port: Of TCP.
        must_answer: Somebody listens there, and this host must reach it; else it counts if it answers.
    """

    address: str
    port: int
    must_answer: bool = True

    def __str__(self) -> str:
        return f"{self.address}:{self.port}"


@dataclass(frozen=True)
class Request:
    """What to check.

    Attributes:
        folders: Where the run will write, e.g. checkpoints and logs; each is checked.
        peers: Whom the host reaches.
        limits: What is allowed.
        secret: That agents share; ``None``: what the way to them carries is not measured.
    """

    folders: tuple[str, ...] = ()
    peers: tuple[Peer, ...] = ()
    limits: HealthLimits = field(default_factory=HealthLimits)
    secret: bytes | None = field(default=None, repr=False)

    def to_text(self) -> str:
        """For the process that checks."""
        secret = None if self.secret is None else self.secret.hex()
        return json.dumps({**dataclasses.asdict(dataclasses.replace(self, secret=None)), "secret": secret})

    @classmethod
    def from_text(cls, text: str) -> Request:
        """The inverse of :meth:`to_text`."""
        given: dict[str, Any] = json.loads(text)
        return cls(
            folders=tuple(given["folders"]),
            peers=tuple(Peer(**peer) for peer in given["peers"]),
            limits=HealthLimits(**given["limits"]),
            secret=None if given["secret"] is None else bytes.fromhex(given["secret"]),
        )

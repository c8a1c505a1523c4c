"""What a server process is told to hold; it passes through a pipe, so that its secret is in no list of processes."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from lightning_dist.gradsync.sparse.rows import Table


@dataclass(frozen=True)
class Share:
    """One rank's rows, in one process.

    Attributes:
        rank: Whose.
        rows: How many it has of each table.
        listener: Number of the open socket on which this copy is asked.
        elsewhere: (address, port) of the other copy; ``None``: there is none.
    """

    rank: int
    rows: tuple[int, ...]
    listener: int
    elsewhere: tuple[str, int] | None = None


@dataclass(frozen=True)
class Task:
    """All that a process is told.

    Attributes:
        tables: What they are like as a whole.
        shares: What of them it holds.
        secret: Of this run's servers.
        timeout_s: Deadline of each wait, in seconds.
        restores: Whether it begins with what the other copies have, and not empty.
    """

    tables: tuple[Table, ...]
    shares: tuple[Share, ...]
    secret: bytes = field(repr=False)
    timeout_s: float
    restores: bool = False

    def to_json(self) -> str:
        """In one line."""
        said: dict[str, Any] = {
            "tables": [{"shape": each.shape, "dtype": str(each.dtype).removeprefix("torch.")} for each in self.tables],
            "shares": [asdict(each) for each in self.shares],
            "secret": self.secret.hex(),
            "timeout_s": self.timeout_s,
            "restores": self.restores,
        }
        return json.dumps(said)

    @classmethod
    def from_json(cls, line: str) -> Task:
        """What :meth:`to_json` made."""
        said = json.loads(line)
        return cls(
            tuple(Table(tuple(each["shape"]), getattr(torch, each["dtype"])) for each in said["tables"]),
            tuple(_share_of(each) for each in said["shares"]),
            bytes.fromhex(said["secret"]),
            float(said["timeout_s"]),
            bool(said["restores"]),
        )


def _share_of(said: dict[str, Any]) -> Share:
    elsewhere = said["elsewhere"]
    return Share(
        int(said["rank"]),
        tuple(said["rows"]),
        int(said["listener"]),
        None if elsewhere is None else (str(elsewhere[0]), int(elsewhere[1])),
    )

"""What a run leaves in its agent's folder for its next start: when it began, with how many ranks, where it saves.

A script's checkpoints may go to another folder each time it is started: Lightning's loggers count versions.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lightning_dist.elastic.agent_folder import read_json, write_json
from lightning_dist.errors import ConfigError

FILE = "run.json"


@dataclass(frozen=True)
class Trail:
    """What is known of the run's earlier starts.

    Attributes:
        begun_s: When it was first started, seconds since 1970.
        folders: Paths or URLs of folders that its checkpoints went to.
        unnamed: Of these, the one that the script did not choose.
        ranks: How many it had at its first start; 0: unknown.
    """

    begun_s: float
    folders: tuple[str, ...] = ()
    unnamed: str | None = None
    ranks: int = 0


def leave(folder: Path, trail: Trail) -> None:
    """Write it into an agent's folder."""
    write_json(folder / FILE, asdict(trail))


def find(folder: Path) -> Trail | None:
    """What was left; ``None`` if nothing was.

    Raises:
        ConfigError: It is that of another version.
    """
    found: Any = read_json(folder / FILE)
    if found is None:
        return None
    try:
        return Trail(
            float(found["begun_s"]),
            tuple(map(str, found["folders"])),
            found.get("unnamed"),
            int(found.get("ranks", 0)),
        )
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise ConfigError(f"{folder / FILE} is no trail of a run: {error!r}") from error


def started_s(process: int) -> float | None:
    """When a process of this host was started, seconds since 1970; ``None`` if that cannot be read."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        booted = next(line for line in Path("/proc/stat").read_text().splitlines() if line.startswith("btime "))
        return float(booted.split()[1]) + int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return None

"""What ``hierdist launch`` was asked for, as values. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lightning_dist.config.elastic import ElasticConfig
from lightning_dist.elastic.agent.command import Program
from lightning_dist.errors import ConfigError


@dataclass(frozen=True)
class LaunchOptions:
    """How this host takes part in a run.

    Attributes:
        program: What ranks run.
        num_ranks: How many run here.
        min_hosts: With fewer, nothing is started.
        max_hosts: More take no part.
        host: This host's name.
        address: Under which other hosts reach it.
        mode: What becomes of failures; ``None``: what the script says, else :meth:`elastic`.
        preload: Modules that are imported once, before ranks are started.
        logs: Folder for a file of each rank and round.
        with_prefix: Write the rank's name before each line.
        record: Folder for incidents.
    """

    program: Program
    num_ranks: int
    min_hosts: int = 1
    max_hosts: int = 1
    host: str = "localhost"
    address: str = "127.0.0.1"
    mode: str | None = None
    preload: Sequence[str] = ()
    logs: Path | None = None
    with_prefix: bool = True
    record: Path | None = None

    def elastic(self) -> ElasticConfig:
        """What holds until the script says what it wants: with a choice of sizes, the run goes on at a smaller one."""
        return ElasticConfig(mode=self.mode or ("degrade" if self.min_hosts < self.max_hosts else "restart"))


def parse_hosts(text: str) -> tuple[int, int]:
    """Read ``MIN:MAX`` or ``N``.

    Raises:
        ConfigError: It is neither, or the smallest number is larger than the largest.
    """
    match = re.fullmatch(r"(\d+)(?::(\d+))?", text.strip())
    if match is None:
        raise ConfigError(f"--hosts {text!r} is no number of hosts; write MIN:MAX, e.g. 2:4, or one number for both")
    least = int(match[1])
    most = least if match[2] is None else int(match[2])
    if least < 1:
        raise ConfigError(f"--hosts {text!r}: at least 1 host is needed; write e.g. 1:{max(most, 1)}")
    if least > most:
        raise ConfigError(f"--hosts {text!r}: the smallest number comes first; write {most}:{least}")
    return least, most

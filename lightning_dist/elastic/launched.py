"""What a rank knows of whoever started it: which run this is, which start of it, and where its host's agent listens."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lightning_dist.errors import LaunchError

AGENT_VARIABLE = "HIERDIST_AGENT"
RUN_VARIABLE = "HIERDIST_RUN"
ROUND_VARIABLE = "HIERDIST_ROUND"
RECORD_VARIABLE = "HIERDIST_RECORD"
PROCESS_VARIABLE = "HIERDIST_PROCESS"
"""Process id of a rank that can stay for the next round, see :mod:`lightning_dist.elastic.agent.staying`; what it
starts itself inherits the variable, and is another process."""


@dataclass(frozen=True)
class Launched:
    """How this process came to be.

    Attributes:
        agent: Folder that the agent of this host shares with its ranks; ``None``: there is no agent of ours.
        run: Names the run, the same on all hosts and after each restart; ``None``: nobody has named it.
        round: Which start of the run this is, from 1.
        num_hosts: Hosts of this round; ``None``: only an agent of ours knows better than the script.
        record: Folder in which agents write down incidents; ``None``: nobody does.
        can_stay: Whether the script can be run once more in this process.
    """

    agent: Path | None = None
    run: str | None = None
    round: int = 1
    num_hosts: int | None = None
    record: str | None = None
    can_stay: bool = False

    @property
    def is_restart(self) -> bool:
        """Whether the run has been started before, by this launch of it."""
        return self.round > 1

    @property
    def owns_name(self) -> bool:
        """Whether no other run has this one's name: a later launch of that name is the same run."""
        return self.agent is not None and self.run is not None


def launched(environ: Mapping[str, str]) -> Launched:
    """Read it off environment variables: those of ``hierdist launch``, of torchrun, or of SLURM.

    Raises:
        LaunchError: A variable is not the number that it has to be.
    """
    agent = environ.get(AGENT_VARIABLE)
    elastic_run = environ.get("TORCHELASTIC_RUN_ID")
    run = environ.get(RUN_VARIABLE) or (elastic_run if elastic_run != "none" else None) or environ.get("SLURM_JOB_ID")
    number = _number(environ, ROUND_VARIABLE)
    if number is None:
        restarts = _number(environ, "TORCHELASTIC_RESTART_COUNT") or _number(environ, "SLURM_RESTART_COUNT") or 0
        number = restarts + 1
    num_hosts = _number(environ, "GROUP_WORLD_SIZE") if agent else None
    return Launched(
        Path(agent) if agent else None,
        run or None,
        number,
        num_hosts,
        environ.get(RECORD_VARIABLE) or None,
        can_stay=environ.get(PROCESS_VARIABLE) == str(os.getpid()),
    )


def _number(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name)
    if not text:
        return None
    if not text.isdecimal():
        raise LaunchError(f"{name}={text!r} in the environment is not a number; whoever starts the ranks sets it")
    return int(text)

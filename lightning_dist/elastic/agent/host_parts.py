"""What the agent of a host works with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lightning_dist.elastic.agent.command import Program
from lightning_dist.elastic.agent.folder import AgentFolder
from lightning_dist.elastic.agent.looking import Lookout
from lightning_dist.elastic.agent.orders import Orders
from lightning_dist.elastic.agent.output import Output
from lightning_dist.elastic.agent.warm import WarmProcess
from lightning_dist.elastic.session import Session


@dataclass(frozen=True)
class HostParts:
    """What an agent works with; whoever makes it closes it.

    Attributes:
        host: This host's name.
        address: Under which other hosts reach it.
        program: What ranks run.
        num_ranks: How many run here.
        environ: Variables that ranks inherit.
        session: Leads to the leader.
        orders: From the leader and by signals.
        folder: Shared with the ranks.
        template: Of which they are forked.
        output: Where they print.
        lookout: Looks after them.
        record: Folder for incidents.
        say: Tells people.
    """

    host: str
    address: str
    program: Program
    num_ranks: int
    environ: dict[str, str]
    session: Session
    orders: Orders
    folder: AgentFolder
    template: WarmProcess
    output: Output
    lookout: Lookout
    record: Path | None
    say: Callable[[str], None]

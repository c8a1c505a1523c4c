"""The agent of a host, on torch's: it starts this host's ranks for each round, looks after them, and ends them.

Torch's agent has the worker group, its states, its events and metrics, and the order of a start: rendezvous, ranks,
workers. The loop is our own: torch's polls, decides by itself how often to restart, and waits long for everything.

Note [who decides]
    Nothing is restarted here. The agent tells the leader what it sees, and does what it is ordered; a rank that died
    leaves the others running until then, which is the tenth of a second in which they find out and say so.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed import Store
from torch.distributed.elastic.agent.server.api import (
    DEFAULT_ROLE,
    RunResult,
    SimpleElasticAgent,
    Worker,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.multiprocessing import ProcessFailure

from lightning_dist.config.elastic import ElasticConfig
from lightning_dist.elastic.agent.command import Program
from lightning_dist.elastic.agent.environment import rank_environment, words_file
from lightning_dist.elastic.agent.exits import Exit, MemoryKills
from lightning_dist.elastic.agent.folder import AgentFolder
from lightning_dist.elastic.agent.looking import Lookout
from lightning_dist.elastic.agent.orders import TURN_S, Orders
from lightning_dist.elastic.agent.output import Output
from lightning_dist.elastic.agent.rank_group import RankGroup
from lightning_dist.elastic.agent.rendezvous import RoundBroken, RunEnded, SessionRendezvous
from lightning_dist.elastic.agent.start import Start
from lightning_dist.elastic.agent.warm import WarmProcess
from lightning_dist.elastic.detect.phases import Order
from lightning_dist.elastic.policy.events import Cause, OptionsTold, RoundDone, RoundStopped, WorkerFailed
from lightning_dist.elastic.session import End, Session, Stop

LEAVE_S = 10.0
"""How long a host that is told to leave waits for the leader's order, in seconds; then it stops by itself."""
INTERRUPT_S = 5.0
"""How long ranks have after Ctrl-C, in seconds."""
SNAPSHOT_S = 30.0
"""How long ranks that do not write on the board have to end at a snapshot, in seconds."""

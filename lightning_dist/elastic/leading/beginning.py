"""Makes a leader of what its host remembers: a first one, or one that takes over."""

from __future__ import annotations

import functools
import secrets
import time
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from lightning_dist import incidents
from lightning_dist.elastic.leading.aside import aside
from lightning_dist.elastic.leading.claiming import PATIENCE_S
from lightning_dist.elastic.leading.duties import Duties
from lightning_dist.elastic.leading.fence import Fence
from lightning_dist.elastic.leading.leader import Leader
from lightning_dist.elastic.leading.line_writer import LineWriter
from lightning_dist.elastic.leading.recorder import Recorder
from lightning_dist.elastic.leading.remembered import Remembered
from lightning_dist.elastic.leading.setup import Setup
from lightning_dist.elastic.policy.machine import Policy
from lightning_dist.elastic.policy.situation import LastRound
from lightning_dist.errors import RecordError


async def begin(setup: Setup, remembered: Remembered, term: int) -> Leader:
    """A leader for this host.

    Args:
        setup: Of the host's node.
        remembered: What the host knows of the run.
        term: The leader's number.

    Raises:
        LaunchError: The fence's folder, or that of incidents, cannot be used.
    """
    run = remembered.run or f"{datetime.now(timezone.utc):%Y%m%d-%H%M%S}-{secrets.token_hex(3)}"
    storage = await aside(functools.partial(_open_storage, setup, run), timeout_s=PATIENCE_S, what="fence and record")
    duties = Duties(
        host=remembered.host,
        instance=remembered.instance,
        term=term,
        run=run,
        pace=setup.pace,
        say=setup.say,
        options=setup.options,
        last_round=remembered.round,
        is_running=not remembered.has_stopped,
        lost=remembered.lost,
        lost_s=remembered.lost_s,
        fence=storage.fence,
        recorder=storage.recorder,
        lines=storage.lines,
    )
    return Leader(duties, _policy(setup, duties, remembered))


def _policy(setup: Setup, duties: Duties, remembered: Remembered) -> Policy:
    last = None
    if duties.last_round is not None:
        seats = duties.last_round.seats
        hosts, ranks = tuple(seat.host for seat in seats), tuple(seat.num_ranks for seat in seats)
        # Not whoever led last: in a cut that comes and goes that may be this host, which has started nothing.
        last = LastRound(
            duties.last_round.number, hosts, remembered.starter, is_running=duties.is_running, num_ranks=ranks
        )
    return Policy(
        setup.options,
        min_hosts=setup.min_hosts,
        max_hosts=setup.max_hosts,
        host=duties.host,
        leads_by_right=setup.own == 0,
        has_fence=setup.fence is not None,
        last=last,
        memory=remembered.memory,
        now_s=duties.clock(),
        waits=setup.waits,
    )


@dataclass(frozen=True)
class _Storage:
    fence: Fence | None
    recorder: Recorder
    lines: LineWriter | None


def _open_storage(setup: Setup, run: str) -> _Storage:
    fence = None if setup.fence is None else Fence(setup.fence, run)
    if setup.record is None:
        return _Storage(fence, Recorder(run, first_number=1, wall_clock=time.time), None)
    recorder = Recorder(run, first_number=1 + _last_number(setup, setup.record), wall_clock=time.time)
    return _Storage(fence, recorder, LineWriter(setup.record / incidents.FILE, setup.say))


def _last_number(setup: Setup, folder: Path) -> int:
    """Of the incidents that earlier leaders have written down."""
    try:
        return max((incident.number for incident in incidents.read(folder)), default=0)
    except (OSError, RecordError) as error:
        setup.say(f"the incidents so far cannot be read: {error}")
        return 0

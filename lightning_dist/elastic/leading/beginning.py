"""Makes a leader of what its host remembers: a first one, or one that takes over."""

from __future__ import annotations

import secrets
import time
from datetime import datetime, timezone
from pathlib import Path

from lightning_dist import incidents
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


def begin(setup: Setup, remembered: Remembered, term: int) -> Leader:
    """A leader for this host.

    Args:
        setup: Of the host's node.
        remembered: What the host knows of the run.
        term: The leader's number.

    Raises:
        LaunchError: The fence's folder cannot be made.
    """
    run = remembered.run or f"{datetime.now(timezone.utc):%Y%m%d-%H%M%S}-{secrets.token_hex(3)}"
    recorder = None if setup.record is None else _recorder(setup, run)
    duties = Duties(
        host=remembered.host,
        address=remembered.address,
        instance=remembered.instance,
        term=term,
        run=run,
        pace=setup.pace,
        say=setup.say,
        options=setup.options,
        last_round=remembered.round,
        is_running=not remembered.has_stopped,
        lost=remembered.lost,
        fence=None if setup.fence is None else Fence(setup.fence, run),
        recorder=recorder,
        lines=None if setup.record is None else LineWriter(setup.record / incidents.FILE, setup.say),
    )
    return Leader(duties, _policy(setup, duties, remembered))


def _policy(setup: Setup, duties: Duties, remembered: Remembered) -> Policy:
    last = None
    if duties.last_round is not None:
        hosts = tuple(seat.host for seat in duties.last_round.seats)
        last = LastRound(duties.last_round.number, hosts, remembered.leader, is_running=duties.is_running)
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


def _recorder(setup: Setup, run: str) -> Recorder:
    return Recorder(run, first_number=1 + _last_number(setup, setup.record), wall_clock=time.time)


def _last_number(setup: Setup, folder: Path | None) -> int:
    """Of the incidents that earlier leaders have written down."""
    if folder is None:
        return 0
    try:
        return max((incident.number for incident in incidents.read(folder)), default=0)
    except (OSError, RecordError) as error:
        setup.say(f"the incidents so far cannot be read: {error}")
        return 0

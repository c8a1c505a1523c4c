"""The agent of a host, on torch's: it starts this host's ranks for each round, looks after them, and ends them.

Torch's agent has the worker group, its states, its events and metrics, and the order of a start: rendezvous, ranks,
workers. The loop is our own: torch's polls, decides by itself how often to restart, and waits long for everything.

Note [who decides]
    Nothing is restarted here. The agent tells the leader what it sees, and does what it is ordered; a rank that died
    leaves the others running until then, which is the tenth of a second in which they find out and say so.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Collection

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

from lightning_dist.elastic.agent.exits import Exit, MemoryKills
from lightning_dist.elastic.agent.host_parts import HostParts
from lightning_dist.elastic.agent.orders import TURN_S
from lightning_dist.elastic.agent.rank_group import RELEASE_S, RankGroup
from lightning_dist.elastic.agent.rendezvous import RunEnded, SessionRendezvous
from lightning_dist.elastic.agent.round_starts import RoundStarts
from lightning_dist.elastic.agent.warm import TemplateLostError
from lightning_dist.elastic.detect.phases import Order
from lightning_dist.elastic.policy.events import Cause, Event, RoundDone, RoundStopped, Snapshot, WorkerFailed
from lightning_dist.elastic.rounds import Round
from lightning_dist.elastic.session import End, Stop

LEAVE_S = 10.0
"""How long a host that was told to leave waits for the leader's order, in seconds; then its ranks end at once."""
INTERRUPT_S = 5.0
"""How long ranks have after Ctrl-C, in seconds."""
PART_S = 3.0
"""How long the leader has to end the run for all hosts after Ctrl-C on this one, in seconds."""
TEARDOWN_S = 10.0
"""How long ranks have to end once they have committed the snapshot they were asked for, in seconds."""
SNAPSHOT_S = 30.0
"""How long ranks that say nothing of themselves have to end on SIGTERM, in seconds."""
_ROLE = "default"


class HostAgent(SimpleElasticAgent):
    """Runs the ranks of this host until the leader, or a signal, ends the run; ``run`` may be called once.

    Args:
        parts: What it works with.
    """

    def __init__(self, parts: HostParts) -> None:
        self._parts = parts
        self._meeting = SessionRendezvous(
            parts.session,
            host=parts.host,
            address=parts.address,
            num_ranks=parts.num_ranks,
            next_order=self._order_or_leave,
        )
        spec = WorkerSpec(
            role=_ROLE,
            local_world_size=parts.num_ranks,
            rdzv_handler=self._meeting,
            entrypoint=str(parts.program),
            max_restarts=0,
            monitor_interval=TURN_S,
            local_addr=parts.address,
        )
        super().__init__(spec)
        self._memory_kills = MemoryKills()
        self._ranks: RankGroup | None = None
        self._starts: RoundStarts | None = None
        self._hung: set[int] = set()  # local ranks of this round that were found to hang
        self.end: End | None = None
        """How the run ended."""

    # -- torch's agent ------------------------------------------------------------------------------------------------

    def _invoke_run(self, role: str = DEFAULT_ROLE) -> RunResult:
        session = self._parts.session
        try:
            while True:
                self._initialize_workers(self._worker_group)
                end = self._look_after_ranks()
                if end is not None:
                    raise RunEnded(end)
        except RunEnded as ended:
            self.end = self._parts.orders.leaving or ended.end
            if self._parts.orders.is_interrupted:
                self._wait_for_the_others()
            session.leave(self.end.reason)
        return self._result(self.end)

    def _assign_worker_ranks(
        self, store: Store, group_rank: int, group_world_size: int, spec: WorkerSpec
    ) -> list[Worker]:
        """By the round's seats; torch's way asks the other agents, and waits for those that have died since."""
        found = self._round
        first, size = found.first_rank(self._parts.host), found.world_size
        return [
            Worker(local_rank, global_rank=first + local_rank, role_rank=first + local_rank, world_size=size,
                   role_world_size=size)
            for local_rank in range(spec.local_world_size)
        ]  # fmt: skip

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, int]:
        parts, found = self._parts, self._round
        starts = RoundStarts(parts, found, self._meeting.master)
        if self._ranks is not None and self._starts is not None:
            starts.keep(self._ranks, self._starts)
        self._starts = starts
        board = parts.folder.begin_round()
        ranks = RankGroup(
            parts.template,
            board,
            number=found.number,
            folder=parts.folder.path,
            was_short_of_memory=self._memory_kills.take,
        )
        self._ranks = ranks
        parts.lookout.begin_round(
            board,
            number=found.number,
            first_rank=found.first_rank(parts.host),
            began_ns=self._meeting.heard_ns,
        )
        self._memory_kills.forget()
        self._hung = set()
        pids: dict[int, int] = {}
        try:
            for worker in worker_group.workers:
                pids[worker.local_rank] = starts.start(worker.local_rank)
                ranks.add(worker.local_rank, pids[worker.local_rank])
        except TemplateLostError as error:
            first = found.first_rank(parts.host)
            self._tell(WorkerFailed(parts.host, found.number, first + len(pids), Cause.START, str(error)))
        return pids

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        ranks = self._ranks
        if ranks is None or ranks.running or len(ranks.exits) < self._parts.num_ranks:
            return RunResult(WorkerState.HEALTHY)
        failed = any(exit_.cause is not None for exit_ in ranks.exits.values())
        return RunResult(WorkerState.FAILED if failed else WorkerState.SUCCEEDED)

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        self._end_at_once("the agent restarts its ranks")

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        self._end_at_once("the agent ends")
        self._meeting.shutdown()

    # -- our own ------------------------------------------------------------------------------------------------------

    @property
    def _round(self) -> Round:
        found = self._meeting.round
        assert found is not None
        return found

    def _order_or_leave(self, timeout_s: float) -> Stop | End | None:
        """While no ranks run: nothing keeps a host that was told to leave."""
        return self._parts.orders.next(timeout_s) or self._parts.orders.leaving

    def _tell(self, event: Event) -> None:
        self._parts.session.tell(event)

    def _is_forked_instead(self, exit_: Exit) -> bool:
        """Whether another process has taken the place of one that should have gone on, and could not."""
        ranks, starts = self._ranks, self._starts
        assert ranks is not None
        assert starts is not None
        if not starts.gives_way(exit_.local_rank, ranks):
            return False
        self._parts.say(f"its process could not go on ({exit_.detail}): another one is started")
        try:
            ranks.add(exit_.local_rank, starts.fork(exit_.local_rank))
        except TemplateLostError:  # with all ranks: that is found by itself
            return False
        return True

    def _look_after_ranks(self) -> End | None:
        """From the start of a round to its end. How the run ends, or ``None``: there may be another round."""
        parts, ranks = self._parts, self._ranks
        assert ranks is not None
        leave_s: float | None = None
        while True:
            order = parts.orders.next(TURN_S, parts.template)
            if isinstance(order, End):
                self._end_ranks(order)
                return order
            if isinstance(order, Stop) and order.number >= self._round.number:
                return self._stop(order)
            self._tell_news()
            self._worker_group.state = self._monitor_workers(self._worker_group).state
            if self._worker_group.state is WorkerState.SUCCEEDED:
                self._tell(RoundDone(parts.host, self._round.number))
                return None
            if parts.orders.leaving is not None:
                leave_s = time.monotonic() + LEAVE_S if leave_s is None else leave_s
                if time.monotonic() > leave_s:
                    return self._stop(Stop(self._round.number, parts.orders.leaving.reason))

    def _tell_news(self, *, stopping: bool = False) -> list[WorkerFailed]:
        """Tell the leader what there is to tell; the failures among it.

        Args:
            stopping: Ranks were asked to stop: that they have is no news.
        """
        ranks = self._ranks
        assert ranks is not None
        exits = [exit_ for exit_ in ranks.collect() if exit_.cause is None or not self._is_forked_instead(exit_)]
        events = self._parts.lookout.look(time.monotonic(), now=bool(exits))
        failures = [failure for exit_ in exits if (failure := self._failure(exit_)) is not None]
        events += [failure for failure in failures if not (stopping and self._has_stopped(failure))]
        first = self._round.first_rank(self._parts.host)
        for event in events:
            self._tell(event)
            if isinstance(event, WorkerFailed) and event.cause is Cause.HANG:
                self._hung.add(event.rank - first)
        return [event for event in events if isinstance(event, WorkerFailed)]

    def _has_stopped(self, failure: WorkerFailed) -> bool:
        """Whether a rank did as it was asked, by the board or by SIGTERM."""
        return failure.cause is Cause.PREEMPTED or failure.exit_code == -signal.SIGTERM

    def _failure(self, exit_: Exit) -> WorkerFailed | None:
        """What to tell of a rank that has ended; ``None``: it ended well.

        One that has stopped at a snapshot without having been asked to by us was preempted: somebody else signalled it.
        """
        host, found = self._parts.host, self._round
        rank = found.first_rank(host) + exit_.local_rank
        if exit_.cause is not None:
            return WorkerFailed(
                host,
                found.number,
                rank,
                exit_.cause,
                exit_.detail,
                exit_code=exit_.status,
                is_consequence=exit_.is_consequence,
            )
        if exit_.local_rank in self._answered():
            return WorkerFailed(host, found.number, rank, Cause.PREEMPTED, "stopped at a snapshot", exit_code=0)
        return None

    def _answered(self) -> set[int]:
        """Local ranks that have committed a snapshot and stopped."""
        assert self._ranks is not None
        return {local_rank for local_rank, beat in self._ranks.beats().items() if beat.answered_step >= 0}

    def _stop(self, stop: Stop) -> End | None:
        """End the ranks of this round as ordered, and say so."""
        ranks, host, number = self._ranks, self._parts.host, self._round.number
        assert ranks is not None
        end = self._stop_at_snapshot(stop) if stop.at_snapshot else None
        ended_before = set(ranks.exits)
        stays = not stop.at_snapshot and end is None and self._parts.orders.leaving is None
        ranks.end(why=stop.reason, hung=self._hung, may_stay=stays and self._is_worth_staying())
        for local_rank in sorted(set(ranks.exits) - ended_before):
            exit_ = ranks.exits[local_rank]
            if exit_.words and exit_.status < 0:  # else it has shown its error itself
                rank = self._round.first_rank(host) + local_rank
                self._parts.say(f"rank {rank} was let go: {exit_.words}")
        for event in self._parts.lookout.look(time.monotonic(), now=True):
            if isinstance(event, Snapshot):  # the rest is old news
                self._tell(event)
        self._worker_group.state = WorkerState.STOPPED
        if end is not None:
            return end
        was_over = len(ranks.exits) == self._parts.num_ranks and all(
            exit_.cause is None for exit_ in ranks.exits.values()
        )
        if was_over and stop.at_snapshot and ranks.beats() and not self._answered():
            self._tell(RoundDone(host, number))
        else:
            self._tell(RoundStopped(host, number, step=self._parts.lookout.newest_step))
        return self._parts.orders.leaving

    def _is_worth_staying(self) -> bool:
        """Processes that have stayed for this round, and got no further in it than its snapshot, do not stay again."""
        assert self._ranks is not None
        has_advanced = any(beat.snapshot_step >= 0 for beat in self._ranks.beats().values())
        return has_advanced or self._starts is None or not self._starts.went_on

    def _stop_at_snapshot(self, stop: Stop) -> End | None:
        """Let ranks commit a snapshot and end, until they have or cannot. What ends the run, should that come."""
        parts, ranks = self._parts, self._ranks
        assert ranks is not None
        heard = set(ranks.beats())
        ordered = self._order_snapshot(stop, heard)
        ranks.send(signal.SIGTERM, [one for one in ranks.running if one not in heard])
        deadline_s = time.monotonic() + (parts.lookout.options.save_s if heard else SNAPSHOT_S)
        while ranks.running and time.monotonic() < deadline_s:
            if parts.orders.leaving is not None and ordered is Order.SNAPSHOT_AND_STOP:
                ordered = self._order_snapshot(stop, heard)  # this host has been told to leave since
            if heard and self._answered().issuperset(ranks.running):
                deadline_s = min(deadline_s, time.monotonic() + TEARDOWN_S)
                heard = set()  # the snapshot is committed; from now on there is nothing to wait for but their end
            order = parts.orders.next(TURN_S, parts.template)
            if isinstance(order, End):
                self._end_ranks(order)
                return order
            if isinstance(order, Stop) and not order.at_snapshot:
                return None
            if self._tell_news(stopping=True):
                return None
        return None

    def _order_snapshot(self, stop: Stop, local_ranks: Collection[int]) -> Order:
        """Ask ranks for a snapshot; if this host leaves, where it is not lost with the host's memory."""
        assert self._ranks is not None
        order = Order.SNAPSHOT_AND_STOP if self._parts.orders.leaving is None else Order.SNAPSHOT_AND_DEPART
        self._ranks.order(order, [one for one in self._ranks.running if one in local_ranks], why=stop.reason)
        return order

    def _end_ranks(self, end: End) -> None:
        """The run ends; after Ctrl-C ranks have longer, unless somebody is in a hurry."""
        assert self._ranks is not None
        if self._parts.orders.is_interrupted:
            self._parts.say(f"ranks have {INTERRUPT_S:g} s to end (Ctrl-C once more: none)")
            self._ranks.send(signal.SIGINT)
            self._ranks.wait(INTERRUPT_S, until=self._parts.orders.is_hurried)
        self._ranks.end(why=end.reason, grace_s=0.0 if self._parts.orders.is_hurried() else RELEASE_S, hung=self._hung)

    def _end_at_once(self, why: str) -> None:
        if self._ranks is not None:
            self._ranks.end(why=why, grace_s=0.0)

    def _wait_for_the_others(self) -> None:
        """After Ctrl-C: the leader, which may be in this process, ends the run for all once it knows our ranks gone."""
        parts = self._parts
        if self._meeting.round is not None:
            self._tell(RoundStopped(parts.host, self._round.number, step=parts.lookout.newest_step))
        deadline_s = time.monotonic() + PART_S
        while time.monotonic() < deadline_s and not parts.orders.is_hurried():
            if isinstance(parts.session.order(), End) or isinstance(parts.session.next_round(TURN_S), End):
                return

    def _result(self, end: End) -> RunResult:
        workers = self._worker_group.workers
        if end.exit_code == 0:  # torch wants to know of each, also if the run was over before any was started
            return RunResult(WorkerState.SUCCEEDED, return_values={worker.global_rank: None for worker in workers})
        exits = self._ranks.exits if self._ranks is not None else {}
        failures = {
            worker.global_rank: ProcessFailure(
                worker.local_rank, worker.id or 0, exits[worker.local_rank].status, error_file="<N/A>"
            )
            for worker in workers
            if worker.local_rank in exits and exits[worker.local_rank].cause is not None
        }
        return RunResult(WorkerState.FAILED, failures=failures)

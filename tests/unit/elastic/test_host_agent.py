"""What an agent tells the leader and does as it is ordered, with a scripted leader and small processes for ranks."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest

from lightning_dist.config.elastic import ElasticConfig
from lightning_dist.elastic.agent.command import Kind, Program
from lightning_dist.elastic.agent.folder import AgentFolder
from lightning_dist.elastic.agent.host_agent import HostAgent
from lightning_dist.elastic.agent.host_parts import HostParts
from lightning_dist.elastic.agent.looking import Lookout
from lightning_dist.elastic.agent.orders import SAME_S, Orders
from lightning_dist.elastic.agent.output import Output
from lightning_dist.elastic.agent.rendezvous import open_store
from lightning_dist.elastic.agent.signals import Signals
from lightning_dist.elastic.agent.start import Start
from lightning_dist.elastic.agent.staying import wait_for_next
from lightning_dist.elastic.agent.warm import Ended, TemplateLostError, WarmProcess
from lightning_dist.elastic.detect.board import Board
from lightning_dist.elastic.detect.last_words import leave_words
from lightning_dist.elastic.detect.phases import Order, Phase
from lightning_dist.elastic.policy.events import (
    Cause,
    EndAsked,
    Event,
    HostLeaves,
    RoundDone,
    RoundStopped,
    WorkerFailed,
)
from lightning_dist.elastic.rounds import Round, Seat
from lightning_dist.elastic.session import End, Session, Stop

HOST = "b"
FIRST = 2  # global rank of this host's first
WAIT = ["sleep", "600"]
STUBBORN = ["sh", "-c", "trap '' TERM; echo ready; sleep 600"]


@dataclass
class Script:
    """A leader that reacts to what it is told by a table, and gives a round to whoever is ready."""

    reactions: list[tuple[type[Event], Stop | End]] = field(default_factory=list)
    told: list[Event] = field(default_factory=list)
    orders: list[Stop | End] = field(default_factory=list)
    num_rounds: int = 0
    left: str | None = None
    is_ready: bool = False
    is_over: bool = False
    num_seats_here: int = 2
    num_ranks_before: int = FIRST

    def ready(self, num_ranks: int, store_port: int = 0) -> None:
        assert store_port > 0
        self.is_ready = True

    def next_round(self, timeout_s: float) -> Round | End | None:
        if self.is_over:
            return End(0, "run test is over")
        if not self.is_ready:
            return None
        if isinstance(self.told[-1] if self.told else None, RoundDone):
            return End(0, "training is over")
        self.is_ready = False
        self.num_rounds += 1
        other = Seat("a", "127.0.0.1", self.num_ranks_before, 4000)
        seats = (other, Seat(HOST, "127.0.0.1", self.num_seats_here, 4001))
        return Round(number=self.num_rounds, seats=seats, run="test")

    def tell(self, event: Event) -> None:
        self.told.append(event)
        for index, (kind, order) in enumerate(self.reactions):
            if isinstance(event, kind):
                self.orders.append(order)
                del self.reactions[index]
                return

    def order(self) -> Stop | End | None:
        return self.orders.pop(0) if self.orders else None

    def leave(self, reason: str) -> None:
        self.left = reason

    def of(self, *kinds: type[Event]) -> list[Event]:
        return [event for event in self.told if isinstance(event, kinds)]


class Processes:
    """In the place of a template: starts what the test says, round after round."""

    is_alive = True

    def __init__(self, plan: dict[tuple[int, int], list[str]]) -> None:
        self._plan = plan
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        self.starts: list[Start] = []
        self.on_collect: Callable[[], None] = lambda: None

    def fileno(self) -> int:
        return -1

    def start(self, start: Start, *, stdout: int, stderr: int) -> int:
        self.starts.append(start)
        command = self._plan.get((int(start.environment["HIERDIST_ROUND"]), start.key), ["true"])
        if command == ["lost"]:
            raise TemplateLostError("the template has ended")
        process = subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE)
        if command is STUBBORN:
            assert process.stdout is not None
            process.stdout.readline()
        self._running[start.key] = process
        return process.pid

    def collect(self) -> list[Ended]:
        self.on_collect()
        ended = [Ended(key, process.returncode) for key, process in self._running.items() if process.poll() is not None]
        for one in ended:
            self._close(self._running.pop(one.key))
        return ended

    def end(self, key: int) -> None:
        """Let a process end well."""
        process = self._running[key]
        process.kill()
        process.wait()
        process.returncode = 0

    def close(self) -> None:
        for process in self._running.values():
            process.kill()
            process.wait()
            self._close(process)

    @staticmethod
    def _close(process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        process.stdout.close()


class Scene:
    """An agent with its parts, ready to run."""

    def __init__(self, stack: ExitStack, plan: dict[tuple[int, int], list[str]], **options: Any) -> None:
        self.leader = Script(**options)
        self.said: list[str] = []
        self.processes = Processes(plan)
        stack.callback(self.processes.close)
        signals = stack.enter_context(Signals())
        self.folder = stack.enter_context(AgentFolder(2))
        session = cast(Session, self.leader)
        orders = Orders(session, signals, host=HOST, say=self.said.append)
        lookout = Lookout(host=HOST, folder=self.folder.path, options=ElasticConfig(), mode=None, say=self.said.append)
        self.agent = HostAgent(
            HostParts(
                host=HOST,
                address="127.0.0.1",
                program=Program(Kind.PROGRAM, "program"),
                num_ranks=2,
                environ={},
                session=session,
                orders=orders,
                folder=self.folder,
                template=cast(WarmProcess, self.processes),
                output=stack.enter_context(Output(with_prefix=False)),
                lookout=lookout,
                record=None,
                say=self.said.append,
            )
        )

    def run(self) -> End:
        self.agent.run()
        assert self.agent.end is not None
        return self.agent.end

    @property
    def board(self) -> Board:
        return self.folder.board

    def once(self, *steps: Callable[[], bool]) -> None:
        """Do each step, once the one before has said that it is done; asked for in the agent's own loop."""
        left = list(steps)

        def go_on() -> None:
            if left and left[0]():
                left.pop(0)

        self.processes.on_collect = go_on


@pytest.fixture(scope="module", autouse=True)
def event_loop_library() -> None:
    """Libuv, of which torch's stores are made, keeps a pipe for signals once there was a loop."""
    open_store("127.0.0.1")


@pytest.fixture
def make_scene() -> Iterator[Callable[..., Scene]]:
    former = signal.signal(signal.SIGINT, signal.default_int_handler)  # it may be ignored, and stays so under an agent
    try:
        with ExitStack() as stack:
            yield lambda plan, **options: Scene(stack, plan, **options)
    finally:
        signal.signal(signal.SIGINT, former)


def test_an_interruption_that_was_ignored_stays_so() -> None:
    former = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Signals() as signals:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGUSR1)
            assert signals.take() == [signal.SIGUSR1]
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, former)


MakeScene = Callable[..., Scene]


def test_a_failed_rank_is_told_and_all_start_again_when_ordered(make_scene: MakeScene) -> None:
    scene = make_scene(
        {(1, 0): WAIT, (1, 1): ["sh", "-c", "exit 3"]}, reactions=[(WorkerFailed, Stop(1, "rank 3 failed"))]
    )
    assert scene.run() == End(0, "training is over")
    assert scene.leader.told == [
        WorkerFailed(HOST, 1, FIRST + 1, Cause.EXIT, "exit code 3", exit_code=3),
        RoundStopped(HOST, 1),
        RoundDone(HOST, 2),
    ]
    ranks = [(start.environment["RANK"], start.environment["MASTER_PORT"]) for start in scene.processes.starts]
    assert ranks == [("2", "4000"), ("3", "4000")] * 2
    assert scene.leader.left == "training is over"


def test_orders_about_earlier_rounds_are_old_news(make_scene: MakeScene) -> None:
    scene = make_scene(
        {(1, 0): ["false"], (1, 1): WAIT, (2, 0): ["sh", "-c", "sleep 0.1"]},
        reactions=[(WorkerFailed, Stop(1, "x")), (RoundStopped, Stop(1, "again"))],
    )
    assert scene.run().exit_code == 0
    assert scene.leader.of(RoundStopped, RoundDone) == [RoundStopped(HOST, 1), RoundDone(HOST, 2)]


def test_ranks_that_hear_nothing_are_killed(make_scene: MakeScene) -> None:
    scene = make_scene({(1, 0): STUBBORN, (1, 1): ["false"]}, reactions=[(WorkerFailed, Stop(1, "x"))])
    assert scene.run().exit_code == 0
    assert len(scene.leader.of(WorkerFailed)) == 1, "what is ended is no failure"


def test_a_rank_that_was_asked_to_stop_at_a_snapshot_is_no_failure(make_scene: MakeScene) -> None:
    scene = make_scene({(1, 0): WAIT, (1, 1): WAIT})

    def begun() -> bool:
        for local_rank in (0, 1):
            scene.board.cell(local_rank).begin(round=1)
            scene.board.cell(local_rank).write(phase=Phase.TRAINING, step=7)
        scene.leader.orders.append(Stop(1, "a host is back", at_snapshot=True))
        return True

    def stopped() -> bool:
        cells = [scene.board.cell(local_rank) for local_rank in (0, 1)]
        if any(cell.ordered() != (Order.SNAPSHOT_AND_STOP, 1) for cell in cells):
            return False
        for cell in cells:
            cell.answer(8)
        for process in scene.processes._running.values():
            process.kill()
            process.wait()
            process.returncode = 0  # as a rank that has stopped ends
        return True

    scene.once(begun, stopped)
    assert scene.run().exit_code == 0
    assert scene.leader.of(WorkerFailed, RoundStopped, RoundDone) == [
        RoundStopped(HOST, 1, step=7),
        RoundDone(HOST, 2),
    ]


def offered(scene: Scene, *local_ranks: int, number: int = 1) -> bool:
    """Ranks of a round that offer to stay."""
    for local_rank in local_ranks:
        scene.board.cell(local_rank).begin(round=number)
        scene.board.cell(local_rank).offer_to_stay()
    return True


def waits(scene: Scene, local_rank: int) -> bool:
    """A rank that takes its round apart, and waits for the next."""
    leave_words(scene.folder.path, local_rank, "PeerLostError: rank 2 is gone", None)
    scene.board.cell(local_rank).write(phase=Phase.WAITING)
    return True


def is_let_go(scene: Scene, local_rank: int, *, number: int = 1) -> bool:
    return scene.board.cell(local_rank).ordered() == (Order.RELEASE, number)


def test_a_process_that_stays_is_a_rank_of_the_next_round(make_scene: MakeScene) -> None:
    scene = make_scene(
        {(1, 0): WAIT, (1, 1): ["sh", "-c", "exit 3"]}, reactions=[(WorkerFailed, Stop(1, "rank 3 failed"))]
    )

    def goes_on() -> bool:
        environment = wait_for_next(scene.folder.path, 0, timeout_s=0)
        if environment is None:
            return False
        assert (environment["RANK"], environment["HIERDIST_ROUND"]) == ("2", "2")
        scene.processes.end(0)
        return True

    scene.once(lambda: offered(scene, 0), lambda: is_let_go(scene, 0) and waits(scene, 0), goes_on)
    assert scene.run().exit_code == 0
    assert scene.leader.of(WorkerFailed, RoundStopped, RoundDone) == [
        WorkerFailed(HOST, 1, FIRST + 1, Cause.EXIT, "exit code 3", exit_code=3),
        RoundStopped(HOST, 1),
        RoundDone(HOST, 2),
    ]
    assert [(start.key, start.environment["HIERDIST_ROUND"]) for start in scene.processes.starts] == [
        (0, "1"),
        (1, "1"),
        (1, "2"),
    ]


def test_a_process_that_has_stayed_in_vain_does_not_stay_again(make_scene: MakeScene) -> None:
    fails = ["sh", "-c", "exit 3"]
    scene = make_scene(
        {(1, 0): WAIT, (1, 1): fails, (2, 1): fails},
        reactions=[(WorkerFailed, Stop(1, "once")), (WorkerFailed, Stop(2, "twice"))],
    )

    def goes_on() -> bool:
        if wait_for_next(scene.folder.path, 0, timeout_s=0) is None:
            return False
        return offered(scene, 0, number=2)

    def has_heard() -> bool:
        if not is_let_go(scene, 0, number=2):
            return False
        leave_words(scene.folder.path, 0, "PeerLostError: once more", None)
        return True

    scene.once(lambda: offered(scene, 0), lambda: is_let_go(scene, 0) and waits(scene, 0), goes_on, has_heard)
    assert scene.run().exit_code == 0
    assert [(start.key, start.environment["HIERDIST_ROUND"]) for start in scene.processes.starts] == [
        (0, "1"),
        (1, "1"),
        (1, "2"),
        (0, "3"),
        (1, "3"),
    ]


def test_a_process_that_stays_and_has_no_place_any_more_is_ended(make_scene: MakeScene) -> None:
    scene = make_scene({(1, 0): WAIT, (1, 1): ["false"]}, reactions=[(WorkerFailed, Stop(1, "rank 3 failed"))])
    first: list[subprocess.Popen[bytes]] = []

    def stays() -> bool:
        first.append(scene.processes._running[0])
        scene.leader.num_ranks_before = 1
        return waits(scene, 0)

    scene.once(lambda: offered(scene, 0), lambda: is_let_go(scene, 0) and stays())
    assert scene.run().exit_code == 0
    assert first[0].returncode == -signal.SIGKILL
    assert len(scene.processes.starts) == 4


def test_ranks_that_wait_unasked_have_failed(make_scene: MakeScene) -> None:
    """As where each has lost the other, and none has ended; and nobody is left where the run ends then."""
    scene = make_scene({(1, 0): WAIT, (1, 1): WAIT}, reactions=[(WorkerFailed, Stop(1, "both"))])
    scene.leader.reactions.append((RoundStopped, End(5, "too often")))
    scene.once(lambda: offered(scene, 0, 1), lambda: waits(scene, 0) and waits(scene, 1))
    assert scene.run() == End(5, "too often")
    detail = "exit code 1: PeerLostError: rank 2 is gone"
    assert scene.leader.of(WorkerFailed) == [
        WorkerFailed(HOST, 1, rank, Cause.EXIT, detail, exit_code=1, is_consequence=True) for rank in (FIRST, FIRST + 1)
    ]
    assert scene.processes._running == {}


def test_a_script_that_says_nothing_of_itself_gets_a_signal(make_scene: MakeScene) -> None:
    scene = make_scene({(1, 0): WAIT, (1, 1): WAIT})
    scene.once(lambda: scene.leader.orders.append(Stop(1, "a host is back", at_snapshot=True)) is None)
    assert scene.run().exit_code == 0
    assert scene.leader.of(WorkerFailed, RoundStopped) == [RoundStopped(HOST, 1)]


def test_a_rank_that_has_stopped_by_itself_was_preempted(make_scene: MakeScene) -> None:
    scene = make_scene({(1, 0): ["true"], (1, 1): WAIT}, reactions=[(WorkerFailed, Stop(1, "preempted"))])

    def answered() -> bool:
        scene.board.cell(0).begin(round=1)
        scene.board.cell(0).answer(5)
        return True

    scene.once(answered)
    assert scene.run().exit_code == 0
    assert scene.leader.of(WorkerFailed) == [
        WorkerFailed(HOST, 1, FIRST, Cause.PREEMPTED, "stopped at a snapshot", exit_code=0)
    ]


def test_an_order_to_end_ends_the_ranks(make_scene: MakeScene) -> None:
    scene = make_scene({(1, 0): WAIT, (1, 1): WAIT})
    scene.once(lambda: scene.leader.orders.append(End(3, "rank 0 failed too often")) is None)
    assert scene.run() == End(3, "rank 0 failed too often")
    assert scene.leader.told == []


def test_a_host_that_comes_when_the_run_is_over_ends_well(make_scene: MakeScene) -> None:
    scene = make_scene({}, is_over=True)
    assert scene.run() == End(0, "run test is over")
    assert scene.processes.starts == []


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGUSR1], ids=["SIGTERM", "SIGUSR1"])
def test_a_host_that_is_preempted_leaves_at_a_snapshot(make_scene: MakeScene, signum: signal.Signals) -> None:
    scene = make_scene(
        {(1, 0): WAIT, (1, 1): WAIT}, reactions=[(HostLeaves, Stop(1, "host b leaves", at_snapshot=True))]
    )
    scene.once(lambda: os.kill(os.getpid(), signum) is None)
    end = scene.run()
    assert end.exit_code == 128 + signum
    assert scene.leader.of(HostLeaves, RoundStopped, RoundDone) == [
        HostLeaves(HOST, signum.name),
        RoundStopped(HOST, 1),
    ]
    assert scene.leader.left == end.reason


def test_a_second_signal_ends_at_once(make_scene: MakeScene) -> None:
    scene = make_scene({(1, 0): STUBBORN, (1, 1): STUBBORN})
    began_s = time.monotonic() + SAME_S  # the first signal comes before that
    scene.once(
        lambda: os.kill(os.getpid(), signal.SIGTERM) is None,
        lambda: os.kill(os.getpid(), signal.SIGTERM) is None,  # at once: the same, passed on by a launcher
        lambda: scene.leader.of(HostLeaves) == [HostLeaves(HOST, "SIGTERM")],
        lambda: time.monotonic() > began_s + SAME_S and os.kill(os.getpid(), signal.SIGTERM) is None,
    )
    assert scene.run().exit_code == 143
    assert scene.leader.of(RoundStopped, RoundDone) == []


def test_an_interruption_ends_the_run_for_all(make_scene: MakeScene) -> None:
    scene = make_scene({(1, 0): WAIT, (1, 1): WAIT})
    scene.leader.reactions = [(RoundStopped, End(130, "somebody has asked for it"))]  # once the ranks here are gone
    scene.once(lambda: os.kill(os.getpid(), signal.SIGINT) is None)
    assert scene.run().exit_code == 130
    assert scene.leader.reactions == []
    (asked,) = scene.leader.of(EndAsked)
    assert isinstance(asked, EndAsked)
    assert (asked.exit_code, asked.at_snapshot) == (130, False)


def test_a_template_that_is_lost_is_a_failed_start(make_scene: MakeScene) -> None:
    scene = make_scene({(1, 1): ["lost"], (1, 0): WAIT}, reactions=[(WorkerFailed, Stop(1, "lost"))])
    assert scene.run().exit_code == 0
    assert scene.leader.of(WorkerFailed) == [WorkerFailed(HOST, 1, FIRST + 1, Cause.START, "the template has ended")]


def test_the_folder_is_there_in_all_rounds_and_gone_at_the_end(make_scene: MakeScene, tmp_path: Path) -> None:
    scene = make_scene({(1, 0): ["false"]}, reactions=[(WorkerFailed, Stop(1, "x"))])
    scene.run()
    folders = {start.environment["HIERDIST_AGENT"] for start in scene.processes.starts}
    assert folders == {str(scene.folder.path)}
    assert scene.folder.path.stat().st_mode & 0o077 == 0
    scene.folder.close()
    assert not scene.folder.path.exists()

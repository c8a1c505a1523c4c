"""What a conductor does for a rank, by kind; see the table of kinds for what each is."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from lightning_dist.config.checks import is_url
from lightning_dist.elastic.chaos.agenda import Agenda
from lightning_dist.elastic.chaos.command import LaunchedCommand
from lightning_dist.elastic.chaos.folder import Asked
from lightning_dist.elastic.chaos.host import links, memory_limit, tearing
from lightning_dist.elastic.chaos.host.processes import Process, command_of, listener
from lightning_dist.elastic.chaos.host.refusal import Refused
from lightning_dist.elastic.chaos.plan import Fault

_PERIOD_S = 0.2
"""A slow host's ranks are stopped once in so many seconds."""


class Kept(Protocol):
    """Checkpoints of this host, as far as faults need them."""

    marker: str
    """Name of the file by which a checkpoint is committed."""

    def tear(self, folder: str) -> str:
        """Cut the largest file that is kept in memory of the newest checkpoint of a folder; what was done.

        Raises:
            Refused: Nothing is kept.
        """

    def kill(self, folder: str) -> str:
        """SIGKILL to the process that keeps the checkpoints of a folder in memory; what was done.

        Raises:
            Refused: There is none.
        """


@dataclass(frozen=True)
class Host:
    """What can be acted on.

    Attributes:
        command: The launched one.
        ranks: Processes of the ranks that live here.
        kept: Checkpoints.
        agenda: For what is to be done later.
        clock_s: The agenda's.
    """

    command: LaunchedCommand
    ranks: Callable[[], list[Process]]
    kept: Kept
    agenda: Agenda
    clock_s: Callable[[], float] = time.monotonic


@dataclass(frozen=True)
class Done:
    """A fault that has been done.

    Attributes:
        detail: What, for people.
        undo: Puts right what lasts, and says what; ``None``: nothing does.
        command_ended: The command has ended by it, and is started again if the fault lasts for some seconds.
    """

    detail: str = ""
    undo: Callable[[], str] | None = None
    command_ended: bool = False


Act = Callable[[Host, Fault, Asked], Done]


def stop(host: Host, fault: Fault, asked: Asked) -> Done:
    """SIGSTOP to the rank that asks."""
    del host, fault
    process = asked.process
    if not process.send(signal.SIGSTOP):
        raise Refused(f"process {process.pid} has ended")

    def undo() -> str:
        return "it goes on" if process.send(signal.SIGCONT) else "it has ended"

    return Done(f"process {process.pid}", undo)


def bound_memory(host: Host, fault: Fault, asked: Asked) -> Done:
    """The rank has little memory left; it uses more once it has the answer."""
    del host, fault
    group = memory_limit.bound(asked.process)

    def undo() -> str:
        kills = group.kills()
        return f"the kernel killed {kills} processes in it" + ("" if group.remove() else f"; {group.path} stays")

    return Done(f"{memory_limit.HEADROOM_BYTES >> 20} MiB more, in {group.path}", undo)


def kill_agent(host: Host, fault: Fault, asked: Asked) -> Done:
    """SIGKILL to the command's own process."""
    del fault, asked
    _check_runs(host)
    host.command.kill()
    return Done("the launched command", command_ended=True)


def kill_host(host: Host, fault: Fault, asked: Asked) -> Done:
    """SIGKILL to all that was launched here, and to what is kept in memory."""
    del fault
    _check_runs(host)
    killed = host.command.kill_all()
    if asked.checkpoints is not None:
        try:
            host.kept.kill(asked.checkpoints)
        except Refused:
            return Done(f"{killed} processes", command_ended=True)
        killed += 1
    return Done(f"{killed} processes", command_ended=True)


def cut(host: Host, fault: Fault, asked: Asked) -> Done:
    """Nothing passes the link."""
    del host, asked
    interface, direction = fault.options["interface"], fault.options["direction"]
    undo = links.cut(interface, direction)
    return Done("", lambda: (undo(), f"{interface} is whole again")[1])


def slow_link(host: Host, fault: Fault, asked: Asked) -> Done:
    """The link sends slowly."""
    del host, asked
    interface = fault.options["interface"]
    undo = links.slow(interface, fault.options["rate_mbit"])
    return Done("", lambda: (undo(), f"{interface} has its rate again")[1])


def slow_host(host: Host, fault: Fault, asked: Asked) -> Done:
    """Stop the ranks, let them go on, and again; ranks that are started meanwhile too."""
    del asked
    stopped: set[Process] = set()
    is_over = False

    def go_on() -> None:
        for process in stopped:
            process.send(signal.SIGCONT)
        stopped.clear()

    def begin_period() -> None:
        if is_over:
            return
        stopped.update(process for process in host.ranks() if process.send(signal.SIGSTOP))
        now_s = host.clock_s()
        host.agenda.at(now_s + fault.options["share"] * _PERIOD_S, go_on)
        host.agenda.at(now_s + _PERIOD_S, begin_period)

    def undo() -> str:
        nonlocal is_over
        is_over = True
        go_on()
        return "its ranks run as before"

    begin_period()
    return Done(f"processes {', '.join(str(process.pid) for process in stopped) or 'none'}", undo)


def tear(host: Host, fault: Fault, asked: Asked) -> Done:
    """Cut a file of the newest checkpoint."""
    folder = _checkpoints(fault, asked)
    if fault.options["place"] == "memory":
        return Done(host.kept.tear(folder))
    if is_url(folder):
        raise Refused(f"{folder} is a URL; only files on disk are torn")
    return Done(tearing.tear_newest(Path(folder), host.kept.marker))


def kill_keeper(host: Host, fault: Fault, asked: Asked) -> Done:
    """SIGKILL to the process that keeps checkpoints in memory."""
    return Done(host.kept.kill(_checkpoints(fault, asked)))


def kill_store(host: Host, fault: Fault, asked: Asked) -> Done:
    """SIGKILL to whoever listens where the ranks have met."""
    del fault
    if asked.master is None:
        raise Refused("the rank does not know where its store is: MASTER_ADDR and MASTER_PORT are not set")
    address, port = asked.master
    process = listener(port)
    if process is None:
        raise Refused(f"nobody that may be seen listens on port {port} of this host, {address}")
    text = f"{process.pid}: {command_of(process)}"
    if host.command.is_process(process):
        host.command.kill()
        return Done(text, command_ended=True)
    process.send(signal.SIGKILL)
    return Done(text)


def _check_runs(host: Host) -> None:
    if host.command.status() is not None:
        raise Refused("the launched command has ended already")


def _checkpoints(fault: Fault, asked: Asked) -> str:
    folder = fault.options["folder"] or asked.checkpoints
    if folder is None:
        raise Refused("it is not known where the run saves to; write folder: FOLDER in the plan")
    return str(folder)


ACTS: dict[str, Act] = {
    "stop": stop,
    "oom": bound_memory,
    "agent": kill_agent,
    "host": kill_host,
    "cut": cut,
    "slow_link": slow_link,
    "slow_host": slow_host,
    "torn": tear,
    "keeper": kill_keeper,
    "store": kill_store,
}

"""Beside the launched command of a host: does what ranks ask for and cannot do themselves, and undoes it.

One thread looks at the folder every few milliseconds. What lasts for some seconds is an entry in the agenda; whatever
is still cut, slow or stopped when the command has ended is put right then.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from lightning_dist.elastic.chaos.agenda import Agenda
from lightning_dist.elastic.chaos.command import LaunchedCommand
from lightning_dist.elastic.chaos.folder import Answer, Asked, ChaosFolder, facts_of
from lightning_dist.elastic.chaos.host.processes import command_of, is_own_address, kill_all
from lightning_dist.elastic.chaos.host.refusal import Refused
from lightning_dist.elastic.chaos.on_host import ACTS, Host, Kept
from lightning_dist.elastic.chaos.plan import Fault

_LOOKS_EVERY_S = 0.02
LEFT_BEHIND_S = 10.0
"""Processes of the command may outlive it for so long before they count as left behind, in seconds."""


@dataclass(frozen=True)
class Ending:
    """What became of the command.

    Attributes:
        status: Its exit status, 128 and the signal if it was killed.
        left_behind: Command lines of processes that outlived it, and were killed.
        not_reached: Faults of the plan whose step no rank has come to.
    """

    status: int
    left_behind: tuple[str, ...]
    not_reached: tuple[Fault, ...]


class Conductor:
    """Runs the command of a host and lets the plan happen to it.

    Args:
        folder: Made, with the plan.
        command: To run.
        host: Name of this host.
        kept: Checkpoints of this host.
        say: Tells people a line.
    """

    def __init__(
        self,
        folder: ChaosFolder,
        command: LaunchedCommand,
        *,
        host: str,
        kept: Kept,
        say: Callable[[str], None],
    ) -> None:
        self._folder = folder
        self._plan = folder.plan()
        self._command = command
        self._host = host
        self._say = say
        self._agenda = Agenda()
        self._undo: dict[int, Callable[[], str]] = {}
        self._restarts = 0  # to come
        self._said = len(folder.record())
        self._acted_on = Host(command, lambda: folder.ranks_of(host), kept, self._agenda)

    def run(self) -> Ending:
        """Until the command has ended, and is not to be started again."""
        self._note("began")
        self._command.start()
        try:
            while (status := self._command.status()) is None or self._restarts:
                self._look()
                time.sleep(_LOOKS_EVERY_S)
        finally:
            for number in list(self._undo):
                self._end_fault(number)
            left_behind = self._left_behind()
        self._note("ended", status=status, left_behind=list(left_behind))
        self._say_news()
        reached = self._folder.is_claimed
        not_reached = (fault for number, fault in enumerate(self._plan.faults) if not reached(number))
        return Ending(status, left_behind, tuple(not_reached))

    def pass_on(self, signal_number: int) -> None:
        """A signal to the command; if it is to be started again, it is not. May be called from a signal's handler."""
        if self._command.status() is None:
            self._command.send(signal_number)
        else:
            self._restarts = 0

    def _look(self) -> None:
        self._agenda.run(time.monotonic())
        for asked in self._folder.asked():
            fault = self._plan.faults[asked.number]
            if self._is_mine(fault, asked):
                self._begin_fault(fault, asked)
        self._say_news()

    def _is_mine(self, fault: Fault, asked: Asked) -> bool:
        if fault.kind == "store" and asked.master is not None:
            return is_own_address(asked.master[0])
        return bool((fault.options.get("host") or asked.host) == self._host)

    def _begin_fault(self, fault: Fault, asked: Asked) -> None:
        facts = {**facts_of(asked.number, fault), "step": asked.step}
        try:
            done = ACTS[fault.kind](self._acted_on, fault, asked)
        except Refused as refusal:
            self._note("refused", **facts, detail=str(refusal))
            self._folder.answer(asked.number, Answer(False, str(refusal)))
            return
        self._note("injected", **facts, detail=done.detail)
        self._folder.answer(asked.number, Answer(True, done.detail))
        if done.undo is not None:
            self._undo[asked.number] = done.undo
        seconds = fault.options.get("seconds")
        if seconds is None:
            return
        if done.command_ended:
            self._restarts += 1
            self._agenda.at(time.monotonic() + seconds, lambda: self._start_again(asked.number))
        else:
            self._agenda.at(time.monotonic() + seconds, lambda: self._end_fault(asked.number))

    def _start_again(self, number: int) -> None:
        if not self._restarts:
            return
        self._restarts -= 1
        self._command.start()
        self._note("undone", **facts_of(number, self._plan.faults[number]), detail="the command is started again")

    def _end_fault(self, number: int) -> None:
        undo = self._undo.pop(number, None)
        if undo is not None:
            self._note("undone", **facts_of(number, self._plan.faults[number]), detail=undo())

    def _left_behind(self) -> tuple[str, ...]:
        end_s = time.monotonic() + LEFT_BEHIND_S
        while (left := self._command.processes()) and time.monotonic() < end_s:
            time.sleep(_LOOKS_EVERY_S)
        found = tuple(f"{process.pid}: {command_of(process)}" for process in left)
        kill_all(left)
        return found

    def _note(self, what: str, **facts: Any) -> None:
        self._folder.note(what, host=self._host, **facts)

    def _say_news(self) -> None:
        """Lines of the record that are new, of this host's ranks and conductor."""
        record = self._folder.record()
        for line in record[self._said :]:
            if line["host"] == self._host:
                self._say(in_words(line))
        self._said = len(record)


def in_words(line: Mapping[str, Any]) -> str:
    """A line of the record, for people."""
    if "fault" not in line:
        return f"{line['what']} on {line['host']}" + (f" with {line['status']}" if "status" in line else "")
    options = "".join(f" {name}={value}" for name, value in line["options"].items())
    at = f" at step {line['step']} of rank {line['rank']}" if "step" in line else ""
    detail = f": {line['detail']}" if line.get("detail") else ""
    return f"{line['what']} {line['kind']}{options}{at} on {line['host']}{detail}"

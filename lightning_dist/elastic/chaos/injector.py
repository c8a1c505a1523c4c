"""Before each step a rank looks whether a fault of its plan is due."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from lightning_dist.elastic.chaos.folder import HOST_VARIABLE, Asked, ChaosFolder, facts_of
from lightning_dist.elastic.chaos.host.processes import this_process
from lightning_dist.elastic.chaos.in_rank import ACTS, AFTER_ANSWER, Act
from lightning_dist.elastic.chaos.plan import Fault

ANSWER_S = 20.0
"""A conductor that has not answered by then is taken for gone."""
_LOOKS_EVERY_S = 0.01


@dataclass(frozen=True)
class Place:
    """Of a rank.

    Attributes:
        rank: Global rank.
        host: Name of its host, as its conductor calls it.
        master: Address and port of the ranks' store; ``None``: unknown.
    """

    rank: int
    host: str
    master: tuple[str, int] | None = None


def place_of(environ: Mapping[str, str], rank: int) -> Place:
    """What a launcher has set, and the conductor."""
    address, port = environ.get("MASTER_ADDR", ""), environ.get("MASTER_PORT", "")
    master = (address, int(port)) if address and port.isdigit() else None
    host = environ.get(HOST_VARIABLE) or environ.get("HIERDIST_HOST") or socket.gethostname()
    return Place(rank, host, master)


class Injector:
    """Lets the plan's faults of one rank happen.

    Args:
        folder: With the plan.
        place: Of the rank.
        acts: What else a rank can do to itself, by kind.
    """

    def __init__(self, folder: ChaosFolder, place: Place, *, acts: Mapping[str, Act] | None = None) -> None:
        self._folder = folder
        self._place = place
        self._acts = {**ACTS, **(acts or {})}
        self._due = folder.plan().of_rank(place.rank)
        folder.register(place.host, this_process(), place.rank)

    def at_step(self, step: int, *, checkpoints: Callable[[], str | None] = lambda: None) -> None:
        """Call it before each step.

        Args:
            step: Steps done.
            checkpoints: Where the run saves to; asked if somebody wants to know.
        """
        while self._due and self._due[0][1].step <= step:
            number, fault = self._due.pop(0)
            if not self._folder.claim(number):
                continue  # it has happened before this rank was started again
            if fault.what.by_rank:
                self._note("injected", number, fault, step)
                self._acts[fault.kind](fault)
            else:
                self._ask(number, fault, step, checkpoints())

    def _ask(self, number: int, fault: Fault, step: int, checkpoints: str | None) -> None:
        """And wait until it is done, so that it is done at this step."""
        place = self._place
        self._folder.ask(Asked(number, step, place.host, this_process(), place.master, checkpoints))
        end_s = time.monotonic() + ANSWER_S
        while (answer := self._folder.answer_to(number)) is None and time.monotonic() < end_s:
            time.sleep(_LOOKS_EVERY_S)
        if answer is None:
            self._note("refused", number, fault, step, detail=f"no conductor has answered within {ANSWER_S:g} s")
        elif answer.is_done and fault.kind in AFTER_ANSWER:
            AFTER_ANSWER[fault.kind](fault)

    def _note(self, what: str, number: int, fault: Fault, step: int, detail: str = "") -> None:
        self._folder.note(what, **facts_of(number, fault), step=step, host=self._place.host, detail=detail)

"""The ranks of one host in one round, from their start to their end."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from lightning_dist.elastic.agent.environment import words_file
from lightning_dist.elastic.agent.exits import Exit, exit_of
from lightning_dist.elastic.agent.staying import STAY_S
from lightning_dist.elastic.agent.warm import TemplateLostError, WarmProcess
from lightning_dist.elastic.detect.board import Beat, Board
from lightning_dist.elastic.detect.phases import Order, Phase

RELEASE_S = 1.0
"""How long ranks have, at most, to say their last words once they are to end, in seconds."""
_KILL_S = 30.0  # for the kernel to take a killed process apart, which may hold hundreds of gigabytes
_POLL_S = 0.01


class RankGroup:
    """Ranks that were started, and how they ended. One whose process stays for the next round has ended for this one.

    Args:
        template: They are forked of it.
        board: They write on it; ``order`` and the like do nothing to a rank that does not.
        number: The round's.
        folder: Where they leave last words.
        was_short_of_memory: See :func:`~lightning_dist.elastic.agent.exits.exit_of`.
    """

    def __init__(
        self,
        template: WarmProcess,
        board: Board,
        *,
        number: int,
        folder: Path,
        was_short_of_memory: Callable[[], bool],
    ) -> None:
        self._template = template
        self._board = board
        self._number = number
        self._folder = folder
        self._was_short_of_memory = was_short_of_memory
        self._pids: dict[int, int] = {}
        self.exits: dict[int, Exit] = {}
        """By local rank, of those that have ended."""
        self.staying: dict[int, int] = {}
        """Process ids of those that wait for the next round, by local rank."""

    def add(self, local_rank: int, pid: int) -> None:
        """A rank was started; one that was there before, and has ended, is forgotten."""
        self._pids[local_rank] = pid
        self.exits.pop(local_rank, None)

    @property
    def running(self) -> list[int]:
        """Local ranks that have not ended."""
        return [local_rank for local_rank in self._pids if local_rank not in self.exits]

    def beats(self) -> dict[int, Beat]:
        """What the ranks of this round have said last, by local rank; of those that say anything."""
        beats = {}
        for local_rank in self._pids:
            beat = self._board.cell(local_rank).read()
            if beat is not None and beat.round == self._number:
                beats[local_rank] = beat
        return beats

    def collect(self) -> list[Exit]:
        """Those that have ended since the last call, or stay since then; returns at once."""
        try:
            ended = {one.key: one.status for one in self._template.collect()}
        except TemplateLostError:
            ended = dict.fromkeys(self._alive, -signal.SIGKILL)  # by the kernel, together with their parent
            self._kill_groups(self._alive)
        for local_rank in ended:
            self.staying.pop(local_rank, None)
        found = [self._note_end(one, ended[one]) for one in ended if one in self.running]
        for local_rank, beat in self.beats().items():
            if beat.phase is Phase.WAITING and local_rank in self.running:
                self.staying[local_rank] = self._pids[local_rank]
                found.append(self._note_end(local_rank, 1))  # as it would have ended
        return found

    def _note_end(self, local_rank: int, status: int) -> Exit:
        words = words_file(self._folder, local_rank)
        exit_ = exit_of(local_rank, status, words=words, was_short_of_memory=self._was_short_of_memory)
        self.exits[local_rank] = exit_
        return exit_

    @property
    def _alive(self) -> list[int]:
        return [*self.running, *self.staying]

    def order(self, order: Order, local_ranks: Sequence[int], *, why: str) -> None:
        """Ask something of ranks."""
        for local_rank in local_ranks:
            self._board.cell(local_rank).order(order, self._number, why)

    def send(self, number: int, local_ranks: Sequence[int] | None = None) -> None:
        """Send ranks a signal, to all if none are named; what they have started gets none."""
        for local_rank in self.running if local_ranks is None else local_ranks:
            with suppress(ProcessLookupError):
                os.kill(self._pids[local_rank], number)

    def end(self, *, why: str, grace_s: float = RELEASE_S, hung: Collection[int] = (), may_stay: bool = False) -> None:
        """End all ranks: let them go, for a moment, then kill them.

        Those that write on the board leave the collectives that they wait in, and say what these were; once they have,
        their moment is over. The others get SIGTERM, of which a script may have made something.

        Args:
            why: For their last words.
            grace_s: The moment, in seconds.
            hung: Local ranks that will not hear anything.
            may_stay: Those that have offered to, and were let go, may stay for the next round.
        """
        self.collect()
        heard = [local_rank for local_rank in self.running if local_rank in self.beats()]
        self.order(Order.RELEASE, heard, why=why)
        self.send(signal.SIGTERM, [local_rank for local_rank in self.running if local_rank not in heard])
        self.wait(grace_s, until=lambda: all(self._has_spoken(one) or one in hung for one in self.running))
        stays = self._offers() - set(hung) if may_stay else set()
        self._kill_groups(set(self.running) - stays)
        if stays:
            self.wait(STAY_S, until=lambda: stays.isdisjoint(self.running))
            self._kill_groups(self.running)
        self.wait(_KILL_S)
        if not may_stay:
            self.dismiss(list(self.staying))

    def dismiss(self, local_ranks: Iterable[int]) -> None:
        """End processes that have stayed."""
        leaving = set(local_ranks)
        self._kill_groups(leaving)
        self._wait(_KILL_S, lambda: leaving.isdisjoint(self.staying))

    def _offers(self) -> set[int]:
        """Local ranks that have offered to stay, and were let go."""
        return {one for one, beat in self.beats().items() if beat.may_stay and self._has_spoken(one)}

    def _has_spoken(self, local_rank: int) -> bool:
        return words_file(self._folder, local_rank).exists()

    def wait(self, timeout_s: float, *, until: Callable[[], bool] = bool) -> bool:
        """Wait until all have ended, at most so many seconds, or until something else is so; whether they have."""
        self._wait(timeout_s, lambda: not self.running or until())
        return not self.running

    def _wait(self, timeout_s: float, until: Callable[[], bool]) -> None:
        deadline = time.monotonic() + timeout_s
        while True:
            self.collect()
            if until() or time.monotonic() >= deadline:
                return
            time.sleep(_POLL_S)

    def _kill_groups(self, local_ranks: Iterable[int]) -> None:
        """With the workers of their data loaders."""
        for local_rank in local_ranks:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._pids[local_rank], signal.SIGKILL)

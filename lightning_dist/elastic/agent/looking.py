"""What an agent sees on the board and in the files of its ranks, as events for the leader."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from lightning_dist.config.elastic import ElasticConfig
from lightning_dist.elastic.agent.progress import Progress
from lightning_dist.elastic.agent_folder import told_options, told_sizes
from lightning_dist.elastic.detect.board import Board
from lightning_dist.elastic.detect.sights import look_at, progress_of
from lightning_dist.elastic.detect.watch import Watch
from lightning_dist.elastic.policy.events import Cause, Event, OptionsTold, SizesTold, WorkerFailed
from lightning_dist.elastic.policy.sizes import Sizes

_LOOK_S = 0.2
_PROGRESS_S = 1.0


class Lookout:
    """Looks after the ranks of a host, round after round.

    Args:
        host: Its name.
        folder: The agent's.
        options: What holds until the script says what it wants.
        mode: Wins over the script's; ``None``: the script's counts.
        say: Tells people.
    """

    def __init__(
        self, *, host: str, folder: Path, options: ElasticConfig, mode: str | None, say: Callable[[str], None]
    ) -> None:
        self._host = host
        self._folder = folder
        self.options = options
        self._mode = mode
        self._say = say
        self._told: ElasticConfig | None = None
        self._sizes = Sizes()
        self._has_beats = False  # a script that never says how far it is cannot be told from one that hangs
        self._looked_s = self._progress_s = -math.inf

    def begin_round(self, board: Board, *, number: int, first_rank: int, began_ns: int) -> None:
        """Another round begins.

        Args:
            board: Its ranks'.
            number: The round's.
            first_rank: Global rank of the first rank here.
            began_ns: When the agent had heard of it, on the host's monotonic clock.
        """
        self._board = board
        self._number = number
        self._first_rank = first_rank
        self._watch = Watch(self.options)
        self._progress = Progress(host=self._host, round=number, num_ranks=board.num_cells, began_ns=began_ns)
        self._looked_s = self._progress_s = -math.inf

    @property
    def newest_step(self) -> int | None:
        """That any rank has done in this round; ``None``: none."""
        return self._progress.newest_step

    def look(self, now_s: float, *, now: bool = False) -> list[Event]:
        """What is new. Five times a second there is something to look at; other calls cost nothing.

        Args:
            now_s: Monotonic clock.
            now: Look whatever the time.
        """
        if not now and now_s - self._looked_s < _LOOK_S:
            return []
        self._looked_s = now_s
        sights = [
            sight if sight.beat is None or sight.beat.round == self._number else replace(sight, beat=None)
            for sight in look_at(self._board)
        ]
        beats = {index: sight.beat for index, sight in enumerate(sights) if sight.beat is not None}
        self._has_beats = self._has_beats or bool(beats)
        events: list[Event] = [*self._options_told(), *self._sizes_told(), *self._progress.look(beats)]
        if self._has_beats:
            hangs = self._watch.look(sights, now_s)
            if hangs:
                self._board.count_timeouts(len(hangs))
            events += [
                WorkerFailed(
                    self._host,
                    self._number,
                    self._first_rank + hang.local_rank,
                    Cause.HANG,
                    hang.detail,
                    is_consequence=hang.waits,
                    silent_s=hang.silent_s,
                )
                for hang in hangs
            ]
        if now_s - self._progress_s >= _PROGRESS_S:
            self._progress_s = now_s
            progress = progress_of(sights, host=self._host)
            events += [progress] if progress is not None else []
        return events

    def _options_told(self) -> list[Event]:
        told = told_options(self._folder)
        if told is None or told == self._told:
            return []
        self._told = told
        wanted = told if self._mode is None else replace(told, mode=self._mode)
        if wanted == self.options:
            return []
        self.options = wanted
        self._watch = Watch(wanted)
        return [OptionsTold(wanted)]

    def _sizes_told(self) -> list[Event]:
        told = told_sizes(self._folder)
        if told is None or told == self._sizes:
            return []
        self._sizes = told
        return [SizesTold(told)]

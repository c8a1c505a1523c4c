"""Plays the agent of a host, in a thread: finds ranks that hang, frees the others, and ends the ones that hang.

Usage::

    with Lookout([folder_of_a, folder_of_b], config) as lookout:
        pool.run(train, env_per_rank=..., may_die=[1])     # HIERDIST_AGENT names the rank's folder
    assert [hang.local_rank for _, hang in lookout.hangs] == [0]
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from lightning_dist.config.elastic import ElasticConfig
from lightning_dist.elastic.detect.board import FILE, Board
from lightning_dist.elastic.detect.phases import Order, Phase
from lightning_dist.elastic.detect.sights import look_at, progress_of
from lightning_dist.elastic.detect.watch import Hang, Sight, Watch
from lightning_dist.elastic.policy.events import Progress

_LOOK_S = 0.05
WHY = "somebody hangs"


class Lookout:
    """Looks after the ranks of some hosts, from the start to the end of a ``with`` statement.

    Args:
        folders: Of the hosts' agents; made if they are not there.
        config: The deadlines.
        num_ranks: Of each host.
        frees: Whether it does something about hangs: it is the last rank of the last host that hangs.
    """

    def __init__(
        self, folders: Sequence[Path], config: ElasticConfig, *, num_ranks: int = 1, frees: bool = True
    ) -> None:
        for folder in folders:
            folder.mkdir(exist_ok=True)
        self.hangs: list[tuple[int, Hang]] = []  # host, and what was found there
        self.progress: list[Progress] = []  # the newest of each host, at the end
        self.phases: set[Phase] = set()  # that were seen
        self._boards = [Board.create(folder / FILE, num_ranks) for folder in folders]
        self._watches = [Watch(config) for _ in folders]
        self._frees = frees
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lookout", daemon=True)

    def __enter__(self) -> Lookout:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ending.set()
        self._thread.join()
        found = [progress_of(look_at(board), host=str(host)) for host, board in enumerate(self._boards)]
        self.progress = [progress for progress in found if progress is not None]
        for board in self._boards:
            board.close()

    def count_timeouts(self, *, host: int, found: int) -> None:
        """As if so many hangs had been found there."""
        self._boards[host].count_timeouts(found)

    def _run(self) -> None:
        while not self._ending.wait(_LOOK_S):
            sights = [look_at(board) for board in self._boards]
            self.phases |= {sight.beat.phase for host in sights for sight in host if sight.beat is not None}
            for host, watch in enumerate(self._watches):
                self.hangs += [(host, hang) for hang in watch.look(sights[host], time.monotonic())]
            if self._frees and self.hangs:
                self._free(sights)

    def _free(self, sights: Sequence[Sequence[Sight]]) -> None:
        """Order it; once all others have ended, end the last rank, which is the one that tests let hang."""
        for board in self._boards:
            for local_rank in range(board.num_cells):
                board.cell(local_rank).order(Order.RELEASE, 1, WHY)
        culprit = sights[-1][-1]
        others = [sight.beat for host in sights for sight in host if sight is not culprit and sight.beat is not None]
        board = self._boards[-1]
        has_spoken = culprit.is_stopped or (board.path.parent / f"words.{board.num_cells - 1}.json").exists()
        if culprit.beat is not None and has_spoken and all(beat.phase >= Phase.ENDING for beat in others):
            with contextlib.suppress(ProcessLookupError):
                os.kill(culprit.beat.pid, signal.SIGKILL)

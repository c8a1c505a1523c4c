"""The agent's private folder, which it shares with the ranks of its host: board, options, last words."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from types import TracebackType

from lightning_dist.elastic.agent.environment import words_file
from lightning_dist.elastic.agent.staying import next_file
from lightning_dist.elastic.detect.board import FILE, Board


class AgentFolder:
    """A folder that only this user may read, from the start to the end of a ``with`` statement; there in all rounds.

    Args:
        num_ranks: Of this host.
    """

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self.path = Path(tempfile.mkdtemp(prefix="hierdist-agent-"))
        self.board = Board.create(self.path / FILE, num_ranks)

    def __enter__(self) -> AgentFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def begin_round(self) -> Board:
        """Make an empty board, and forget what ranks of the last round have said, and what was said to them."""
        for local_rank in range(self._num_ranks):
            words_file(self.path, local_rank).unlink(missing_ok=True)
            next_file(self.path, local_rank).unlink(missing_ok=True)
        former = self.board
        self.board = Board.create(self.path / FILE, self._num_ranks)
        self.board.count_timeouts(former.timeouts)
        former.close()
        return self.board

    def close(self) -> None:
        """Remove it. Safe to call twice."""
        self.board.close()
        shutil.rmtree(self.path, ignore_errors=True)

"""What the leader is told of a round's progress, from what ranks write on the board. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from lightning_dist.elastic.detect.board import Beat
from lightning_dist.elastic.policy.events import Event, FirstStep, Snapshot


class Progress:
    """One host's ranks in one round.

    Args:
        host: Its name.
        round: Number of the round.
        num_ranks: Of the host.
        began_ns: When the agent had heard of the round, on the host's monotonic clock.
    """

    def __init__(self, *, host: str, round: int, num_ranks: int, began_ns: int) -> None:  # noqa: A002  # the field's word
        self._host = host
        self._round = round
        self._num_ranks = num_ranks
        self._began_ns = began_ns
        self._has_begun = False
        self._snapshot_step = -1
        self.newest_step: int | None = None
        """Of any rank; ``None``: none has done one in this round."""

    def look(self, beats: Mapping[int, Beat]) -> list[Event]:
        """What is new.

        Args:
            beats: What ranks have written last, by local rank.
        """
        steps = [beat.step for beat in beats.values() if beat.step >= 0 and beat.first_step_ns]
        if steps:
            self.newest_step = max(steps)
        if len(beats) < self._num_ranks:
            return []
        events: list[Event] = []
        if not self._has_begun and len(steps) == self._num_ranks:
            self._has_begun = True
            events.append(self._first_step(beats))
        snapshot_step = min(beat.snapshot_step for beat in beats.values())
        if snapshot_step > self._snapshot_step:
            self._snapshot_step = snapshot_step
            events.append(Snapshot(self._round, snapshot_step))
        return events

    def _first_step(self, beats: Mapping[int, Beat]) -> FirstStep:
        """With the seconds of the slowest rank to each point."""
        joined_ns = max(beat.joined_ns for beat in beats.values())
        loaded_ns = max(beat.loaded_ns for beat in beats.values())
        done_ns = max(beat.first_step_ns for beat in beats.values())
        return FirstStep(
            self._host,
            self._round,
            min(beat.first_step for beat in beats.values()),
            start_s=max(0, joined_ns - self._began_ns) / 1e9,
            load_s=max(0, loaded_ns - joined_ns) / 1e9,
            first_step_s=max(0, done_ns - loaded_ns) / 1e9,
        )

"""Which ranks of a host hang, judged from what they wrote on the board; pure.

Note: whom to name.
    When one rank stands still, all others soon wait for it, and none makes progress. So a rank that waits for others is
    given as long as any of them may take for anything, and one that does not only its own deadline: the one that they
    wait for is found first, by the agent of its host. A process that is stopped waits for nobody, wherever it was.

Note: time in which nobody looked.
    A host that was frozen, agent and ranks together, wakes with old signs of life only. So what counts is not their
    age but the time in which the agent looked and saw nothing new; the time between two looks counts for a third of
    the deadline at most.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from lightning_dist.config.elastic import ElasticConfig
from lightning_dist.elastic.detect.board import Beat, Mark
from lightning_dist.elastic.detect.phases import Phase

_KEPT_STEPS = 20
_STARTING = (Phase.STARTING, Phase.JOINING, Phase.LOADING, Phase.FIRST_STEP)


@dataclass(frozen=True)
class Sight:
    """What an agent sees of one rank.

    Attributes:
        beat: What it has said last; ``None``: nothing.
        mark: What it waits for.
        is_stopped: Whether its process is stopped (SIGSTOP).
    """

    beat: Beat | None
    mark: Mark = field(default_factory=Mark)
    is_stopped: bool = False


@dataclass(frozen=True)
class Hang:
    """A rank without progress.

    Attributes:
        local_rank: Which.
        silent_s: For how long nothing was seen of it, in seconds.
        deadline_s: How long it may take, in seconds.
        detail: In words: the phase, the deadline and what it does.
        waits: Whether it waits for other ranks, so that it may be one of them that hangs.
    """

    local_rank: int
    silent_s: float
    deadline_s: float
    detail: str
    waits: bool = False


@dataclass
class _Seen:
    """What the watch remembers of a rank."""

    beats: tuple[int, int] = (0, -1)  # of which process
    silent_s: float = 0.0
    starting_s: float = 0.0
    stopped_s: float = 0.0
    step: tuple[int, float] = (-1, math.nan)  # and its seconds
    is_named: bool = False


class Watch:
    """Finds ranks that hang; each once, until it makes progress again. Make a new one for each round.

    Args:
        config: The deadlines.
    """

    def __init__(self, config: ElasticConfig) -> None:
        self._config = config
        self._seen: dict[int, _Seen] = {}
        self._steps_s: deque[float] = deque(maxlen=_KEPT_STEPS)
        self._looked_s: float | None = None

    def look(self, sights: Sequence[Sight], now_s: float) -> list[Hang]:
        """Who has been found to hang since the last look.

        Args:
            sights: By local rank.
            now_s: Monotonic clock.
        """
        passed_s = 0.0 if self._looked_s is None else now_s - self._looked_s
        self._looked_s = now_s
        for local_rank, sight in enumerate(sights):
            self._note(self._seen.setdefault(local_rank, _Seen()), sight, passed_s)
        return [hang for local_rank, sight in enumerate(sights) for hang in self._judge(local_rank, sight)]

    def training_deadline_s(self) -> float:
        """How long a training step may take now, in seconds."""
        slowest_s = max(self._steps_s, default=0.0)
        return max(self._config.hang_floor_s, self._config.hang_factor * slowest_s)

    def _note(self, seen: _Seen, sight: Sight, passed_s: float) -> None:
        beat = sight.beat
        passed_s = min(passed_s, self._deadline_s(sight) / 3)
        beats = (0, -1) if beat is None else (beat.pid, beat.beats)
        if beats[0] != seen.beats[0]:
            seen.starting_s = 0.0
        if beats != seen.beats:
            seen.silent_s, seen.is_named = 0.0, False
        else:
            seen.silent_s += passed_s
        seen.stopped_s = seen.stopped_s + passed_s if sight.is_stopped else 0.0
        is_starting = beat is None or beat.phase in _STARTING
        seen.starting_s = seen.starting_s + passed_s if is_starting else 0.0
        if beat is not None and (beat.step, beat.step_s) != seen.step and not math.isnan(beat.step_s):
            self._steps_s.append(beat.step_s)
            seen.step = (beat.step, beat.step_s)
        seen.beats = beats

    def _judge(self, local_rank: int, sight: Sight) -> Iterator[Hang]:
        seen, beat, deadline_s = self._seen[local_rank], sight.beat, self._deadline_s(sight)
        is_starting = beat is None or beat.phase in _STARTING
        silent_s = seen.starting_s if is_starting else seen.silent_s
        if seen.stopped_s > self._config.stopped_s:
            deadline_s = min(deadline_s, self._config.stopped_s)
        if silent_s > deadline_s and not seen.is_named:
            seen.is_named = True
            yield Hang(local_rank, silent_s, deadline_s, _in_words(sight, silent_s, deadline_s), _waits(sight))

    def _deadline_s(self, sight: Sight) -> float:
        phase = Phase.STARTING if sight.beat is None else sight.beat.phase
        own_s = max(self._config.hang_floor_s, self._phase_s(phase))
        return max(own_s, self._longest_s()) if _waits(sight) else own_s

    def _phase_s(self, phase: Phase) -> float:
        config = self._config
        if phase in _STARTING:
            return config.start_s
        if phase == Phase.TRAINING:
            return self.training_deadline_s()
        if phase == Phase.SAVING:
            return config.save_s
        if phase == Phase.ENDING:
            return max(config.save_s, config.validation_s)
        return math.inf if phase in (Phase.DONE, Phase.WAITING) else config.validation_s

    def _longest_s(self) -> float:
        config = self._config
        return max(config.start_s, config.save_s, config.validation_s, self.training_deadline_s())


def _waits(sight: Sight) -> bool:
    return sight.mark.waits > 0 and not sight.is_stopped


def _in_words(sight: Sight, silent_s: float, deadline_s: float) -> str:
    beat, mark = sight.beat, sight.mark
    if beat is None:
        return f"its process has said nothing in {silent_s:.1f} s (deadline {deadline_s:g} s)"
    where = beat.phase.name.lower().replace("_", " ")
    after = f" after step {beat.step}" if beat.step >= 0 else ""
    words = f"no progress in {silent_s:.1f} s, {where}{after} (deadline {deadline_s:g} s)"
    if sight.is_stopped:
        words += "; its process is stopped"
    if mark.waits:
        words += f"; {'was' if sight.is_stopped else 'is'} in {mark.what}"
    elif mark.begun:
        words += f"; in no operation between ranks, the last was {mark.what}"
    return words

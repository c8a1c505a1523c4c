"""Which fragment is sent at which optimizer step, and when it arrives; pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Timetable:
    """Steps are counted from 1: step n is the n-th that an optimizer makes.

    Fragments are sent one after another, at even distances (Streaming DiLoCo, Douillard et al. 2025); the last of
    ``fragments`` where ``every`` steps are full.

    Attributes:
        every: Steps between two sendings of a fragment.
        fragments: How many there are, at most ``every``.
        warmup_steps: So many first steps are made together: nothing is sent, nothing need be.
        overlap_steps: So many steps after a fragment was sent it arrives; less than ``every``.
    """

    every: int
    fragments: int = 1
    warmup_steps: int = 0
    overlap_steps: int = 0

    def is_exact(self, step: int) -> bool:
        """Whether a step is made by all workers together."""
        return step <= self.warmup_steps

    def sent_at(self, step: int) -> tuple[int, ...]:
        """The fragments that are sent once a step is made, in order."""
        own = step - self.warmup_steps
        if own <= 0:
            return ()
        return tuple(f for f in range(self.fragments) if (own - self._offset(f)) % self.every == 0)

    def arrives_at(self, sent_at: int) -> int:
        """The step after which a fragment that was sent after another arrives."""
        return sent_at + self.overlap_steps

    def _offset(self, fragment: int) -> int:
        """At which step of a period a fragment is sent."""
        return (fragment + 1) * self.every // self.fragments

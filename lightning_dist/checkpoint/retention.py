"""What to keep and what to delete. Pure: names and numbers in, names out.

Whatever is asked for: the newest committed checkpoint stays, and so does one that is being read.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from lightning_dist.errors import ConfigError


@dataclass(frozen=True)
class Candidate:
    """A committed checkpoint.

    Attributes:
        name: Of its folder.
        created_s: When it was committed, seconds since 1970.
        step: Optimizer steps done.
        score: What checkpoints are ranked by; ``None``: it has none, and is not among the best.
    """

    name: str
    created_s: float
    step: int = -1
    score: float | None = None


@dataclass(frozen=True)
class Keep:
    """What to keep; a checkpoint stays if any rule wants it.

    Attributes:
        last: So many of the newest, at least 1; ``None`` keeps all.
        best: So many with the best score.
        mode: ``min`` if a lower score is better, ``max`` if a higher one is.
        every_n_steps: All whose step is a multiple of this.
    """

    last: int | None = 1
    best: int = 0
    mode: str = "min"
    every_n_steps: int | None = None

    def __post_init__(self) -> None:
        if self.last is not None and self.last < 1:
            raise ConfigError(
                f"the newest checkpoint is always kept: last is at least 1, or None for all; got {self.last}"
            )
        if self.best < 0:
            raise ConfigError(f"best is at least 0, got {self.best}")
        if self.mode not in ("min", "max"):
            raise ConfigError(f"mode={self.mode!r} is unknown; allowed: min, max")
        if self.every_n_steps is not None and self.every_n_steps < 1:
            raise ConfigError(f"every_n_steps is at least 1, or None; got {self.every_n_steps}")


def to_delete(candidates: Sequence[Candidate], keep: Keep, *, in_use: Collection[str] = ()) -> list[str]:
    """Names of those that no rule keeps, the oldest first.

    Args:
        candidates: All committed checkpoints.
        keep: The rules.
        in_use: Names of those that are being read, or that a link points to.
    """
    newest_first = sorted(candidates, key=lambda c: (c.created_s, c.step, c.name), reverse=True)
    kept = {c.name for c in (newest_first if keep.last is None else newest_first[: keep.last])}
    sign = 1 if keep.mode == "min" else -1
    # NaN compares with nothing: it is no score. Of equal scores the newer is the better.
    scored = [c for c in newest_first if c.score is not None and c.score == c.score]
    scored.sort(key=lambda c: sign * (c.score or 0.0))
    kept |= {c.name for c in scored[: keep.best]}
    if keep.every_n_steps is not None:
        kept |= {c.name for c in candidates if c.step >= 0 and c.step % keep.every_n_steps == 0}
    return [c.name for c in reversed(newest_first) if c.name not in kept and c.name not in in_use]

"""How gradients travel as products of thin matrices."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_dist.config.checks import check_count, check_flags


@dataclass(frozen=True)
class PowerSGDConfig:
    """Options of ``sync.algorithm=powersgd``.

    Attributes:
        rank: Columns of the two factors that stand for a matrix; more is closer, and costs more bytes. Matrices that
            they would not make smaller than half stay exact, and so do vectors.
        warm_start: Whether a factor begins where it was the step before, which is closer than a random one.
    """

    rank: int = 4
    warm_start: bool = True

    def __post_init__(self) -> None:
        check_count("sync.powersgd.rank", self.rank, low=1, high=1024, unit="columns")
        check_flags("sync.powersgd", self)

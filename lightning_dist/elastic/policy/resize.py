"""What becomes of the global batch and of the learning rate at another number of ranks: pure arithmetic.

With ``keep`` the global batch stays, by accumulation, and so does the learning rate. With ``per_rank`` each rank goes
on with its own batch, and the rate follows: linear (Goyal et al. 2017, arXiv:1706.02677), by the square root
(Krizhevsky 2014, arXiv:1404.5997), or not at all.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from lightning_dist.config.checks import check_choice, check_count
from lightning_dist.config.elastic import BATCHES, RATES


@dataclass(frozen=True)
class Batch:
    """What one optimizer step is made of.

    Attributes:
        ranks: Data-parallel ranks; those of one pipeline or one tensor group are one.
        micro_batch: Samples of a rank in one pass.
        accumulation: Passes of a rank a step.
    """

    ranks: int
    micro_batch: int
    accumulation: int = 1

    def __post_init__(self) -> None:
        check_count("ranks", self.ranks, low=1, unit="ranks")
        check_count("micro_batch", self.micro_batch, low=1, unit="samples")
        check_count("accumulation", self.accumulation, low=1, unit="passes")

    @property
    def global_size(self) -> int:
        """Samples a step."""
        return self.ranks * self.micro_batch * self.accumulation


@dataclass(frozen=True)
class Resized:
    """A batch at another number of ranks.

    Attributes:
        reference: What the user has asked for, at the size the user has asked for.
        batch: At the present size.
        rate_factor: The learning rate is that of the reference times this.
        is_exact: The batch is what was asked for: the same global size with ``keep``, the same of a rank else.
        rate: How the learning rate follows.
    """

    reference: Batch
    batch: Batch
    rate_factor: float
    is_exact: bool
    rate: str

    @property
    def sentence(self) -> str:
        """What has changed, to be printed. Where batches count as one sample, as of most loaders, it speaks of them."""
        old, new = self.reference, self.batch
        ranks = f"{old.ranks} -> {new.ranks} ranks: "
        counts_samples = max(old.micro_batch, new.micro_batch) > 1
        samples = f" x {new.micro_batch} samples" if counts_samples else ""
        shape, unit = (
            f"{new.ranks} ranks{samples} x {new.accumulation} passes",
            "samples" if counts_samples else "batches",
        )
        if new.global_size == old.global_size:
            size = f"the global batch stays {new.global_size} {unit} ({shape})"
        else:
            size = f"global batch {old.global_size} -> {new.global_size} {unit} ({shape})"
        if not self.is_exact:
            size += f"; {old.global_size} cannot be kept exactly on {new.ranks} ranks, this is the nearest"
        if self.rate_factor == 1:
            return f"{ranks}{size}; the learning rate stays"
        return f"{ranks}{size}; learning rate x {self.rate_factor:.4g} ({self.rate})"


def resize(
    reference: Batch, ranks: int, *, mode: str = "keep", rate: str = "linear", fixed_micro_batch: bool = False
) -> Resized:
    """The batch on another number of ranks. It depends on the reference alone: going back gives the same again.

    Args:
        reference: The batch at the size it was chosen for.
        ranks: Data-parallel ranks now.
        mode: ``keep`` or ``per_rank``.
        rate: ``linear``, ``sqrt`` or ``none``; it acts with ``per_rank``.
        fixed_micro_batch: With ``keep``: only the number of passes may change. Else micro-batches may shrink; they
            never grow, since memory was chosen for the reference's.

    Raises:
        ConfigError: An unknown mode or rate, or a number below 1.
    """
    check_choice("elastic.batch", mode, BATCHES)
    check_choice("elastic.rate", rate, RATES)
    check_count("ranks", ranks, low=1, unit="ranks")
    if mode == "per_rank":
        batch = replace(reference, ranks=ranks)
        return Resized(reference, batch, _factor(batch.global_size / reference.global_size, rate), True, rate)
    batch = _nearest(reference, ranks, micro_batches=None if not fixed_micro_batch else (reference.micro_batch,))
    return Resized(reference, batch, 1.0, batch.global_size == reference.global_size, rate)


def _factor(growth: float, rate: str) -> float:
    return {"linear": growth, "sqrt": math.sqrt(growth), "none": 1.0}[rate]


def _nearest(reference: Batch, ranks: int, *, micro_batches: tuple[int, ...] | None) -> Batch:
    """The batch nearest to the reference's in size; among those the one with the fewest passes, then the larger.

    Where no number of passes is exact, at most twice the fewest are tried: more would cost time and gain little.
    """
    wanted = reference.global_size
    if micro_batches is None and wanted % ranks == 0:
        per_rank = wanted // ranks
        fewest = math.ceil(per_rank / reference.micro_batch)
        passes = next(number for number in range(fewest, per_rank + 1) if per_rank % number == 0)
        return Batch(ranks, per_rank // passes, passes)
    sizes = micro_batches or tuple(range(1, reference.micro_batch + 1))
    fewest = max(1, math.floor(wanted / (ranks * sizes[-1])))
    candidates = [Batch(ranks, size, passes) for passes in range(fewest, 2 * fewest + 2) for size in sizes]
    return min(candidates, key=lambda batch: (abs(batch.global_size - wanted), batch.accumulation, -batch.global_size))

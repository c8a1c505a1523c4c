"""How gradients of which few rows are not zero travel."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_dist.config.checks import check_range


@dataclass(frozen=True)
class SparseConfig:
    """What becomes of the gradients of ``nn.Embedding(sparse=True)``.

    Attributes:
        dense_above: Share of a table's rows, 0 to 1, above which its gradient travels whole and no longer as rows; 0
            always sends it whole, 1 never. ``None``: where that costs less, by what a row costs and by the link.
    """

    dense_above: float | None = None

    def __post_init__(self) -> None:
        if self.dense_above is not None:
            check_range("sync.sparse.dense_above", self.dense_above, low=0, high=1, unit="of the rows")

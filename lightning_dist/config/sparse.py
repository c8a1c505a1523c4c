"""How gradients of which few rows are not zero travel."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_dist.config.checks import check_choice, check_count, check_range

EXCHANGES = ("rows", "parameter_server", "auto")


@dataclass(frozen=True)
class SparseConfig:
    """What becomes of the gradients of ``nn.Embedding(sparse=True)``.

    Attributes:
        exchange: ``rows`` (each rank has whole tables, and gets the gradients of the rows that any has used),
            ``parameter_server`` (the rows of each table are dealt to the ranks, which serve and train them) or ``auto``
            (by size: ``server_above_bytes``). On CPU.
        server_above_bytes: With ``auto``, tables larger than this go to the parameter server, in bytes.
        dense_above: Share of a table's rows, 0 to 1, above which its gradient travels whole and no longer as rows; 0
            always sends it whole, 1 never. ``None``: where that costs less, by what a row costs and by the link; never
            with a ``sync.codec``, which would encode whole tables, and not rows.
    """

    exchange: str = "rows"
    server_above_bytes: int = 1 << 30
    dense_above: float | None = None

    @property
    def serves_above_bytes(self) -> int | None:
        """Tables larger than this are served; ``None``: none is."""
        return {"rows": None, "parameter_server": 0, "auto": self.server_above_bytes}[self.exchange]

    def __post_init__(self) -> None:
        check_choice("sync.sparse.exchange", self.exchange, EXCHANGES)
        check_count("sync.sparse.server_above_bytes", self.server_above_bytes, low=0, unit="bytes")
        if self.dense_above is not None:
            check_range("sync.sparse.dense_above", self.dense_above, low=0, high=1, unit="of the rows")

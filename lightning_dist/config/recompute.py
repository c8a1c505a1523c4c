"""Which blocks run again in backward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lightning_dist.config.checks import check_choice, check_count, check_range, parse_bytes
from lightning_dist.errors import ConfigError

RECOMPUTE_MODES = ("off", "full", "every_n", "selective", "budget")


@dataclass(frozen=True)
class RecomputeConfig:
    """Which blocks keep only their input for the backward pass and run again in it.

    Attributes:
        mode: ``off``, ``full`` (every block), ``every_n`` (each ``every``-th block), ``selective`` (every block, but
            what matrix products, attention and convolutions return is kept), ``budget`` (as few blocks as make the
            activations of all blocks fit into ``budget``; measured in the first backward).
        every: With ``every_n``: of so many blocks one is recomputed, the first of them.
        budget: With ``budget``: bytes a rank may keep for backward, as a number or with a unit (``8GB``, ``512MiB``).
        modules: Class names, or dotted paths in which ``*`` stands for one name (``model.blocks.*``), of the blocks;
            ``None`` means they are found.
    """

    mode: str = "off"
    every: int = 2
    budget: int | str | None = None
    modules: list[str] | None = None

    def __post_init__(self) -> None:
        check_choice("recompute.mode", self.mode, RECOMPUTE_MODES)
        check_count("recompute.every", self.every, low=1, unit="blocks")
        if self.budget is not None:
            check_range("recompute.budget", parse_bytes("recompute.budget", self.budget), low=1024, unit="bytes")
        elif self.mode == "budget":
            raise ConfigError(
                "recompute.mode=budget needs recompute.budget, the bytes a rank may keep for backward, "
                "e.g. recompute.budget=8GB; write recompute=full to recompute every block"
            )
        names = [] if self.modules is None or isinstance(self.modules, str) else list(self.modules)
        if self.modules is not None and (not names or not all(isinstance(name, str) for name in names)):
            raise ConfigError(
                f"recompute.modules is a list of class names or dotted paths such as [Block, model.blocks.*], or null "
                f"to have the blocks found; got {self.modules!r}"
            )

    @property
    def budget_bytes(self) -> int | None:
        """The budget, in bytes."""
        return None if self.budget is None else parse_bytes("recompute.budget", self.budget)


RECOMPUTE_PRESETS: dict[str, RecomputeConfig | dict[str, Any]] = {
    "off": RecomputeConfig(),
    "full": RecomputeConfig(mode="full"),
    "every_n": RecomputeConfig(mode="every_n"),
    "selective": RecomputeConfig(mode="selective"),
    "budget": {"mode": "budget"},  # needs a budget
}

"""What is kept from step to step: what is owed of each parameter, and the factors to begin with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from lightning_dist.comm.feedback import Account, Feedback, Origin, Place, Span
from lightning_dist.gradsync.powersgd.factors import first_factor

_KIND = "part"  # of what a rank has put in, this much is not in the product


class LowRankFeedback(Feedback):
    """Accounts, one a parameter, and a factor a matrix.

    Residues are saved as any codec's, so that a run may go on with another ``sync``. Factors are the same on all ranks,
    and go on only where the ranks do as before; else all begin with random ones.

    Args:
        layout: As for :class:`~lightning_dist.comm.feedback.Feedback`.
        rank: Likewise.
        world_size: Number of ranks.
        warmup_steps: As for :class:`~lightning_dist.comm.feedback.Feedback`.
        keeps: Likewise.
        columns: Of a factor.
        warm_start: Whether a factor is kept.
    """

    def __init__(
        self,
        *,
        layout: str,
        rank: int,
        world_size: int,
        columns: int,
        warm_start: bool,
        warmup_steps: int = 0,
        keeps: bool = True,
    ) -> None:
        super().__init__(layout=layout, rank=rank, warmup_steps=warmup_steps, keeps=keeps)
        self.columns = columns
        self._warm_start = warm_start
        self._weight = 1 / world_size
        self._factors: dict[str, torch.Tensor] = {}

    def enter_parameter(self, name: str, gradient: torch.Tensor) -> Account:
        """The account of a parameter whose gradient is about to be sent; every rank calls it in the same order.

        Args:
            name: Of the parameter.
            gradient: [n]; what is owed of it and was taken over from other ranks is added.
        """
        origin = Origin(f"parameter {name}", (Span(name, 0, gradient.numel()),), self._weight)
        return self.enter(origin, gradient)

    def settle_in(self, account: Account, origin: Origin, gradients: torch.Tensor) -> None:
        """What is owed in an account is added to gradients, and the account is empty afterwards.

        Args:
            account: Of these gradients, or of a part of their sum.
            origin: What the gradients are made of.
            gradients: Contiguous; changed.
        """
        if account.residues:
            self._file(account)
            self._settle_filed(origin, gradients.view(-1))

    def factor(self, name: str, columns: int, device: torch.device, *, window: int) -> torch.Tensor:
        """What a matrix is multiplied by first, [columns of the matrix, columns of a factor]."""
        kept = self._factors.get(name)
        if kept is not None and kept.shape[0] == columns:
            return kept
        return first_factor(name, columns, self.columns, window=window).to(device)

    def keep_factor(self, name: str, factor: torch.Tensor) -> None:
        """Begin with it the next time."""
        if self._warm_start:
            self._factors[name] = factor

    def state_dict(self) -> dict[str, Any]:
        """Accounts and factors."""
        return {**super().state_dict(), "factors": dict(self._factors)}

    def load_state_dicts(self, states: Sequence[Mapping[str, Any]], device: torch.device, *, window: int = 0) -> None:
        """Take over what ranks have saved, under whatever ``sync``."""
        super().load_state_dicts(states, device, window=window)
        goes_on = len(states) == 1 and states[0]["layout"] == self.layout
        factors = states[0].get("factors", {}) if goes_on else {}
        self._factors = {name: factor.to(device) for name, factor in factors.items()}


def owed(account: Account) -> torch.Tensor | None:
    """[n] fp32; ``None``: nothing."""
    slot = account.residues.get((_KIND, 0))
    return None if slot is None else slot[1][0]


def owe(account: Account, lost: torch.Tensor) -> None:
    """Keep what is not in the product.

    Args:
        account: Of the parameter.
        lost: [n].
    """
    if account.keeps:
        account.residues[_KIND, 0] = Place(_KIND, (0,), lost.numel(), 1.0), lost.unsqueeze(0)


def settle(account: Account) -> None:
    """Nothing is owed any more."""
    account.residues.clear()

"""Error feedback: what a codec has lost of a gradient is added to what is sent next, so that nothing is lost for good.

(1-bit SGD, Seide et al. 2014; error feedback, Karimireddy et al. 2019.) Two things are lost on the way: of the part
that a rank sends, and of the sum that an owner encodes. What a rank holds of both lies where it was lost: in the
account of the tensor, at the place in it.

Note [What is owed, wherever it lies]
    A residue is a part of the model's gradient that has not been applied yet. Sums are linear, so any rank may add it
    to its own gradient, once, and it is applied. So where tensors are laid out anew (a parameter is unfrozen, the run
    goes on with other ranks, or under another parallel mode), accounts are dissolved: their residues are filed by
    parameter and offset, and added to this rank's gradient when that parameter comes again. No rank needs to know what
    others hold, and the sum over ranks is what it was.

    They are filed in units of the mean gradient. An element of a tensor is ``weight`` of them, and an element of a
    residue is ``unit`` elements of the tensor.

Note [Velocities move, too]
    With momentum (Note [Momentum before encoding] in :mod:`~lightning_dist.comm.account`) a velocity ``u`` is worth
    ``momentum * u`` of the next gradient, which is filed likewise. What is owed must not come under momentum once more.
    So a tensor that is laid out anew crosses once as it is: its gradient, what velocities are worth, and what is owed.
    That is what momentum would have sent, had it sent all; and of the first two, times ``momentum``, the next gradient
    is made. Whether a tensor is new is the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from lightning_dist.comm.account import Account, Origin, Place, Span, account_of

__all__ = ["Account", "Feedback", "Origin", "Place", "Span"]

_Filed = dict[str, list[tuple[int, torch.Tensor]]]
"""Offset and values of runs of parameters, in units of the mean gradient."""


class Feedback:
    """All accounts of a rank, and what is owed of parameters that are in none.

    Args:
        layout: Says how tensors are cut and who holds what: residues are at home only where it is the same.
        rank: Of this process.
        warmup_steps: So many synchronisations are exact, before the first that is not.
        keeps: Whether what is lost is kept; else it is lost for good.
        loses: Whether anything is encoded here; else there is only what was taken over.
        momentum: Of gradients before they are encoded; 0: none.
    """

    def __init__(
        self,
        *,
        layout: str,
        rank: int,
        warmup_steps: int = 0,
        keeps: bool = True,
        loses: bool = True,
        momentum: float = 0.0,
    ) -> None:
        self.loses = loses
        self.scale_of: Callable[[], torch.Tensor | None] = lambda: None
        self._scale: torch.Tensor | None = None  # of what is owed
        self._layout = layout
        self._rank = rank
        self._warmup_steps = warmup_steps
        self._keeps = keeps
        self._momentum = momentum
        self._is_anew = False  # whether tensors that come first may find what is owed
        self._window = 0
        self._seen: set[str] = set()
        self._accounts: dict[str, Account] = {}
        self._filed: _Filed = {}
        self._moving: _Filed = {}  # what velocities are worth of the next gradient

    @property
    def layout(self) -> str:
        """How tensors are cut and who holds what."""
        return self._layout

    @property
    def window(self) -> int:
        """How many times gradients have been synchronised before the present time."""
        return self._window

    def enter(self, origin: Origin, tensor: torch.Tensor | None) -> Account:
        """The account of a tensor that is about to be sent; called on every rank in the order of sending.

        What is owed of its parameters and is in no account is added to the tensor. A window ends when a tensor comes
        again. The accounts of those that did not come in it are dissolved.

        Args:
            origin: What the tensor is made of.
            tensor: This rank's gradients, contiguous; changed. ``None``: another tensor has got what is owed.
        """
        if origin.key in self._seen:
            self._window += 1
            for key in [key for key in self._accounts if key not in self._seen]:
                self._file(self._accounts.pop(key))
            self._seen.clear()
        if not self._seen:
            self._follow_scale()
        self._seen.add(origin.key)
        account = self._accounts.get(origin.key)
        is_new = account is None or account.origin != origin
        if account is None or account.origin != origin:
            if account is not None:
                self._file(account)
            account = self._accounts[origin.key] = self._opened(origin)
        account.window = self._window
        may_find_owed = self._window > 0 or self._is_anew
        account.is_settling = is_new and may_find_owed and self._momentum > 0 and self.loses
        account.is_exact = self._window < self._warmup_steps or account.is_settling
        if tensor is not None:
            self._settle_all(account, tensor.view(-1))
        return account

    def give_back(self, name: str, low: int, values: torch.Tensor) -> None:
        """A mean gradient was not applied, since no rank used the parameter: it is owed still. One rank calls it.

        Args:
            name: The parameter's.
            low: Offset of the first value.
            values: [n] any type; copied.
        """
        self._filed.setdefault(name, []).append((low, values.float().clone()))

    def owed(self) -> dict[str, list[tuple[int, torch.Tensor]]]:
        """All that this rank owes: offset and values of each run of a parameter, in units of the mean gradient."""
        found = {name: list(pieces) for name, pieces in self._filed.items()}
        for account in self._accounts.values():
            _file(found, Account(account.origin, residues=dict(account.residues)).dissolved())
        return found

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Plain values and tensors, to be saved by each rank for itself, between two windows.

        The tensors are those that are in use.
        """
        return {
            "layout": self._layout,
            "scale": None if self._scale is None else float(self._scale),
            "window": self._window,
            "seen": sorted(self._seen),
            "accounts": [account.state_dict() for account in self._accounts.values()],
            "filed": _copied(self._filed),
            **({"moving": _copied(self._moving)} if self._moving else {}),
        }

    def load_state_dicts(self, states: Sequence[Mapping[str, Any]], device: torch.device, *, window: int = 0) -> None:
        """Take over what ranks have saved; of each parameter, a rank's state is to be given to exactly one rank.

        Args:
            states: One, this rank's own, if as many ranks go on as have saved; else any number, or none.
            device: Where gradients live.
            window: Where counting goes on, on ranks that are given none.
        """
        self._accounts, self._filed, self._moving, self._seen = {}, {}, {}, set()
        self._window, self._is_anew = window, True
        for state in states:
            self._window = max(self._window, state["window"])
            accounts = [
                account_of(saved, rank=self._rank, keeps=self._keeps, momentum=self._momentum, device=device)
                for saved in state["accounts"]
            ]
            if len(states) == 1 and state["layout"] == self._layout:
                self._accounts = {account.origin.key: account for account in accounts}
                self._seen = set(state["seen"])
                self._is_anew = False
            else:
                for account in accounts:
                    self._file(account)
            _file(self._filed, _on(device, state["filed"]))
            _file(self._moving, _on(device, state.get("moving", {}) if self._momentum else {}))
        scales = [state["scale"] for state in states if state.get("scale") is not None]
        self._scale = None
        if scales:  # of one run: alike
            self._multiply(1 / scales[0])

    def _follow_scale(self) -> None:
        """Bring what is owed to the scale of the gradients that come, without asking a device for it."""
        scale = self.scale_of()
        if scale is not None:
            self._multiply(scale if self._scale is None else scale / self._scale)
            self._scale = scale.clone()

    def _multiply(self, factor: torch.Tensor | float) -> None:
        slots = [slots for each in self._accounts.values() for slots in (each.residues, each.velocities)]
        rows = [rows for each in slots for _, rows in each.values()]
        rows += [values for filed in (self._filed, self._moving) for each in filed.values() for _, values in each]
        for each in rows:
            each.mul_(factor)

    def keep_only(self, names: Collection[str]) -> None:
        """Forget what is filed of other parameters: another rank has taken it over, too."""
        self._filed = {name: pieces for name, pieces in self._filed.items() if name in names}
        self._moving = {name: pieces for name, pieces in self._moving.items() if name in names}

    # -- what is filed ------------------------------------------------------------------------------------------------

    def _opened(self, origin: Origin) -> Account:
        return Account(origin, rank=self._rank, keeps=self._keeps, momentum=self._momentum)

    def _file(self, account: Account) -> None:
        _file(self._filed, account.dissolved())
        _file(self._moving, account.run_out())

    def _settle_all(self, account: Account, flat: torch.Tensor) -> None:
        """Add to this rank's gradients what is filed of them."""
        if self._moving:
            _settle(self._moving, account.origin, flat)
        if self._momentum and not self.loses:  # momentum may be taken here, before what is owed is added
            whole = Place("whole", (0,), flat.numel(), 1.0)
            flat.copy_(account.accelerated(flat.unsqueeze(0), whole)[0])
        elif account.is_settling:
            _file(self._moving, account.spread(flat, self._momentum))
        self._settle_filed(account.origin, flat)

    def _settle_filed(self, origin: Origin, flat: torch.Tensor) -> None:
        """Add to a tensor what is owed of its parameters and is in no account."""
        if self._filed:
            _settle(self._filed, origin, flat)


def _file(filed: _Filed, found: Iterable[tuple[str, int, torch.Tensor]]) -> None:
    for name, low, values in found:
        filed.setdefault(name, []).append((low, values))


def _on(device: torch.device, filed: _Filed) -> Iterator[tuple[str, int, torch.Tensor]]:
    return ((name, low, values.to(device)) for name, pieces in filed.items() for low, values in pieces)


def _copied(filed: _Filed) -> _Filed:
    return {name: list(pieces) for name, pieces in filed.items()}


def _settle(filed: _Filed, origin: Origin, flat: torch.Tensor) -> None:
    """Add to a tensor what is filed of its parameters, which is not filed any more."""
    position = 0
    for span in origin.spans:
        if span.name is not None and span.name in filed:
            target = flat[position : position + span.length]
            left = list(_settled(filed.pop(span.name), span, target, origin.weight))
            if left:
                filed[span.name] = left
        position += span.length


def _settled(
    pieces: Iterable[tuple[int, torch.Tensor]], span: Span, target: torch.Tensor, weight: float
) -> Iterator[tuple[int, torch.Tensor]]:
    """Add to a target what of some pieces is in it; yields the rest."""
    for low, values in pieces:
        first, last = max(low, span.low), min(low + len(values), span.low + span.length)
        if first >= last:
            yield low, values
            continue
        owed = values[first - low : last - low] / weight
        target[first - span.low : last - span.low].add_(owed.to(target.dtype))
        if low < first:
            yield low, values[: first - low]
        if last < low + len(values):
            yield last, values[last - low :]

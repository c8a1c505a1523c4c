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
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from lightning_dist.comm.codecs import Codec
from lightning_dist.comm.codecs.dither import seed_of


class Span(NamedTuple):
    """Successive elements of a tensor, and which of a parameter's they are.

    Attributes:
        name: The parameter's; ``None``: of none, such as padding, or of one that cannot be told.
        low: Of the first, in the parameter's flat order.
        length: How many.
    """

    name: str | None
    low: int
    length: int


@dataclass(frozen=True)
class Origin:
    """What a tensor of gradients is made of.

    Attributes:
        key: The same each time the tensor comes, and no other's.
        spans: Its elements, in order.
        weight: What an element counts in the model's mean gradient, e.g. 1 / number of ranks.
    """

    key: str
    spans: tuple[Span, ...]
    weight: float


class Place(NamedTuple):
    """Rows of a tensor's elements that are encoded together.

    Attributes:
        kind: ``part`` of what a rank sends between hosts, ``sum`` of what an owner encodes; another name at each other
            leg.
        starts: Of each row: its first element.
        end: Elements from here on are padding.
        unit: Elements of the tensor that one element of a row is worth.
    """

    kind: str
    starts: tuple[int, ...]
    end: int
    unit: float


@dataclass
class Account:
    """What is owed of one tensor. Used by one lane at a time.

    Attributes:
        origin: What it is made of.
        window: How many times gradients have been synchronised before.
        is_exact: Whether values cross as they are this time.
        keeps: Whether what is lost is kept.
        rank: Of this process.
        residues: By kind and first element of a place.
    """

    origin: Origin
    window: int = 0
    is_exact: bool = False
    keeps: bool = True
    rank: int = 0
    residues: dict[tuple[str, int], tuple[Place, torch.Tensor]] = field(default_factory=dict)

    def encode(self, codec: Codec, rows: torch.Tensor, place: Place) -> torch.Tensor:
        """Encode rows and what is owed of them; what is lost is owed from now on.

        A row that is not finite is sent as such, and nothing is owed of it afterwards.

        Args:
            codec: How.
            rows: [rows, n], floating; not changed.
            place: Where they are.

        Returns:
            [rows, bytes] uint8.
        """
        values = rows.float()
        slot = (place.kind, place.starts[0])
        if slot in self.residues:
            values = values + self.residues[slot][1]
        name = zlib.crc32(f"{place.kind} {self.origin.key}".encode())
        seed = seed_of(self.window, name, place.starts[0], self.rank)
        encoded = codec.encode(values, seed=seed)
        if self.keeps:
            lost = (values - codec.decode(encoded, values.shape[1])).nan_to_num_(0.0, 0.0, 0.0)
            self.residues[slot] = place, lost
        return encoded

    def dissolved(self) -> Iterator[tuple[str, int, torch.Tensor]]:
        """Name, offset and values of what is owed, in units of the mean gradient; the account is empty afterwards."""
        for place, rows in self.residues.values():
            for start, row in zip(place.starts, rows, strict=True):
                owed = row[: max(0, place.end - start)] * (place.unit * self.origin.weight)
                yield from _filed(self.origin.spans, start, owed)
        self.residues = {}


class Feedback:
    """All accounts of a rank, and what is owed of parameters that are in none.

    Args:
        layout: Says how tensors are cut and who holds what: residues are at home only where it is the same.
        rank: Of this process.
        warmup_steps: So many synchronisations are exact, before the first that is not.
        keeps: Whether what is lost is kept; else it is lost for good.
    """

    def __init__(self, *, layout: str, rank: int, warmup_steps: int = 0, keeps: bool = True) -> None:
        self._layout = layout
        self._rank = rank
        self._warmup_steps = warmup_steps
        self._keeps = keeps
        self._window = 0
        self._seen: set[str] = set()
        self._accounts: dict[str, Account] = {}
        self._filed: dict[str, list[tuple[int, torch.Tensor]]] = {}

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
        self._seen.add(origin.key)
        account = self._accounts.get(origin.key)
        if account is None or account.origin != origin:
            if account is not None:
                self._file(account)
            account = self._accounts[origin.key] = Account(origin, rank=self._rank, keeps=self._keeps)
        account.window = self._window
        account.is_exact = self._window < self._warmup_steps
        if self._filed and tensor is not None:
            self._settle(origin, tensor.view(-1))
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
            for name, low, values in Account(account.origin, residues=dict(account.residues)).dissolved():
                found.setdefault(name, []).append((low, values))
        return found

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Plain values and tensors on the CPU, to be saved by each rank for itself, between two windows."""
        accounts = [
            {
                "key": account.origin.key,
                "spans": [tuple(span) for span in account.origin.spans],
                "weight": account.origin.weight,
                "residues": [(tuple(place), rows.cpu()) for place, rows in account.residues.values()],
            }
            for account in self._accounts.values()
        ]
        filed = {name: [(low, values.cpu()) for low, values in pieces] for name, pieces in self._filed.items()}
        return {
            "layout": self._layout,
            "window": self._window,
            "seen": sorted(self._seen),
            "accounts": accounts,
            "filed": filed,
        }

    def load_state_dicts(self, states: Sequence[Mapping[str, Any]], device: torch.device, *, window: int = 0) -> None:
        """Take over what ranks have saved; of each parameter, a rank's state is to be given to exactly one rank.

        Args:
            states: One, this rank's own, if as many ranks go on as have saved; else any number, or none.
            device: Where gradients live.
            window: Where counting goes on, on ranks that are given none.
        """
        self._accounts, self._filed, self._seen = {}, {}, set()
        self._window = window
        for state in states:
            self._window = max(self._window, state["window"])
            accounts = [_account_of(saved, self._rank, self._keeps, device) for saved in state["accounts"]]
            if len(states) == 1 and state["layout"] == self._layout:
                self._accounts = {account.origin.key: account for account in accounts}
                self._seen = set(state["seen"])
            else:
                for account in accounts:
                    self._file(account)
            for name, pieces in state["filed"].items():
                self._filed.setdefault(name, []).extend((low, values.to(device)) for low, values in pieces)

    def keep_only(self, names: Collection[str]) -> None:
        """Forget what is filed of other parameters: another rank has taken it over, too."""
        self._filed = {name: pieces for name, pieces in self._filed.items() if name in names}

    # -- what is filed ------------------------------------------------------------------------------------------------

    def _file(self, account: Account) -> None:
        for name, low, values in account.dissolved():
            self._filed.setdefault(name, []).append((low, values))

    def _settle(self, origin: Origin, flat: torch.Tensor) -> None:
        position = 0
        for span in origin.spans:
            if span.name is not None and span.name in self._filed:
                target = flat[position : position + span.length]
                left = list(_settled(self._filed.pop(span.name), span, target, origin.weight))
                if left:
                    self._filed[span.name] = left
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


def _filed(spans: Sequence[Span], start: int, values: torch.Tensor) -> Iterator[tuple[str, int, torch.Tensor]]:
    """Values from an element of a tensor on, parted by parameters."""
    position = 0
    for span in spans:
        first, last = max(position, start), min(position + span.length, start + len(values))
        if span.name is not None and first < last:
            yield span.name, span.low + first - position, values[first - start : last - start]
        position += span.length


def _account_of(saved: Mapping[str, Any], rank: int, keeps: bool, device: torch.device) -> Account:
    origin = Origin(saved["key"], tuple(Span(*span) for span in saved["spans"]), saved["weight"])
    account = Account(origin, rank=rank, keeps=keeps)
    for fields, rows in saved["residues"]:
        place = Place(*fields)
        account.residues[place.kind, place.starts[0]] = place, rows.to(device)
    return account

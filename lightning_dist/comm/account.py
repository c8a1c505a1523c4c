"""What is owed of one tensor of gradients, and by which place in it.

Note [Momentum before encoding]
    (Deep Gradient Compression, Lin et al. 2018, 3.1 and 3.2.) Where few values are sent, momentum that an optimizer
    takes of them comes late and in bursts. So each host takes it of its own gradients, before anything is left out:
    ``u = momentum * u + gradient``, and what is owed and sent is the sum of ``u``. A value that has been sent starts
    again from ``u = 0`` (factor masking). A host's gradients are in two kinds of places: ``part``, which it sends, and
    ``own``, which go into the sum as they are, and count as sent where the sum is.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
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
        kind: ``part`` of what a rank sends between hosts, ``own`` of what goes into the sum as it is, ``sum`` of what
            an owner encodes; another name at each other leg.
        starts: Of each row: its first element.
        end: Elements from here on are padding.
        unit: Elements of the tensor that one element of a row is worth.
    """

    kind: str
    starts: tuple[int, ...]
    end: int
    unit: float


SUM = "sum"
OWN = "own"
Slots = dict[tuple[str, int], tuple[Place, torch.Tensor]]
"""Values by kind and first element of their place."""


@dataclass
class Account:
    """What is owed of one tensor. Used by one lane at a time.

    Attributes:
        origin: What it is made of.
        window: How many times gradients have been synchronised before.
        is_exact: Whether values cross as they are this time.
        keeps: Whether what is lost is kept.
        rank: Of this process.
        momentum: Of gradients before they are encoded; 0: none.
        is_settling: Whether values cross without momentum this time, since what was owed elsewhere is among them.
        residues: By kind and first element of a place.
        velocities: Of gradients, likewise.
    """

    origin: Origin
    window: int = 0
    is_exact: bool = False
    keeps: bool = True
    rank: int = 0
    momentum: float = 0.0
    is_settling: bool = False
    residues: Slots = field(default_factory=dict)
    velocities: Slots = field(default_factory=dict)

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
        slot = (place.kind, place.starts[0])
        values = rows.float() if place.kind == SUM else self.accelerated(rows, place)
        if slot in self.residues:
            values = values + self.residues[slot][1]
        name = zlib.crc32(f"{place.kind} {self.origin.key}".encode())
        seed = seed_of(self.window, name, place.starts[0], self.rank)
        encoded = codec.encode(values, seed=seed)
        if self.keeps:
            decoded = codec.decode(encoded, values.shape[1])
            self.residues[slot] = place, (values - decoded).nan_to_num_(0.0, 0.0, 0.0)
            self._stop((OWN, place.starts[0]) if place.kind == SUM else slot, decoded)
        return encoded

    def accelerated(self, rows: torch.Tensor, place: Place) -> torch.Tensor:
        """Gradients as they go into what is sent: their velocity where there is momentum, and themselves where not.

        Args:
            rows: [rows, n], floating; not changed.
            place: Where they are.

        Returns:
            [rows, n] fp32.
        """
        values = rows.float()
        if self.momentum == 0 or self.is_settling:
            return values
        slot = (place.kind, place.starts[0])
        if slot in self.velocities:
            values = torch.add(values, self.velocities[slot][1], alpha=self.momentum)
        self.velocities[slot] = place, values.nan_to_num(0.0, 0.0, 0.0)
        return values

    def _stop(self, slot: tuple[str, int], decoded: torch.Tensor) -> None:
        """Factor masking: what has been sent begins anew; its old velocity does not run into what comes next."""
        if slot in self.velocities and self.velocities[slot][1].shape == decoded.shape:
            self.velocities[slot][1].masked_fill_(decoded != 0, 0.0)

    def dissolved(self) -> Iterator[tuple[str, int, torch.Tensor]]:
        """Name, offset and values of what is owed, in units of the mean gradient; the account is empty afterwards."""
        yield from self._dissolved(self.residues)
        self.residues = {}

    def run_out(self) -> Iterator[tuple[str, int, torch.Tensor]]:
        """The same of what velocities are worth of the next gradient."""
        for name, low, values in self._dissolved(self.velocities):
            yield name, low, values * self.momentum
        self.velocities = {}

    def _dissolved(self, slots: Slots) -> Iterator[tuple[str, int, torch.Tensor]]:
        for place, rows in slots.values():
            for start, row in zip(place.starts, rows, strict=True):
                owed = row[: max(0, place.end - start)] * (place.unit * self.origin.weight)
                yield from _filed(self.origin.spans, start, owed)

    def spread(self, flat: torch.Tensor, factor: float) -> Iterator[tuple[str, int, torch.Tensor]]:
        """Name, offset and values of the tensor, times a factor, in units of the mean gradient; copied."""
        yield from _filed(self.origin.spans, 0, flat.float() * (factor * self.origin.weight))

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Plain values and tensors, those that are in use."""
        state = {
            "key": self.origin.key,
            "spans": [tuple(span) for span in self.origin.spans],
            "weight": self.origin.weight,
            "residues": [(tuple(place), rows) for place, rows in self.residues.values()],
        }
        velocities = [(tuple(place), rows) for place, rows in self.velocities.values()]
        return {**state, "velocities": velocities} if velocities else state


def _filed(spans: Sequence[Span], start: int, values: torch.Tensor) -> Iterator[tuple[str, int, torch.Tensor]]:
    """Values from an element of a tensor on, parted by parameters."""
    position = 0
    for span in spans:
        first, last = max(position, start), min(position + span.length, start + len(values))
        if span.name is not None and first < last:
            yield span.name, span.low + first - position, values[first - start : last - start]
        position += span.length


def account_of(saved: Mapping[str, Any], *, rank: int, keeps: bool, momentum: float, device: torch.device) -> Account:
    """An account as :meth:`Account.state_dict` has saved it."""
    origin = Origin(saved["key"], tuple(Span(*span) for span in saved["spans"]), saved["weight"])
    account = Account(origin, rank=rank, keeps=keeps, momentum=momentum)
    kept = {"residues": account.residues, "velocities": account.velocities if momentum else {}}
    for name, slots in kept.items():
        for (kind, starts, end, unit), rows in saved.get(name, ()):
            place = Place(kind, tuple(starts), end, unit)
            slots[place.kind, place.starts[0]] = place, rows.to(device)
    return account

"""What this rank writes of what it holds, copied into host memory: the part of a save that training waits for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lightning_dist.build.shares import Share, share_of
from lightning_dist.checkpoint.host_copies import HostCopies
from lightning_dist.checkpoint.host_pieces import Held, HostPiece, TiedTo
from lightning_dist.checkpoint.late_copy import Late
from lightning_dist.checkpoint.objects import Encoded
from lightning_dist.config import CheckpointConfig
from lightning_dist.parallel.held_state import HeldTensor

_SMALL_BYTES = 64 << 10  # what is smaller is not worth being copied late


@dataclass(frozen=True)
class Copied:
    """Ready to be written.

    Attributes:
        state: As for :func:`lightning_dist.checkpoint.sharded.save`.
        objects: Names of those in it.
        layout: Of its tensors: the same, the same pieces of the same tensors.
        size_bytes: Of its tensors.
        late_bytes: Of these, what is copied late.
    """

    state: Mapping[str, Any]
    objects: frozenset[str]
    layout: tuple[tuple[Any, ...], ...]
    size_bytes: int
    late_bytes: int


class CopiedShares:
    """Copies this rank's share, one save at a time. What follows from the tensors is made once for the same ones.

    Args:
        copies: Where to.
        rank: This one.
        config: Options.
    """

    def __init__(self, copies: HostCopies, rank: int, config: CheckpointConfig) -> None:
        self._copies = copies
        self._rank = rank
        self._config = config
        self._held: list[HeldTensor] | None = None
        self._layout: tuple[tuple[Any, ...], ...] = ()
        self._share: tuple[Share, ...] = ()
        self._sources: list[Tensor] = []
        self._late: dict[int, Late] = {}
        self._taken: list[Tensor] | None = None
        self._state: dict[str, Any] = {}

    def copied(self, held: list[HeldTensor], objects: Mapping[str, Encoded]) -> Copied:
        """Copy; what is copied late is not there yet.

        Args:
            held: What this rank holds; the same list if nothing but values has changed.
            objects: What else is to be written.
        """
        if held is not self._held:
            self._plan(held)
        taken = self._copies.take(self._sources, self._late)
        if taken is not self._taken:
            self._taken, self._state = taken, self._state_of(held, taken)
        size_bytes = sum(copy.nbytes for copy in taken)
        late_bytes = sum(taken[index].nbytes for index in self._late)
        return Copied({**self._state, **objects}, frozenset(objects), self._layout, size_bytes, late_bytes)

    def _plan(self, held: list[HeldTensor]) -> None:
        layout = tuple((each.names[0], each.local.dtype, each.spread, each.holders) for each in held)
        if layout != self._layout:  # the same from save to save, unless layers are frozen or thawed
            self._share = share_of(held, self._rank, chunk_bytes=self._config.chunk_bytes)
            self._layout = layout
        self._held = held
        self._sources = [held[mine.number].local[mine.inside] for mine in self._share]
        is_late = self._config.snapshot == "overlapped"
        self._late = {
            index: Late(held[mine.number].names[0], held[mine.number].steady)
            for index, (mine, source) in enumerate(zip(self._share, self._sources, strict=True))
            if is_late and held[mine.number].steady and source.nbytes >= _SMALL_BYTES
        }
        self._taken = None

    def _state_of(self, held: Iterable[HeldTensor], copies: Sequence[Tensor]) -> dict[str, Any]:
        pieces: dict[str, list[HostPiece]] = {}
        for mine, copy in zip(self._share, copies, strict=True):
            pieces.setdefault(mine.piece.name, []).append(HostPiece(mine.piece, copy))
        state: dict[str, Any] = {name: Held(tuple(own)) for name, own in pieces.items()}
        for each in held:
            state.update(dict.fromkeys(each.names[1:], TiedTo(each.names[0])))
        return state

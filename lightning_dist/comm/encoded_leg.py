"""The top leg with a codec."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lightning_dist.comm.account import OWN, SUM
from lightning_dist.comm.chunk_codec import ChunkCodec, even_pieces, place_of, without
from lightning_dist.comm.codecs import Codec
from lightning_dist.comm.codecs.codec import store
from lightning_dist.comm.collectives import Collectives, RankGroup
from lightning_dist.comm.legs import Chunk, NamedStep, keep_for_current_stream, sum_in_order


class EncodedLeg:
    """Parts cross encoded, are summed decoded in fp32, and cross back encoded.

    Each owner first receives its piece of the part from all others and sums it (exact but for the encoding of what it
    received), encodes the sum once, then sends it to all others. Every owner, the summing one too, takes the sum as it
    is decoded, so that the result is the same on all ranks to the bit. The two halves are steps of two lanes with a
    group each. Of a type that the codec does not apply to, and while it warms up, values cross as they are.

    Args:
        collectives: The seam.
        scatter_group: The owners of this rank's part, for the first half; ``None`` if it owns none.
        gather_group: The same ranks, for the second half.
        codec: How values are encoded.
        is_only: Whether there is no inner leg, so that this leg scales also what must be scaled first.
        hands_on: Whether the legs below hand on the code of the sum (:class:`EncodedInnerLeg`).
    """

    def __init__(
        self,
        *,
        collectives: Collectives,
        scatter_group: RankGroup | None,
        gather_group: RankGroup | None,
        codec: Codec,
        is_only: bool,
        hands_on: bool = False,
    ) -> None:
        self._collectives = collectives
        self._scatter_group = scatter_group
        self._gather_group = gather_group
        self._codec = ChunkCodec(codec)
        self._is_only = is_only
        self._hands_on = hands_on

    @property
    def up(self) -> Sequence[NamedStep]:
        """See :class:`Leg`."""
        return (NamedStep("cross", self._scatter), NamedStep("cross_gather", self._gather))

    @property
    def down(self) -> Sequence[NamedStep]:
        """See :class:`Leg`."""
        return ()

    @property
    def description(self) -> str:
        """See :class:`Leg`."""
        size = self._scatter_group.size if self._scatter_group else "the owning"
        return f"all-reduce among {size} ranks as {self._codec.name}"

    def abort(self, reason: str) -> None:
        """See :class:`Leg`. The backend's own deadline frees its waits."""

    def close(self) -> None:
        """See :class:`Leg`."""

    def _scatter(self, chunk: Chunk) -> None:
        part, group = chunk.top, self._scatter_group
        if part is None or group is None:
            return
        pieces = even_pieces(part, group.size)
        own, columns = pieces[group.index], pieces.shape[1]
        others = [i for i in range(group.size) if i != group.index]
        scales_here = chunk.scale is not None and (self._is_only or not chunk.scale_first)
        before = 1.0 if scales_here or chunk.scale is None else 1 / chunk.scale
        outgoing = self._codec.encode(
            without(pieces, group.index), chunk, place_of("part", chunk, columns, others, before)
        )
        incoming = torch.empty_like(outgoing)
        sends, receives = list(zip(others, outgoing, strict=True)), list(zip(others, incoming, strict=True))
        self._collectives.start_exchange(sends, receives, group, "reduce_scatter").wait(leg="cross", **chunk.attributes)
        total = torch.empty_like(own, dtype=torch.float32 if own.dtype.is_floating_point else own.dtype)
        terms = [term.to(total.dtype) for term in self._codec.decode(incoming, chunk, columns)]
        own = self._codec.own(own.unsqueeze(0), chunk, place_of(OWN, chunk, columns, [group.index], before))[0]
        terms.insert(group.index, own.to(total.dtype))
        sum_in_order(terms, total, maximum=chunk.maximum, scale=chunk.scale if scales_here else None)
        after = 1.0 if chunk.scale is None else 1 / chunk.scale
        place = place_of(SUM, chunk, columns, [group.index], after)
        chunk.encoded = self._codec.encode(total.unsqueeze(0), chunk, place)

    def _gather(self, chunk: Chunk) -> None:
        part, group, summed = chunk.top, self._gather_group, chunk.encoded
        if part is None or group is None or summed is None:
            return
        keep_for_current_stream(summed)
        incoming = summed.new_empty(group.size, summed.shape[1])
        incoming[group.index].copy_(summed[0])
        sends = [(i, summed[0]) for i in range(group.size) if i != group.index]
        receives = [(i, incoming[i]) for i, _ in sends]
        self._collectives.start_exchange(sends, receives, group, "all_gather").wait(leg="cross", **chunk.attributes)
        columns = -(-part.numel() // group.size)
        store(self._codec.decode(incoming, chunk, columns).reshape(-1)[: part.numel()], part)
        chunk.encoded = incoming if self._hands_on else None

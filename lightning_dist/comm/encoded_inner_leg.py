"""An inner leg with a codec, for hosts whose ranks are far from each other (``sync.everywhere``)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lightning_dist.comm.chunk_codec import ChunkCodec, even_pieces, place_of, without
from lightning_dist.comm.codecs import Codec
from lightning_dist.comm.codecs.codec import store
from lightning_dist.comm.collectives import Collectives, RankGroup
from lightning_dist.comm.legs import Chunk, NamedStep, keep_for_current_stream, part_bounds, part_start, sum_in_order


class EncodedInnerLeg:
    """Members give owners their parts encoded; owners hand on, as it came, the code that the top leg made of the sum.

    So a value is encoded on the way up at each leg, and once on the way down: what arrives is the same on all ranks to
    the bit, and no leg below the top loses anything of the sum.

    Args:
        collectives: The seam.
        reduce_group: Group of the lane that reduces; ``None`` if this rank is alone in its group.
        gather_group: Group of the lane that gathers.
        codec: How values are encoded.
        width: The first ``width`` members own a part.
        cuts: Parts that the legs above cut a part into, from the next one to the top.
        label: Prefix of its lanes' names, e.g. ``"switch_"``.
        is_first: Whether this is the innermost leg, which scales what must be scaled first.
    """

    def __init__(
        self,
        *,
        collectives: Collectives,
        reduce_group: RankGroup | None,
        gather_group: RankGroup | None,
        codec: Codec,
        width: int,
        cuts: Sequence[int],
        label: str,
        is_first: bool,
    ) -> None:
        self._collectives = collectives
        self._reduce_group = reduce_group
        self._gather_group = gather_group
        self._codec = ChunkCodec(codec)
        self._width = width
        self._cuts = tuple(cuts)
        self._label = label
        self._is_first = is_first

    @property
    def up(self) -> Sequence[NamedStep]:
        """See :class:`Leg`."""
        return (NamedStep(f"{self._label}reduce", self._reduce),)

    @property
    def down(self) -> Sequence[NamedStep]:
        """See :class:`Leg`."""
        return (NamedStep(f"{self._label}gather", self._gather),)

    @property
    def description(self) -> str:
        """See :class:`Leg`."""
        where = "across the hosts of a switch" if self._label else "in each host"
        return f"{where} by the backend as {self._codec.name}, {self._width} part(s)"

    def abort(self, reason: str) -> None:
        """See :class:`Leg`. The backend's own deadline frees its waits."""

    def close(self) -> None:
        """See :class:`Leg`. The groups belong to who made them."""

    def _reduce(self, chunk: Chunk) -> None:
        source, group = chunk.top, self._reduce_group
        if source is None:
            chunk.rise(None, 0)
            return
        scale = chunk.scale if chunk.scale_first and self._is_first else None
        if group is None:
            if scale is not None:
                source.mul_(scale)
            chunk.rise(source, 0)
            return
        part = self._reduce_among(group, source, chunk, scale)
        chunk.rise(part, part_start(source.numel(), self._width, group.index))

    def _reduce_among(
        self, group: RankGroup, source: torch.Tensor, chunk: Chunk, scale: float | None
    ) -> torch.Tensor | None:
        pieces = even_pieces(source, self._width)
        columns, is_owner = pieces.shape[1], group.index < self._width
        owners = [owner for owner in range(self._width) if owner != group.index]
        scaled_before = chunk.scale if chunk.scale_first and not self._is_first else None
        outgoing = pieces[:0]
        if owners:
            place = place_of(f"{self._label}host", chunk, columns, owners, 1 / (scaled_before or 1.0))
            outgoing = self._codec.encode(without(pieces, group.index) if is_owner else pieces, chunk, place)
        members = [i for i in range(group.size) if i != group.index] if is_owner else []
        row = self._codec.row_length(chunk, columns)
        kind = source.dtype if self._codec.is_exact(chunk) else torch.uint8
        incoming = source.new_empty(len(members), row, dtype=kind)
        sends = list(zip(owners, outgoing, strict=True))
        receives = list(zip(members, incoming, strict=True))
        pending = self._collectives.start_exchange(sends, receives, group, "reduce_scatter")
        pending.wait(leg="reduce", **chunk.attributes)
        if not is_owner:
            return None
        own = pieces[group.index]
        total = torch.empty_like(own, dtype=torch.float32 if own.dtype.is_floating_point else own.dtype)
        terms = [term.to(total.dtype) for term in self._codec.decode(incoming, chunk, columns)]
        terms.insert(group.index, own.to(total.dtype))
        sum_in_order(terms, total, maximum=chunk.maximum, scale=scale)
        low, high = part_bounds(source.numel(), self._width)[group.index]
        store(total[: high - low], source[low:high])
        return source[low:high]

    def _gather(self, chunk: Chunk) -> None:
        part = chunk.sink()
        target, group = chunk.top, self._gather_group
        if target is None or group is None:
            return
        bounds = part_bounds(target.numel(), self._width)
        lengths = [self._codec.code_length(chunk, high - low, self._cuts) for low, high in bounds]
        own = chunk.encoded
        kind = target.dtype if self._codec.is_exact(chunk) else torch.uint8
        codes = list(target.new_empty(sum(lengths), dtype=kind).split(lengths))
        sends: list[tuple[int, torch.Tensor]] = []
        if part is not None and own is not None:
            keep_for_current_stream(own)
            codes[group.index].copy_(own.view(-1))
            sends = [(i, codes[group.index]) for i in range(group.size) if i != group.index]
        receives = [(owner, code) for owner, code in enumerate(codes) if owner != group.index]
        pending = self._collectives.start_exchange(sends, receives, group, "all_gather")
        pending.wait(leg="gather", **chunk.attributes)
        for (owner, code), (low, high) in zip(enumerate(codes), bounds, strict=True):
            if owner != group.index:
                store(self._codec.decode_sum(code, chunk, high - low, self._cuts), target[low:high])
        chunk.encoded = None if self._is_first else torch.cat(codes)

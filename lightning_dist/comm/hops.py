"""What the members of a leg do with segments at one hop, whatever they hand each other rows by."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from lightning_dist.comm.codecs import CastCodec
from lightning_dist.comm.hop_links import HopLink
from lightning_dist.comm.legs import sum_in_order
from lightning_dist.comm.segments import Segments
from lightning_dist.topology.routes import Hop

HopMove = Callable[[Segments, Hop, HopLink], None]


def sum_up(segments: Segments, hop: Hop, link: HopLink) -> None:
    """Out: each member gets the segments it owns from all others, and sums."""
    _sum(segments, hop, link, segments.of(hop.owned_by(hop.index)))


def sum_encoded(codec: CastCodec) -> HopMove:
    """:func:`sum_up`, what is sent being encoded; own values enter the sum as they are."""

    def move(segments: Segments, hop: Hop, link: HopLink) -> None:
        own = segments.of(hop.owned_by(hop.index))
        if codec.applies_to(segments.rows.dtype):
            encoded = torch.empty_like(segments.rows, dtype=codec.wire_dtype)
            codec.encode(segments.rows, encoded)
            segments.rows = encoded
        _sum(segments, hop, link, own)

    return move


def _sum(segments: Segments, hop: Hop, link: HopLink, own: torch.Tensor) -> None:
    others = _others(hop)
    owned = hop.owned_by(hop.index)
    gives = {m: hop.owned_by(m) for m in others}
    takes = dict.fromkeys(others, owned)
    with link.exchanged(segments, gives, takes, operation="reduce_scatter") as received:
        total = segments.room_for(owned, own.dtype)
        if owned:
            terms = [own if m == hop.index else received[m] for m in range(len(hop.group))]
            sum_in_order(terms, total, maximum=own.dtype is torch.bool)
    segments.hold([(owned, total)])


def hand_in(segments: Segments, hop: Hop, link: HopLink) -> None:
    """In, after a sum: each owner hands its segments to the members that lead to their destinations."""
    _hand(segments, hop, link, hop.handed_over)


def hand_out(segments: Segments, hop: Hop, link: HopLink) -> None:
    """Out, before a gather: the same backwards."""
    _hand(segments, hop, link, lambda giver, taker: hop.handed_over(taker, giver))


def _hand(segments: Segments, hop: Hop, link: HopLink, handed: Callable[[int, int], tuple[int, ...]]) -> None:
    others = _others(hop)
    gives = {m: handed(hop.index, m) for m in others}
    takes = {m: handed(m, hop.index) for m in others}
    kept = handed(hop.index, hop.index)
    with link.exchanged(segments, gives, takes, operation="hand_over") as received:
        segments.hold([(kept, segments.of(kept)), *_parts(takes, received)])


def spread(segments: Segments, hop: Hop, link: HopLink) -> None:
    """Each owner gives what it owns to all members."""
    others = _others(hop)
    gives = dict.fromkeys(others, segments.destinations)
    takes = {m: hop.owned_by(m) for m in others}
    with link.exchanged(segments, gives, takes, operation="all_gather") as received:
        segments.hold([(segments.destinations, segments.rows), *_parts(takes, received)])


def _others(hop: Hop) -> list[int]:
    return [member for member in range(len(hop.group)) if member != hop.index]


def _parts(
    takes: Mapping[int, tuple[int, ...]], received: Mapping[int, torch.Tensor]
) -> list[tuple[tuple[int, ...], torch.Tensor]]:
    return [(takes[member], rows) for member, rows in received.items()]

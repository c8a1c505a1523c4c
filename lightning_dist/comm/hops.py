"""What the members of a leg do with segments at one hop, whatever they hand each other rows by."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from lightning_dist.comm.account import OWN
from lightning_dist.comm.codecs import Codec
from lightning_dist.comm.codecs.codec import store
from lightning_dist.comm.codecs.dither import seed_of
from lightning_dist.comm.hop_links import HopLink
from lightning_dist.comm.legs import sum_in_order
from lightning_dist.comm.segments import Segments
from lightning_dist.topology.routes import Hop

HopMove = Callable[[Segments, Hop, HopLink], None]


def sum_up(segments: Segments, hop: Hop, link: HopLink) -> None:
    """Out: each member gets the segments it owns from all others, and sums."""
    others = _others(hop)
    owned = hop.owned_by(hop.index)
    own = segments.of(owned)
    gives = {m: hop.owned_by(m) for m in others}
    takes = dict.fromkeys(others, owned)
    with link.exchanged(segments, gives, takes, operation="reduce_scatter") as received:
        total = segments.room_for(owned, own.dtype)
        if owned:
            terms = [own if m == hop.index else received[m] for m in range(len(hop.group))]
            sum_in_order(terms, total, maximum=own.dtype is torch.bool)
    segments.hold([(owned, total)])


def sum_encoded(codec: Codec, kind: str) -> HopMove:
    """:func:`sum_up`, what is sent being encoded; own values enter the sum, which is taken in fp32, as they are.

    Args:
        codec: How.
        kind: Of the places where something is lost, another at each leg.
    """

    def move(segments: Segments, hop: Hop, link: HopLink) -> None:
        others, owned = _others(hop), hop.owned_by(hop.index)
        gives = {m: hop.owned_by(m) for m in others}
        own, columns = _own(segments, owned), segments.rows.shape[1]
        if _is_exact(codec, segments):
            _accelerate(segments, kind, _all_of(gives), own, owned)
            sum_up(segments, hop, link)
            return
        outgoing = _encoded(codec, kind, segments, _all_of(gives), hop)
        with link.exchanged(outgoing, gives, dict.fromkeys(others, owned), operation="reduce_scatter") as received:
            total = segments.room_for(owned, own.dtype)
            if owned:
                terms = {m: codec.decode(rows, columns) for m, rows in received.items()} | {hop.index: own.float()}
                exact = torch.empty_like(total, dtype=torch.float32)
                sum_in_order([terms[m] for m in range(len(hop.group))], exact)
                store(exact, total)
        segments.hold([(owned, total)])

    return move


def hand_in_encoded(codec: Codec, kind: str) -> HopMove:
    """:func:`hand_in`, what is sent being encoded; arguments as for :func:`sum_encoded`."""

    def move(segments: Segments, hop: Hop, link: HopLink) -> None:
        if _is_exact(codec, segments):
            hand_in(segments, hop, link)
            return
        others, columns, dtype = _others(hop), segments.rows.shape[1], segments.rows.dtype
        gives = {m: hop.handed_over(hop.index, m) for m in others}
        takes = {m: hop.handed_over(m, hop.index) for m in others}
        kept = hop.handed_over(hop.index, hop.index)
        outgoing = _encoded(codec, kind, segments, _all_of(gives), hop)
        with link.exchanged(outgoing, gives, takes, operation="hand_over") as received:
            parts = [(kept, segments.of(kept))]
            for member, rows in received.items():
                values = torch.empty(len(rows), columns, dtype=dtype, device=rows.device)
                store(codec.decode(rows, columns), values)
                parts.append((takes[member], values))
            segments.hold(parts)

    return move


def _is_exact(codec: Codec, segments: Segments) -> bool:
    is_warm_up = segments.trace is not None and segments.trace.account.is_exact
    return is_warm_up or not codec.applies_to(segments.rows.dtype)


def _own(segments: Segments, owned: tuple[int, ...]) -> torch.Tensor:
    """Rows that are not encoded, as they go into the sum: with their momentum, if there is any."""
    rows, trace = segments.of(owned), segments.trace
    if trace is None or trace.account.momentum == 0 or not owned:
        return rows
    return trace.account.accelerated(rows, trace.place(OWN, owned)).to(rows.dtype)


def _accelerate(
    segments: Segments, kind: str, destinations: tuple[int, ...], own: torch.Tensor, owned: tuple[int, ...]
) -> None:
    """Hold rows with their momentum, where there is any and they are not encoded."""
    trace = segments.trace
    if trace is None or trace.account.momentum == 0:
        return
    given = segments.of(destinations)
    if destinations:
        given = trace.account.accelerated(given, trace.place(kind, destinations)).to(given.dtype)
    segments.hold([(owned, own), (destinations, given)])


def _all_of(gives: Mapping[int, tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(sorted(d for given in gives.values() for d in given))


def _encoded(codec: Codec, kind: str, segments: Segments, destinations: tuple[int, ...], hop: Hop) -> Segments:
    """Rows for others, as bytes."""
    rows, trace = segments.of(destinations), segments.trace
    if trace is not None and destinations:
        encoded = trace.account.encode(codec, rows, trace.place(kind, destinations))
    else:
        encoded = codec.encode(rows.float(), seed=seed_of(segments.sequence, hop.index))
    return Segments(destinations, encoded, segments.attributes, segments.tag)


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

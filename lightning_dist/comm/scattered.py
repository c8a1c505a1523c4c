"""Hierarchical reduce-scatter and all-gather: member i of a group gets, or gives, shard i, for any placement of ranks.

The legs are those of :mod:`~lightning_dist.comm.hierarchical`, used in part: a reduce-scatter goes out through the
inner legs, across, and back in only where hosts are uneven; an all-gather goes the same way backwards. Segments travel
point to point, so that a host sends M(H-1)/H bytes and not what an all-reduce would (Gloo's own reduce-scatter moves
twice that).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch.futures import Future

from lightning_dist.comm.codecs import CastCodec
from lightning_dist.comm.collectives import Collectives, RankGroup
from lightning_dist.comm.groups import destroy, make_leg_group
from lightning_dist.comm.lanes import Pipeline, Step, StreamPipeline, ThreadPipeline
from lightning_dist.comm.legs import keep_for_current_stream, sum_in_order
from lightning_dist.comm.segments import Segments
from lightning_dist.comm.signatures import SignatureCheck, WatchedFuture, amount_of, tag_of
from lightning_dist.topology import Cluster, Tier, hierarchy_of
from lightning_dist.topology.routes import Hop, route_of

_Move = Callable[[Segments], None]
_HopMove = Callable[[Segments, Hop, RankGroup], None]


class HierarchicalScatter:
    """Reduce-scatter and all-gather inside groups of ranks, on lanes and process groups of their own.

    Every rank of the world makes it, with the same arguments.

    Args:
        cluster: Who sits where.
        collectives: The seam.
        device: Where the tensors live.
        rank: This process's global rank.
        store: Shared by all ranks, its keys used by nobody else.
        timeout_s: Deadline of each operation, in seconds.
        chunk_bytes: A rank's segments travel in chunks of at most this size together, in bytes.
        parts: Global ranks group by group, each rank once; shard i of a group belongs to its member i. All ranks in one
            group, in their order, if not given.
        codec: What sums cross the top leg in, if that leg leaves the host; ``None`` sends values as they are. Gathered
            values always cross as they are.
    """

    def __init__(
        self,
        cluster: Cluster,
        *,
        collectives: Collectives,
        device: torch.device,
        rank: int,
        store: dist.Store,
        timeout_s: float,
        chunk_bytes: int,
        parts: Sequence[Sequence[int]] | None = None,
        codec: CastCodec | None = None,
    ) -> None:
        self._device = device
        self._chunk_bytes = chunk_bytes
        self._collectives = collectives
        self._codec = codec
        self._groups: list[RankGroup] = []
        self._scatter_lanes: list[tuple[str, _Move]] = []
        self._gather_lanes: list[tuple[str, _Move]] = []
        for part in parts if parts is not None else [range(cluster.world_size)]:
            scatter_lanes, gather_lanes = self._lanes_of(cluster, part, rank, timeout_s)
            if rank in part:
                self._members = tuple(part)
                self._scatter_lanes, self._gather_lanes = scatter_lanes, gather_lanes
        self._index = self._members.index(rank)
        self._size = len(self._members)
        self._scatter_pipeline = self._pipeline([name for name, _ in self._scatter_lanes])
        self._gather_pipeline = self._pipeline([name for name, _ in self._gather_lanes])
        self._signatures = {
            kind: SignatureCheck(
                dist.PrefixStore(f"{kind}/{self._members[0]}/", store),
                collectives=collectives,
                ranks=self._members,
            )
            for kind in ("reduce_scatter", "all_gather")
        }

    @property
    def members(self) -> tuple[int, ...]:
        """Global ranks of this rank's group, by shard."""
        return self._members

    @property
    def index(self) -> int:
        """Which shard is this rank's."""
        return self._index

    def _lanes_of(
        self, cluster: Cluster, part: Sequence[int], rank: int, timeout_s: float
    ) -> tuple[list[tuple[str, _Move]], list[tuple[str, _Move]]]:
        """Make the groups of one part, and for its members the lanes; every rank of the world calls it."""
        inside = cluster.restricted_to(part)
        hierarchy = hierarchy_of(inside)
        hops = {h.leg: h for h in route_of(inside, part.index(rank), hierarchy).hops} if rank in part else {}
        last = len(hierarchy.legs) - 1
        top_sum = self._sum_encoded if self._codec is not None and hierarchy.top.tier is not Tier.HOST else self._sum

        def lane(kind: str, number: int, move: _HopMove) -> tuple[str, _Move]:
            leg = hierarchy.legs[number]
            placed = dataclasses.replace(leg, groups=tuple(tuple(part[i] for i in group) for group in leg.groups))
            name = f"{kind}_{leg.tier.value}"
            group = make_leg_group(placed, rank=rank, label=name, timeout_s=timeout_s)
            self._groups += [group] if group is not None else []
            return name, self._bound(move, hops.get(number), group)

        out, back = range(last), range(last - 1, -1, -1)
        scatter = [lane("scatter_out", n, self._sum) for n in out] + [lane("scatter_top", last, top_sum)]
        scatter += [lane("scatter_in", n, self._hand_in) for n in back]
        gather = [lane("gather_out", n, self._hand_out) for n in out] + [lane("gather_top", last, self._spread)]
        gather += [lane("gather_in", n, self._spread) for n in back]
        return scatter, gather

    def reduce_scatter(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        *,
        name: str = "",
        mean: bool = False,
        then: Callable[[], None] | None = None,
    ) -> Future[torch.Tensor]:
        """Begin to sum ``tensor`` over the group and give each member its shard; all members call it, in one order.

        Args:
            output: Any shape of n elements, contiguous; receives this rank's shard of the sum.
            tensor: Group size x n elements of the same type; not changed.
            name: What it is the gradient of, the same on all members; members that give different ones get an error.
            mean: Divide by the size of the group.
            then: Called once ``output`` is written, in the last lane (its thread, its stream), before the future is
                done; in the order of the calls, so it may start an operation of another group.

        Returns:
            A future of ``output``.
        """
        rows = self._checked(output, tensor).view(self._size, -1)
        asked = f"shards of the {'mean' if mean else 'sum'} of {amount_of(tensor)}{name and f' of {name}'}"
        target = output.view(1, -1)
        scale = 1.0 / self._size if mean else None
        # fp16 could overflow in the sum: every term is scaled instead.
        scale_first = scale is not None and output.dtype is torch.float16
        future, tag = self._agreed("reduce_scatter", asked), tag_of(asked)
        columns = self._columns(rows)

        def start(piece: slice) -> Segments:
            keep_for_current_stream(rows)
            chunk = rows[:, piece].contiguous()
            if scale is not None and scale_first:
                chunk = chunk * scale
            return Segments(tuple(range(self._size)), chunk, {"chunk": piece.start // columns}, tag)

        def finish(piece: slice, segments: Segments) -> None:
            keep_for_current_stream(segments.rows)
            target[:, piece] = segments.rows
            if scale is not None and not scale_first:
                target[:, piece].mul_(scale)

        def end() -> None:
            if then is not None:
                then()
            future.set_result(output)

        self._run(self._scatter_pipeline, self._scatter_lanes, rows.shape[1], columns, start, finish, end, future)
        return future

    def all_gather(self, output: torch.Tensor, tensor: torch.Tensor, *, name: str = "") -> Future[torch.Tensor]:
        """Begin to give every member everybody's shard; all members call it, in one order.

        Args:
            output: Group size x n elements, contiguous; receives shard i in place i.
            tensor: n elements of the same type, this rank's shard; may be a view of ``output``.
            name: What is gathered, as in :meth:`reduce_scatter`.

        Returns:
            A future of ``output``.
        """
        target = self._checked(tensor, output).view(self._size, -1)
        if target.data_ptr() != output.data_ptr():
            raise ValueError("all_gather writes into output, which must be contiguous")
        asked = f"everybody's {amount_of(tensor)}{name and f' of {name}'}"
        row = tensor.reshape(1, -1)
        future, tag = self._agreed("all_gather", asked), tag_of(asked)
        columns = self._columns(target)

        def start(piece: slice) -> Segments:
            keep_for_current_stream(row)
            return Segments((self._index,), row[:, piece].contiguous(), {"chunk": piece.start // columns}, tag)

        def finish(piece: slice, segments: Segments) -> None:
            keep_for_current_stream(segments.rows)
            target[:, piece] = segments.rows

        def end() -> None:
            future.set_result(output)

        self._run(self._gather_pipeline, self._gather_lanes, target.shape[1], columns, start, finish, end, future)
        return future

    def close(self, timeout_s: float = 5.0) -> None:
        """End lanes and groups. Safe to call twice."""
        self._scatter_pipeline.close(timeout_s)
        self._gather_pipeline.close(timeout_s)
        destroy(self._groups)
        self._groups = []

    # -- one hop ------------------------------------------------------------------------------------------------------

    def _sum(self, segments: Segments, hop: Hop, group: RankGroup, own: torch.Tensor | None = None) -> None:
        """Out: each member gets the segments it owns from all others, and sums."""
        owned = hop.owned_by(hop.index)
        own = segments.of(owned) if own is None else own
        received = {m: torch.empty_like(own, dtype=segments.rows.dtype) for m in range(group.size) if m != hop.index}
        sends = [(m, segments.of(hop.owned_by(m)).contiguous()) for m in range(group.size) if m != hop.index]
        self._exchange(sends, list(received.items()), group, "reduce_scatter", segments)
        terms = [own if m == hop.index else received[m] for m in range(group.size)]
        total = torch.empty_like(own)
        sum_in_order(terms, total, maximum=own.dtype is torch.bool)
        segments.hold([(owned, total)])

    def _sum_encoded(self, segments: Segments, hop: Hop, group: RankGroup) -> None:
        """:meth:`_sum`, what is sent being encoded; own values enter the sum as they are."""
        codec = self._codec
        if codec is None or not codec.applies_to(segments.rows.dtype):
            self._sum(segments, hop, group)
            return
        exact = segments.of(hop.owned_by(hop.index))
        encoded = torch.empty_like(segments.rows, dtype=codec.wire_dtype)
        codec.encode(segments.rows, encoded)
        segments.rows = encoded
        self._sum(segments, hop, group, own=exact)

    def _hand_in(self, segments: Segments, hop: Hop, group: RankGroup) -> None:
        """In, after a sum: each owner hands its segments to the members that lead to their destinations."""
        self._hand(segments, group, hop.index, hop.handed_over)

    def _hand_out(self, segments: Segments, hop: Hop, group: RankGroup) -> None:
        """Out, before a gather: the same backwards."""
        self._hand(segments, group, hop.index, lambda giver, taker: hop.handed_over(taker, giver))

    def _hand(
        self, segments: Segments, group: RankGroup, index: int, handed: Callable[[int, int], tuple[int, ...]]
    ) -> None:
        others = [m for m in range(group.size) if m != index]
        sends = [(m, segments.of(handed(index, m)).contiguous()) for m in others if handed(index, m)]
        takes = {m: handed(m, index) for m in others if handed(m, index)}
        columns = segments.rows.shape[1]
        received = {m: segments.rows.new_empty(len(taken), columns) for m, taken in takes.items()}
        self._exchange(sends, list(received.items()), group, "hand_over", segments)
        kept = handed(index, index)
        segments.hold([(kept, segments.of(kept))] + [(takes[m], received[m]) for m in takes])

    def _spread(self, segments: Segments, hop: Hop, group: RankGroup) -> None:
        """Each owner gives what it owns to all members."""
        others = [m for m in range(group.size) if m != hop.index]
        columns = segments.rows.shape[1]
        received = {m: segments.rows.new_empty(len(hop.owned_by(m)), columns) for m in others}
        sends = [(m, segments.rows) for m in others]
        self._exchange(sends, list(received.items()), group, "all_gather", segments)
        segments.hold(
            [(segments.destinations, segments.rows)] + [(hop.owned_by(m), rows) for m, rows in received.items()]
        )

    def _exchange(
        self,
        sends: Sequence[tuple[int, torch.Tensor]],
        receives: Sequence[tuple[int, torch.Tensor]],
        group: RankGroup,
        operation: str,
        segments: Segments,
    ) -> None:
        as_bytes = segments.rows.dtype is torch.bool

        def raw(pairs: Sequence[tuple[int, torch.Tensor]]) -> list[tuple[int, torch.Tensor]]:
            return [(m, t.view(torch.uint8) if as_bytes else t) for m, t in pairs]

        self._collectives.start_exchange(raw(sends), raw(receives), group, operation, segments.tag).wait(
            **segments.attributes
        )

    def _bound(self, move: _HopMove, hop: Hop | None, group: RankGroup | None) -> _Move:
        """The move of one lane; a rank that takes no part in a leg, or is alone in it, lets segments pass."""

        def run(segments: Segments) -> None:
            keep_for_current_stream(segments.rows)
            if hop is not None and group is not None:
                move(segments, hop, group)

        return run

    # -- chunks -------------------------------------------------------------------------------------------------------

    def _run(
        self,
        pipeline: Pipeline,
        lanes: Sequence[tuple[str, _Move]],
        length: int,
        columns: int,
        start: Callable[[slice], Segments],
        finish: Callable[[slice, Segments], None],
        end: Callable[[], None],
        future: Future[torch.Tensor],
    ) -> None:
        pieces = [slice(low, min(low + columns, length)) for low in range(0, length, columns)]
        # An empty shard has nothing to send, but its end comes after the ends of those before it all the same.
        for number, piece in enumerate(pieces or [slice(0, 0)]):
            is_last = number >= len(pieces) - 1
            self._submit(pipeline, lanes, piece, start, finish, end if is_last else None, future)

    def _submit(
        self,
        pipeline: Pipeline,
        lanes: Sequence[tuple[str, _Move]],
        piece: slice,
        start: Callable[[slice], Segments],
        finish: Callable[[slice, Segments], None],
        end: Callable[[], None] | None,
        future: Future[torch.Tensor],
    ) -> None:
        under_way: list[Segments] = []

        def step_of(number: int, move: _Move) -> Step:
            def step() -> None:
                if number == 0:
                    under_way.append(start(piece))
                move(under_way[0])

            return step

        def done() -> None:
            finish(piece, under_way[0])
            if end is not None:
                end()

        def failed(error: BaseException) -> None:
            if end is not None:
                future.set_exception(error)  # type: ignore[arg-type]  # annotated for any T, takes an exception

        pipeline.submit([step_of(n, move) for n, (_, move) in enumerate(lanes)], done=done, failed=failed)

    def _agreed(self, operation: str, asked: str) -> Future[torch.Tensor]:
        """What an operation that all members ask for will give."""
        if self._device.type == "cuda":
            future: Future[torch.Tensor] = Future(devices=[self._device])
        else:
            future = WatchedFuture()
        if self._size > 1:
            look = self._signatures[operation].check(asked, operation=operation)
            if isinstance(future, WatchedFuture):
                future.look = look
        return future

    def _columns(self, rows: torch.Tensor) -> int:
        """Elements of each segment that travel at a time."""
        return max(1, self._chunk_bytes // (self._size * rows.element_size()))

    def _checked(self, shard: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
        if whole.numel() != self._size * shard.numel() or whole.dtype != shard.dtype:
            raise ValueError(
                f"{self._size} shards of {tuple(shard.shape)} {shard.dtype} do not make up "
                f"{tuple(whole.shape)} {whole.dtype}"
            )
        return whole.contiguous()

    def _pipeline(self, names: Sequence[str]) -> Pipeline:
        return StreamPipeline(names, self._device) if self._device.type == "cuda" else ThreadPipeline(names)

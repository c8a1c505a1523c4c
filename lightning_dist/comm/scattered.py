"""Hierarchical reduce-scatter and all-gather: member i of a group gets, or gives, shard i, for any placement of ranks.

The legs are those of :mod:`~lightning_dist.comm.hierarchical`, used in part: a reduce-scatter goes out through the
inner legs, across, and back in only where hosts are uneven; an all-gather goes the same way backwards. Segments travel
point to point, so that a host sends M(H-1)/H bytes and not what an all-reduce would (Gloo's own reduce-scatter moves
twice that).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch.futures import Future

from lightning_dist.comm.codecs import Codec
from lightning_dist.comm.codecs.codec import store
from lightning_dist.comm.collectives import Collectives
from lightning_dist.comm.feedback import Account, Feedback, Place
from lightning_dist.comm.groups import destroy
from lightning_dist.comm.hop_lanes import HopLane, LaneOpening, open_hop_lanes
from lightning_dist.comm.lanes import Pipeline, Step, StreamPipeline, ThreadPipeline
from lightning_dist.comm.legs import keep_for_current_stream
from lightning_dist.comm.segments import Segments, Trace
from lightning_dist.comm.signatures import SignatureCheck, WatchedFuture, amount_of, tag_of
from lightning_dist.errors import CollectiveError
from lightning_dist.topology import Cluster


class HierarchicalScatter:
    """Reduce-scatter and all-gather inside groups of ranks, on lanes and process groups of their own.

    Every rank of the world makes it, with the same arguments.

    Args:
        cluster: Who sits where.
        collectives: The seam.
        device: Where the tensors live.
        store: Shared by all ranks, its keys used by nobody else.
        timeout_s: Deadline of each operation, in seconds.
        chunk_bytes: A rank's segments travel in chunks of at most this size together, in bytes.
        encoded_chunk_bytes: The same of what is encoded, in bytes before that; as ``chunk_bytes`` if not given.
        parts: Global ranks group by group, each rank once; shard i of a group belongs to its member i. All ranks in one
            group, in their order, if not given.
        codec: What sums cross the top leg in, if that leg leaves the host; ``None`` sends values as they are.
        everywhere: Whether all legs are encoded, also inside a host, where memory is not shared then.
        shares_memory: Whether ranks of one host exchange through shared memory, on CPU and where a handshake shows
            that they share it; over process groups else.
        feedback: What is owed of what is sent; ``None``: nothing is lost on the way.
    """

    def __init__(
        self,
        cluster: Cluster,
        *,
        collectives: Collectives,
        device: torch.device,
        store: dist.Store,
        timeout_s: float,
        chunk_bytes: int,
        encoded_chunk_bytes: int | None = None,
        parts: Sequence[Sequence[int]] | None = None,
        codec: Codec | None = None,
        everywhere: bool = False,
        shares_memory: bool = True,
        feedback: Feedback | None = None,
    ) -> None:
        self.feedback = feedback
        self.codec = codec
        self._device = device
        self._events = collectives.events
        self._chunk_bytes = chunk_bytes
        self._encoded_chunk_bytes = encoded_chunk_bytes or chunk_bytes
        opening = LaneOpening(
            cluster=cluster,
            parts=parts if parts is not None else [range(cluster.world_size)],
            collectives=collectives,
            device=device,
            store=store,
            timeout_s=timeout_s,
            chunk_bytes=max(chunk_bytes, self._encoded_chunk_bytes),
            codec=codec,
            everywhere=everywhere,
            shares_memory=shares_memory,
        )
        self._lanes = open_hop_lanes(opening)
        self._groups = self._lanes.groups
        self._members = self._lanes.members
        self._index = self._members.index(collectives.rank)
        self._size = len(self._members)
        self._sequence = 0
        self._encodes = everywhere or cluster.restricted_to(self._members).num_hosts > 1
        self._scatter_pipeline = self._pipeline(self._lanes.scatter)
        self._gather_pipeline = self._pipeline(self._lanes.gather)
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

    @property
    def encodes(self) -> bool:
        """Whether sums are encoded on their way."""
        return self.codec is not None and self._encodes

    @property
    def shares_memory(self) -> bool:
        """Whether the group's ranks of this host exchange through memory that they share."""
        return self._lanes.memory is not None

    def reduce_scatter(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        *,
        name: str = "",
        mean: bool = False,
        then: Callable[[], None] | None = None,
        account: Account | None = None,
    ) -> Future[torch.Tensor]:
        """Begin to sum ``tensor`` over the group and give each member its shard; all members call it, in one order.

        Args:
            output: Any shape of n elements, contiguous; receives this rank's shard of the sum. It shares no memory with
                ``tensor``.
            tensor: Group size x n elements of the same type; not changed, and not to be changed until the future is
                done.
            name: What it is the gradient of, the same on all members; members that give different ones get an error.
            mean: Divide by the size of the group.
            then: Called once ``output`` is written, in the last lane (its thread, its stream), before the future is
                done; in the order of the calls, so it may start an operation of another group.
            account: Of :meth:`Feedback.enter`, where what is lost of the tensor is kept.

        Returns:
            A future of ``output``.
        """
        rows = self._checked(output, tensor).view(self._size, -1)
        asked = f"shards of the {'mean' if mean else 'sum'} of {amount_of(tensor)}{name and f' of {name}'}"
        target = output.view(1, -1)
        scale = 1.0 / self._size if mean else None
        # fp16 could overflow in the sum: every term is scaled instead.
        scale_first = scale is not None and output.dtype is torch.float16
        unit = 1 / scale if scale is not None and scale_first else 1.0
        future, tag = self._agreed("reduce_scatter", asked), tag_of(asked)
        columns = self._columns(rows, encoded=self.encodes)
        self._sequence += 1
        sequence = self._sequence

        def start(piece: slice) -> Segments:
            keep_for_current_stream(rows)
            chunk = rows[:, piece]
            if scale is not None and scale_first:
                chunk = chunk * scale
            attributes = {"chunk": piece.start // columns}
            everyone = tuple(range(self._size))
            trace = None if account is None else Trace(account, rows.shape[1], piece.start, unit)
            return Segments(everyone, chunk, attributes, tag, target[:, piece], (self._index,), sequence, trace)

        def finish(segments: Segments) -> None:
            keep_for_current_stream(segments.rows)
            segments.arrive()
            if scale is not None and not scale_first and segments.goal is not None:
                segments.goal.mul_(scale)

        def end() -> None:
            if then is not None:
                then()
            future.set_result(output)

        self._run(self._scatter_pipeline, self._lanes.scatter, rows.shape[1], columns, start, finish, end, future)
        return future

    def all_gather(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        *,
        name: str = "",
        codec: Codec | None = None,
        account: Account | None = None,
    ) -> Future[torch.Tensor]:
        """Begin to give every member everybody's shard; all members call it, in one order.

        Args:
            output: Group size x n elements, contiguous; receives shard i in place i.
            tensor: n elements of the same type, this rank's shard; may be a view of ``output``.
            name: What is gathered, as in :meth:`reduce_scatter`.
            codec: Values travel encoded by it, where they leave the host or are encoded everywhere, and arrive as
                decoded on every member, the one that gave them too.
            account: Of the tensor whose mean is gathered, where what is lost of it is kept.

        Returns:
            A future of ``output``.
        """
        target = self._checked(tensor, output).view(self._size, -1)
        if target.data_ptr() != output.data_ptr():
            raise ValueError("all_gather writes into output, which must be contiguous")
        asked = f"everybody's {amount_of(tensor)}{name and f' of {name}'}"
        row, everyone = tensor.reshape(1, -1), tuple(range(self._size))
        future, tag = self._agreed("all_gather", asked), tag_of(asked)
        if not self._encodes or (account is not None and account.is_exact):
            codec = None
        if codec is not None and not codec.applies_to(target.dtype):
            codec = None
        columns = self._columns(target, encoded=codec is not None)

        def start(piece: slice) -> Segments:
            keep_for_current_stream(row)
            mine, goal, attributes = row[:, piece], target[:, piece], {"chunk": piece.start // columns}
            if codec is None:
                return Segments((self._index,), mine, attributes, tag, goal, everyone)
            first = self._index * row.shape[1] + piece.start
            place = Place("sum", (first,), first + mine.shape[1], float(self._size))
            encoded = codec.encode(mine.float()) if account is None else account.encode(codec, mine, place)
            arriving = encoded.new_empty(self._size, encoded.shape[1])
            return Segments((self._index,), encoded, attributes, tag, arriving, everyone, piece=goal)

        def finish(segments: Segments) -> None:
            keep_for_current_stream(segments.rows)
            segments.arrive()
            if codec is not None and segments.piece is not None and segments.goal is not None:
                store(codec.decode(segments.goal, segments.piece.shape[1]), segments.piece)

        def end() -> None:
            future.set_result(output)

        self._run(self._gather_pipeline, self._lanes.gather, target.shape[1], columns, start, finish, end, future)
        return future

    def close(self, timeout_s: float = 5.0) -> None:
        """End lanes, shared memory and groups. Safe to call twice."""
        self._scatter_pipeline.close(timeout_s)
        self._gather_pipeline.close(timeout_s)
        if self._lanes.memory is not None:
            self._lanes.memory.close()
        destroy(self._groups)
        self._groups = ()

    def _abort(self, reason: str) -> None:
        """Free whoever waits in shared memory, here and at the peers."""
        if self._lanes.memory is not None:
            self._lanes.memory.abort(reason)

    # -- chunks -------------------------------------------------------------------------------------------------------

    def _run(
        self,
        pipeline: Pipeline,
        lanes: Sequence[HopLane],
        length: int,
        columns: int,
        start: Callable[[slice], Segments],
        finish: Callable[[Segments], None],
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
        lanes: Sequence[HopLane],
        piece: slice,
        start: Callable[[slice], Segments],
        finish: Callable[[Segments], None],
        end: Callable[[], None] | None,
        future: Future[torch.Tensor],
    ) -> None:
        under_way: list[Segments] = []

        def step_of(number: int, lane: HopLane) -> Step:
            def step() -> None:
                if number == 0:
                    under_way.append(start(piece))
                lane.run(under_way[0])

            return step

        def done() -> None:
            finish(under_way[0])
            if end is not None:
                end()

        def failed(error: BaseException) -> None:
            if end is not None:
                future.set_exception(error)  # type: ignore[arg-type]  # annotated for any T, takes an exception

        pipeline.submit([step_of(n, lane) for n, lane in enumerate(lanes)], done=done, failed=failed)

    def _agreed(self, operation: str, asked: str) -> Future[torch.Tensor]:
        """What an operation that all members ask for will give."""
        if self._device.type == "cuda":
            future: Future[torch.Tensor] = Future(devices=[self._device])
        else:
            future = WatchedFuture(self._events)
        if self._size > 1:
            try:
                look = self._signatures[operation].check(asked, operation=operation)
            except CollectiveError as error:
                self._abort(str(error))
                raise
            if isinstance(future, WatchedFuture):
                future.look = look
        return future

    def _columns(self, rows: torch.Tensor, *, encoded: bool) -> int:
        """Elements of each segment that travel at a time."""
        chunk_bytes = self._encoded_chunk_bytes if encoded else self._chunk_bytes
        return max(1, chunk_bytes // (self._size * rows.element_size()))

    def _checked(self, shard: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
        if whole.numel() != self._size * shard.numel() or whole.dtype != shard.dtype:
            raise ValueError(
                f"{self._size} shards of {tuple(shard.shape)} {shard.dtype} do not make up "
                f"{tuple(whole.shape)} {whole.dtype}"
            )
        return whole.contiguous()

    def _pipeline(self, lanes: Sequence[HopLane]) -> Pipeline:
        names = [lane.name for lane in lanes]
        if self._device.type == "cuda":
            return StreamPipeline(names, self._device)
        return ThreadPipeline(names, on_failure=lambda error: self._abort(str(error)))

"""Bytes of memory that training takes on a rank, between steps and at the peak of a step. Pure.

The moments of a step are walked through in order: gather of the root, forward of each block, loss, backward and
reduction of each block in reverse, reduction of the root. At each the bytes that live are added up; the peak is the
largest sum. How long each lives is read off FSDP2 (torch 2.13) and DistributedDataParallel; see the Note.

[Note: what is assumed]
- Each block is a FSDP2 group of its own, blocks run in the order of their index, and parameters in no block form the
  root's group. The root stays whole through forward and backward (FSDP2's default), and its gradients are counted from
  the loss on: right for a head, too early for an untied embedding.
- A rank allocates the padded shard of a parameter, and of a reduced gradient; optimizer state is not padded.
- Parameters are gathered in a flat buffer a block, and copied out of it when the block computes. ``zero1`` and
  ``zero2`` start all gathers before forward; the others run some blocks ahead, in forward and in backward. A flat
  buffer of gradients lives until as many later ones are made as may live. FSDP2 copies parameters also if there is one
  shard only.
- The step is not the first one: optimizer state exists, and DDP has built its buckets anew. The gradients of a step
  are dropped between forward and backward of the next one, as Lightning does; ``ddp`` keeps the buckets. Without
  synchronisation DDP accumulates beside its buckets also with ``gradient_as_bucket_view``.
- ``tensor`` averages gradients where there are replicas: a bucket (taken to be a block's) is copied, and its mean is
  written beside the gradients and copied into them when all are there.
- Autocast keeps a 16-bit copy of every parameter of two dims and more from its forward to its backward. (It makes none
  of an embedding: these bytes are too many for a large one.)
- Not counted: temporary values of a ``foreach`` optimizer (one state's worth), of autograd inside a block, of ``ddp``'s
  first step, buffers of the module, the process itself and the allocator's fragments.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace

from lightning_dist.planning.activation_cost import Activations
from lightning_dist.planning.parameter_cost import GroupBytes, combined, common_bytes, parameter_bytes
from lightning_dist.planning.training import ParameterLike, TrainingSetup
from lightning_dist.topology.layout import Coordinates

ORIGIN = Coordinates(0, 0, 0, 0)
_NO_ACTIVATIONS = Activations()


@dataclass(frozen=True)
class Usage:
    """Bytes that live on a rank at one moment.

    Attributes:
        parameters: What is kept between steps.
        copies: Copies to compute with: gathered parameters, second shards, 16-bit copies.
        gradients: Reduced or not; of ``ddp`` with ``gradient_as_bucket_view`` the buckets they lie in.
        optimizer: State of the optimizer, and what it makes for a moment.
        communication: Buffers of collectives.
        activations: Kept for backward.
    """

    parameters: int = 0
    copies: int = 0
    gradients: int = 0
    optimizer: int = 0
    communication: int = 0
    activations: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return sum(getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True)
class RankMemory:
    """Memory of one rank.

    Attributes:
        rest: After an optimizer step.
        peak: At the moment of a step at which most bytes live.
        peak_moment: Which one, e.g. ``backward of block 3``.
    """

    rest: Usage
    peak: Usage
    peak_moment: str


@dataclass(frozen=True)
class MemoryCost:
    """Memory of a rank and of the one that needs most; printed, it is a table.

    Attributes:
        setup: How the model is trained.
        rank: The rank asked for.
        worst: The rank with the first shard of everything: none needs more.
    """

    setup: TrainingSetup
    rank: RankMemory
    worst: RankMemory

    def __str__(self) -> str:
        columns = (self.rank.rest, self.rank.peak, self.worst.rest, self.worst.peak)
        head = ("MB a rank", "at rest", "at peak", "worst at rest", "worst at peak")
        body = [
            (name, *(f"{getattr(column, name) / 1e6:,.2f}" for column in columns))
            for name in (*(field.name for field in fields(Usage)), "total")
        ]
        widths = [max(map(len, cells)) for cells in zip(head, *body, strict=True)]
        lines = [
            "  ".join([cells[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(cells[1:], widths[1:], strict=True))])
            for cells in (head, *body)
        ]
        setup = self.setup
        title = f"{setup.mode}, {setup.axes}, {setup.precision}, {setup.micro_batches} micro-batches a step"
        moments = f"peak: {self.rank.peak_moment}; worst: {self.worst.peak_moment}"
        return "\n".join([title, *lines, moments])


def memory_cost(
    parameters: Iterable[ParameterLike],
    setup: TrainingSetup,
    *,
    activations: Activations = _NO_ACTIVATIONS,
    at: Coordinates = ORIGIN,
) -> MemoryCost:
    """Memory that training takes, by what it is for.

    Args:
        parameters: Each once, also if it is tied.
        setup: How they are trained.
        activations: Of one micro-batch on one rank.
        at: Where the rank asked for stands: :meth:`~lightning_dist.topology.layout.Layout.coordinates`.

    Raises:
        ConfigError: A parameter has no such dim as ``tp`` is to cut.
    """
    described = tuple(parameters)
    worst = _rank_memory(described, setup, activations, ORIGIN)
    rank = worst if (at.dp_shard, at.tp) == (0, 0) else _rank_memory(described, setup, activations, at)
    return MemoryCost(setup, rank, worst)


def _rank_memory(
    parameters: tuple[ParameterLike, ...], setup: TrainingSetup, activations: Activations, at: Coordinates
) -> RankMemory:
    by_block: dict[int | None, list[GroupBytes]] = {}
    common = common_bytes(parameters, setup)
    for parameter in parameters:
        by_block.setdefault(parameter.block, []).append(parameter_bytes(parameter, setup, at, sharded_bytes=common))
    count = 1 + max((block for block in by_block if block is not None), default=-1)
    root = combined(by_block.get(None, ()))
    step = _Step(root, tuple(combined(by_block.get(i, ())) for i in range(count)), setup, activations)
    rest = step.usage(gradients=step.all.reduced)
    moments = {"ddp": step.ddp_moments, "tensor": step.tensor_moments}.get(setup.mode, step.sharded_moments)()
    update = ("optimizer step", replace(rest, optimizer=rest.optimizer + step.all.largest_update))
    name, peak = max((update, *moments), key=lambda moment: moment[1].total)
    return RankMemory(rest, peak, name)


@dataclass(frozen=True)
class _Step:
    """A model's groups on one rank, and what lives at each moment of a step of theirs."""

    root: GroupBytes
    blocks: tuple[GroupBytes, ...]
    setup: TrainingSetup
    activations: Activations

    @functools.cached_property
    def all(self) -> GroupBytes:
        return combined((self.root, *self.blocks))

    @functools.cached_property
    def _before(self) -> tuple[GroupBytes, ...]:
        """``[i]``: the first i blocks, taken as one."""
        return tuple(itertools.accumulate(self.blocks, _joined, initial=GroupBytes()))

    @functools.cached_property
    def _from(self) -> tuple[GroupBytes, ...]:
        """``[i]``: block i and those after it, taken as one."""
        return tuple(itertools.accumulate(reversed(self.blocks), _joined, initial=GroupBytes()))[::-1]

    def usage(self, *, copies: int = 0, gradients: int = 0, communication: int = 0, activations: int = 0) -> Usage:
        """The given bytes and those that live all the time."""
        held = self.all
        fixed = self.setup.staging_bytes
        if self.setup.mode == "ddp" and not self.setup.gradient_as_bucket_view:
            fixed += held.reducing
        return Usage(held.kept, copies, gradients, held.optimizer, communication + fixed, activations)

    def ddp_moments(self) -> Iterator[tuple[str, Usage]]:
        """From the loss on: in forward less lives."""
        blocks, kept = self.blocks, self.activations
        yield (
            "loss",
            self.usage(
                copies=self.all.cast,
                gradients=self._in_ddp(len(blocks)) + self.root.largest_gradient,
                activations=len(blocks) * kept.per_block + kept.outside + kept.loss,
            ),
        )
        for i in reversed(range(len(blocks))):
            yield (
                f"backward of block {i}",
                self.usage(
                    copies=self._before[i + 1].cast,
                    gradients=self._in_ddp(i + 1) + blocks[i].largest_gradient,
                    activations=(i + 1) * kept.per_block + kept.outside + kept.recomputed,
                ),
            )

    def _in_ddp(self, unreduced: int) -> int:
        """Gradients, those on their way into a bucket left out, while the first so many blocks are not reduced yet.

        What former micro-batches left, without synchronisation, is not in buckets; it goes there in the last backward.
        """
        everything = self.all.gradient
        if self.setup.gradient_as_bucket_view and self.setup.micro_batches > 1:
            return everything + self.root.gradient + self._before[unreduced].gradient
        return everything

    def tensor_moments(self) -> Iterator[tuple[str, Usage]]:
        """From the loss on: in forward less lives."""
        blocks, kept = self.blocks, self.activations
        yield (
            "loss",
            self.usage(
                copies=self.all.cast,
                gradients=self._unaveraged(len(blocks)),
                activations=len(blocks) * kept.per_block + kept.outside + kept.loss,
            ),
        )
        for i in reversed(range(len(blocks))):
            yield (
                f"backward of block {i}",
                self.usage(
                    copies=self._before[i + 1].cast,
                    gradients=self._unaveraged(i),
                    communication=self._averaging(i + 1),
                    activations=(i + 1) * kept.per_block + kept.outside + kept.recomputed,
                ),
            )
        yield ("averages", self.usage(gradients=self.all.gradient, communication=self._averaging(0)))

    def _unaveraged(self, i: int) -> int:
        """Gradients once backward has come to block i."""
        return self.all.gradient if self.setup.micro_batches > 1 else self.root.gradient + self._from[i].gradient

    def _averaging(self, i: int) -> int:
        """Means of the root and of blocks from block i on, and copies that are still on their way to them."""
        copies = [group.reducing for group in (*self.blocks[i:], self.root) if group.reducing]
        return sum(copies) + sum(copies[: self.setup.reduction_buffers])

    def sharded_moments(self) -> Iterator[tuple[str, Usage]]:
        """The moments of a mode that FSDP2 carries out."""
        yield (
            "gather of the root",
            self.usage(
                copies=self.root.whole,
                gradients=self._held_in_forward,
                communication=self.root.gathering + self._gathering(0),
            ),
        )
        yield from self._forward()
        yield from self._backward()

    def _forward(self) -> Iterator[tuple[str, Usage]]:
        kept, count = self.activations, len(self.blocks)
        for i in range(count):
            yield (
                f"forward of block {i}",
                self.usage(
                    copies=self._whole(i, at_work=True) + self._before[i + 1].cast,
                    gradients=self._held_in_forward,
                    communication=max(self._gathering(i), self._gathering(i + 1)),
                    activations=(i + 1) * kept.per_block,
                ),
            )
        yield (
            "loss",
            self.usage(
                copies=self._whole(count, at_work=False) + self.all.cast,
                gradients=max(self._held_in_forward, self._held(count) + self._fresh(self.root)),
                communication=self._gathered_again(count),
                activations=count * kept.per_block + kept.outside + kept.loss,
            ),
        )

    def _backward(self) -> Iterator[tuple[str, Usage]]:
        blocks, kept, count = self.blocks, self.activations, len(self.blocks)
        for i in reversed(range(count)):
            gradients = self._held(i + 1) + self._fresh(self.root) + self._fresh(blocks[i])
            yield (
                f"backward of block {i}",
                self.usage(
                    copies=self._whole(i, at_work=True) + self._before[i + 1].cast,
                    gradients=gradients,
                    communication=self._gathered_again(i) + self._reducing(i + 1),
                    activations=(i + 1) * kept.per_block + kept.outside + kept.recomputed,
                ),
            )
            yield (
                f"reduction of block {i}",
                self.usage(
                    copies=self._whole(i, at_work=False) + self._before[i].cast,
                    gradients=gradients,
                    communication=self._gathered_again(i) + self._reducing(i),
                    activations=i * kept.per_block + kept.outside,
                ),
            )
        pending = self._pending(0, self.setup.reduction_buffers - 1)
        yield (
            "reduction of the root",
            self.usage(gradients=self._held(0) + self._fresh(self.root), communication=self.root.reducing + pending),
        )

    def _whole(self, i: int, *, at_work: bool) -> int:
        """Whole parameters and second shards while block i computes, or before it does so and after it did."""
        before = self._before[i]
        others = before.whole if self.setup.keeps_whole else before.secondary
        return self.root.whole + others + (self.blocks[i].whole if at_work else 0)

    def _gathering(self, i: int) -> int:
        """The flat buffers of block i and those after it that are gathered ahead, in forward."""
        stop = len(self.blocks) if self.setup.keeps_whole else i + self.setup.prefetch
        return sum(block.gathering for block in self.blocks[i:stop])

    def _gathered_again(self, i: int) -> int:
        """The flat buffers of blocks before block i, in backward."""
        if self.setup.keeps_whole:
            return 0
        return sum(block.gathering for block in self.blocks[max(0, i - self.setup.prefetch) : i])

    def _reducing(self, i: int) -> int:
        """The flat buffers of gradients that live when the last one made is that of block i."""
        return self._pending(i, self.setup.reduction_buffers)

    def _pending(self, i: int, most: int) -> int:
        """Buffers of so many blocks from block i on; with their sums, where these are added to former ones."""
        adds = self.setup.micro_batches > 1 and not self.setup.accumulates_whole
        pending = itertools.islice((block for block in self.blocks[i:] if block.reducing), most)
        return sum(block.reducing + (block.reduced if adds else 0) for block in pending)

    @property
    def _held_in_forward(self) -> int:
        """Gradients of former micro-batches, or of the step before."""
        return max(self.all.reduced, self._held(len(self.blocks)))

    def _held(self, first_reduced: int) -> int:
        """In backward, gradients of former micro-batches, and of this one where they are reduced: from a block on.

        The micro-batch is the last one of a step.
        """
        if self.setup.micro_batches == 1:
            return self._from[first_reduced].reduced
        if self.setup.accumulates_whole:
            unreduced = self.root.accumulated + self._before[first_reduced].accumulated
            return unreduced + self._from[first_reduced].reduced
        return self.all.reduced

    def _fresh(self, group: GroupBytes) -> int:
        """Whole gradients of a group that are not reduced yet and lie in no other's memory."""
        if self.setup.accumulates_whole and group.gradient == group.accumulated:
            return 0  # autograd adds to what is there
        return group.gradient


def _joined(first: GroupBytes, second: GroupBytes) -> GroupBytes:
    return combined((first, second))

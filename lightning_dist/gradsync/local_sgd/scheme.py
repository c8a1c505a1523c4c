"""Workers train apart; fragment by fragment, they average how far they have gone.

Note [A fragment's way]
    After the step at which it is due, each rank takes outer values minus its own, and a mean over ranks is started on
    the lanes: inside the host first, then across, as gradients go. The mean is the same on all ranks, to the bit, and
    so are the outer values that the outer optimizer makes of it when it has arrived, ``overlap_steps`` later. The
    worker's own values become outer ones, or a mixture.

Note [Workers that differ]
    Before a fragment is sent all ranks say which of its parameters train with them, or have, and whether their values
    are finite. What trains on any rank is averaged. A worker with values that are not finite has no part in the mean,
    and takes what the others have.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future

from lightning_dist.comm.feedback import Account, Origin, Span
from lightning_dist.comm.hierarchical import HierarchicalAllReduce
from lightning_dist.events import EventStream
from lightning_dist.gradsync.local_sgd.fragments import deal
from lightning_dist.gradsync.local_sgd.outer import OuterOptimizer, mix
from lightning_dist.gradsync.local_sgd.schedule import Timetable
from lightning_dist.gradsync.local_sgd.weights import OuterWeights

Vote = Callable[[Sequence[bool]], list[bool]]
"""Every rank says yes or no to some questions; the answer to each is yes if any rank's is. Collective."""

SEND, WAIT = "outer send", "outer wait"


@dataclass(frozen=True)
class Workers:
    """Who trains together.

    Attributes:
        parts: Global ranks of each worker.
        rank: This one's global rank.
    """

    parts: tuple[tuple[int, ...], ...]
    rank: int

    @property
    def index(self) -> int:
        """Of this rank's worker."""
        return next(i for i, part in enumerate(self.parts) if self.rank in part)

    @property
    def own(self) -> tuple[int, ...]:
        """The ranks of this worker."""
        return self.parts[self.index]


@dataclass
class InFlight:
    """A fragment on its way.

    Attributes:
        fragment: Which.
        sent_at: After which step it was sent.
        lost: Workers that have no part in the mean.
        means: Name -> of this rank's values; filled once ``futures`` are done.
        futures: Of the lanes.
    """

    fragment: int
    sent_at: int
    lost: tuple[int, ...]
    means: dict[str, Tensor]
    futures: list[Future[Tensor]] = field(default_factory=list)

    def wait(self) -> None:
        """Until the means are there."""
        while self.futures:
            self.futures.pop(0).wait()


class LocalSGD:
    """Every rank makes it, and calls its methods at the same steps.

    Args:
        weights: What is averaged.
        sizes: Bytes of each parameter, whole, in model order; the same on all ranks.
        timetable: When.
        optimizer: Of the outer weights.
        kept: What a worker keeps of its own values when outer ones arrive, in [0, 1).
        lanes: Over which a mean over workers travels.
        vote: Among all ranks.
        workers: Who they are.
        events: Where spans go.
    """

    def __init__(
        self,
        weights: OuterWeights,
        sizes: Mapping[str, int],
        *,
        timetable: Timetable,
        optimizer: OuterOptimizer,
        kept: float,
        lanes: HierarchicalAllReduce,
        vote: Vote,
        workers: Workers,
        events: EventStream,
    ) -> None:
        self.step = 0
        self.weights = weights
        self.timetable = timetable
        self.workers = workers
        self.lanes = lanes
        self.in_flight: list[InFlight] = []
        self._optimizer = optimizer
        self._kept = kept
        self._vote = vote
        self._events = events
        self._sent_at: dict[int, int] = {}
        dealt = deal(list(sizes.values()), timetable.fragments)
        self._names = [
            [name for name, at in zip(sizes, dealt, strict=True) if at == fragment]
            for fragment in range(timetable.fragments)
        ]

    @property
    def is_exact(self) -> bool:
        """Whether the next step is made by all workers together."""
        return self.timetable.is_exact(self.step + 1)

    def before_step(self) -> None:
        """Parameters that train now have outer values before a step changes them; safe to call often."""
        if self.is_exact:
            return
        if self.weights.has_begun:
            self.weights.note_trained()
        else:
            self.weights.begin()

    def after_step(self) -> None:
        """An optimizer step is made: what is due arrives, then what is due is sent. Collective."""
        self.step += 1
        for sent in [each for each in self.in_flight if self.timetable.arrives_at(each.sent_at) <= self.step]:
            self._receive(sent, self._kept)
        for fragment in self.timetable.sent_at(self.step):
            sent = self._send(fragment)
            if self.timetable.arrives_at(self.step) == self.step:
                self._receive(sent, self._kept)

    def settle(self) -> None:
        """Wait until nothing is on its way any more; what has arrived is applied when it is due."""
        for sent in self.in_flight:
            sent.wait()

    def finish(self) -> None:
        """Training ends: all that was made apart is averaged, and every rank has the outer weights. Collective."""
        for sent in list(self.in_flight):
            self._receive(sent, 0.0)
        if self.weights.has_begun:
            for fragment in range(self.timetable.fragments):
                if self._sent_at.get(fragment) != self.step or self.timetable.overlap_steps:
                    self._receive(self._send(fragment), 0.0)
        self.weights.show()
        self.forget()

    def forget(self) -> None:
        """All workers have what is in the module, and begin anew; what is on its way is waited for and dropped."""
        self.settle()
        self.in_flight = []
        self._sent_at = {}
        self.weights.forget()

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def record(self) -> dict[str, Any]:
        """Plain values that say where training is, alike on all ranks."""
        return {
            "step": self.step,
            "workers": [list(part) for part in self.workers.parts],
            "sent_at": sorted(self._sent_at.items()),
            "in_flight": [[sent.fragment, sent.sent_at, list(sent.lost)] for sent in self.in_flight],
        }

    def take(self, record: Mapping[str, Any], means: Mapping[str, Tensor]) -> None:
        """Go on where a checkpoint was saved.

        Args:
            record: Of :meth:`record`.
            means: Name -> what had arrived and was not applied.
        """
        self.step = int(record["step"])
        self._sent_at = {int(fragment): int(step) for fragment, step in record["sent_at"]}
        self.in_flight = []
        for fragment, sent_at, lost in record["in_flight"]:
            if fragment >= self.timetable.fragments:
                continue
            names = [*self._names[fragment], *(self.weights.buffers if fragment == 0 else ())]
            own = {name: means[name] for name in names if name in means}
            self.in_flight.append(InFlight(fragment, sent_at, tuple(lost), own))

    # -- a fragment ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _send(self, fragment: int) -> InFlight:
        with self._events.measure(SEND, fragment=fragment):
            names, buffers, lost = self._agree(fragment)
            is_lost = self.workers.index in lost
            sent = InFlight(fragment, self.step, lost, {})
            if names:
                gone = [(self.weights.copy(name), self.weights.own(name)) for name in names]
                dtype = torch.float64 if any(own.dtype is torch.float64 for _, own in gone) else torch.float32
                pieces = [(outer.to(dtype) - own.to(dtype)).reshape(-1) for outer, own in gone]
                shapes = [own.shape for _, own in gone]
                self._start(sent, names, shapes, pieces, is_lost=is_lost, exactly=False)
            if buffers:
                values = [self.weights.own(name) for name in buffers]
                pieces = [value.to(torch.float64).reshape(-1) for value in values]
                shapes = [value.shape for value in values]
                self._start(sent, buffers, shapes, pieces, is_lost=is_lost, exactly=True)
            self._sent_at[fragment] = self.step
            self.in_flight.append(sent)
            return sent

    def _agree(self, fragment: int) -> tuple[list[str], list[str], tuple[int, ...]]:
        """Which parameters and buffers any rank has changed, and which workers have no part; see the second note."""
        weights, workers = self.weights, self.workers
        names, buffers = self._names[fragment], list(weights.buffers) if fragment == 0 else []
        trained = [name in weights.copies for name in names]
        changed = [not torch.equal(weights.own(name), weights.copies[name]) for name in buffers]
        looked_at = [name for name, trains in zip(names, trained, strict=True) if trains]
        is_finite = _are_finite(weights.own(name) for name in looked_at)
        lost = [not is_finite and index == workers.index for index in range(len(workers.parts))]
        said = self._vote([*lost, *trained, *changed])
        chosen = iter(said[len(lost) :])
        return (
            [name for name in names if next(chosen)],
            [name for name in buffers if next(chosen)],
            self._lost(said[: len(lost)]),
        )

    def _lost(self, said: Sequence[bool]) -> tuple[int, ...]:
        lost = tuple(index for index, is_lost in enumerate(said) if is_lost)
        if lost and self.workers.rank == 0:
            ranks = ", ".join(str(rank) for index in lost for rank in self.workers.parts[index])
            left = "nobody is left" if len(lost) == len(said) else "they take what the others have"
            warnings.warn(
                f"after step {self.step} weights of ranks {ranks} are not finite: they have no part in the mean, and "
                f"{left}",
                stacklevel=2,
            )
        return lost

    def _start(
        self,
        sent: InFlight,
        names: Sequence[str],
        shapes: Sequence[torch.Size],
        pieces: Sequence[Tensor],
        *,
        is_lost: bool,
        exactly: bool,
    ) -> None:
        """Hand to the lanes a mean of pieces, of which those of lost workers do not count."""
        payload = torch.cat(list(pieces))
        if is_lost:
            payload.zero_()
        kind = "buffers of fragment" if exactly else "fragment"
        spans = tuple(
            Span(name, self.weights.start(name), piece.numel()) for name, piece in zip(names, pieces, strict=True)
        )
        origin = Origin(f"{kind} {sent.fragment}", spans, 1 / self.lanes.world_size)
        feedback, account = self.lanes.feedback, None
        if exactly:
            account = Account(origin, is_exact=True, keeps=False)
        elif feedback is not None:
            account = feedback.enter(origin, payload)
        attributes = {"fragment": sent.fragment}
        sent.futures.append(self.lanes.start(payload, mean=True, attributes=attributes, account=account))
        lengths = [piece.numel() for piece in pieces]
        for name, mean, shape in zip(names, payload.split(lengths), shapes, strict=True):
            sent.means[name] = mean.view(shape)

    @torch.no_grad()
    def _receive(self, sent: InFlight, kept: float) -> None:
        with self._events.measure(WAIT, fragment=sent.fragment):
            sent.wait()
        self.in_flight.remove(sent)
        weights, workers = self.weights, self.workers
        everyone = sum(map(len, workers.parts))
        counted = everyone - sum(len(workers.parts[index]) for index in sent.lost)
        if counted == 0:  # outer weights are the last that were finite
            for name in sent.means:
                weights.own(name).copy_(weights.copy(name))
            return
        kept = 0.0 if workers.index in sent.lost else kept
        for name, mean in sent.means.items():
            mean.mul_(everyone / counted)
            if name in weights.buffers:
                outer = weights.copies[name]
                outer.copy_(mean if outer.dtype.is_floating_point else mean.round())
                weights.own(name).copy_(outer)
            else:
                outer = weights.copy(name)
                self._optimizer.step(outer, weights.momentum.get(name), mean.to(_step_dtype(outer)))
                mix(weights.own(name), outer, kept)


def _step_dtype(outer: Tensor) -> torch.dtype:
    return torch.float64 if outer.dtype is torch.float64 else torch.float32


def _are_finite(values: Iterator[Tensor]) -> bool:
    said = [torch.isfinite(value).all() for value in values]
    return not said or bool(torch.stack(said).all())

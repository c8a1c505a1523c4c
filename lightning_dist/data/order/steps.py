"""Which samples each step of an epoch takes, and how many steps there are. Pure.

All replicas have equally many steps. A step is a run of positions, so that what was taken at any time is a prefix of
the order, and it goes on from any position: also from one that was reached with another number of replicas or another
batch size.

Note [Few samples left]
At the end of an epoch there may be fewer samples than replicas, and no replica may have an empty batch. With
``last_batch="short"`` they go into the step before, in which some replicas then have a sample more. Where there is no
such step any more, because a run that was resumed with more replicas begins that near to the end, they go into the
first step of the next epoch on top of its own samples: its first positions are below 0, see
:meth:`~lightning_dist.data.order.sample_order.SampleOrder.locate`. Each sample is still trained on once for its epoch,
and all epochs have equally many steps.

Note [Steps of a pass]
A pass is what Lightning calls an epoch. The number of its steps does not depend on where it was resumed: those that are
done are counted in the present batch size, as the whole number less those that are left. So what was asked for the
number before the pass was resumed, or after, was told the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from lightning_dist.config.checks import check_choice, check_count
from lightning_dist.config.data import LAST_BATCHES
from lightning_dist.data.index.dataset_index import Numbers
from lightning_dist.errors import ConfigError


class Step(NamedTuple):
    """A run of positions.

    Attributes:
        start: The first.
        stop: One after the last.
    """

    start: int
    stop: int


class Place(NamedTuple):
    """Where in the epochs.

    Attributes:
        epoch: Which one.
        consumed: Samples of it that are done; negative: so many of the epoch before are yet to do, and come first.
    """

    epoch: int
    consumed: int


class Steps(Protocol):
    """How positions become steps."""

    def next(self, consumed: int) -> Step | None:
        """The step at a position; ``None`` at the end of the epoch."""

    @property
    def length(self) -> int:
        """Number of steps of a pass."""

    def done(self, place: Place, taken: int) -> int:
        """Steps of a pass that count as done; see Note [Steps of a pass].

        Args:
            place: Where the next one begins.
            taken: Samples that the pass has taken.
        """

    def after(self, place: Place) -> Place:
        """Where the next step begins."""

    def next_pass(self, place: Place) -> Place:
        """Where the pass after the one at a place begins."""

    def start_of(self, number: int) -> Place:
        """Where a pass begins that ``number`` whole ones went before."""

    def positions(self, taken: Numbers) -> Numbers:
        """Of those that a step has; for :meth:`~lightning_dist.data.order.sample_order.SampleOrder.locate`."""


@dataclass(frozen=True, kw_only=True)
class ExactSteps:
    """Each sample once an epoch, but for the last batch.

    Attributes:
        num_samples: Of an epoch.
        num_replicas: Among which a step is dealt.
        batch_size: Samples of a step, of all replicas together.
        last_batch: What becomes of a last batch with fewer samples: ``pad`` (filled from the start of the same epoch),
            ``drop`` (left out) or ``short`` (dealt as it is: replicas differ by one sample at most). Evaluation is
            ``short``.
        repeats: Whether all passes are the same one, as in evaluation.

    Raises:
        ConfigError: A replica would have no samples, or no step would be left.
    """

    num_samples: int
    num_replicas: int
    batch_size: int
    last_batch: str = "short"
    repeats: bool = False

    def __post_init__(self) -> None:
        check_choice("last_batch", self.last_batch, LAST_BATCHES)
        _check_batch(self.num_samples, self.num_replicas, self.batch_size)
        if self.last_batch == "short" and self.num_samples < self.num_replicas:
            raise ConfigError(
                f"{self.num_samples} samples are too few for {self.num_replicas} replicas, each of which needs one: "
                f"use at most {self.num_samples} replicas, or last_batch=pad, which repeats samples"
            )
        if self.last_batch == "drop" and self.num_samples < self.batch_size:
            raise ConfigError(
                f"{self.num_samples} samples are less than one batch of {self.batch_size} of all {self.num_replicas} "
                "replicas, and last_batch=drop leaves out what is less: write last_batch=short or a smaller batch"
            )

    def next(self, consumed: int) -> Step | None:
        """See :meth:`Steps.next`."""
        start = max(consumed, 0)  # those before it come on top; see Note [Few samples left]
        rest = self.num_samples - start
        if rest < self._fewest:
            return None
        whole = Step(consumed, start + self.batch_size)
        if self.last_batch != "short" or rest == self.batch_size or rest >= self.batch_size + self.num_replicas:
            return whole
        return Step(consumed, self.num_samples)  # see Note [Few samples left]

    @property
    def length(self) -> int:
        """See :meth:`Steps.length`."""
        return self._left(0)

    def done(self, place: Place, taken: int) -> int:
        """See :meth:`Steps.done`."""
        return self.length - self._left(place.consumed)

    def after(self, place: Place) -> Place:
        """See :meth:`Steps.after`; after the last step all samples count as done, dropped ones too."""
        step = self.next(place.consumed)
        assert step is not None
        return place._replace(consumed=self.num_samples if self.next(step.stop) is None else step.stop)

    def next_pass(self, place: Place) -> Place:
        """See :meth:`Steps.next_pass`: the next epoch."""
        if self.repeats:
            return Place(0, 0)
        rest = self.num_samples - place.consumed
        is_over = self.last_batch == "short" and rest < self._fewest  # see Note [Few samples left]
        return Place(place.epoch + 1, -rest if is_over else 0)

    def start_of(self, number: int) -> Place:
        """See :meth:`Steps.start_of`."""
        return Place(number, 0)

    def positions(self, taken: Numbers) -> Numbers:
        """See :meth:`Steps.positions`."""
        return np.where(taken >= self.num_samples, taken % self.num_samples, taken)

    def _left(self, consumed: int) -> int:
        """Steps from a position to the end of the epoch."""
        whole, rest = divmod(self.num_samples - max(consumed, 0), self.batch_size)
        return whole + (rest >= self._fewest)

    @property
    def _fewest(self) -> int:
        """Samples that are enough for a last step."""
        return {"pad": 1, "drop": self.batch_size, "short": self.num_replicas}[self.last_batch]


@dataclass(frozen=True, kw_only=True)
class EndlessSteps:
    """Epochs one after the other, with batches across their borders: nothing is padded or dropped.

    Attributes:
        num_samples: Of an epoch.
        num_replicas: Among which a step is dealt.
        batch_size: Samples of a step, of all replicas together.

    Raises:
        ConfigError: A replica would have no samples.
    """

    num_samples: int
    num_replicas: int
    batch_size: int

    def __post_init__(self) -> None:
        _check_batch(self.num_samples, self.num_replicas, self.batch_size)

    def next(self, consumed: int) -> Step:
        """See :meth:`Steps.next`; there always is one."""
        return Step(consumed, consumed + self.batch_size)

    @property
    def length(self) -> int:
        """See :meth:`Steps.length`: whole batches of an epoch, at least one."""
        return max(1, self.num_samples // self.batch_size)

    def done(self, place: Place, taken: int) -> int:
        """See :meth:`Steps.done`."""
        return min(taken // self.batch_size, self.length)

    def after(self, place: Place) -> Place:
        """See :meth:`Steps.after`."""
        epochs, consumed = divmod(place.consumed + self.batch_size, self.num_samples)
        return Place(place.epoch + epochs, consumed)

    def next_pass(self, place: Place) -> Place:
        """See :meth:`Steps.next_pass`: it goes on where it is."""
        return place

    def start_of(self, number: int) -> Place:
        """See :meth:`Steps.start_of`."""
        return Place(*divmod(number * self.length * self.batch_size, self.num_samples))

    def positions(self, taken: Numbers) -> Numbers:
        """See :meth:`Steps.positions`."""
        return taken


def _check_batch(num_samples: int, num_replicas: int, batch_size: int) -> None:
    check_count("num_replicas", num_replicas, low=1, unit="replicas")
    check_count("batch_size", batch_size, low=1, unit="samples")
    if num_samples < 1:
        raise ConfigError("there are no samples to make batches of")
    if batch_size % num_replicas:
        lower, upper = batch_size // num_replicas * num_replicas, -(-batch_size // num_replicas) * num_replicas
        allowed = f"{lower} or {upper}" if lower else f"{upper}"
        raise ConfigError(
            f"a batch of {batch_size} samples of all {num_replicas} replicas gives them different numbers: write "
            f"{allowed}"
        )

"""Where training is in the data: the state that is saved, and how it moves. Pure.

A position counts samples that were trained on, of all replicas together. So it is the same on all ranks, and means the
same with any number of them, with another batch size, and with any number of workers.

::

    position = begun(position, steps)              # the first batch is asked for
    while not is_at_end(position, steps):
        step = steps.next(position.place.consumed)
        ...                                        # the batch of this step is given
        position = given(position, steps)

``begun`` may come again at any time, as it does after an epoch was cut short:

=========================================  ==============================  ==============================
when                                       exact epochs                    endless
=========================================  ==============================  ==============================
no batch was given since begun or loaded   goes on where it is             goes on where it is
the same, and the pass is at its end       next epoch                      goes on, as a new pass
batches were given                         next epoch                      goes on, as a new pass
=========================================  ==============================  ==============================
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_dist.data.index.dataset_index import DatasetIndex
from lightning_dist.data.order.identity import DataIdentity, check_unchanged
from lightning_dist.data.order.steps import Place, Steps
from lightning_dist.errors import ForeignDataError

FIRST = Place(epoch=0, consumed=0)


@dataclass(frozen=True)
class Position:
    """Where training is.

    Attributes:
        place: Epoch and samples.
        taken: Samples that the present pass has taken.
        is_started: Whether it took some since it was begun or resumed in this process. It is not saved.
    """

    place: Place = FIRST
    taken: int = 0
    is_started: bool = False


def is_at_end(position: Position, steps: Steps) -> bool:
    """Whether all steps of the pass are done."""
    return done(position, steps) >= steps.length


def done(position: Position, steps: Steps) -> int:
    """Steps of the pass that count as done."""
    return steps.done(position.place, position.taken)


def begun(position: Position, steps: Steps) -> Position:
    """The position once the data are iterated over from there."""
    if position.is_started or is_at_end(position, steps):
        return Position(steps.next_pass(position.place))
    return position


def given(position: Position, steps: Steps) -> Position:
    """The position once the step there is done."""
    step = steps.next(position.place.consumed)
    assert step is not None, "not at the end"
    return Position(steps.after(position.place), position.taken + step.stop - step.start, is_started=True)


def to_state(position: Position, identity: DataIdentity) -> dict[str, Any]:
    """Plain values to be saved.

    Args:
        position: After the last step that was trained on.
        identity: Of data and order.
    """
    return {
        "epoch": position.place.epoch,
        "consumed": position.place.consumed,
        "taken": position.taken,
        "data": identity.to_dict(),
    }


def from_state(state: Mapping[str, Any], identity: DataIdentity, indexes: Sequence[DatasetIndex]) -> Position:
    """The position that was saved.

    Args:
        state: What :func:`to_state` gave.
        identity: Of the data and the order that it is to be used with.
        indexes: Of these data.

    Raises:
        ChangedDataError: They are not those that it was saved with.
        ForeignDataError: The state is something else.
    """
    try:
        epoch, consumed, taken = (operator.index(state[name]) for name in ("epoch", "consumed", "taken"))
        saved = state["data"]
    except (KeyError, TypeError) as error:
        raise ForeignDataError(f"this is no position of the data: {type(error).__name__}: {error}") from error
    check_unchanged(DataIdentity.from_dict(saved), identity, indexes)
    return Position(Place(epoch, consumed), taken)

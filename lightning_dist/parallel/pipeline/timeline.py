"""What each rank of a pipeline does when: predicted from a schedule's order, and how long it idles; pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT = "forward", "backward", "backward_input", "backward_weight"
KINDS = (FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT)


class Action(NamedTuple):
    """One piece of work of a rank.

    Attributes:
        kind: One of :data:`KINDS`.
        stage: Of which stage.
        micro_batch: On which micro-batch.
    """

    kind: str
    stage: int
    micro_batch: int


class Slot(NamedTuple):
    """When an action runs, in seconds from the start of the step."""

    action: Action
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Timeline:
    """A step of a pipeline.

    Attributes:
        rows: The slots of each rank of the pipeline, in their order.
        length_s: From the start of the first to the end of the last.
    """

    rows: tuple[tuple[Slot, ...], ...]
    length_s: float

    @property
    def idle_shares(self) -> tuple[float, ...]:
        """Of each rank: the part of the step in which it has nothing to do."""
        return tuple(
            1.0 - sum(slot.end_s - slot.start_s for slot in row) / self.length_s if self.length_s else 0.0
            for row in self.rows
        )

    @property
    def idle_share(self) -> float:
        """Mean over ranks."""
        return sum(self.idle_shares) / len(self.rows)


def predict(orders: Sequence[Sequence[Action]], seconds: Mapping[tuple[str, int], float]) -> Timeline:
    """When each action runs if each rank does its actions in order, each as soon as what it needs is there.

    Messages take no time.

    Args:
        orders: The actions of each rank, in its order.
        seconds: (kind, stage) -> how long it takes.

    Raises:
        ValueError: The orders wait for each other.
    """
    last_stage = max(action.stage for order in orders for action in order)
    end_of: dict[Action, float] = {}
    free_at = [0.0] * len(orders)
    position = [0] * len(orders)
    rows: list[list[Slot]] = [[] for _ in orders]
    left = sum(map(len, orders))
    while left:
        moved = False
        for rank, order in enumerate(orders):
            while position[rank] < len(order):
                action = order[position[rank]]
                needs = _needs(action, last_stage, end_of)
                if needs is None:
                    break
                start = max([free_at[rank], *needs])
                end = start + seconds[action.kind, action.stage]
                end_of[action] = free_at[rank] = end
                rows[rank].append(Slot(action, start, end))
                position[rank] += 1
                left -= 1
                moved = True
        if not moved:
            stuck = [order[at] for order, at in zip(orders, position, strict=True) if at < len(order)]
            raise ValueError(f"the orders wait for each other: {stuck}")
    return Timeline(tuple(map(tuple, rows)), max(free_at))


def _needs(action: Action, last_stage: int, end_of: Mapping[Action, float]) -> list[float] | None:
    """When what an action needs is there; ``None`` if it is not known yet."""
    kind, stage, micro_batch = action
    if kind == FORWARD:
        return [] if stage == 0 else _end_of_any([Action(FORWARD, stage - 1, micro_batch)], end_of)
    if kind == BACKWARD_WEIGHT:
        return _end_of_any([Action(BACKWARD_INPUT, stage, micro_batch)], end_of)
    own = _end_of_any([Action(FORWARD, stage, micro_batch)], end_of)
    if own is None or stage == last_stage:
        return own
    behind = [Action(kind, stage + 1, micro_batch) for kind in (BACKWARD, BACKWARD_INPUT)]
    following = _end_of_any(behind, end_of)
    return None if following is None else [*own, *following]


def _end_of_any(actions: Sequence[Action], end_of: Mapping[Action, float]) -> list[float] | None:
    found = [end_of[action] for action in actions if action in end_of]
    return found or None

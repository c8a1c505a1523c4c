"""Which layers make which stage: neighbours, in their order, so that the slowest stage is as fast as can be; pure."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_dist.errors import ConfigError


def split_evenly(costs: Sequence[float], stages: int) -> tuple[int, ...]:
    """The number of layers of each stage, at least one, such that the largest cost of a stage is smallest.

    Of several such splits the one whose costs differ least, in the sense of least squares.

    Args:
        costs: Of each layer, in any unit.
        stages: How many.

    Raises:
        ConfigError: There are fewer layers than stages.
    """
    count = len(costs)
    if count < stages:
        raise ConfigError(
            f"{count} layers cannot make {stages} pipeline stages; use fewer ranks, more layers, or a schedule with "
            "fewer stages a rank (parallel.pipeline.schedule=1f1b has one)"
        )
    before = [0.0]
    for cost in costs:
        before.append(before[-1] + cost)
    # best[n] = (largest cost, sum of squares, counts) of the first n layers in the stages so far
    best: list[tuple[float, float, tuple[int, ...]] | None] = [(0.0, 0.0, ())] + [None] * count
    for stage in range(stages):
        step: list[tuple[float, float, tuple[int, ...]] | None] = [None] * (count + 1)
        for end in range(stage + 1, count - (stages - stage - 1) + 1):
            for start in range(stage, end):
                reached = best[start]
                if reached is None:
                    continue
                own = before[end] - before[start]
                found = (max(reached[0], own), reached[1] + own * own, (*reached[2], end - start))
                if step[end] is None or found[:2] < step[end][:2]:  # type: ignore[index]  # mypy does not narrow it
                    step[end] = found
        best = step
    chosen = best[count]
    assert chosen is not None, "there are as many layers as stages, or more"
    return chosen[2]


def check_split(counts: Sequence[int], layers: int) -> tuple[int, ...]:
    """A split given by hand.

    Raises:
        ConfigError: It is for another number of layers.
    """
    if sum(counts) != layers:
        raise ConfigError(
            f"parallel.pipeline.split={list(counts)} deals out {sum(counts)} layers, and the model has {layers}"
        )
    return tuple(counts)

"""Plans drawn by chance: the same seed and numbers give the same plan, on every machine."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from lightning_dist.config.checks import check_count
from lightning_dist.elastic.chaos.kinds import KINDS, REQUIRED
from lightning_dist.elastic.chaos.plan import Plan, make_fault
from lightning_dist.errors import ConfigError, unknown_option

_SECONDS = (0.5, 2.0, 5.0)
_SECONDS_STOPPED = (0.5, 2.0, 15.0)  # the last is longer than a stopped rank is waited for
_NEEDS_INTERFACE = tuple(name for name, kind in KINDS.items() if kind.options.get("interface") is REQUIRED)


def random_plan(
    seed: int,
    *,
    num_faults: int,
    num_ranks: int,
    num_steps: int,
    kinds: Sequence[str] = (),
    interface: str | None = None,
) -> Plan:
    """Faults at random ranks and steps. Kinds come in turn, shuffled anew for each turn, so that none is left out.

    Args:
        seed: Of the draw.
        num_faults: How many.
        num_ranks: Ranks 0 to ``num_ranks - 1`` are hit.
        num_steps: Steps 1 to ``num_steps - 1`` are hit, no two faults at the same one.
        kinds: Which; empty: all that can be done (without an interface, none that needs one).
        interface: For kinds that act on a link.

    Raises:
        ConfigError: There are not enough steps, or a kind needs an interface.
    """
    check_count("num_faults", num_faults, low=1, unit="faults")
    check_count("num_ranks", num_ranks, low=1, unit="ranks")
    if num_steps - 1 < num_faults:
        raise ConfigError(f"{num_faults} faults need at least {num_faults + 1} steps, got {num_steps}")
    for kind in kinds:
        if kind not in KINDS:
            raise unknown_option("kinds", kind, KINDS)
        if kind in _NEEDS_INTERFACE and interface is None:
            raise ConfigError(f"kinds has {kind}, which acts on a link; name its interface, e.g. eth0")
    chosen = list(kinds) or [kind for kind in KINDS if interface is not None or kind not in _NEEDS_INTERFACE]
    draw = _Draw(seed)
    steps = sorted(draw.shuffled(range(1, num_steps))[:num_faults])
    order: list[str] = []
    while len(order) < num_faults:
        order += draw.shuffled(chosen)
    return Plan(
        tuple(
            make_fault(kind, rank=draw.below(num_ranks), step=step, **_options(kind, draw, interface))
            for kind, step in zip(order, steps, strict=False)
        )
    )


def _options(kind: str, draw: _Draw, interface: str | None) -> dict[str, Any]:
    """What makes a fault pass: a run is to survive it, or to end by itself."""
    options: dict[str, Any] = {}
    known = KINDS[kind].options
    if "interface" in known:
        options["interface"] = interface
    if "direction" in known:
        options["direction"] = draw.one_of(("both", "in", "out"))
    if "rate_mbit" in known:
        options["rate_mbit"] = draw.one_of((1.0, 5.0, 20.0))
    if "share" in known:
        options["share"] = draw.one_of((0.5, 0.75, 0.9))
    if "code" in known:
        options["code"] = 1 + draw.below(255)
    if "place" in known:
        options["place"] = draw.one_of(("storage", "memory"))
    if "seconds" in known:
        options["seconds"] = draw.one_of(_SECONDS_STOPPED if kind == "stop" else _SECONDS)
    return options


class _Draw:
    """Only ``random()`` gives the same numbers in all versions of Python."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)  # noqa: S311 - it hides nothing

    def below(self, limit: int) -> int:
        return int(self._random.random() * limit)

    def one_of(self, values: Sequence[Any]) -> Any:
        return values[self.below(len(values))]

    def shuffled(self, values: Sequence[Any]) -> list[Any]:
        rest, drawn = list(values), []
        while rest:
            drawn.append(rest.pop(self.below(len(rest))))
        return drawn

"""Small models and ways to train them."""

from __future__ import annotations

from dataclasses import fields

from lightning_dist.planning.memory_cost import MemoryCost, Usage, memory_cost
from lightning_dist.planning.training import ADAMW, MODES, Parameter, TrainingSetup
from lightning_dist.topology.layout import Axes, Coordinates

SHARDED_MODES = MODES[2:]
ODD = (
    Parameter("up.weight", (13, 7), block=0),
    Parameter("up.bias", (13,), block=0),
    Parameter("down.weight", (5, 13), block=1),
    Parameter("head.weight", (3, 5)),
)  # 91 + 13 + 65 + 15 = 184 values
ITEMS = [field.name for field in fields(Usage)] + ["total"]


def setup_for(mode: str, ranks: int, **options: object) -> TrainingSetup:
    axes = Axes(dp_replicate=ranks) if mode in ("ddp", "tensor") else Axes(dp_shard=ranks)
    return TrainingSetup(**{"mode": mode, "axes": axes, "optimizer": ADAMW, **options})  # type: ignore[arg-type]


def on_shard(parameters: tuple[Parameter, ...], setup: TrainingSetup, index: int, tp: int = 0) -> MemoryCost:
    return memory_cost(parameters, setup, at=Coordinates(0, 0, index, tp))


def even_model(blocks: int) -> tuple[Parameter, ...]:
    """Blocks of 16,384 values, which every world up to 16 divides."""
    return tuple(Parameter(f"{i}.weight", (128, 128), block=i) for i in range(blocks))

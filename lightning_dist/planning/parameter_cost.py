"""Bytes that one rank holds for parameters, whatever the moment: rows, padding, groups. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace

from lightning_dist.errors import ConfigError
from lightning_dist.planning.training import ParameterLike, TrainingSetup
from lightning_dist.topology.layout import Coordinates


def padded_rows(rows: int, shards: int) -> int:
    """Rows that each of n ranks allocates for a dim of d: ceil(d/n); the last ranks use fewer of them, or none."""
    return -(-rows // shards)


def shard_rows(rows: int, shards: int, index: int) -> int:
    """Rows that rank ``index`` of n holds of a dim of d: ceil(d/n), as long as there are any.

    What ``torch.chunk`` gives, and with it FSDP2 and DTensor's ``Shard``: 5 rows over 4 ranks are 2, 2, 1 and 0.
    """
    most = padded_rows(rows, shards)
    return max(0, min(most, rows - index * most))


@dataclass(frozen=True)
class GroupBytes:
    """Bytes on one rank of parameters that are gathered and reduced together.

    Attributes:
        kept: Parameters between steps, padding included.
        whole: Gathered parameters, padding included.
        gathering: The buffer they are gathered in, which lives beside them until they are copied out of it.
        secondary: The rank's part of a second copy.
        cast: 16-bit copies of matrices that autocast makes.
        gradient: Whole gradients, as autograd makes them.
        largest_gradient: The largest of them.
        accumulated: Whole gradients that are held over micro-batches.
        reducing: The buffer gradients are reduced in, padding included; of ``ddp`` and ``tensor``, their buckets.
        reduced: Gradients once they are reduced, padding included.
        optimizer: State of the optimizer; nothing is padded.
        largest_update: What the optimizer makes for a moment, of the parameter for which it is most.
    """

    kept: int = 0
    whole: int = 0
    gathering: int = 0
    secondary: int = 0
    cast: int = 0
    gradient: int = 0
    largest_gradient: int = 0
    accumulated: int = 0
    reducing: int = 0
    reduced: int = 0
    optimizer: int = 0
    largest_update: int = 0


def combined(groups: Iterable[GroupBytes]) -> GroupBytes:
    """Groups taken as one."""
    parts = tuple(groups)
    values = {field.name: [getattr(part, field.name) for part in parts] for field in fields(GroupBytes)}
    return GroupBytes(
        **{name: max(v, default=0) if name.startswith("largest_") else sum(v) for name, v in values.items()}
    )


def common_bytes(parameters: Iterable[ParameterLike], setup: TrainingSetup) -> int | None:
    """Bytes a value of most values: what FSDP2 shards. ``None`` if there are no parameters."""
    values: dict[int, int] = {}
    for parameter in parameters:
        stored = setup.stored_bytes(parameter)
        values[stored] = values.get(stored, 0) + math.prod(parameter.shape)
    return max(values, key=lambda stored: values[stored], default=None)


def parameter_bytes(
    parameter: ParameterLike, setup: TrainingSetup, at: Coordinates, *, sharded_bytes: int | None
) -> GroupBytes:
    """Bytes of one parameter on the rank at a coordinate.

    Args:
        parameter: Which one.
        setup: How it is trained.
        at: Where the rank stands.
        sharded_bytes: Bytes a value of what is sharded (:func:`common_bytes`). A group of FSDP2 sums its gradients in
            one tensor, and FSDP2 refuses 0-dim parameters: such, and those of another width, are whole on each rank.

    Raises:
        ConfigError: The parameter has no such dim as ``tp`` is to cut.
    """
    shape, stored = _tp_shape(parameter, setup.axes.tp, at.tp), setup.stored_bytes(parameter)
    if not setup.shards or not shape or stored != sharded_bytes:
        return _replicated(parameter, setup, math.prod(shape), stored)
    return _sharded(parameter, setup, shape, stored, at.dp_shard)


def _tp_shape(parameter: ParameterLike, tp: int, index: int) -> tuple[int, ...]:
    shape, dim = list(parameter.shape), parameter.tp_dim
    if dim is None or tp == 1:
        return tuple(shape)
    if not 0 <= dim < len(shape):
        raise ConfigError(f"parameter {parameter.name} of shape {parameter.shape} has no dim {dim} for tp to cut")
    shape[dim] = shard_rows(shape[dim], tp, index)
    return tuple(shape)


def _replicated(parameter: ParameterLike, setup: TrainingSetup, values: int, stored: int) -> GroupBytes:
    size = values * stored
    gradient = size if parameter.trainable else 0
    if setup.shards:
        return replace(_state_bytes(parameter, setup, size), kept=size, reduced=gradient)
    averages = setup.mode == "ddp" or setup.axes.dp_replicate > 1
    return replace(
        _state_bytes(parameter, setup, size),
        kept=size,
        cast=_cast_bytes(parameter, setup, values, stored),
        gradient=gradient,
        largest_gradient=gradient,
        accumulated=gradient,
        reducing=gradient if averages else 0,
        reduced=gradient,
    )


def _sharded(
    parameter: ParameterLike, setup: TrainingSetup, shape: tuple[int, ...], stored: int, index: int
) -> GroupBytes:
    shards, width = setup.axes.dp_shard, math.prod(shape[1:])
    values, padded = shape[0] * width, padded_rows(shape[0], shards) * width
    gathered = stored if setup.gathered_bytes is None else setup.gathered_bytes
    reduced = gathered if setup.reduced_bytes is None else setup.reduced_bytes
    trained = int(parameter.trainable)
    gradient = trained * values * gathered
    second = setup.secondary_shards
    return replace(
        _state_bytes(parameter, setup, shard_rows(shape[0], shards, index) * width * stored),
        kept=padded * stored,
        whole=padded * shards * gathered,
        gathering=padded * shards * gathered if shards > 1 else 0,
        secondary=padded * shards // second * gathered if second is not None else 0,
        cast=_cast_bytes(parameter, setup, values, gathered),
        gradient=gradient,
        largest_gradient=gradient,
        accumulated=trained * values * reduced,
        reducing=trained * padded * shards * reduced,
        reduced=trained * padded * stored,
    )


def _state_bytes(parameter: ParameterLike, setup: TrainingSetup, held_bytes: int) -> GroupBytes:
    """The optimizer's part, for what a rank holds of a parameter."""
    if not parameter.trainable:
        return GroupBytes()
    states = setup.states_of(parameter.name)
    return GroupBytes(
        optimizer=states.per_value * held_bytes + states.bytes_per_parameter,
        largest_update=states.temporaries * held_bytes,
    )


def _cast_bytes(parameter: ParameterLike, setup: TrainingSetup, values: int, computed: int) -> int:
    """Of a parameter that compute gets in ``computed`` bytes a value."""
    is_cast = setup.precision.endswith("-mixed") and computed > 2 and len(parameter.shape) >= 2
    return 2 * values if is_cast else 0

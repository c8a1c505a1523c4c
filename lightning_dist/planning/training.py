"""What is trained and how, as plain values: the input of the cost models. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from lightning_dist.errors import CombinationError, ConfigError, unknown_option
from lightning_dist.topology.layout import Axes

MODES = ("ddp", "tensor", "zero1", "zero2", "zero3", "hsdp")
PRECISIONS = ("32-true", "bf16-true", "bf16-mixed", "16-mixed")


class ParameterLike(Protocol):
    """What the cost models ask of a parameter: :class:`Parameter`, or any other value with these names."""

    @property
    def name(self) -> str:
        """Its name in the module; of a tied parameter, one of them."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole parameter, whatever a rank holds of it."""

    @property
    def dtype_bytes(self) -> int:
        """Bytes a value."""

    @property
    def trainable(self) -> bool:
        """Whether it gets a gradient."""

    @property
    def block(self) -> int | None:
        """Index of its block, in the order of execution; ``None`` if it is in none."""

    @property
    def tp_dim(self) -> int | None:
        """The dim that tensor parallelism cuts; ``None`` if each rank of the ``tp`` axis holds all of it."""


class Parameter(NamedTuple):
    """A parameter, described. The attributes are those of :class:`ParameterLike`."""

    name: str
    shape: tuple[int, ...]
    dtype_bytes: int = 4
    trainable: bool = True
    block: int | None = None
    tp_dim: int | None = None


class OptimizerStates(NamedTuple):
    """What an optimizer keeps, in torch's implementations.

    Attributes:
        per_value: Tensors of the parameter's shape and dtype.
        bytes_per_parameter: Bytes a parameter tensor, whatever its shape, also where a rank holds nothing of it.
        temporaries: Tensors of the parameter's shape that its update makes, one parameter after the other.
    """

    per_value: int
    bytes_per_parameter: int = 0
    temporaries: int = 0


SGD = OptimizerStates(0)
SGD_MOMENTUM = OptimizerStates(1)
ADAMW = OptimizerStates(2, bytes_per_parameter=4, temporaries=2)  # the step is a 0-dim fp32 tensor


@dataclass(frozen=True, kw_only=True)
class TrainingSetup:
    """How a model is trained, as far as memory depends on it.

    Attributes:
        mode: ``ddp``; ``tensor`` (parameters that ``axes.tp`` cuts, and gradients that ``axes.dp_replicate`` averages
            bucket by bucket); or what FSDP2 shards over ``axes.dp_shard``: ``zero1`` (parameters are gathered together
            before forward and whole until backward, gradients are whole until the last micro-batch), ``zero2`` (the
            same, but gradients are reduced after each micro-batch), ``zero3`` (parameters are whole in the block that
            computes) and ``hsdp`` (``zero3`` over the ranks of a host, with ``axes.dp_replicate`` replicas).
            ``axes.tp`` cuts parameters in any of them.
        axes: Sizes of the parallel axes; ``pp`` is not looked at: the parameters are those of one stage.
        optimizer: What the optimizer keeps for each parameter; or parameter name -> that, where parameter groups
            differ: parameters not in it are in no optimizer.
        precision: Lightning's name. ``-true`` of 16 bit converts the module; ``-mixed`` keeps it, and autocast makes
            16-bit copies of matrices.
        gathered_bytes: Bytes a value of the whole parameters that FSDP2 gathers (its ``param_dtype``), which are then
            also those of gradients before they are reduced; ``None``: as they are stored.
        reduced_bytes: Bytes a value of gradients on their way (FSDP2's ``reduce_dtype``); ``None``: as they are
            computed.
        secondary_shards: Over how many ranks of ``axes.dp_shard`` ``zero3`` shards a second copy of the parameters
            from forward to backward, usually the ranks of a host; ``None``: no second copy.
        prefetch: Of ``zero3`` and ``hsdp``: blocks gathered ahead of the one that computes.
        reduction_buffers: Flat buffers of gradients that blocks may hold at a time, that of the block being reduced
            included; more of them overlap more. Of ``tensor``, copies on their way to being summed. FSDP2 by itself
            has 1 (``set_reduce_scatter_max_input_buffers``).
        micro_batches: Of one optimizer step.
        gradient_as_bucket_view: Of ``ddp``: gradients lie in the buckets.
        staging_bytes: Of the collectives' own buffers on a rank, such as windows in shared memory.

    Raises:
        ConfigError: A value is out of range.
        CombinationError: Values do not go together.
    """

    mode: str
    axes: Axes
    optimizer: OptimizerStates | Mapping[str, OptimizerStates]
    precision: str = "32-true"
    gathered_bytes: int | None = None
    reduced_bytes: int | None = None
    secondary_shards: int | None = None
    prefetch: int = 1
    reduction_buffers: int = 1
    micro_batches: int = 1
    gradient_as_bucket_view: bool = True
    staging_bytes: int = 0

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise unknown_option("mode", self.mode, MODES)
        if self.precision not in PRECISIONS:
            raise unknown_option("precision", self.precision, PRECISIONS)
        for name in ("gathered_bytes", "reduced_bytes", "prefetch", "reduction_buffers", "micro_batches"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}")
        if self.staging_bytes < 0:
            raise ConfigError(f"staging_bytes must be at least 0, got {self.staging_bytes}")
        if not self.shards:
            self._check_unsharded()
        if self.secondary_shards is not None:
            self._check_secondary_shards(self.secondary_shards)

    @property
    def shards(self) -> bool:
        """Whether FSDP2 shards parameters."""
        return self.mode not in ("ddp", "tensor")

    @property
    def keeps_whole(self) -> bool:
        """Whether sharded parameters stay whole from a block's forward to its backward."""
        return self.mode in ("zero1", "zero2")

    @property
    def accumulates_whole(self) -> bool:
        """Whether whole gradients are held over several micro-batches."""
        return self.mode == "zero1" and self.micro_batches > 1

    def stored_bytes(self, parameter: ParameterLike) -> int:
        """Bytes a value of a parameter between steps, and of its optimizer state."""
        is_converted = self.precision.endswith("-true") and self.precision != "32-true"
        return min(2, parameter.dtype_bytes) if is_converted else parameter.dtype_bytes

    def states_of(self, name: str) -> OptimizerStates:
        """What the optimizer keeps for a parameter."""
        if isinstance(self.optimizer, OptimizerStates):
            return self.optimizer
        return self.optimizer.get(name, OptimizerStates(0))

    def _check_unsharded(self) -> None:
        if self.axes.dp_shard > 1:
            raise CombinationError(
                f"{self.mode} shards nothing over data, got axes {self.axes}; put the ranks on dp_replicate, or use "
                "zero1, zero2 or zero3"
            )
        if self.gathered_bytes is not None or self.reduced_bytes is not None:
            raise CombinationError(
                f"gathered_bytes and reduced_bytes are FSDP2's; {self.mode} gathers nothing: leave them out"
            )

    def _check_secondary_shards(self, size: int) -> None:
        shards = self.axes.dp_shard
        if self.mode != "zero3":
            raise CombinationError(f"a second copy is kept by zero3 only, not by {self.mode}; leave it out")
        if self.axes.tp > 1:
            raise CombinationError("FSDP2 keeps no second copy of parameters that tp cuts; leave it out, or set tp=1")
        divisors = [n for n in range(2, shards) if shards % n == 0]
        if size not in divisors:
            raise ConfigError(
                f"secondary_shards={size} must divide dp_shard={shards} and be neither 1 nor all of it; "
                f"allowed: {', '.join(map(str, divisors)) or 'none'}"
            )

"""What becomes of the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from lightning_dist.config.checks import check_choice, check_count, check_flags
from lightning_dist.config.pipeline import PipelineConfig
from lightning_dist.errors import CombinationError, ConfigError

SHARDING_MODES = ("zero1", "zero2", "zero3", "hsdp")
STAGE_SHARDING_MODES = ("zero1", "zero2")
PARALLEL_MODES = ("ddp", *SHARDING_MODES, "tensor", "pipeline")
TENSOR_PLANS = ("auto", "gpt", "huggingface", "mlp")
SECONDARY_SHARDS = ("off", "host")
SHARD_DTYPES = ("same", "fp32", "bf16", "fp16")
UNEVEN_INPUTS = ("stop", "error", "off")
START_METHODS = ("popen", "spawn", "fork", "forkserver")


@dataclass(frozen=True)
class TensorConfig:
    """Layers split over the ranks of a host.

    Attributes:
        size: Ranks that share each layer; they must sit on one host. ``None`` means all ranks of a host with
            ``parallel.mode=tensor``, and 1, which splits nothing, with the others.
        plan: What is split: ``auto`` (the ready plan that fits the model), ``gpt``, ``huggingface`` or ``mlp``, or a
            mapping of patterns of module names to styles, e.g. ``{"*.up": column, "*.down": row}``.
        loss_parallel: Logits stay split over the vocabulary in ``training_step``, and cross-entropy is computed on the
            parts; needs a ``head`` in the plan.
    """

    size: int | None = None
    plan: Any = "auto"
    loss_parallel: bool = False

    def __post_init__(self) -> None:
        if self.size is not None:
            check_count("parallel.tensor.size", self.size, low=1, unit="ranks")
        check_flags("parallel.tensor", self)
        if isinstance(self.plan, str):
            check_choice("parallel.tensor.plan", self.plan, TENSOR_PLANS)
        elif not isinstance(self.plan, Mapping) or not self.plan:
            raise ConfigError(
                f"parallel.tensor.plan={self.plan!r}: must be one of {', '.join(TENSOR_PLANS)}, or a mapping of "
                'patterns of module names to styles, e.g. {"*.up": column, "*.down": row}'
            )


_TENSOR_OPTIONS = tuple(option.name for option in fields(TensorConfig))


@dataclass(frozen=True)
class ParallelConfig:
    """What becomes of the model.

    Attributes:
        mode: ``ddp`` (each rank holds the whole model, gradients are averaged), ``zero1`` (optimizer state is sharded
            over all ranks, gradients are summed into shards once a step), ``zero2`` (also gradients, after each
            micro-batch), ``zero3`` (also parameters, gathered a block ahead), ``hsdp`` (as ``zero3`` over the ranks of
            a host; each host holds all shards), ``tensor`` (the ranks of a host share each layer; hosts are
            replicas) or ``pipeline`` (each rank of a host has some of the layers; hosts are replicas).
        find_unused_parameters: Look for parameters that took no part in a step; costs a walk of the graph under
            ``ddp``, else a small exchange a step, and in ``zero3`` and ``hsdp`` that parameters are gathered all at
            once.
        static_graph: The same parameters take part in every step, in the same order. Only ``ddp``.
        gradient_as_bucket_view: Gradients are views into the buckets, which saves two copies a step and, without
            accumulation, their size in memory. Set it to false for code that detaches or replaces ``.grad``. Only
            ``ddp``.
        broadcast_buffers: Buffers (BatchNorm statistics) follow rank 0 at each training forward.
        uneven_inputs: What happens when ranks have different numbers of training batches: ``stop`` (all stop at the
            same step, the shortest rank's), ``error`` (a named error on all ranks), ``off`` (not checked; ranks that
            run dry leave the others waiting until the deadline).
        secondary_shard: ``host`` (``zero3`` keeps a second shard over the ranks of each host between forward and
            backward, so that backward gathers inside the host) or ``off``.
        shard_modules: Class names, or patterns of module names such as ``model.blocks.*``, of the modules that are
            sharded as a unit; empty: repeated blocks are found. Only ``zero1`` to ``hsdp``.
        prefetch: Blocks gathered ahead of the one that computes. Only ``zero3`` and ``hsdp``.
        cpu_offload: Shards and optimizer live in host memory. Only GPUs, only ``zero1`` to ``hsdp``.
        gather_dtype: What parameters are gathered and computed in: ``same`` as their own, ``bf16`` or ``fp16``; the
            shards, which the optimizer steps, stay as they are. Only ``zero1`` to ``hsdp``.
        reduce_dtype: What gradients are summed in: ``same`` as their parameter's, ``fp32``, ``bf16`` or ``fp16``. Only
            ``zero1`` to ``hsdp``.
        tensor: Layers split over the ranks of a host: by themselves with ``tensor``, inside the shards of ``zero1`` to
            ``hsdp``, or in the stages of ``pipeline``.
        pipeline: Layers dealt to ranks as stages: by themselves with ``pipeline``; with ``zero1`` and ``zero2`` and a
            size, the ranks that hold the same stages shard what is in them.
    """

    mode: str = "ddp"
    find_unused_parameters: bool = False
    static_graph: bool = False
    gradient_as_bucket_view: bool = True
    broadcast_buffers: bool = True
    uneven_inputs: str = "stop"
    secondary_shard: str = "off"
    shard_modules: list[str] = field(default_factory=list)
    prefetch: int = 1
    cpu_offload: bool = False
    gather_dtype: str = "same"
    reduce_dtype: str = "same"
    tensor: TensorConfig = field(default_factory=TensorConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)

    def __post_init__(self) -> None:
        check_choice("parallel.mode", self.mode, PARALLEL_MODES)
        check_choice("parallel.uneven_inputs", self.uneven_inputs, UNEVEN_INPUTS)
        check_choice("parallel.secondary_shard", self.secondary_shard, SECONDARY_SHARDS)
        check_choice("parallel.gather_dtype", self.gather_dtype, SHARD_DTYPES)
        check_choice("parallel.reduce_dtype", self.reduce_dtype, SHARD_DTYPES)
        check_flags("parallel", self)
        check_count("parallel.prefetch", self.prefetch, low=1, high=64, unit="blocks")
        if isinstance(self.shard_modules, str) or not all(isinstance(name, str) for name in self.shard_modules):
            raise ConfigError(
                f"parallel.shard_modules={self.shard_modules!r}: must be a list of class names or patterns, "
                "e.g. [Block] or ['model.blocks.*']"
            )
        if not isinstance(self.tensor, TensorConfig):
            raise ConfigError(
                f"parallel.tensor={self.tensor!r}: must be a mapping of the options {', '.join(_TENSOR_OPTIONS)}, "
                "e.g. {size: 2}; the mode is parallel=tensor"
            )
        if self.secondary_shard == "host" and self.mode != "zero3":
            raise CombinationError(
                f"parallel.secondary_shard=host is for parallel.mode=zero3, whose backward gathers over all hosts; "
                f"with parallel.mode={self.mode} write parallel.secondary_shard=off"
            )
        self._check_split()
        self._check_stages()

    def _check_stages(self) -> None:
        """Refuse what does not go with pipeline stages."""
        if not self.stages:
            return
        if self.mode == "pipeline" and self.pipeline.size == 1:
            raise CombinationError(
                "parallel.mode=pipeline with parallel.pipeline.size=1 cuts nothing; write parallel=ddp"
            )
        stages = f"parallel.pipeline.size={self.pipeline.size}"
        if self.mode in ("zero3", "hsdp"):
            raise CombinationError(
                f"{stages} with parallel.mode={self.mode}: a stage's parameters would have to be gathered for each "
                "micro-batch, or kept while a batch runs, which is what zero2 does; write parallel=zero2 with that size"
            )
        if self.mode in STAGE_SHARDING_MODES:
            self._check_stage_shards(stages)
        elif self.mode != "pipeline":
            raise CombinationError(
                f"{stages} with parallel.mode={self.mode}: write parallel=pipeline with that size; ranks that hold the "
                "same stage then average their gradients"
            )
        if self.shards and (self.tensor.size or 1) > 1:
            raise CombinationError(
                f"{stages} with parallel.mode={self.mode} and parallel.tensor.size={self.tensor.size}: FSDP2 does not "
                "take split layers of a stage; write parallel=pipeline with both sizes, or parallel.tensor.size=null"
            )

    def _check_stage_shards(self, stages: str) -> None:
        """Refuse options of shards that are not right with stages."""
        if self.gather_dtype != "same":
            raise CombinationError(
                f"parallel.gather_dtype={self.gather_dtype} with {stages}: gradients of micro-batches would add up in "
                "that type; write parallel.gather_dtype=same, and precision=bf16-mixed to compute in bf16"
            )
        if self.cpu_offload:
            raise CombinationError(
                f"parallel.cpu_offload=true with {stages}: gradients of tied weights are summed between devices; write "
                "parallel.cpu_offload=false"
            )

    def _check_split(self) -> None:
        """Refuse what does not go with split layers."""
        if self.mode == "tensor" and self.tensor.size == 1:
            raise CombinationError(
                "parallel.mode=tensor with parallel.tensor.size=1 splits nothing; write parallel=ddp"
            )
        no_ddp = "DistributedDataParallel does not take split layers; write parallel=tensor"
        no_second = "FSDP2 keeps no second shard of split layers; write parallel.secondary_shard=off, or parallel=hsdp"
        no_offload = "layers are split between devices; write parallel.cpu_offload=false"
        refused = {
            "mode=ddp": (self.mode == "ddp", no_ddp),
            "secondary_shard=host": (self.secondary_shard == "host", no_second),
            "cpu_offload=true": (self.cpu_offload, no_offload),
        }
        for option, (is_set, reason) in refused.items():
            if self.splits and is_set:
                raise CombinationError(f"parallel.{option} with parallel.tensor.size={self.tensor.size}: {reason}")

    @property
    def shards(self) -> bool:
        """Whether parameters, gradients or optimizer state are sharded over the ranks that read different data."""
        return self.mode in SHARDING_MODES

    @property
    def stages(self) -> bool:
        """Whether the layers are dealt to ranks as pipeline stages."""
        return self.mode == "pipeline" or (self.pipeline.size or 1) > 1

    @property
    def splits(self) -> bool:
        """Whether ranks share layers, and read the same data."""
        return self.mode == "tensor" or (self.tensor.size or 1) > 1


PARALLEL_PRESETS: dict[str, ParallelConfig] = {mode: ParallelConfig(mode=mode) for mode in PARALLEL_MODES}

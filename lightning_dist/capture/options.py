"""The options of a run, flat, by the names under which a user sets them."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import re
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from typing import Any

import lightning.pytorch as pl
from torch import nn

from lightning_dist import build
from lightning_dist.capture.loader_facts import training_loaders
from lightning_dist.config import CheckpointConfig, ParallelConfig
from lightning_dist.data.loading.loader import ShardedLoader

_TRAINER_OPTIONS = (
    "accumulate_grad_batches",
    "check_val_every_n_epoch",
    "gradient_clip_algorithm",
    "gradient_clip_val",
    "log_every_n_steps",
    "max_epochs",
    "max_steps",
    "num_devices",
    "num_nodes",
    "precision",
    "val_check_interval",
)
_CONFIGS = ("parallel", "sync", "topology", "recompute", "checkpoint")
_DDP_BUCKET_MB = 25  # DistributedDataParallel's own
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def strategy_name(trainer: pl.Trainer) -> str:
    """``hierdist zero2``, or the class of another strategy."""
    parallel = getattr(trainer.strategy, "parallel_config", None)
    return type(trainer.strategy).__name__ if parallel is None else f"hierdist {parallel.mode}"


def options_of(trainer: pl.Trainer) -> dict[str, Any]:
    """The options of the Trainer, its strategy, callbacks, optimizers and loader; the same in each run of a script.

    To be asked once training begins: what the user left open (the size of a pipeline, micro-batches) is what it has
    become. What cannot be read is left out.
    """
    found: dict[str, Any] = {}
    for part in _PARTS:
        with contextlib.suppress(Exception):  # parts are the user's, and may raise anything when they are asked
            found.update(part(trainer))
    return found


def _of_trainer(trainer: pl.Trainer) -> dict[str, Any]:
    return {
        **{f"trainer.{name}": plain(getattr(trainer, name, None)) for name in _TRAINER_OPTIONS},
        "trainer.accelerator": trainer.strategy.root_device.type,
        "trainer.strategy": strategy_name(trainer),
    }


def _of_its_parts(trainer: pl.Trainer) -> dict[str, Any]:
    return {
        "trainer.use_distributed_sampler": trainer._accelerator_connector.use_distributed_sampler,
        "trainer.enable_progress_bar": trainer.progress_bar_callback is not None,
        "model.is_compiled": any(map(_is_compiled, trainer.lightning_module.modules())),
    }


def _of_strategy(trainer: pl.Trainer) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for group in _CONFIGS:
        config = getattr(trainer.strategy, f"{group}_config", None)
        if dataclasses.is_dataclass(config):
            found.update(_flat(group, config))
    return found


def _of_sizes(trainer: pl.Trainer) -> dict[str, Any]:
    """What hosts and ranks decide where the user does not."""
    run = getattr(trainer.strategy, "run_context", None)
    parallel = getattr(trainer.strategy, "parallel_config", None)
    if run is None or not isinstance(parallel, ParallelConfig) or not (parallel.splits or parallel.stages):
        return {}
    axes = build.layout_of(run, parallel).axes
    found: dict[str, Any] = {"parallel.tensor.size": axes.tp}
    if parallel.stages:
        found["parallel.pipeline.size"] = axes.pp
        found["parallel.pipeline.micro_batches"] = parallel.pipeline.micro_batches_for(axes.pp)
        found["parallel.pipeline.virtual_stages"] = parallel.pipeline.stages_per_rank
    return found


def _of_checkpoints(trainer: pl.Trainer) -> dict[str, Any]:
    """Of a callback of ours that saves: how often, and how, unless the strategy writes, which was told."""
    callbacks: list[Any] = list(trainer.checkpoint_callbacks)
    ours = [each for each in callbacks if isinstance(getattr(each, "checkpoint_config", None), CheckpointConfig)]
    if not ours:
        return {}
    how = {} if hasattr(trainer.strategy, "checkpoint_config") else _flat("checkpoint", ours[0].checkpoint_config)
    return {**how, "checkpoint.every": ours[0].every}


def _of_ddp(trainer: pl.Trainer) -> dict[str, Any]:
    """Of Lightning's ``DDPStrategy``."""
    given = getattr(trainer.strategy, "_ddp_kwargs", None)
    if not isinstance(given, Mapping):
        return {}
    options = {"bucket_cap_mb": _DDP_BUCKET_MB, **given, "comm_hook": getattr(trainer.strategy, "_ddp_comm_hook", None)}
    return {f"ddp.{name}": plain(value) for name, value in options.items()}


def _of_optimizers(trainer: pl.Trainer) -> dict[str, Any]:
    optimizers = trainer.optimizers
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    return {
        "optimizer.name": ", ".join(type(optimizer).__name__ for optimizer in optimizers),
        "optimizer.fused": bool(groups) and all(bool(group.get("fused")) for group in groups),
    }


def _of_data(trainer: pl.Trainer) -> dict[str, Any]:
    loaders = list(training_loaders(trainer))
    return _flat("data", loaders[0].config) if len(loaders) == 1 and isinstance(loaders[0], ShardedLoader) else {}


def _is_compiled(module: nn.Module) -> bool:
    return module._compiled_call_impl is not None or hasattr(module, "_orig_mod")


def _flat(prefix: str, config: Any) -> dict[str, Any]:
    return {f"{prefix}.{name}": value for name, value in _fields(config)}


def _fields(config: Any) -> Iterator[tuple[str, Any]]:
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            yield from ((f"{field.name}.{name}", inner) for name, inner in _fields(value))
        else:
            yield field.name, plain(value)


def plain(value: Any) -> Any:
    """What JSON holds, the same in each process: without addresses in memory, and without a set's order."""
    if isinstance(value, enum.Enum):
        return value.value
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, AbstractSet):
        return sorted(str(plain(each)) for each in value)
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    try:
        return _ADDRESS.sub("", str(value))
    except Exception:  # the user's class says how it is written
        return type(value).__qualname__


_PARTS: tuple[Callable[[pl.Trainer], dict[str, Any]], ...] = (
    *(_of_trainer, _of_its_parts, _of_strategy, _of_sizes),  # what is resolved, after what was given
    *(_of_checkpoints, _of_ddp, _of_optimizers, _of_data),
)

"""Train a byte-level GPT on text, or an MLP on random vectors, with the groups of ``conf/``.

::

    python examples/train.py                                     # 2 processes on CPU, or this machine's GPUs
    python examples/train.py experiment=quick                    # the same in seconds
    python examples/train.py model=gpt-tiny sync=flat data.path=my_texts/
    python examples/train.py -m sync=flat,hierarchical,bf16      # one job after the other
    torchrun --nproc-per-node=4 examples/train.py trainer.devices=4
    hierdist launch --hosts 1:2 --ranks-per-host 2 -- python examples/train.py elastic=degrade
    python examples/train.py --help                              # the groups and their options
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import hydra
import lightning.pytorch as pl
import torch
from hydra.core.hydra_config import HydraConfig
from lightning.pytorch.callbacks import Callback, LearningRateMonitor, ModelCheckpoint, RichProgressBar
from lightning.pytorch.loggers import TensorBoardLogger
from model import GPT, Learner
from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table
from text_data import ExampleData, StreamedText

from lightning_dist import AsyncShardedCheckpoint, HierDistStrategy, PipelinePicture, monitor_callbacks
from lightning_dist.config_store import check_overrides, register, to_run_config
from lightning_dist.errors import ConfigError, DataError, LaunchError, TopologyError
from lightning_dist.launch import check_environment, job
from lightning_dist.run_config import RunConfig, ShardedDataConfig


class ProgressBar(RichProgressBar):
    """Lightning's, without "/-2" where the number of epochs has no limit."""

    def _get_train_description(self, current_epoch: int) -> str:
        max_epochs = self.trainer.max_epochs
        return (
            super()._get_train_description(current_epoch) if max_epochs and max_epochs > 0 else f"Epoch {current_epoch}"
        )


class Throughput(Callback):
    """Counts training samples a second, validation and the first micro-batch left out."""

    def __init__(self) -> None:
        self.samples = 0
        self.seconds = 0.0
        self._since: float | None = None

    @property
    def rate(self) -> float | None:
        """Samples a second over all ranks; None before the second micro-batch."""
        return self.samples / self.seconds if self.seconds > 0 else None

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._since = self._since or time.perf_counter()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        now = time.perf_counter()
        if self._since is not None and trainer.fit_loop.total_batch_idx > 0:
            self.seconds += now - self._since
            part = trainer.distributed_sampler_kwargs
            self.samples += len(batch[0]) * (part["num_replicas"] if part else 1)
        self._since = now

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._since = None


def make_trainer(run: RunConfig, folder: Path, *, validate: bool) -> pl.Trainer:
    """A Trainer with our strategy that writes into ``folder``."""
    arguments = asdict(run.trainer)
    arguments["devices"] = _devices(run, os.environ)
    arguments["num_nodes"] = _num_nodes(run, os.environ)
    show_progress = arguments.pop("enable_progress_bar")
    logger = TensorBoardLogger(folder, name="tensorboard", version="") if arguments.pop("logger") else False
    monitor = replace(run.monitor, folder=run.monitor.folder or str(folder / "monitor"))
    callbacks: list[Callback] = [Throughput(), *monitor_callbacks(monitor)]
    if show_progress:
        callbacks.append(ProgressBar())
    if logger:
        callbacks.append(LearningRateMonitor())
    if run.parallel.stages:
        callbacks.append(PipelinePicture(folder))
    keep = run.checkpoint
    if keep.mode != "off":
        kind = ModelCheckpoint if keep.mode == "full" else AsyncShardedCheckpoint
        is_auto = keep.every == "auto"
        pace = {"every": "auto", "mtbf_h": keep.mtbf_h} if is_auto else {"every_n_train_steps": keep.every_n_steps}
        callbacks.append(
            kind(
                keep.folder or folder / "checkpoints",
                **pace,
                save_top_k=keep.save_top_k,
                save_last=keep.save_last,
                monitor=keep.monitor,
            )
        )
    if not validate:
        arguments["limit_val_batches"] = 0
    return pl.Trainer(
        **arguments,
        strategy=HierDistStrategy(
            parallel=run.parallel,
            sync=run.sync,
            topology=run.topology,
            recompute=run.recompute,
            checkpoint=keep.of_strategy,
            elastic=run.elastic,
        ),
        default_root_dir=folder,
        logger=logger,
        callbacks=callbacks,
        enable_checkpointing=keep.mode != "off",
        enable_progress_bar=show_progress,
        enable_model_summary=False,
    )


def train(run: RunConfig, folder: Path) -> None:
    """One run: train, then show what came out."""
    if (
        run.ckpt_path not in (None, "last", "best", "hpc")
        and "://" not in run.ckpt_path
        and not (Path(run.ckpt_path).exists())
    ):
        raise ConfigError(f"ckpt_path={run.ckpt_path} does not exist")
    pl.seed_everything(run.seed, workers=True, verbose=False)
    data: ExampleData | StreamedText
    if isinstance(run.data, ShardedDataConfig):
        data = StreamedText(run.data, run.model, folder, seed=run.seed)
    else:
        data = ExampleData(run.data, run.model, seed=run.seed)
    trainer = make_trainer(run, folder, validate=data.has_validation)
    check_environment(trainer.num_devices, trainer.num_nodes, os.environ)
    data.check(trainer.world_size)
    learner = Learner(run.model, run.optimizer, max_steps=run.trainer.max_steps)
    trainer.fit(learner, data, ckpt_path=run.ckpt_path)
    if trainer.is_global_zero:
        show(run, trainer, learner, folder)


def show(run: RunConfig, trainer: pl.Trainer, learner: Learner, folder: Path) -> None:
    """Print the results and a sample of text, and keep both in the folder."""
    console = Console()
    table = Table(title="Result", show_header=False, title_justify="left")
    results = _results(trainer, learner)
    for name, value in results.items():
        table.add_row(name, value)
    (folder / "result.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    here = Path.cwd()
    table.add_row("outputs", str(folder.relative_to(here) if folder.is_relative_to(here) else folder))
    console.print(table)
    if isinstance(learner.model, GPT) and run.sample_bytes:
        text = learner.model.continue_text(
            run.sample_prompt.encode(), num_bytes=run.sample_bytes, temperature=run.sample_temperature, seed=run.seed
        )
        sample = run.sample_prompt + text.decode(errors="replace")
        (folder / "sample.txt").write_text(sample, encoding="utf-8")
        console.rule("Sample")
        console.print(sample, markup=False, highlight=False)


def _results(trainer: pl.Trainer, learner: Learner) -> dict[str, str]:
    names = {
        "train_loss": "training loss, last step",
        "val_loss": "validation loss",
        "train_bits_per_byte": "bits per byte, last step",
        "val_bits_per_byte": "bits per byte, validation",
    }
    metrics = trainer.callback_metrics
    results = {text: f"{metrics[name].item():.4f}" for name, text in names.items() if name in metrics}
    throughput = next(callback for callback in trainer.callbacks if isinstance(callback, Throughput))
    rate = throughput.rate
    results["samples/s"] = "unavailable" if rate is None else f"{rate:.1f}"
    results["steps"] = str(trainer.global_step)
    results["ranks"] = str(trainer.world_size)
    results["parameters"] = f"{sum(p.numel() for p in learner.parameters()):,}"
    return results


def _devices(run: RunConfig, environ: os._Environ[str]) -> Any:
    """Processes a host: what a launcher outside has started, else one a GPU, else two on CPU."""
    if run.trainer.devices != "auto":
        return run.trainer.devices
    started = environ.get("LOCAL_WORLD_SIZE") or environ.get("SLURM_NTASKS_PER_NODE")
    if started:
        return int(started)
    on_gpu = run.trainer.accelerator in ("gpu", "cuda") or (
        run.trainer.accelerator == "auto" and torch.cuda.is_available()
    )
    return "auto" if on_gpu else 2


def _num_nodes(run: RunConfig, environ: os._Environ[str]) -> int:
    """Hosts: as many as a launcher outside has started."""
    if run.trainer.num_nodes != "auto":
        return int(run.trainer.num_nodes)
    is_alone = environ.get("SLURM_JOB_NAME") in ("bash", "interactive")  # an allocation in which the script runs once
    return int(environ.get("GROUP_WORLD_SIZE") or (not is_alone and environ.get("SLURM_NNODES")) or 1)


@hydra.main(version_base="1.3", config_path="pkg://lightning_dist.conf", config_name="train")
@job
def main(config: DictConfig) -> None:
    """The task of one job."""
    try:
        run = to_run_config(config)
        train(run, Path(HydraConfig.get().runtime.output_dir))
    except (ConfigError, DataError, LaunchError, TopologyError) as error:
        sys.exit(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    register()
    try:
        check_overrides(sys.argv[1:])
    except ConfigError as error:
        sys.exit(f"{type(error).__name__}: {error}")
    main()

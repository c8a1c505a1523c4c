"""What a run's facts say of its options: what they have become, and the same in each process."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import nn

from lightning_dist import AsyncShardedCheckpoint, ParallelConfig, ShardedLoader
from lightning_dist.capture.facts import run_facts
from lightning_dist.capture.options import options_of, plain
from lightning_dist.topology.spec import Cluster
from tests.distributed.lightning_runs import OddModule, loader_of, make_batches, sgd


def trainer(**arguments: Any) -> pl.Trainer:
    given: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return pl.Trainer(accelerator="cpu", devices=1, **{**given, **arguments})


def of_cluster(shape: str, parallel: ParallelConfig) -> Any:
    """A Trainer of which only its strategy is there."""
    run = SimpleNamespace(cluster=Cluster.parse(shape))
    return SimpleNamespace(strategy=SimpleNamespace(run_context=run, parallel_config=parallel))


@pytest.mark.parametrize("given", [{}, {"snapshot": "overlapped"}])
def test_a_callback_that_writes_checkpoints_under_ddp_says_how(tmp_path: Path, given: dict[str, Any]) -> None:
    config = {"mode": "async_sharded", **given}
    saves = AsyncShardedCheckpoint(tmp_path, checkpoint=config)
    options = options_of(trainer(strategy="ddp", callbacks=[saves]))
    assert options["checkpoint.mode"] == "async_sharded"
    assert options["checkpoint.snapshot"] == given.get("snapshot", "at_once")
    assert "checkpoint.mode" not in options_of(trainer(strategy="ddp"))


def test_a_strategy_that_was_told_counts_and_not_the_callback(tmp_path: Path) -> None:
    saves = AsyncShardedCheckpoint(tmp_path, every="auto", mtbf_h=200)
    ours = trainer(strategy="hierdist", callbacks=[saves])
    options = options_of(ours)
    assert options["checkpoint.mode"] == ours.strategy.checkpoint_config.mode  # type: ignore[attr-defined]
    assert options["checkpoint.every"] == "auto"


def test_sizes_are_what_they_have_become() -> None:
    options = options_of(of_cluster("2x4", ParallelConfig(mode="pipeline")))
    assert options["parallel.pipeline.size"] == 4
    assert options["parallel.pipeline.micro_batches"] == 16
    assert options["parallel.pipeline.virtual_stages"] == 1
    assert options["parallel.tensor.size"] == 1
    assert options_of(of_cluster("2x4", ParallelConfig(mode="tensor")))["parallel.tensor.size"] == 4
    assert options_of(of_cluster("2x4", ParallelConfig()))["parallel.pipeline.size"] is None


def test_what_advice_would_change_is_known(tmp_path: Path) -> None:
    found: dict[str, Any] = {}

    class Asks(pl.Callback):
        def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            found.update(options_of(trainer))

    module = OddModule(functools.partial(torch.optim.AdamW, fused=True))
    loader = loader_of(make_batches(1, 2)[0])
    options = {"use_distributed_sampler": False, "max_epochs": 1, "enable_checkpointing": False}
    trainer(callbacks=[Asks()], default_root_dir=tmp_path, **options).fit(module, loader, loader)
    assert found["optimizer.name"] == "AdamW"
    assert found["optimizer.fused"] is True
    assert found["trainer.use_distributed_sampler"] is False
    assert found["trainer.enable_progress_bar"] is False
    assert found["trainer.log_every_n_steps"] == 50
    assert found["model.is_compiled"] is False


def test_a_compiled_model_and_a_plain_optimizer_are_told_apart() -> None:
    ours = trainer(enable_progress_bar=True)
    module = OddModule(sgd)
    module.net[0].compile(backend="eager")  # never called
    ours.strategy._lightning_module = module
    ours.strategy.optimizers = [torch.optim.SGD(module.parameters(), lr=0.1)]
    options = options_of(ours)
    assert options["model.is_compiled"] is True
    assert options["trainer.enable_progress_bar"] is True
    assert options["optimizer.fused"] is False


def test_options_of_our_loader_are_the_runs() -> None:
    data = [torch.zeros(2)] * 8
    loader = ShardedLoader(data, config={"batch_size": 2, "workers": 3, "readers": "processes"})
    ours = SimpleNamespace(fit_loop=SimpleNamespace(_combined_loader=SimpleNamespace(flattened=[loader])))
    options = options_of(ours)  # type: ignore[arg-type]
    assert (options["data.workers"], options["data.readers"]) == (3, "processes")


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (nn.ReLU(), "ReLU()"),
        (object(), "<object object>"),
        (functools.partial(len, object()), "functools.partial(<built-in function len>, <object object>)"),
        ({"b", "a"}, ["a", "b"]),
        ({"hosts": {"a": (0, 1)}}, {"hosts": {"a": [0, 1]}}),
        (SimpleNamespace(__str__=None), "namespace(__str__=None)"),
    ],
)
def test_values_are_written_without_addresses(value: Any, said: Any) -> None:
    assert plain(value) == said
    json.dumps(plain(value))


def test_what_cannot_be_written_is_named_by_its_class() -> None:
    class Silent:
        def __str__(self) -> str:
            raise RuntimeError

    assert plain(Silent()).endswith("Silent")


def hook(state: object, bucket: object) -> None:
    """Of DistributedDataParallel; never called."""


def test_the_configurations_hash_does_not_know_where_objects_lie() -> None:
    made = [trainer(strategy=DDPStrategy(ddp_comm_hook=functools.partial(hook, object()))) for _ in range(2)]
    one, other = map(run_facts, made)
    assert one.config_hash == other.config_hash
    assert "hook" in one.options["ddp.comm_hook"]

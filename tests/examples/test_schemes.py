"""Every way in which gradients travel, from the example by one override: it trains, and goes on with other ranks."""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import pytest
import torch
from hydra import compose, initialize_config_module

from lightning_dist import config_store
from lightning_dist.run_config import RunConfig
from tests.examples.test_train import TRAIN, printing_into
from tests.support.ranks import RankPool
from tests.support.sweeps import sampled
from tests.support.tasks import RankContext

LAYOUTS: dict[int, dict[str, list[int]]] = {
    4: {"a": [0, 1], "b": [2, 3]},
    3: {"a": [0, 1], "b": [2]},
    1: {"a": [0]},
}
SHORT = [
    "model=gpt-tiny",
    "trainer=debug",
    "trainer.detect_anomaly=false",
    "trainer.num_sanity_val_steps=0",
    "monitor=off",
    "sample_bytes=0",
    "optimizer.schedule=constant",  # so that a step is the same in a longer run
    "optimizer.warmup_steps=0",
    "optimizer.lr=0.003",
    "checkpoint=async_sharded",
    "checkpoint.save_top_k=-1",
    "sync.chunk_bytes=65536",  # several a bucket
    "data.lanes=12",  # shared out evenly by 4, 3 and 1
]
SCHEMES = {
    "hierarchical": [],
    "flat": [],
    "bf16": [],
    "int8": [],
    "onebit": ["sync.warmup_steps=2"],
    "topk": [],
    "powersgd": [],
    "auto": [],
    "local_sgd": ["sync.local_sgd.every=3"],  # HALF lies between two synchronisations
    "parameter_server": [],  # the model has no table to serve: as hierarchical
}
KEEPS = ("int8", "onebit", "topk", "powersgd")
UNEVEN = {("zero2", "local_sgd")}
"""Needs as many ranks on each host."""
HALF, STEPS = 4, 8
LARGEST = 256 * 64  # values of a parameter
DEADLINE_S = 150.0


@dataclass
class Noted:
    """What a rank saw of its run.

    Attributes:
        first_step: Steps made before this run.
        losses: Training loss of each step, of this rank.
        owed_at_start: What this rank owes of each parameter when training begins.
        owed_at_half: The same after step :data:`HALF`.
    """

    first_step: int = -1
    losses: list[float] = field(default_factory=list)
    owed_at_start: dict[str, torch.Tensor] = field(default_factory=dict)
    owed_at_half: dict[str, torch.Tensor] = field(default_factory=dict)


class Notes(pl.Callback):
    """Takes them."""

    def __init__(self) -> None:
        self.noted = Noted()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.noted.first_step = trainer.global_step
        self.noted.owed_at_start = _owed(trainer)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, *_: Any) -> None:
        self.noted.losses.append(float(outputs["loss"]))
        if trainer.global_step == HALF:
            self.noted.owed_at_half = _owed(trainer)


def _owed(trainer: pl.Trainer) -> dict[str, torch.Tensor]:
    feedback = trainer.strategy._mode.feedback  # type: ignore[attr-defined]
    found: dict[str, torch.Tensor] = {}
    for name, pieces in ({} if feedback is None else feedback.owed()).items():
        for low, values in pieces:
            total = found.setdefault(name, torch.zeros(LARGEST))
            total[low : low + len(values)] += values
    return found


def train(context: RankContext, run: RunConfig, folder: Path) -> Noted:
    """The example's training on this rank, watched."""
    sys.path.insert(0, str(TRAIN.parent))
    try:
        import train as example
    finally:
        sys.path.pop(0)
    notes, make_trainer = Notes(), example.make_trainer

    def watched(*args: Any, **kwargs: Any) -> pl.Trainer:
        trainer = make_trainer(*args, **kwargs)
        trainer.callbacks.append(notes)
        return trainer

    with patch.object(example, "make_trainer", watched), printing_into(context.tmp_path / "printed"):
        example.train(run, folder)
    return notes.noted


def train_on(ranks: RankPool, num_ranks: int, folder: Path, *overrides: str) -> list[Noted]:
    """What each rank noted."""
    config_store.register()
    hosts = ", ".join(f"{host}: {members}" for host, members in LAYOUTS[num_ranks].items())
    here = [f"topology.hosts={{{hosts}}}", f"trainer.devices={num_ranks}"]
    with initialize_config_module("lightning_dist.conf", version_base="1.3"):
        run = config_store.to_run_config(compose("train", overrides=[*SHORT, *here, *overrides]))
    environment = {"TORCHELASTIC_RUN_ID": "schemes"}
    # The hosts are made by the option, as a user would: to Lightning they are one.
    return ranks.run(train, world_size=num_ranks, args=(run, folder), deadline_s=DEADLINE_S, env=environment)


def total(noted: list[Noted], when: str) -> dict[str, torch.Tensor]:
    """What all ranks together owe."""
    found: dict[str, torch.Tensor] = {}
    for of_rank in noted:
        for name, values in getattr(of_rank, when).items():
            found[name] = found.get(name, torch.zeros_like(values)) + values
    return found


def write_text(path: Path) -> Path:
    draw = random.Random(0)
    words = ["lane", "host", "rank", "bucket", "link", "slow", "fast", "sum", "mean", "owner"]
    path.write_text(" ".join(draw.choice(words) for _ in range(8000)), encoding="utf-8")
    return path


CELLS = {f"{parallel}-{sync}": (parallel, sync) for parallel in ("ddp", "zero2") for sync in SCHEMES}


@pytest.mark.parametrize(("parallel", "sync"), sampled(CELLS, ["zero2-onebit"]))
def test_it_trains_and_goes_on_with_as_many_ranks_and_with_others(
    ranks: RankPool, tmp_path: Path, parallel: str, sync: str
) -> None:
    common = [f"data.path={write_text(tmp_path / 'text.txt')}", f"parallel={parallel}", f"sync={sync}", *SCHEMES[sync]]
    saving = [*common, f"trainer.max_steps={STEPS}", f"checkpoint.every_n_steps={HALF}"]
    whole = train_on(ranks, 4, tmp_path / "whole", *saving)
    half = next((tmp_path / "whole" / "checkpoints").glob(f"*step={HALF}*"))
    owed = total(whole, "owed_at_half")
    assert bool(owed) == (sync in KEEPS)
    more = [*common, f"trainer.max_steps={STEPS}", "checkpoint=off", f"ckpt_path='{half}'"]
    same = train_on(ranks, 4, tmp_path / "same", *more)
    for of_rank, of_whole in zip(same, whole, strict=True):
        # Where no feedback is kept, torch deals buckets anew after the first backward of each run, so that these two
        # may add up in another order.
        tolerance = 0.0 if sync in KEEPS else 1e-4
        assert of_rank.losses == pytest.approx(of_whole.losses[HALF:], rel=tolerance, abs=0)
    first = max(of_rank.losses[0] for of_rank in whole)
    last = min(of_rank.losses[-1] for of_rank in whole)
    assert last < first - 0.5, "it learns"
    for num_ranks in (1,) if (parallel, sync) in UNEVEN else (3, 1):
        others = train_on(ranks, num_ranks, tmp_path / str(num_ranks), *more)
        for of_rank in others:
            assert of_rank.first_step == HALF
            # Other batches than the run with four ranks has: what it has learnt by now is what counts.
            assert of_rank.losses[0] < (first + whole[0].losses[HALF]) / 2
            assert of_rank.losses[-1] < of_rank.losses[0]
        kept = total(others, "owed_at_start")
        for name, values in owed.items():
            torch.testing.assert_close(kept[name], values, rtol=1e-5, atol=1e-7)  # another order of sums

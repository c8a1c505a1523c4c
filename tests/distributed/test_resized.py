"""A run that goes on with another number of ranks: its batch, its samples, its learning rate and its weights."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_dist import AsyncShardedCheckpoint, DataConfig, ShardedDataModule
from tests.distributed.lightning_runs import adamw, odd_model, strategy_of, trainer_on_pool
from tests.distributed.restarted_runs import MEMORY, KilledAt, Start, prepare, started
from tests.support.keepers import ending_keepers
from tests.support.numbered import Ids, ids_of
from tests.support.ranks import Died, RankPool
from tests.support.sweeps import sampled
from tests.support.tasks import RankContext

SAMPLES, STEPS, EPOCH = 48, 12, 6  # steps of 8 samples


def vectors_of(batch: torch.Tensor) -> torch.Tensor:
    """Ten numbers of each sample."""
    return torch.stack([torch.randn(10, generator=torch.Generator().manual_seed(each)) for each in ids_of(batch)])


class OfIds(pl.LightningModule):
    """What a sample is follows from its number; notes which were trained on in which step."""

    pipeline_layers = "net"

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = odd_model()
        self.trained: list[tuple[int, int]] = []
        self.rates: list[float] = []

    def pipeline_input(self, batch: torch.Tensor) -> torch.Tensor:
        return vectors_of(batch)[:, :7]

    def on_train_batch_start(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.trained += [(self.trainer.global_step, each) for each in ids_of(batch)]

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        vectors = vectors_of(batch)
        return torch.nn.functional.mse_loss(self.net(vectors[:, :7]), vectors[:, 7:])

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        assert not self.training
        self.net(self.pipeline_input(batch))

    def on_before_zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
        self.rates.append(optimizer.param_groups[0]["lr"])

    def configure_optimizers(self) -> Any:
        optimizer = adamw(list(self.parameters()))
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]


@dataclass(frozen=True)
class Ended:
    """What a rank has after a fit."""

    first: int
    accumulation: int
    batch: int
    trained: list[tuple[int, int]]
    weights: dict[str, torch.Tensor]
    validated_at: list[int]


class Notes(pl.Callback):
    """Where training begins, and where it is validated."""

    def __init__(self) -> None:
        self.first = -1
        self.validated_at: list[int] = []

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.first = trainer.global_step

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.validated_at.append(trainer.global_step)


def fit(context: RankContext, start: Start, elastic: dict[str, Any], batch_size: int, accumulation: int = 1) -> Ended:
    with started(start):
        notes = Notes()
        kind = ModelCheckpoint if start.checkpoint == "full" else AsyncShardedCheckpoint
        config = DataConfig(batch_size=batch_size, lanes=12, shuffle_block=4)
        data = ShardedDataModule(Ids(SAMPLES), val=Ids(12), config=config)
        trainer = trainer_on_pool(
            context,
            strategy_of(parallel=start.parallel, checkpoint=start.checkpoint, elastic={"mode": "degrade", **elastic}),
            callbacks=[
                kind(start.checkpoints, every_n_train_steps=start.saves_every),
                notes,
                KilledAt(start.killed_at, start.killed_in),
            ],
            enable_checkpointing=True,
            default_root_dir=start.folder,
            max_epochs=-1,
            max_steps=STEPS,
            val_check_interval=4 * accumulation,
            check_val_every_n_epoch=None,
            limit_val_batches=1,
            accumulate_grad_batches=accumulation,
        )
        module = OfIds()
        trainer.fit(module, data)
        weights = {name: value.detach().clone() for name, value in module.state_dict().items()}
        return Ended(
            notes.first, trainer.accumulate_grad_batches, data.batch_size, module.trained, weights, notes.validated_at
        )


@dataclass(frozen=True)
class Size:
    """Ranks of each host, samples of a batch, and passes a step; how many ranks read other data, if not all."""

    hosts: tuple[int, ...]
    batch: int
    passes: int
    readers: int | None = None

    @property
    def ranks(self) -> int:
        return sum(self.hosts)

    @property
    def samples(self) -> int:
        return (self.readers or self.ranks) * self.batch * self.passes

    @property
    def layout(self) -> list[tuple[str, list[int]]]:
        ends = list(itertools.accumulate(self.hosts))
        return [
            (f"host-{n}", list(range(end - count, end)))
            for n, (count, end) in enumerate(zip(self.hosts, ends, strict=True))
        ]


ONE, TWO, FOUR = Size((1,), 4, 2), Size((2,), 4, 1), Size((2, 2), 2, 1)
CUT = {"mode": "pipeline", "pipeline": {"size": 2, "micro_batches": 2, "schedule": "gpipe"}}
CUT_AGAIN = {"mode": "pipeline", "pipeline": {"micro_batches": 2, "schedule": "gpipe"}}  # as many as a host has ranks
RESIZES: dict[str, tuple[Any, Size, Size]] = {
    "ddp, 2 to 1": ("ddp", TWO, ONE),
    "zero2, 2 to 1": ("zero2", TWO, ONE),
    "zero3, 2 to 1": ("zero3", TWO, ONE),
    "ddp, 1 to 2": ("ddp", ONE, TWO),
    "zero2, 4 to 3": ("zero2", Size((4,), 3, 1), Size((3,), 2, 2)),
    "zero3, 4 to 2": ("zero3", FOUR, Size((2,), 2, 2)),
    "zero3, 3 + 1 to 3": ("zero3", Size((3, 1), 3, 1), Size((3,), 2, 2)),
    "ddp, 3 + 1 to 1": ("ddp", Size((3, 1), 2, 1), Size((1,), 2, 4)),
    "hsdp, 2 + 2 to 2": ("hsdp", FOUR, Size((2,), 2, 2)),
    "hsdp, 2 to 2 + 2": ("hsdp", Size((2,), 2, 2), Size((2, 2), 2, 1)),
    "hsdp, 2 + 2 to 1 + 1": ("hsdp", FOUR, Size((1, 1), 2, 2)),
    "pipeline, 2 + 2 to 2": (CUT, Size((2, 2), 4, 1, readers=2), Size((2,), 4, 2, readers=1)),
    "pipeline, 2 to 2 + 2": (CUT, Size((2,), 4, 2, readers=1), Size((2, 2), 4, 1, readers=2)),
    "pipeline, 4 to 3": (CUT_AGAIN, Size((4,), 4, 2, readers=1), Size((3,), 4, 2, readers=1)),
    "zero2 in stages, 2 + 2 to 2": (
        {**CUT, "mode": "zero2"},
        Size((2, 2), 4, 1, readers=2),
        Size((2,), 4, 2, readers=1),
    ),
    "pipeline, 2 to 1": (CUT_AGAIN, Size((2,), 4, 2, readers=1), Size((1,), 4, 2)),
    "the same, zero3": ("zero3", TWO, TWO),
    "the same, ddp": ("ddp", TWO, TWO),
    "the same, hsdp": ("hsdp", FOUR, FOUR),
}


@pytest.mark.parametrize(
    ("parallel", "first", "then"),
    sampled(
        RESIZES,
        always=["ddp, 2 to 1", "zero3, 3 + 1 to 3", "zero2, 4 to 3", "hsdp, 2 + 2 to 2", "pipeline, 2 + 2 to 2"],
    ),
)
def test_the_global_batch_stays_and_so_do_the_numbers(
    ranks: RankPool, tmp_path: Path, parallel: Any, first: Size, then: Size
) -> None:
    """Sums of gradients are rounded in another order, so weights differ by that; at the same size by nothing."""
    start = Start(tmp_path / "run", parallel=parallel, checkpoint=MEMORY)
    whole = replace(start, folder=tmp_path / "whole", checkpoint="full")
    prepare(start)
    prepare(whole)
    assert first.samples == then.samples
    killed_at = SAMPLES // first.samples - 1
    kept = killed_at - killed_at % 2
    expected = ranks.run(fit, layout=first.layout, args=(whole, {}, first.batch, first.passes))
    with ending_keepers(start.checkpoints):
        args = (replace(start, killed_at=killed_at), {}, first.batch, first.passes)
        died = ranks.run(fit, layout=first.layout, args=args, may_die=range(first.ranks))
        assert {type(each) for each in died} == {Died}
        got = ranks.run(fit, layout=then.layout, args=(replace(start, round=2), {}, first.batch, first.passes))
    for ended in got:
        assert (ended.first, ended.batch, ended.accumulation) == (kept, then.batch, then.passes)
        for name, value in expected[0].weights.items():
            error = (ended.weights[name] - value).abs().max()
            assert error <= (0 if first == then else 1e-6), f"{name} by {error:.2g}"
    again = by_step(got, then)
    assert again == {step: ids for step, ids in by_step(expected, first).items() if step >= kept}
    assert expected[0].validated_at
    assert got[0].validated_at == [step for step in expected[0].validated_at if step > kept]


@pytest.mark.parametrize("checkpoint", ["sharded", pytest.param("full", marks=pytest.mark.sweep)])
def test_a_step_that_is_saved_is_not_saved_again_in_the_middle_of_the_next(
    ranks: RankPool, tmp_path: Path, checkpoint: str
) -> None:
    """The samples of its first pass would be lost."""
    start = Start(tmp_path / "run", checkpoint=checkpoint, saves_every=2)
    prepare(start)
    first, again = replace(start, killed_at=3), replace(start, round=2, killed_at=2, killed_in=1)
    for size, stopped in ((TWO, first), (ONE, again)):
        args = (stopped, {}, TWO.batch, TWO.passes)
        died = ranks.run(fit, layout=size.layout, args=args, may_die=range(size.ranks))
        assert {type(each) for each in died} == {Died}
    (got,) = ranks.run(fit, layout=ONE.layout, args=(replace(start, round=3), {}, TWO.batch, TWO.passes))
    left = [ids for step, ids in by_step([got], ONE).items() if step < EPOCH]
    assert (got.first, [len(ids) for ids in left]) == (2, [8] * (EPOCH - 2))
    assert len({each for ids in left for each in ids}) == SAMPLES - 2 * 8


def test_where_the_batch_cannot_be_kept_each_step_has_all_its_passes(ranks: RankPool, tmp_path: Path) -> None:
    """8 samples a step become 9, and 24 that are done are no multiple of 9: the first step has 9 all the same."""
    start = Start(tmp_path / "run", checkpoint={**MEMORY, "memory_every_n_steps": 1})
    first, then = Size((2,), 2, 2), Size((3,), 1, 3)
    prepare(start)
    with ending_keepers(start.checkpoints):
        args = (replace(start, killed_at=3), {}, first.batch, first.passes)
        died = ranks.run(fit, layout=first.layout, args=args, may_die=range(first.ranks))
        assert {type(each) for each in died} == {Died}
        # Saved in the middle of that epoch, too: its windows go on as they are.
        again = replace(start, round=2, killed_at=4)
        died = ranks.run(fit, layout=then.layout, args=(again, {}, first.batch, first.passes), may_die=range(3))
        assert {type(each) for each in died} == {Died}
        got = ranks.run(fit, layout=then.layout, args=(replace(start, round=3), {}, first.batch, first.passes))
    steps = by_step(got, then)
    # Of the 24 samples that were left of the epoch, 9 were step 3's; the next epoch begins with whole steps.
    assert {step: len(ids) for step, ids in steps.items()} == {4: 9, 5: 6, **dict.fromkeys(range(6, 11), 9), 11: 3}
    assert len({*steps[4], *steps[5]}) == 15
    assert sorted(each for step in range(6, 12) for each in steps[step]) == list(range(SAMPLES))


def test_a_run_of_which_nothing_was_saved_begins_at_the_size_that_it_first_had(ranks: RankPool, tmp_path: Path) -> None:
    start, whole = Start(tmp_path / "run", killed_at=1), Start(tmp_path / "whole", checkpoint="full")
    prepare(start)
    prepare(whole)
    expected = ranks.run(fit, layout=TWO.layout, args=(whole, {}, TWO.batch, TWO.passes))
    with ending_keepers(start.checkpoints):
        died = ranks.run(fit, layout=TWO.layout, args=(start, {}, TWO.batch, TWO.passes), may_die=range(2))
        assert {type(each) for each in died} == {Died}
        again = replace(start, round=2, killed_at=None)
        (ended,) = ranks.run(fit, layout=ONE.layout, args=(again, {}, TWO.batch, TWO.passes))
    assert (ended.first, ended.batch, ended.accumulation) == (0, ONE.batch, ONE.passes)
    assert by_step([ended], ONE) == by_step(expected, TWO)


def by_step(ended: list[Ended], size: Size) -> dict[int, list[int]]:
    """The samples of each step, of all ranks; those of a pipeline read the same."""
    found: dict[int, list[int]] = {}
    for each in ended:
        for step, number in each.trained:
            found.setdefault(step, []).append(number)
    each = size.ranks // (size.readers or size.ranks)
    return {step: sorted(ids)[::each] for step, ids in sorted(found.items())}


# -- per_rank ----------------------------------------------------------------------------------------------------------


class Rates(pl.Callback):
    """The learning rate of each step as the optimizer has it, and as everybody else sees it."""

    def __init__(self) -> None:
        self.used: list[float] = []
        self.seen: list[float] = []
        self._is_watching = False

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        """Once all hooks on the optimizer are there that come before it."""
        if not self._is_watching:
            self._is_watching = True
            trainer.optimizers[0].register_step_pre_hook(self._note)

    def _note(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self.used.append(optimizer.param_groups[0]["lr"])

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.seen.append(trainer.optimizers[0].param_groups[0]["lr"])


def fit_per_rank(context: RankContext, start: Start, rate: str) -> tuple[list[float], list[float], list[int]]:
    """The rates, and the samples of each step."""
    with started(start):
        rates = Rates()
        elastic = {"mode": "degrade", "batch": "per_rank", "rate": rate}
        trainer = trainer_on_pool(
            context,
            strategy_of(checkpoint=start.checkpoint, elastic=elastic),
            callbacks=[
                AsyncShardedCheckpoint(start.checkpoints, every_n_train_steps=100),
                rates,
                KilledAt(start.killed_at),
            ],
            enable_checkpointing=True,
            default_root_dir=start.folder,
            max_epochs=2,
        )
        module = OfIds()
        trainer.fit(module, ShardedDataModule(Ids(SAMPLES), config=DataConfig(batch_size=4, lanes=12, shuffle_block=4)))
        return rates.used, rates.seen, [each for _, each in module.trained]


@pytest.mark.parametrize(
    ("rate", "factor"),
    [
        pytest.param("linear", 0.5, marks=pytest.mark.sweep),
        ("sqrt", 0.5**0.5),
        pytest.param("none", 1.0, marks=pytest.mark.sweep),
    ],
)
def test_the_learning_rate_follows_the_global_batch(ranks: RankPool, tmp_path: Path, rate: str, factor: float) -> None:
    start = Start(tmp_path / "run", checkpoint=MEMORY)
    prepare(start)
    with ending_keepers(start.checkpoints):
        died = ranks.run(fit_per_rank, world_size=2, args=(replace(start, killed_at=4), rate), may_die=[0, 1])
        assert {type(each) for each in died} == {Died}
        again = replace(start, round=2, killed_at=8)  # 4 steps of 8 samples are done, and then 4 of 4
        assert type(ranks.run(fit_per_rank, world_size=1, args=(again, rate), may_die=[0])[0]) is Died
        used, seen, trained = ranks.run(fit_per_rank, world_size=1, args=(replace(start, round=3), rate))[0]
    assert seen == [*[0.005] * 11, 0.0025]  # the scheduler halves it after each epoch, and nobody else does
    assert used == [0.005 * factor] * 12
    assert sorted(trained) == list(range(SAMPLES))

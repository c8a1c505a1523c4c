"""Tables that are dealt to ranks: look-ups some steps old, or ahead of their batch, against one process alike."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

import lightning_dist
from lightning_dist.errors import CombinationError
from tests.distributed.lightning_runs import loader_of, strategy_of, trainer_on_pool
from tests.support.ranks import RankPool, RanksFailed
from tests.support.sweeps import sampled
from tests.support.tasks import RankContext

NUM_ROWS, WIDTH, STEPS, HALF = 60, 5, 8, 4
LAYOUT = {"a": [0, 1], "b": [2]}
RANKS = 3
OPTIMIZERS = {
    "SGD": torch.optim.SGD,
    "Adagrad": torch.optim.Adagrad,
    "SparseAdam": torch.optim.SparseAdam,
    "RowWiseAdagrad": lightning_dist.RowWiseAdagrad,
}
Batch = dict[str, torch.Tensor]


def batch_of(step: int, rank: int) -> Batch:
    """Words and bags of them, with some that all ranks use in each step."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    words = torch.cat([torch.randint(NUM_ROWS, (9,), generator=generator), torch.tensor([0, 1, 1])])
    return {"words": words, "offsets": torch.tensor([0, 3, 3, 7, 12]), "weights": torch.rand(12, generator=generator)}


class Bags(pl.LightningModule):
    """A table of words and one whose rows are summed in bags, both sparse, and nothing else.

    Args:
        optimizer: One of :data:`OPTIMIZERS`.
    """

    def __init__(self, optimizer: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(NUM_ROWS, WIDTH, sparse=True)
        self.bags = nn.EmbeddingBag(NUM_ROWS, WIDTH, sparse=True, mode="sum", include_last_offset=True, padding_idx=5)
        self.optimizer = optimizer
        self.losses: list[float] = []

    def loss(self, batch: Batch) -> torch.Tensor:
        words = self.words(batch["words"]).view(4, 3, WIDTH).sum(1)
        bags = self.bags(batch["words"], batch["offsets"], per_sample_weights=batch["weights"])
        return torch.tanh(words * bags).square().mean()

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch)
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = OPTIMIZERS[self.optimizer](list(self.parameters()), lr=0.1)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class LooksAhead(Bags):
    """The same; it says which rows it will need."""

    def rows_of_batch(self, batch: Batch) -> Mapping[str, torch.Tensor]:
        return {"words": batch["words"], "bags": batch["words"]}


def reference(
    optimizer: str, staleness: int, *, window: int = 1, drains: tuple[int, ...] = (), begins_anew: bool = False
) -> Ended:
    """One process, whose look-ups see the tables of so many steps ago, or of the last drain."""
    module, seen = Bags(optimizer), Bags(optimizer)
    configured = module.configure_optimizers()
    stepping, schedule = configured["optimizer"], configured["lr_scheduler"]["scheduler"]
    states, oldest, losses = [_values(module)], 0, []
    for step in range(STEPS // window):
        seen.load_state_dict(states[max(oldest, step - staleness)])
        seen.zero_grad()
        for passed in range(step * window, (step + 1) * window):
            of_ranks = [seen.loss(batch_of(passed, rank)) for rank in range(RANKS)]
            torch.stack(of_ranks).mean().div(window).backward()
            losses.append([float(loss.detach()) for loss in of_ranks])
        for parameter, other in zip(module.parameters(), seen.parameters(), strict=True):
            parameter.grad = other.grad
        with torch.sparse.check_sparse_tensor_invariants(True):  # else torch warns that it does not
            stepping.step()
        schedule.step()
        if begins_anew and step + 1 == HALF:
            module.load_state_dict(states[0])
        states.append(_values(module))
        if step + 1 in drains:
            oldest = step + 1
    return Ended(states[-1], [list(of_rank) for of_rank in zip(*losses, strict=True)])


def _values(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


@dataclass
class Ended:
    """What a run leaves: whole tables, and the losses of a rank (of all, the reference)."""

    weights: dict[str, torch.Tensor]
    losses: list[Any]


class Saves(pl.Callback):
    """Saves once."""

    def __init__(self, path: str | None) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == HALF and self.path is not None:
            trainer.save_checkpoint(self.path)


def fit(
    context: RankContext,
    optimizer: str,
    options: dict[str, Any],
    *,
    looks_ahead: bool,
    window: int = 1,
    checkpoint: str = "full",
    save: str | None = None,
    resume: str | None = None,
) -> Ended:
    module = LooksAhead(optimizer) if looks_ahead else Bags(optimizer)
    sync = {"sparse": {"exchange": "parameter_server"}, "parameter_server": options}
    first = HALF if resume is not None else 0
    trainer = trainer_on_pool(
        context,
        strategy_of(sync=sync, checkpoint=checkpoint),
        callbacks=[Saves(save)],
        accumulate_grad_batches=window,
        default_root_dir=context.tmp_path,
    )
    batches = [batch_of(step, context.rank) for step in range(first, STEPS)]
    trainer.fit(module, loader_of(batches), ckpt_path=resume)
    return Ended(_values(module), module.losses)


class BeginsAnew(pl.Callback):
    """Half-way, puts values back that were there at the start."""

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.values = _values(module)

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == HALF:
            module.load_state_dict(self.values)
            trainer.strategy.barrier()


def fit_anew(context: RankContext, staleness: int) -> Ended:
    module = LooksAhead("SGD")
    sync = {"sparse": {"exchange": "parameter_server"}, "parameter_server": {"staleness": staleness}}
    trainer = trainer_on_pool(context, strategy_of(sync=sync), callbacks=[BeginsAnew()])
    trainer.fit(module, loader_of([batch_of(step, context.rank) for step in range(STEPS)]))
    return Ended(_values(module), module.losses)


@pytest.mark.parametrize("staleness", [0, 2])
def test_values_that_are_loaded_in_a_fit_count_from_then_on(ranks: RankPool, staleness: int) -> None:
    """Not those of before that were looked up ahead, nor steps that were under way."""
    results = ranks.run(fit_anew, layout=LAYOUT, args=(staleness,))
    check(results, reference("SGD", staleness, drains=(HALF,), begins_anew=True))


def check(results: list[Ended], expected: Ended, *, first: int = 0) -> None:
    """Up to a few roundings, which roots make larger where gradients are small; a step more or less is 1e-3."""
    for rank, ended in enumerate(results):
        torch.testing.assert_close(ended.losses, expected.losses[rank][first:], rtol=0, atol=1e-5)
        assert ended.weights.keys() == expected.weights.keys()
        for name, value in ended.weights.items():
            torch.testing.assert_close(value, expected.weights[name], rtol=0, atol=1e-5)


CASES = {
    f"{optimizer}, {staleness} steps old, {'ahead' if looks_ahead else 'in time'}": (optimizer, staleness, looks_ahead)
    for optimizer in OPTIMIZERS
    for staleness in (0, 1, 4)
    for looks_ahead in (False, True)
}
ALWAYS = [
    "SGD, 0 steps old, in time",
    "Adagrad, 0 steps old, ahead",
    "SparseAdam, 1 steps old, ahead",
    "RowWiseAdagrad, 4 steps old, in time",
    "RowWiseAdagrad, 4 steps old, ahead",
]


@pytest.mark.parametrize(("optimizer", "staleness", "looks_ahead"), sampled(CASES, ALWAYS))
def test_look_ups_are_exactly_as_old_as_said(
    ranks: RankPool, optimizer: str, staleness: int, looks_ahead: bool
) -> None:
    results = ranks.run(
        fit, layout=LAYOUT, args=(optimizer, {"staleness": staleness}), kwargs={"looks_ahead": looks_ahead}
    )
    check(results, reference(optimizer, staleness))


@pytest.mark.sweep
@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
@pytest.mark.parametrize("looks_ahead", [True, False])
def test_servers_as_processes_make_the_same_steps(ranks: RankPool, optimizer: str, looks_ahead: bool) -> None:
    options = {"servers": "processes", "replicas": 1}
    results = ranks.run(fit, layout=LAYOUT, args=(optimizer, options), kwargs={"looks_ahead": looks_ahead, "window": 2})
    check(results, reference(optimizer, 0, window=2))


@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_a_checkpoint_has_all_steps_and_a_run_goes_on_as_if_it_had_not_ended(
    ranks: RankPool, tmp_path: Path, kind: str
) -> None:
    """Look-ups after it see at least its step, in the run that goes on and in one that begins with it."""
    path, options = str(tmp_path / "half.ckpt"), {"staleness": 3}
    expected = reference("SparseAdam", 3, drains=(HALF,))
    straight = ranks.run(
        fit,
        layout=LAYOUT,
        args=("SparseAdam", options),
        kwargs={"looks_ahead": True, "checkpoint": kind, "save": path},
    )
    check(straight, expected)
    resumed = ranks.run(
        fit,
        layout=LAYOUT,
        args=("SparseAdam", options),
        kwargs={"looks_ahead": True, "checkpoint": kind, "resume": path},
    )
    check(resumed, expected, first=HALF)


@pytest.mark.parametrize("staleness", [0, 2])
def test_accumulated_gradients_make_a_step_a_window(ranks: RankPool, staleness: int) -> None:
    results = ranks.run(
        fit, layout=LAYOUT, args=("Adagrad", {"staleness": staleness}), kwargs={"looks_ahead": True, "window": 2}
    )
    check(results, reference("Adagrad", staleness, window=2))


class Linear(pl.LightningModule):
    """Its gradients do not depend on its values, and are small whole numbers: steps add up in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(NUM_ROWS, WIDTH, sparse=True)
        nn.init.zeros_(self.words.weight)
        self.slow: list[int] = []

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        return (self.words(batch["words"]) * torch.arange(12).view(12, 1)).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=float(RANKS))


def fit_asynchronously(context: RankContext, path: str) -> tuple[torch.Tensor, torch.Tensor]:
    module = Linear()
    sync = {"sparse": {"exchange": "parameter_server"}, "parameter_server": {"staleness": None, "max_pending": 2}}
    trainer = trainer_on_pool(context, strategy_of(sync=sync, checkpoint="sharded"), callbacks=[Saves(path)])
    trainer.fit(module, loader_of([batch_of(step, context.rank) for step in range(STEPS)]))
    loaded = lightning_dist.load_from_checkpoint(Linear, path) if context.rank == 0 else module
    return module.words.weight.detach().clone(), loaded.words.weight.detach().clone()


def test_asynchronous_steps_are_all_made_and_a_checkpoint_has_those_before_it_and_no_other(
    ranks: RankPool, tmp_path: Path
) -> None:
    results = ranks.run(fit_asynchronously, layout=LAYOUT, args=(str(tmp_path / "half.ckpt"),))

    def after(steps: int) -> torch.Tensor:
        total = torch.zeros(NUM_ROWS, WIDTH)
        for step in range(steps):
            for rank in range(RANKS):
                total.index_add_(0, batch_of(step, rank)["words"], torch.arange(12.0).view(12, 1).expand(12, WIDTH))
        return -total

    for weights, _ in results:
        assert torch.equal(weights, after(STEPS))
    assert torch.equal(results[0][1], after(HALF))


class Drifts(pl.Callback):
    """Rank 0 waits in a step until another rank has got as far as it can; that one says when it begins each step."""

    def __init__(self, path: Path, *, held_in: int, until: int, wait_s: float) -> None:
        self.path = path
        self.held_in = held_in
        self.until = until
        self.wait_s = wait_s

    def on_before_backward(self, trainer: pl.Trainer, module: pl.LightningModule, loss: torch.Tensor) -> None:
        step = trainer.global_step
        (self.path / f"{trainer.global_rank}.{step}").touch()
        if trainer.global_rank == 0 and step == self.held_in:
            give_up_s = time.monotonic() + self.wait_s
            while not (self.path / f"1.{self.until}").exists():
                assert time.monotonic() < give_up_s, f"rank 1 has not come to step {self.until}"
                threading.Event().wait(0.01)


def fit_apart(context: RankContext, staleness: int | None, until: int, wait_s: float) -> list[float]:
    module = Bags("SGD")
    sync = {"sparse": {"exchange": "parameter_server"}, "parameter_server": {"staleness": staleness}}
    drifts = Drifts(context.tmp_path, held_in=1, until=until, wait_s=wait_s)
    trainer = trainer_on_pool(context, strategy_of(sync=sync), callbacks=[drifts])
    trainer.fit(module, loader_of([batch_of(step, context.rank) for step in range(STEPS)]))
    return module.losses


@pytest.mark.parametrize(("staleness", "ahead"), [(3, 3), (None, 5)], ids=["bounded", "asynchronous"])
def test_ranks_drift_apart_as_far_as_they_may(ranks: RankPool, staleness: int | None, ahead: int) -> None:
    """Rank 0 goes on only once rank 1 is so many steps ahead; what both compute is what they would have in step."""
    results = ranks.run(fit_apart, world_size=2, args=(staleness, 1 + ahead, 20.0), deadline_s=60)
    assert all(len(losses) == STEPS for losses in results)


def test_nobody_gets_further_ahead_than_that(ranks: RankPool) -> None:
    with pytest.raises(RanksFailed, match="rank 1 has not come to step 4"):
        ranks.run(fit_apart, world_size=2, args=(2, 1 + 3, 3.0), fresh=True, deadline_s=60)


@pytest.mark.parametrize("looks_ahead", [True, False])
def test_rows_are_asked_for_in_one_message_and_ahead(ranks: RankPool, looks_ahead: bool) -> None:
    for counted in ranks.run(fit_counted, world_size=2, args=(looks_ahead,)):
        if looks_ahead:  # of each batch but the first
            assert counted == {"look-up of rows": STEPS, "look-up of rows ahead": STEPS - 1}
        else:
            assert counted == {"look-up of rows": 2 * STEPS}


def fit_counted(context: RankContext, looks_ahead: bool) -> dict[str, int]:
    module = LooksAhead("SGD") if looks_ahead else Bags("SGD")
    strategy = strategy_of(sync={"sparse": {"exchange": "parameter_server"}})
    trainer_on_pool(context, strategy).fit(module, loader_of([batch_of(step, context.rank) for step in range(STEPS)]))
    operations = [event.attributes.get("operation", "") for event in strategy.events.snapshot()]
    return dict(Counter(name for name in operations if name.startswith("look-up")))


def fit_bounded(context: RankContext) -> None:
    module = Linear()
    module.words.max_norm = 1.0
    trainer_on_pool(context, strategy_of()).fit(module, loader_of([batch_of(0, context.rank)]))


def test_rows_that_a_forward_would_change_on_one_rank_are_refused(ranks: RankPool) -> None:
    with pytest.raises(RanksFailed, match=r"words: Embedding\(sparse=True, max_norm=1.0\): forward shortens the rows"):
        ranks.run(fit_bounded, world_size=2, fresh=True, deadline_s=60)


def fit_refused(context: RankContext, what: str) -> str:
    module = LooksAhead("SGD")
    staleness, arguments = 1, dict[str, Any]()
    if what == "clipping":
        arguments["gradient_clip_val"] = 1.0
    else:
        staleness = 0 if what == "momentum ahead" else None
        module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)  # type: ignore[method-assign]
    sync = {"sparse": {"exchange": "parameter_server"}, "parameter_server": {"staleness": staleness}}
    trainer = trainer_on_pool(context, strategy_of(sync=sync), **arguments)
    try:
        trainer.fit(module, loader_of([batch_of(0, context.rank)]))
    except CombinationError as error:
        return str(error)
    return "nothing was refused"


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("clipping", "gradient_clip_val=1.0 with sync.parameter_server.staleness=1"),
        ("momentum", "SGD(momentum=0.9) with sync.parameter_server.staleness=None"),
        ("momentum ahead", "SGD(momentum=0.9) with sync.parameter_server.prefetch=true and rows_of_batch"),
    ],
)
def test_what_would_need_the_gradients_of_all_ranks_is_refused(ranks: RankPool, what: str, said: str) -> None:
    for text in ranks.run(fit_refused, world_size=2, args=(what,), fresh=True):
        assert said in text

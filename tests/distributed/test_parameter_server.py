"""Tables that are dealt to the ranks: their checkpoints, what users see of them, look-ups in any number."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from tests.distributed.lightning_runs import loader_of, strategy_of, trainer_on_pool
from tests.support.ranks import RankPool, RanksFailed
from tests.support.sweeps import sampled
from tests.support.tasks import RankContext

NUM_ROWS, WIDTH, STEPS, HALF = 300, 5, 6, 3
SERVED = {"sparse": {"exchange": "parameter_server"}}
IN_PROCESSES = {**SERVED, "parameter_server": {"servers": "processes", "replicas": 1}}
PARTS = 6  # of the batch of a step, which 2 and 3 ranks share alike


class Words(pl.LightningModule):
    """Two tables, one of them with a row that stays, and perhaps a layer.

    Args:
        optimizer: Name in torch.optim.
        has_layer: Without, nothing is left to the reducer.
    """

    def __init__(self, optimizer: str, *, has_layer: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(NUM_ROWS, WIDTH, sparse=True)
        self.contexts = nn.Embedding(NUM_ROWS, WIDTH, sparse=True, padding_idx=7)
        self.head = nn.Linear(WIDTH, 1) if has_layer else nn.Flatten(0)
        self.optimizer = optimizer
        self.looked_up: list[torch.Tensor] = []

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.head(self.words(ids[0]) * self.contexts(ids[1])))  # type: ignore[no-any-return]

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self(batch).square().mean()  # type: ignore[no-any-return]

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.looked_up.append(self.words(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return getattr(torch.optim, self.optimizer)(list(self.parameters()), lr=0.05)  # type: ignore[no-any-return]


@dataclass
class Ended:
    """What a rank has after a fit.

    Attributes:
        weights: Whole.
        seen: ``state_dict()`` in the fit.
        held: Elements of the first table's parameter in the fit.
        stored_bytes: What it takes in memory there.
        looked_up: In validation.
    """

    weights: dict[str, torch.Tensor]
    seen: dict[str, torch.Tensor]
    held: int
    stored_bytes: int
    looked_up: list[torch.Tensor]


class Looks(pl.Callback):
    """Looks at the model after a step, and saves it."""

    def __init__(self, path: str | None) -> None:
        self.path = path
        self.seen: dict[str, torch.Tensor] = {}
        self.held = 0
        self.stored_bytes = 0

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == HALF:
            self.seen = {name: value.clone() for name, value in module.state_dict().items()}
            self.held = module.words.weight.numel()
            self.stored_bytes = module.words.weight.untyped_storage().nbytes()
            if self.path is not None:
                trainer.save_checkpoint(self.path)


def ids_of(step: int, part: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + part)
    return torch.randint(NUM_ROWS - 20, (2, 6), generator=generator)


def fit(
    context: RankContext,
    optimizer: str,
    strategy: dict[str, Any],
    *,
    has_layer: bool = True,
    save: str | None = None,
    resume: str | None = None,
    steps: int = STEPS,
    validates: bool = False,
) -> Ended:
    module, looks = Words(optimizer, has_layer=has_layer), Looks(save)
    batches = [
        torch.cat([ids_of(step, part) for part in range(context.rank, PARTS, context.world_size)], 1)
        for step in range(STEPS)
    ]
    if resume is not None:  # a plain loader begins anew
        batches = batches[HALF:]
    validation = loader_of([torch.arange(NUM_ROWS)] * (context.rank + 1)) if validates else None
    trainer = trainer_on_pool(
        context, strategy_of(**strategy), callbacks=[looks], max_steps=steps, default_root_dir=context.tmp_path
    )
    trainer.fit(module, loader_of(batches), validation, ckpt_path=resume)
    weights = {name: value.clone() for name, value in module.state_dict().items()}
    return Ended(weights, looks.seen, looks.held, looks.stored_bytes, module.looked_up)


def check_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    """Up to a few roundings, which Adagrad's and Adam's roots make larger where gradients are small."""
    assert one.keys() == other.keys()
    for name, value in one.items():
        torch.testing.assert_close(value, other[name], rtol=0, atol=1e-5)


@pytest.mark.parametrize("has_layer", [True, False], ids=["beside a layer", "all served"])
@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_checkpoints_load_at_another_size_and_without_servers(
    ranks: RankPool, tmp_path: Path, kind: str, has_layer: bool
) -> None:
    optimizer = "Adagrad" if has_layer else "SparseAdam"
    path = str(tmp_path / "half.ckpt")
    rows = {"checkpoint": kind}
    served = {"checkpoint": kind, "sync": SERVED}
    straight: list[Ended] = ranks.run(fit, world_size=3, args=(optimizer, rows), kwargs={"has_layer": has_layer})
    expected = straight[0].weights

    first: list[Ended] = ranks.run(
        fit,
        layout={"a": [0, 1], "b": [2]},
        args=(optimizer, served),
        kwargs={"has_layer": has_layer, "save": path, "steps": HALF},
    )
    assert sum(ended.held for ended in first) == NUM_ROWS * WIDTH, "each row is on one rank"
    for ended in first:
        check_same(ended.seen, straight[0].seen)
        check_same(ended.weights, straight[0].seen)

    for strategy in (served, rows):
        resumed: list[Ended] = ranks.run(
            fit, world_size=2, args=(optimizer, strategy), kwargs={"has_layer": has_layer, "resume": path}
        )
        for ended in resumed:
            check_same(ended.weights, expected)
    back: list[Ended] = ranks.run(
        fit, world_size=1, args=(optimizer, served), kwargs={"has_layer": has_layer, "resume": path}
    )
    check_same(back[0].weights, expected)


@pytest.mark.parametrize("kind", sampled({"full": ("full",), "sharded": ("sharded",)}, ["sharded"]))
def test_rows_in_processes_train_as_whole_tables_and_share_their_checkpoints(
    ranks: RankPool, tmp_path: Path, kind: str
) -> None:
    """The first half with rows in processes, the second on ranks, on whole tables and in processes, of other sizes."""
    path = str(tmp_path / "half.ckpt")
    served, rows = {"checkpoint": kind, "sync": IN_PROCESSES}, {"checkpoint": kind}
    straight: list[Ended] = ranks.run(fit, world_size=3, args=("Adagrad", rows))
    first: list[Ended] = ranks.run(
        fit, layout={"a": [0, 1], "b": [2]}, args=("Adagrad", served), kwargs={"save": path, "steps": HALF}
    )
    for ended in first:
        check_same(ended.seen, straight[0].seen)
        check_same(ended.weights, straight[0].seen)
        assert ended.stored_bytes == 4, "one number: a rank has no rows"
    others = [({"checkpoint": kind, "sync": SERVED}, 2), (rows, 1), (served, {"a": [0], "b": [1]})]
    for strategy, size in others:
        place = {"world_size": size} if isinstance(size, int) else {"layout": size}
        resumed: list[Ended] = ranks.run(fit, **place, args=("Adagrad", strategy), kwargs={"resume": path})
        for ended in resumed:
            check_same(ended.weights, straight[0].weights)


def test_ranks_look_up_as_often_as_they_like(ranks: RankPool) -> None:
    results: list[Ended] = ranks.run(fit, world_size=3, args=("Adagrad", {"sync": SERVED}), kwargs={"validates": True})
    for rank, ended in enumerate(results):
        assert len(ended.looked_up) == rank + 1
        for values in ended.looked_up:
            assert torch.equal(values, ended.weights["words.weight"])


class OneLooks(pl.Callback):
    """Rank 0 looks up after each step, while the others wait for it."""

    def __init__(self) -> None:
        self.sums: list[float] = []

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.is_global_zero:
            with torch.no_grad():
                self.sums.append(float(module.words(torch.arange(NUM_ROWS)).sum()))
        trainer.strategy.barrier()


def fit_with_one_that_looks(context: RankContext) -> tuple[list[float], float]:
    module, looks = Words("Adagrad", has_layer=False), OneLooks()
    loader = loader_of([ids_of(step, context.rank) for step in range(3)])
    trainer_on_pool(context, strategy_of(sync=SERVED), callbacks=[looks]).fit(module, loader)
    return looks.sums, float(module.words.weight.detach().sum())


def test_one_rank_looks_up_while_others_wait(ranks: RankPool) -> None:
    (sums, last), *_ = ranks.run(fit_with_one_that_looks, world_size=3)
    assert len(set(sums)) == 3, "each step is seen"
    assert sums[-1] == last


def test_the_row_of_the_padding_stays(ranks: RankPool) -> None:
    (ended, *_) = ranks.run(fit, world_size=2, args=("Adagrad", {"sync": SERVED}))
    assert torch.equal(ended.weights["contexts.weight"][7], torch.zeros(WIDTH))


def look_up_outside(context: RankContext) -> None:
    module = Words("SGD", has_layer=True)
    ids = torch.full((2, 6), NUM_ROWS)
    trainer_on_pool(context, strategy_of(sync=SERVED)).fit(module, loader_of([ids]))


def test_an_id_that_is_no_row_is_an_error_that_says_so(ranks: RankPool) -> None:
    with pytest.raises(RanksFailed, match="ids from 300 to 300 of a table of 300 rows"):
        ranks.run(look_up_outside, world_size=2, fresh=True, deadline_s=40)


@pytest.mark.parametrize(("above_bytes", "held"), [(NUM_ROWS * WIDTH * 4, NUM_ROWS * WIDTH), (100, None)])
def test_auto_goes_by_size(ranks: RankPool, above_bytes: int, held: int | None) -> None:
    sync = {"sparse": {"exchange": "auto", "server_above_bytes": above_bytes}}
    for ended in ranks.run(fit, world_size=2, args=("Adagrad", {"sync": sync})):
        assert (ended.held == NUM_ROWS * WIDTH) == (held is not None)

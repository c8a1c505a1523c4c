"""A model made on the meta device is cut before it has values: each rank makes its stages only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from lightning_dist.errors import ConfigError
from tests.distributed.lightning_runs import trainer_on_pool
from tests.distributed.pipeline_runs import STEPS, StageCase, StageLearner, odd_net, strategy_for, tied_gpt
from tests.distributed.stage_use import losses_of
from tests.support.ranks import RankPool
from tests.support.reference import assert_same
from tests.support.tasks import RankContext

SEED = 5


def make_net(case: StageCase) -> nn.Module:
    return tied_gpt() if case.model == "gpt" else odd_net()


class Deferred(StageLearner):
    """Makes its network on the meta device, when the strategy asks for it."""

    def __init__(self, case: StageCase) -> None:
        super().__init__(case)
        self.net = nn.Identity()  # type: ignore[assignment]

    def configure_model(self) -> None:
        if isinstance(self.net, nn.Identity):
            with torch.device("meta"):
                self.net = make_net(self.case)


class Whole(StageLearner):
    """Makes the same network at once, with the values of its modules' ``reset_parameters``."""

    def __init__(self, case: StageCase) -> None:
        super().__init__(case)
        net: Any = make_net(case)
        if case.model == "gpt":
            net.head.weight = nn.Parameter(torch.empty_like(net.head.weight))  # untied: each draws
        torch.manual_seed(SEED)
        for module in net.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
        if case.model == "gpt":
            net.head.weight = net.tokens.weight
        self.net = net


class Held(pl.Callback):
    """Bytes of parameters on this rank."""

    bytes = -1

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.bytes = sum(p.untyped_storage().nbytes() for p in set(pl_module.parameters()))


def train(
    context: RankContext, case: StageCase, kind: type[StageLearner], path: Path | None = None
) -> tuple[list[float], dict[str, Tensor], int]:
    """Losses of a fit, which goes on from a checkpoint, and weights after it, and what is held in it."""
    module, held = kind(case), Held()
    torch.manual_seed(SEED + context.rank)  # rank 0's counts
    trainer = trainer_on_pool(context, strategy_for(case), limit_val_batches=0, callbacks=[held], max_epochs=2)
    trainer.fit(module, ckpt_path=path)
    weights = {name: value.detach().clone() for name, value in module.net.state_dict().items()}
    return losses_of(module), weights, held.bytes


CASES = {
    "2": ({"a": [0, 1]}, StageCase(pipeline={"micro_batches": 4})),
    "2+2-tied": ({"a": [0, 1], "b": [2, 3]}, StageCase("gpt", pipeline={"micro_batches": 4})),
    "zbv-tied": ({"a": [0, 1]}, StageCase("gpt", pipeline={"micro_batches": 4, "schedule": "zbv"})),
    "zero2-tied": (
        {"a": [0, 1], "b": [2, 3]},
        StageCase("gpt", pipeline={"micro_batches": 4, "size": 2}, parallel={"mode": "zero2"}),
    ),
}


@pytest.mark.parametrize(("layout", "case"), CASES.values(), ids=CASES)
def test_values_are_those_of_the_uncut_model(ranks: RankPool, layout: dict[str, list[int]], case: StageCase) -> None:
    expected = ranks.run(train, layout=layout, args=(case, Whole))
    for (losses, weights, held), (whole_losses, whole_weights, whole_held) in zip(
        ranks.run(train, layout=layout, args=(case, Deferred)), expected, strict=True
    ):
        assert losses == whole_losses
        assert_same(weights, whole_weights, atol=0)
        assert held == whole_held


def make_largest(context: RankContext) -> int:
    """Bytes of parameters that one rank has at most while the model is cut; layers are of one size."""
    case = StageCase(pipeline={"micro_batches": 4})

    class Large(Deferred):
        def configure_model(self) -> None:
            with torch.device("meta"):
                self.net = nn.Sequential(nn.Linear(7, 64), *(nn.Linear(64, 64) for _ in range(6)), nn.Linear(64, 3))

    module, most = Large(case), 0
    plain = nn.Linear.reset_parameters

    def measured(self: nn.Linear) -> None:
        nonlocal most
        plain(self)
        held = [p.untyped_storage().nbytes() for p in module.parameters() if not p.is_meta]
        most = max(most, sum(held))

    nn.Linear.reset_parameters = measured  # type: ignore[method-assign]
    try:
        trainer_on_pool(context, strategy_for(case), limit_val_batches=0).fit(module)
    finally:
        nn.Linear.reset_parameters = plain  # type: ignore[method-assign]
    return most


def test_no_rank_ever_holds_the_whole_model(ranks: RankPool) -> None:
    whole = sum(4 * (a * b + b) for a, b in ((7, 64), *[(64, 64)] * 6, (64, 3)))
    for most in ranks.run(make_largest, world_size=2):
        assert most < 0.75 * whole, "half of the layers, and one more"


def train_and_resume(context: RankContext, case: StageCase) -> list[list[float]]:
    """Losses of two epochs at once, and of the second one from a checkpoint of the first."""
    path = context.tmp_path / "first.ckpt"

    class Save(pl.Callback):
        def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            if trainer.current_epoch == 0:
                trainer.save_checkpoint(path)

    module = Deferred(case)
    torch.manual_seed(SEED)
    trainer_on_pool(context, strategy_for(case), limit_val_batches=0, callbacks=[Save()], max_epochs=2).fit(module)
    return [losses_of(module)[STEPS:], train(context, case, Deferred, path)[0]]


def test_it_takes_the_checkpoint_that_it_is_resumed_from(ranks: RankPool) -> None:
    for straight, resumed in ranks.run(train_and_resume, world_size=2, args=(CASES["2"][1],)):
        assert resumed == straight


def refuse_timing(context: RankContext) -> None:
    case = StageCase(pipeline={"micro_batches": 4, "balance": "time"})
    with pytest.raises(ConfigError, match=r"on the meta device.*write parallel.pipeline.balance=parameters"):
        train(context, case, Deferred)


def test_layers_without_values_cannot_be_timed(ranks: RankPool) -> None:
    ranks.run(refuse_timing, world_size=2)

"""After a failure the user's own error is what is raised, and the model says what has become of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_dist.errors import LostWeightsError
from lightning_dist.parallel import zero
from tests.distributed.lightning_runs import (
    OddModule,
    adamw,
    loader_of,
    make_batches,
    mse,
    strategy_of,
    trainer_on_pool,
)
from tests.distributed.sharded_runs import LAYOUTS, MODES, TiedNet
from tests.distributed.test_sharded_training import SaveAtEnd
from tests.support.ranks import RankPool
from tests.support.reference import assert_same
from tests.support.tasks import RankContext


class Failing(OddModule):
    """Fails in a batch, and keeps the graphs of its forwards."""

    def __init__(self, at: int) -> None:
        super().__init__(adamw, make_model=TiedNet)
        self.at = at
        self.kept: list[torch.Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = mse(self.net, batch)
        if batch_idx == self.at:
            self.kept.append(loss)
            raise ValueError("the user's own")
        return loss


def fail_and_go_on(context: RankContext, strategy: dict[str, Any], folder: str) -> list[dict[str, torch.Tensor]]:
    """Fail, use the model, load a checkpoint into it and train on; the same with a new model."""
    batches = make_batches(context.world_size, 3)[context.rank]

    def fit(module: Failing, **options: Any) -> None:
        callbacks, path = [SaveAtEnd(str(options.pop("save")))] if "save" in options else [], options.pop("path", None)
        trainer = trainer_on_pool(context, strategy_of(**strategy), callbacks=callbacks, **options)
        trainer.fit(module, loader_of(batches), ckpt_path=path)

    path = Path(folder) / "one.ckpt"
    fit(Failing(at=-1), save=path)
    failed, fresh = Failing(at=1), Failing(at=-1)
    with pytest.raises(ValueError, match="the user's own"):
        fit(failed)
    for use in (failed.net.state_dict, lambda: failed.net(batches[0][0]), lambda: fit(failed)):
        with pytest.raises(LostWeightsError, match="ckpt_path="):
            use()
    failed.at = -1
    for module in (failed, fresh):
        fit(module, max_epochs=2, path=path)
    return [failed.net.state_dict(), fresh.net.state_dict()]


@pytest.mark.parametrize("mode", ["zero2", "zero3"])
def test_the_users_error_is_raised_and_a_checkpoint_restores_the_model(
    ranks: RankPool, tmp_path: Path, mode: str
) -> None:
    for failed, fresh in ranks.run(
        fail_and_go_on, layout=LAYOUTS["1+1"], args=(MODES[mode], str(tmp_path)), fresh=True
    ):
        assert_same(failed, fresh, atol=0)


def fail_to_shard(context: RankContext) -> dict[str, Any]:
    """The second unit cannot be sharded."""
    done: list[Any] = []
    plain = zero.fully_shard

    def fails(module: torch.nn.Module, **options: Any) -> None:
        if done:
            raise ValueError("not this one")
        done.append(plain(module, **options))

    zero.fully_shard = fails  # type: ignore[assignment]
    module = Failing(at=-1)
    try:
        with pytest.raises(ValueError, match="not this one"):
            trainer_on_pool(context, strategy_of(parallel="zero2")).fit(module, loader_of([]))
    finally:
        zero.fully_shard = plain
    return {name: value.detach() for name, value in module.net.state_dict().items()}


def test_a_model_that_could_not_be_sharded_is_what_it_was(ranks: RankPool) -> None:
    for weights in ranks.run(fail_to_shard, layout=LAYOUTS["1+1"], fresh=True):
        assert_same(weights, Failing(at=-1).net.state_dict(), atol=0)

"""What a rank holds of a model with split layers, alone and inside shards: what the cost model says, to the byte."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lightning_dist.parallel.inventory import inventory_of
from lightning_dist.parallel.tensor.cuts import cut_dims
from lightning_dist.planning.memory_cost import memory_cost
from lightning_dist.planning.training import ADAMW, TrainingSetup
from lightning_dist.topology import Axes, Cluster, Layout
from tests.distributed.lightning_runs import trainer_on_pool
from tests.distributed.split_models import MODELS
from tests.distributed.tensor_runs import SplitCase, SplitLearner, strategy_for
from tests.support.ranks import RankPool
from tests.support.sweeps import sampled
from tests.support.tasks import RankContext

SIZE = 2  # ranks that share each layer
LAYOUT = {"a": [0, 1], "b": [2, 3]}
AXES = {
    "tensor": Axes(dp_replicate=2, tp=SIZE),
    "hsdp": Axes(dp_replicate=2, tp=SIZE),
    **{mode: Axes(dp_shard=2, tp=SIZE) for mode in ("zero1", "zero2", "zero3")},
}
CASES = {f"{mode}-{model}": (mode, model) for mode in AXES for model in ("gpt", "huggingface")}


class Watch(pl.Callback):
    """Bytes of distinct storages of parameters, gradients and optimizer state after a step."""

    held: tuple[int, ...] = ()

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *args: Any) -> None:
        if self.held:
            return
        parameters = list(module.parameters())
        states = [value for state in trainer.optimizers[0].state.values() for value in state.values()]
        self.held = (
            bytes_of(parameters),
            bytes_of(p.grad for p in parameters if p.grad is not None),
            bytes_of(value for value in states if isinstance(value, torch.Tensor)),
        )


def bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    """Of a DTensor, what this rank holds."""
    storages = [getattr(tensor, "_local_tensor", tensor).untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def hold(context: RankContext, mode: str, model: str) -> tuple[int, ...]:
    watch = Watch()
    case = SplitCase(model, "adamw", parallel={"mode": mode, "tensor": {"size": SIZE}})
    trainer = trainer_on_pool(context, strategy_for(case), callbacks=[watch], limit_val_batches=0)
    trainer.fit(SplitLearner(case))
    return watch.held


@pytest.mark.parametrize(("mode", "model"), sampled(CASES, ["tensor-gpt", "zero2-huggingface", "zero3-gpt"]))
def test_a_rank_holds_what_is_predicted(ranks: RankPool, mode: str, model: str) -> None:
    whole = MODELS[model]()
    entries = inventory_of(whole, tp_dims=cut_dims(whole, size=SIZE))
    setup = TrainingSetup(mode=mode, axes=AXES[mode], optimizer=ADAMW)
    layout = Layout.place(Cluster.parse("2x2"), AXES[mode])
    for rank, held in enumerate(ranks.run(hold, layout=LAYOUT, args=(mode, model))):
        rest = memory_cost(entries, setup, at=layout.coordinates(rank)).rank.rest
        assert held == (rest.parameters, rest.gradients, rest.optimizer)

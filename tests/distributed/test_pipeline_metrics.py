"""Metric objects under pipelines: what they say of a step and of an epoch is what they say on one rank, everywhere."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  # the name everybody uses
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric, Metric, MetricCollection, SumMetric
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC, MulticlassF1Score, MulticlassPrecision
from torchmetrics.regression import PearsonCorrCoef

from tests.distributed.lightning_runs import loader_of, sgd, strategy_of, trainer_on_pool
from tests.support.ranks import RankPool
from tests.support.tasks import RankContext


def make_batches(count: int, *, seed: int, size: int = 8) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(size, 7, generator=generator), torch.randint(3, (size,), generator=generator))
        for _ in range(count)
    ]


class Counting(pl.LightningModule):
    """Logs metrics of several kinds: counters, one that is no mean, lists, collections, one computed in a hook."""

    pipeline_layers = "net"

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))
        self.accuracy, self.f1 = MulticlassAccuracy(3), MulticlassF1Score(3)
        self.seen, self.hooked = SumMetric(), SumMetric()
        self.both = MetricCollection({"p": MulticlassPrecision(3), "f": MulticlassF1Score(3)}, prefix="of_")
        self.unlogged = MetricCollection([MulticlassPrecision(3), MulticlassF1Score(3)])
        self.auroc = nn.ModuleList(MulticlassAUROC(3) for _ in range(2))
        self.correlation, self.mean = PearsonCorrCoef(), MeanMetric()
        self.steps: list[dict[str, float]] = []

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        output, target = self.net(batch[0]), batch[1]
        self.accuracy(output, target)
        self.log("accuracy", self.accuracy)  # of the step only
        self.f1(output, target)
        self.log("f1", self.f1, on_step=True, on_epoch=True)
        self.log_dict(self.both(output, target) and self.both, on_step=True, on_epoch=True)
        self.unlogged.update(output, target)
        self.seen(len(target))
        self.log("seen", self.seen, on_step=True, on_epoch=True)
        return {"loss": F.cross_entropy(output, target), "output": output.detach()}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.hooked.update(len(outputs["output"]))
        self.steps.append({name: float(value) for name, value in self.trainer.callback_metrics.items()})

    def on_train_epoch_end(self) -> None:
        self.log_dict({**self.unlogged.compute(), "hooked": self.hooked.compute()})
        self.unlogged.reset()
        self.hooked.reset()

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        output, target = self.net(batch[0]), batch[1]
        auroc = self.auroc[dataloader_idx]
        assert isinstance(auroc, Metric)
        auroc.update(output.softmax(-1), target)
        self.log("auroc", auroc)
        self.correlation.update(output[:, 0], target.float())
        loss = F.cross_entropy(output, target)
        self.log("val_loss", loss, sync_dist=True)
        self.mean.update(loss, weight=len(target))

    def on_validation_epoch_end(self) -> None:
        self.log_dict({"mean": self.mean.compute(), "correlation": self.correlation.compute()})
        self.mean.reset()
        self.correlation.reset()

    def train_dataloader(self) -> DataLoader[Any]:
        return loader_of(make_batches(3, seed=1))

    def val_dataloader(self) -> list[DataLoader[Any]]:
        return [loader_of(make_batches(2, seed=2)), loader_of(make_batches(3, seed=3, size=5))]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return sgd(list(self.net.parameters()))


def count(context: RankContext, schedule: str) -> list[dict[str, float]]:
    """What is logged: before a fit, after each of its steps, at its end."""
    module = Counting()
    pipeline = {"micro_batches": 4, "schedule": schedule}
    trainer = trainer_on_pool(
        context, strategy_of(parallel={"mode": "pipeline", "pipeline": pipeline}), max_epochs=2, num_sanity_val_steps=1
    )
    trainer.validate(module, verbose=False)
    said = [{name: float(value) for name, value in trainer.callback_metrics.items()}]
    trainer.fit(module)
    said += [*module.steps, {name: float(value) for name, value in trainer.callback_metrics.items()}]
    assert all(metric.process_group is None for metric in module.modules() if isinstance(metric, Metric))
    return said


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_metrics_are_those_of_one_rank(ranks: RankPool, schedule: str) -> None:
    expected = ranks.run(count, world_size=1, args=(schedule,))[0]
    for said in ranks.run(count, world_size=2, args=(schedule,)):
        assert said == [pytest.approx(step, rel=1e-5) for step in expected]


def test_each_pipeline_counts_once(ranks: RankPool) -> None:
    """Two pipelines that read the same: sums are twice those of one, all else is the same."""
    expected = ranks.run(count, world_size=1, args=("1f1b",))[0]
    for step in expected:
        summed = ("seen_epoch", "hooked", "seen") if step is expected[-1] else ("seen_epoch", "hooked")
        for name in step.keys() & summed:
            step[name] *= 2
    for said in ranks.run(count, layout={"a": [0, 1], "b": [2, 3]}, args=("1f1b",)):
        assert said == [pytest.approx(step, rel=1e-5) for step in expected]


class OverRanks(Counting):
    """What a step says of accuracy is of all pipelines."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = MulticlassAccuracy(3, dist_sync_on_step=True)

    def train_dataloader(self) -> DataLoader[Any]:
        return loader_of(make_batches(3, seed=int(self.trainer.distributed_sampler_kwargs["rank"])))


def accuracies(context: RankContext) -> list[float]:
    module = OverRanks()
    strategy = strategy_of(parallel={"mode": "pipeline", "pipeline": {"size": 2, "micro_batches": 4}})
    trainer_on_pool(context, strategy, limit_val_batches=0).fit(module)
    return [step["accuracy"] for step in module.steps]


def test_a_metric_that_is_synchronised_each_step_is_alike_on_all_ranks(ranks: RankPool) -> None:
    said = ranks.run(accuracies, layout={"a": [0, 1], "b": [2, 3]})
    module = OverRanks()
    first = [make_batches(1, seed=rank)[0] for rank in (0, 1)]
    both = [torch.cat(parts) for parts in zip(*first, strict=True)]
    with torch.no_grad():
        expected = MulticlassAccuracy(3)(module.net(both[0]), both[1])
    assert said[0][0] == pytest.approx(float(expected))
    assert all(each == said[0] for each in said)

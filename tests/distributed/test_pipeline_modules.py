"""Modules of many kinds, cut into stages: each gives what it gives on one rank, or is refused by name."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import BackboneFinetuning, GradientAccumulationScheduler
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  # the name everybody uses
from torch.utils.data import DataLoader

from lightning_dist import PipelineLayer
from lightning_dist.errors import ConfigError
from tests.distributed.lightning_runs import loader_of, make_batches, sgd, strategy_of, trainer_on_pool
from tests.support.ranks import RankPool, RanksFailed
from tests.support.reference import assert_same
from tests.support.tasks import RankContext


class Learner(pl.LightningModule):
    """Trains four linear layers on batches of eight samples."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.losses: list[float] = []
        self.said: list[float] = []
        self.make()

    def make(self) -> None:
        widths = (7, 6, 6, 5)
        self.net = nn.Sequential(*(nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in itertools.pairwise(widths)))
        self.net.append(nn.Linear(5, 3))

    def pipeline_layers(self) -> Any:
        return self.net

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def loss(self, batch: Any) -> Tensor:
        model = self.net if "net" in self._modules else self
        return F.mse_loss(model(batch[0]), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def on_validation_end(self) -> None:
        self.said.append(float(self.trainer.callback_metrics["val_loss"]))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def train_dataloader(self) -> DataLoader[Any]:
        return loader_of(make_batches(1, 4, size=8)[0])

    def val_dataloader(self) -> DataLoader[Any]:
        return loader_of(make_batches(1, 1, size=8, seed=2)[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return sgd(list(self.parameters()))


class InPlace(Learner):
    """Layers write into their inputs, at the boundary of each stage too."""

    def make(self) -> None:
        self.net = nn.Sequential(
            *(nn.Linear(7, 6), nn.ReLU(inplace=True), nn.Linear(6, 6), nn.ReLU(inplace=True), nn.Linear(6, 3))
        )


class InPlaceExample(InPlace):
    def make(self) -> None:
        super().make()
        self.net.insert(0, nn.ReLU(inplace=True))
        self.example_input_array = -torch.ones(2, 7)

    def on_train_end(self) -> None:
        assert self.example_input_array.max() < 0, "it is the user's"


class Normalized(Learner):
    """The first layer writes into the batch."""

    class Shift(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.sub_(1.0)

    def make(self) -> None:
        self.net = nn.Sequential(self.Shift(), nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 3))


class LooksUp(Learner):
    """What crosses a boundary are numbers of rows, of which 0 is none."""

    def make(self) -> None:
        self.table, self.middle, self.head = nn.Embedding(9, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def number(self, x: Tensor) -> Tensor:
        return (x.abs() * 3).long().clamp(max=8) + 1

    def look_up(self, rows: Tensor) -> Tensor:
        return self.table(rows - 1).mean(1)

    def pipeline_layers(self) -> Any:
        return [PipelineLayer(self.number), PipelineLayer(self.look_up, self.table), self.middle, self.head]

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.middle(self.look_up(self.number(x))))


class OwnParameter(Learner):
    """A layer uses a parameter and a buffer that no module but the whole holds."""

    def make(self) -> None:
        self.first, self.second, self.head = nn.Linear(7, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.start = nn.Parameter(torch.ones(6))
        self.register_buffer("shift", torch.arange(6.0))

    def embed(self, x: Tensor) -> Tensor:
        return torch.tanh(self.first(x) + self.start) + self.shift

    def pipeline_layers(self) -> Any:
        return [PipelineLayer(self.embed, self.first, self.start, self.shift), self.second, self.head]

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.embed(x)))


class InAList(Learner):
    """The layers are the children of a list, which nobody calls."""

    class Blocks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(7, 7) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
            return x

    def make(self) -> None:
        self.model = self.Blocks()

    def pipeline_layers(self) -> Any:
        return list(self.model.blocks)

    def loss(self, batch: Any) -> Tensor:
        return F.mse_loss(self.model(batch[0])[:, :3], batch[1])


class OneMoreInTraining(Learner):
    """In training a layer gives two tensors, in evaluation one."""

    class Gives(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            return (super().forward(x), x) if self.training else super().forward(x)

    class Takes(nn.Linear):
        def forward(self, x: Tensor, *more: Tensor) -> Tensor:
            return super().forward(sum(more, x))

    def make(self) -> None:
        self.a, self.b, self.c, self.d = nn.Linear(7, 6), self.Gives(6, 6), self.Takes(6, 6), nn.Linear(6, 3)

    def pipeline_layers(self) -> Any:
        return [self.a, self.b, self.c, self.d]

    def forward(self, x: Tensor) -> Tensor:
        inner = self.b(self.a(x))
        return self.d(self.c(*inner) if isinstance(inner, tuple) else self.c(inner))


class GivesItsOwn(Learner):
    """One of the two tensors that a layer gives depends on its parameters only."""

    def make(self) -> None:
        self.first, self.second, self.third, self.head = (nn.Linear(a, b) for a, b in ((7, 6), (6, 6), (6, 6), (6, 3)))
        self.bias = nn.Linear(1, 6)

    def give(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tanh(self.second(x)), self.bias(torch.ones(len(x), 1))

    def take(self, x: Tensor, bias: Tensor) -> Tensor:
        return torch.tanh(self.third(x) + bias)

    def pipeline_layers(self) -> Any:
        give, take = PipelineLayer(self.give, self.second, self.bias), PipelineLayer(self.take, self.third)
        return [self.first, give, take, self.head]

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.take(*self.give(self.first(x))))


class Masked(Learner):
    """A mask of floats travels with the values; of these only what trains has a gradient, from the third batch on."""

    def make(self) -> None:
        self.first, self.second, self.third, self.head = (nn.Linear(a, b) for a, b in ((7, 6), (6, 6), (6, 6), (6, 3)))
        self.first.requires_grad_(False)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.first.requires_grad_(batch_idx >= 2)

    def embed(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tanh(self.first(x)), (x[:, :6] > 0).float()

    def step(self, layer: nn.Module, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        if self.training:
            assert not mask.requires_grad
            assert x.requires_grad == (layer is not self.second or self.first.weight.requires_grad)
        return torch.tanh(layer(x)) * mask, mask

    def end(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.head(x * mask)

    def pipeline_layers(self) -> Any:
        second, third = (functools.partial(self.step, layer) for layer in (self.second, self.third))
        middle = [PipelineLayer(second, self.second), PipelineLayer(third, self.third)]
        return [PipelineLayer(self.embed, self.first), *middle, PipelineLayer(self.end, self.head)]

    def forward(self, x: Tensor) -> Tensor:
        return self.end(*self.step(self.third, *self.step(self.second, *self.embed(x))))


class Finetuned(Learner):
    """Its first layers, which two names lead to, train from the second epoch on, in a group of their own."""

    def make(self) -> None:
        super().make()
        self.backbone = nn.Sequential(self.net[0], self.net[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return sgd([p for p in self.parameters() if p.requires_grad])


class Missing(Learner):
    """Some of its inputs are not known."""

    def make(self) -> None:
        self.first, self.second, self.head = nn.Linear(7, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def fill(self, x: Tensor) -> Tensor:
        return self.first(x.nan_to_num(0.5))

    def pipeline_layers(self) -> Any:
        return [PipelineLayer(self.fill, self.first), self.second, self.head]

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.fill(x)))

    def train_dataloader(self) -> DataLoader[Any]:
        return loader_of([(x.where(x > 0, torch.nan), y) for x, y in make_batches(1, 4, size=8)[0]])


class NoNumber(Learner):
    """Its step does not ask for the number of the batch."""

    def training_step(self, batch: Any) -> Tensor:  # type: ignore[override]
        return self.loss(batch)


class OwnZeroing(Learner):
    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=False)


class Watches(Learner):
    """Looks at all gradients wherever a hook lets it."""

    def look(self, *_: Any) -> None:
        squares = torch.stack(
            [p.grad.pow(2).sum() for p in self.parameters() if p.grad is not None] or [torch.zeros(())]
        )
        total = squares.sum()
        torch.distributed.all_reduce(total)
        self.said.append(round(float(total), 5))

    on_before_zero_grad = on_after_backward = on_before_optimizer_step = look


class OneElement(Learner):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch).reshape(1)


class ReturnsMore(Learner):
    """Returns its outputs, one a sample, a number, and something else."""

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        output = self.net(batch[0])
        more = {"mean": output.mean(), "positive": (output > 0).sum(), "name": "it"}
        return {"loss": F.mse_loss(output, batch[1]), "output": output, **more}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        assert outputs["output"].shape == (8, 3)
        assert outputs["name"] == "it"
        assert outputs["positive"] == (outputs["output"] > 0).sum()
        self.said.append(round(float(outputs["mean"] - outputs["output"].mean()), 5))


def train(context: RankContext, kind: type[Learner], pipeline: dict[str, Any], arguments: dict[str, Any]) -> Any:
    """What a fit gives, and what it leaves on the module."""
    module = kind()
    before = {name: id(p) for name, p in module.named_parameters()}
    strategy = strategy_of(parallel={"mode": "pipeline", "pipeline": pipeline})
    trainer = trainer_on_pool(context, strategy, **arguments)
    trainer.fit(module)
    assert before == {name: id(p) for name, p in module.named_parameters()}
    for inner in module.modules() if context.world_size > 1 else ():  # Lightning itself leaves a forward under ddp
        assert not {"forward", "log"} & set(vars(inner))
        hooks = [name for name, value in vars(inner).items() if name.endswith("_hooks") and value]
        assert not hooks, hooks
    return {name: value.clone() for name, value in module.state_dict().items()}, module.losses, module.said


def pipe(schedule: str = "1f1b", **more: Any) -> dict[str, Any]:
    return {"schedule": schedule, "micro_batches": 4, **more}


ACCUMULATED = {"accumulate_grad_batches": 2}
BY_TIME = pipe(balance="time")
FINETUNED: dict[str, Any] = {
    "max_epochs": 3,
    "val_check_interval": 2,
    "callbacks": [BackboneFinetuning(1, verbose=False), GradientAccumulationScheduler({0: 1, 2: 3})],
}
CASES: dict[str, tuple[type[Learner], dict[str, Any], dict[str, Any]]] = {
    "in_place": (InPlace, pipe(split=[1, 4]), {}),
    "in_place-by_time": (InPlaceExample, BY_TIME, {}),
    "in_place-zbv": (InPlace, pipe("zbv", split=[1, 1, 1, 2]), {}),
    "writes_into_the_batch": (Normalized, pipe(), {}),
    "looks_up": (LooksUp, pipe("interleaved_1f1b"), {}),
    "looks_up-zero_bubble": (LooksUp, pipe("interleaved_zero_bubble"), {}),
    "gives_its_own-zero_bubble": (GivesItsOwn, pipe("interleaved_zero_bubble"), {}),
    "own_parameter": (OwnParameter, pipe(), {}),
    "in_a_list": (InAList, pipe(), {}),
    "one_more_in_training": (OneMoreInTraining, pipe(split=[2, 2]), {}),
    "masked": (Masked, pipe(split=[1, 3]), {}),
    "masked-zbv": (Masked, pipe("zbv"), {}),
    "masked-zero_bubble": (Masked, pipe("interleaved_zero_bubble"), {}),
    "finetuned": (Finetuned, pipe(), FINETUNED),
    "finetuned-zbv": (Finetuned, pipe("zbv"), FINETUNED),
    "missing": (Missing, pipe(), {}),
    "no_number": (NoNumber, pipe(), ACCUMULATED),
    "own_zeroing": (OwnZeroing, pipe(), {}),
    "own_zeroing-accumulated": (OwnZeroing, pipe(), ACCUMULATED),
    "watches": (Watches, pipe(), {}),
    "watches-accumulated": (Watches, pipe("zbv"), ACCUMULATED),
    "one_element": (OneElement, pipe(), {}),
    "returns_more": (ReturnsMore, pipe(), {}),
}


@pytest.mark.parametrize(("kind", "pipeline", "arguments"), CASES.values(), ids=CASES)
def test_equals_one_rank(
    ranks: RankPool, kind: type[Learner], pipeline: dict[str, Any], arguments: dict[str, Any]
) -> None:
    expected_weights, expected_losses, expected_said = ranks.run(train, world_size=1, args=(kind, {}, arguments))[0]
    for weights, losses, said in ranks.run(train, world_size=2, args=(kind, pipeline, arguments)):
        assert_same(weights, expected_weights, atol=1e-6)
        assert losses == pytest.approx(expected_losses, rel=1e-5)
        assert said == pytest.approx(expected_said, rel=1e-4)


# -- refused -----------------------------------------------------------------------------------------------------------


class Undeclared(OwnParameter):
    def pipeline_layers(self) -> Any:
        return [PipelineLayer(self.embed, self.first, self.shift), self.second, self.head]


class Penalty(Learner):
    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) + sum(p.pow(2).sum() for p in self.net.parameters())


class Incomplete(InAList):
    class Blocks(InAList.Blocks):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(7, 7)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(super().forward(x))


class LogsInLayer(OwnParameter):
    def embed(self, x: Tensor) -> Tensor:
        self.log("mean", x.mean())
        return super().embed(x)


class Gathers(Learner):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return torch.as_tensor(self.all_gather(self.loss(batch))).mean()


class StepsInBackward(Learner):
    def make(self) -> None:
        super().make()
        self.net[0][0].weight.register_post_accumulate_grad_hook(lambda p: None)


class Vector(Learner):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return (self.net(batch[0]) - batch[1]).pow(2)


REFUSED: dict[str, tuple[type[Learner], str]] = {
    "undeclared": (Undeclared, "uses start, which is on another rank"),
    "penalty": (Penalty, r"stage 1 of 2 uses net\.\d\.0\.\w+, which is on another rank"),
    "incomplete": (Incomplete, r"self.model, and model.head.weight is in none of them"),
    "logs_in_layer": (LogsInLayer, r"self.log\('mean', ...\) in a layer of a pipeline"),
    "gathers": (Gathers, r"self.all_gather in Gathers.training_step.*gather them in on_train_batch_end"),
    "post_accumulate": (StepsInBackward, "net.0.0.weight has a hook by register_post_accumulate_grad_hook"),
    "vector": (Vector, r"a loss of shape \[2, 3\]: return one number"),
}


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_zero_bubble"])
@pytest.mark.parametrize(("kind", "said"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_right_is_refused_by_name(
    ranks: RankPool, kind: type[Learner], said: str, schedule: str
) -> None:
    with pytest.raises(RanksFailed, match=said):
        ranks.run(train, world_size=2, args=(kind, pipe(schedule, virtual_stages=1), {}))


def refuse_without_example(context: RankContext) -> None:
    with pytest.raises(ConfigError, match="example_input_array, which is not set"):
        train(context, InPlace, BY_TIME, {})


def test_measuring_without_an_example_is_refused_on_every_rank(ranks: RankPool) -> None:
    ranks.run(refuse_without_example, world_size=2)


def warn_of_hooks(context: RankContext) -> None:
    class Clamped(Learner):
        def make(self) -> None:
            super().make()
            self.net[0][0].weight.register_hook(lambda gradient: gradient.clamp(-1, 1))

    with pytest.warns(UserWarning, match="net.0.0.weight has a hook by register_hook, which a pipeline calls once a"):
        train(context, Clamped, pipe(), {})


def test_hooks_on_gradients_are_warned_of(ranks: RankPool) -> None:
    ranks.run(warn_of_hooks, world_size=2)

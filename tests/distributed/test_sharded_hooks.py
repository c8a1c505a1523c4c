"""What users do with a sharded model in hooks, outside of its steps: the numbers are those of ddp."""

from __future__ import annotations

import copy
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.utilities import grad_norm
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_dist import HierDistStrategy
from tests.distributed.compared import check_equal
from tests.distributed.lightning_runs import OddModule, sgd
from tests.distributed.sharded_runs import LAYOUTS, MODES, OddNet, in_modes
from tests.distributed.test_sharded_refusals import error_of
from tests.distributed.test_sharded_training import fit_case
from tests.support.ranks import RankPool

TWO = LAYOUTS["1+1"]


class Sampled(OddModule):
    """Calls itself, its network and a layer of it in hooks, with and without gradients."""

    def __init__(self) -> None:
        super().__init__(sgd, make_model=OddNet)
        self.samples: dict[str, float] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)

    def sample(self, place: str, call: Any) -> None:
        value = float(call(torch.linspace(-1, 1, 14).view(2, 7)).detach().sum())
        self.log(place, value, sync_dist=False)

    def on_train_batch_end(self, *args: Any) -> None:
        with torch.no_grad():
            self.sample("after a batch", self)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.sample("before a step", self.net.layers[0])

    def on_train_epoch_end(self) -> None:
        self.sample("after an epoch", self.net)

    def on_validation_epoch_end(self) -> None:
        self.sample("after validation", self)


@in_modes("zero3", "hsdp")
def test_a_module_called_outside_of_its_steps_gathers(ranks: RankPool, mode: str) -> None:
    pairs = ranks.run(fit_case, layout=TWO, args=(mode, Sampled), kwargs={"trainer": {"accumulate_grad_batches": 2}})
    check_equal(pairs)
    assert len(pairs[0].ours.logged) == 5


class Norms(OddModule):
    """Logs norms of gradients as Lightning offers, and the norm before clipping."""

    def __init__(self) -> None:
        super().__init__(sgd, make_model=OddNet)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for norm_type in (1, 2, "inf"):
            self.log_dict(grad_norm(self, norm_type=norm_type))
        self.log("largest", max(p.grad.abs().max() for p in self.parameters()))
        self.log("squared", sum(p.grad.pow(2).sum() for p in self.parameters()))
        if isinstance(self.trainer.strategy, HierDistStrategy):
            ours = self.trainer.strategy.gradient_norm()
        else:
            ours = nn.utils.get_total_norm([p.grad for p in self.parameters()])
        self.log("before clipping", ours)


@in_modes("zero2", "hsdp")
def test_norms_of_gradients_in_hooks_equal_ddp(ranks: RankPool, mode: str) -> None:
    pairs = ranks.run(fit_case, layout=TWO, args=(mode, Norms), kwargs={"trainer": {"gradient_clip_val": 0.05}})
    check_equal(pairs)
    assert pairs[0].ours.logged["before clipping"] > 0.05
    assert pairs[0].ours.logged["before clipping"] == pytest.approx(pairs[0].ours.logged["grad_2.0_norm_total"])


class Decayed(OddModule):
    """A penalty over all parameters in the loss."""

    def __init__(self) -> None:
        super().__init__(sgd, make_model=OddNet)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return super().training_step(batch, batch_idx) + 0.01 * sum(p.pow(2).sum() for p in self.parameters())


class DecayedShards(Decayed):
    """The same, of what torch gathers."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        shards = [p for p in self.parameters() if isinstance(p, DTensor)]
        return OddModule.training_step(self, batch, batch_idx) + sum(p.pow(2).sum().full_tensor() for p in shards)


@pytest.mark.parametrize("mode", ["zero1", "zero2"])
def test_a_penalty_on_weights_equals_ddp(ranks: RankPool, mode: str) -> None:
    check_equal(
        ranks.run(fit_case, layout=TWO, args=(mode, Decayed), kwargs={"trainer": {"accumulate_grad_batches": 2}})
    )


@pytest.mark.parametrize("kind", [Decayed, DecayedShards])
def test_a_penalty_on_shards_is_refused(ranks: RankPool, kind: type[Decayed]) -> None:
    for said in ranks.run(error_of, layout=TWO, args=(MODES["zero3"], kind), fresh=True):
        assert said.startswith("CombinationError")
        assert "weight_decay" in said


def swa() -> list[pl.Callback]:
    return [StochasticWeightAveraging(swa_lrs=0.02, swa_epoch_start=1, annealing_epochs=1)]


def make_plain() -> pl.LightningModule:
    return OddModule(sgd, make_model=OddNet)


@in_modes("zero2", "hsdp")
def test_stochastic_weight_averaging_equals_ddp(ranks: RankPool, mode: str) -> None:
    arguments = {"make_callbacks": swa, "trainer": {"max_epochs": 4}}
    check_equal(ranks.run(fit_case, layout=TWO, args=(mode, make_plain), kwargs=arguments))


class Copied(OddModule):
    """Copies its network once it is sharded."""

    def __init__(self) -> None:
        super().__init__(sgd, make_model=OddNet)

    def on_train_start(self) -> None:
        self.copied = copy.deepcopy(self.net)


class Writing(OddModule):
    """Writes a weight in its step, in place."""

    def __init__(self) -> None:
        super().__init__(sgd, make_model=OddNet)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.net(batch[0])
        self.write(self.net.layers[1].bias)
        return super().training_step(batch, batch_idx)

    def write(self, parameter: nn.Parameter) -> None:
        with torch.no_grad():
            parameter.mul_(0.5)


class Replacing(Writing):
    """Gives a weight other memory."""

    def write(self, parameter: nn.Parameter) -> None:
        parameter.data = parameter.data * 0.5


@pytest.mark.parametrize(
    ("kind", "part"),
    [(Copied, "EMAWeightAveraging"), (Writing, "net.layers.1.bias was"), (Replacing, "net.layers.1.bias was")],
)
def test_copies_and_lost_writes_are_refused(ranks: RankPool, kind: type[OddModule], part: str) -> None:
    for said in ranks.run(error_of, layout=TWO, args=(MODES["zero2"], kind), fresh=True):
        assert said.startswith("CombinationError")
        assert part in said

"""What users do with a sharded model in hooks, outside of its steps: the numbers are those of ddp."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.distributed.compared import check_equal
from tests.distributed.lightning_runs import OddModule, sgd
from tests.distributed.sharded_runs import OddNet
from tests.distributed.test_sharded_training import fit_case
from tests.distributed.test_zero import LAYOUTS, MODES
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


@pytest.mark.parametrize("mode", MODES)
def test_a_module_called_outside_of_its_steps_gathers(ranks: RankPool, mode: str) -> None:
    pairs = ranks.run(fit_case, layout=TWO, args=(mode, Sampled), kwargs={"trainer": {"accumulate_grad_batches": 2}})
    check_equal(pairs)
    assert len(pairs[0].ours.logged) == 5

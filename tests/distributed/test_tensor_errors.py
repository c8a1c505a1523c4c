"""What is refused where layers are split, and what happens when a peer is lost."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_dist.errors import CombinationError, ConfigError
from lightning_dist.parallel.tensor import keep_kinds_apart, parallelize
from tests.distributed.split_models import make_batches, make_gpt, placed_mesh
from tests.support.ranks import RankPool, RanksFailed
from tests.support.tasks import RankContext


class Leaking(nn.Module):
    """Its first layer may be split, its last never takes that."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)
        self.down = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(4)
        self.use_norm = False

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        return self.norm(y).sum() if self.use_norm else y.sum()


def misuse(context: RankContext) -> None:
    plan = {"up": "column", "down": "row"}
    with placed_mesh(context, {"dp_shard": 2, "tp": 2}) as placed:
        with pytest.raises(ConfigError, match="one axis"):
            parallelize(Leaking(), placed.mesh, plan=plan)
        mesh = placed.mesh["tp"]
        with pytest.raises(CombinationError, match="loss_parallel keeps the logits"):
            parallelize(Leaking(), mesh, plan=plan, loss_parallel=True)
        model = Leaking()
        before = {name: (parameter, parameter.detach().clone()) for name, parameter in model.named_parameters()}
        with pytest.raises(CombinationError, match="leaves a rest"):
            parallelize(nn.ModuleDict({"m": model, "n": nn.Linear(3, 5)}), mesh, plan={"m.up": "column", "n": "row"})
        for name, parameter in model.named_parameters():
            assert parameter is before[name][0]
            assert torch.equal(parameter, before[name][1]), "refused before anything is changed"
        parallel = parallelize(model, mesh, plan=plan)
        with pytest.raises(ConfigError, match=r"output of up is split .* no row layer took it"), parallel.running():
            model(torch.ones(2, 8))
        model.use_norm = True
        with pytest.raises(CombinationError, match=r"norm \(LayerNorm\) has parameters and runs between up"):
            model(torch.ones(2, 8))
        with pytest.raises(ConfigError, match="already"):
            parallelize(model, mesh, plan=plan)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        with pytest.raises(CombinationError, match=r"AdamW\(fused=True\)"):
            keep_kinds_apart(optimizer)


def test_misuse_is_refused(ranks: RankPool) -> None:
    ranks.run(misuse, world_size=4)


def silent_peer(context: RankContext) -> float:
    model = make_gpt()
    with placed_mesh(context, {"tp": 2}, timeout_s=2.0) as placed:
        parallel = parallelize(model, placed.mesh)
        start_s = time.monotonic()
        if context.rank == 1:
            dist.barrier()  # in another group than the one the peer waits in
        try:
            with parallel.running():
                model(make_batches("gpt", 1)[0][0])
        except RuntimeError:
            return time.monotonic() - start_s
        finally:
            if context.rank == 0:
                dist.barrier()
        return 0.0


def test_a_silent_peer_is_an_error_within_the_deadline_of_the_mesh(ranks: RankPool) -> None:
    waited_s = ranks.run(silent_peer, world_size=2, fresh=True, deadline_s=60, group_timeout_s=50)[0]
    assert 1.0 < waited_s < 20.0, "2 s and what a busy machine adds, not the 50 s of the default group"


def lose_peer(context: RankContext) -> None:
    model = make_gpt()
    with placed_mesh(context, {"tp": 2}, timeout_s=30.0) as placed:
        parallel = parallelize(model, placed.mesh)
        if context.rank == 1:
            raise ZeroDivisionError("lost")
        with parallel.running():
            model(make_batches("gpt", 1)[0][0])


def test_a_lost_peer_is_an_error_at_once(ranks: RankPool) -> None:
    with pytest.raises(RanksFailed) as caught:
        ranks.run(lose_peer, world_size=2, fresh=True, deadline_s=40)
    assert {failure.rank: failure.kind for failure in caught.value.failures} == {0: "raised", 1: "raised"}

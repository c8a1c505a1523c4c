"""Recomputation through the strategy together with split layers, and with blocks that torch.compile compiles."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.nn import functional
from tqdm import tqdm

from tests.distributed.lightning_runs import loader_of, strategy_of, trainer_on_pool
from tests.distributed.sharded_runs import MODES
from tests.distributed.tensor_runs import SplitCase, SplitLearner
from tests.distributed.test_recompute import Block, Deep, make_batches
from tests.distributed.test_tensor_training import LAYOUTS, TENSOR, inside
from tests.support.ranks import RankPool
from tests.support.tasks import RankContext

RECOMPUTED: dict[str, Any] = {
    "full": "full",
    "selective": "selective",
    "every_n": {"mode": "every_n", "every": 2},
    "budget": {"mode": "budget", "budget": 20_000},
}


def left_by(context: RankContext, module: pl.LightningModule, loader: Any = None, **strategy: Any) -> dict[str, Any]:
    """Train with accumulation and clipping; weights and losses."""
    torch.manual_seed(100)  # of the masks
    trainer = trainer_on_pool(
        context,
        strategy_of(**strategy),
        limit_val_batches=0,
        accumulate_grad_batches=2,
        gradient_clip_val=0.5,
    )
    trainer.fit(module, loader)
    state = {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}
    return {**state, "losses": torch.tensor(module.losses)}


def different(mine: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    return [name for name in theirs if not torch.equal(mine[name], theirs[name])]


# -- split layers


def train_split(context: RankContext, parallel: dict[str, Any], kinds: list[str]) -> dict[str, list[str]]:
    """What differs from a training that keeps everything, by kind of recomputation."""
    case = SplitCase("noisy", parallel=parallel, accumulation=2)
    plain = left_by(context, SplitLearner(case), parallel=parallel)
    return {
        kind: different(left_by(context, SplitLearner(case), parallel=parallel, recompute=RECOMPUTED[kind]), plain)
        for kind in kinds
    }


@pytest.mark.parametrize(
    ("mode", "kinds"),
    [
        ("tensor", ["full", "selective"]),
        ("zero2", ["budget"]),
        ("zero3", ["every_n"]),
        *(pytest.param(mode, list(RECOMPUTED), marks=pytest.mark.sweep) for mode in ("tensor", "zero2", "zero3")),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_split_blocks_that_draw_masks_are_recomputed_bit_for_bit(ranks: RankPool, mode: str, kinds: list[str]) -> None:
    parallel = TENSOR if mode == "tensor" else inside(mode)
    for found in ranks.run(train_split, layout=LAYOUTS["2+2"], args=(parallel, kinds), deadline_s=100):
        assert found == {kind: [] for kind in kinds}


# -- compiled blocks


class QuietBlock(Block):
    """Does not count its runs: each new count would be compiled anew."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(functional.dropout(torch.tanh(self.norm(self.up(x))), 0.3, self.training))


class Once(Deep):
    """Calls each block once: a compiled block with batch statistics cannot be called twice under ``selective``."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def deep(how: str) -> Once:
    torch._dynamo.reset()
    module = Once()
    module.blocks = nn.ModuleList([QuietBlock() for _ in module.blocks])
    for index, block in enumerate(module.blocks):
        if how == "in place":
            block.compile(backend="aot_eager")
        elif how == "wrapped":
            module.blocks[index] = torch.compile(block, backend="aot_eager")  # type: ignore[assignment]
    return module


def train_compiled(context: RankContext, mode: dict[str, Any], how: str) -> dict[str, list[str]]:
    tqdm.monitor_interval = 0  # dynamo's progress bar would start a thread for good
    batches = make_batches(context.world_size, 4)[context.rank]
    plain = left_by(context, deep(how), loader_of(batches), **mode)
    return {
        str(recompute): different(left_by(context, deep(how), loader_of(batches), **mode, recompute=recompute), plain)
        for recompute in ("full", "selective", {"mode": "budget", "budget": 4_000})
    }


@pytest.mark.parametrize(
    ("mode", "how"),
    [
        ("ddp", "in place"),
        ("zero2", "wrapped"),
        ("zero3", "in place"),
        pytest.param("ddp", "wrapped", marks=pytest.mark.sweep),
        pytest.param("zero1", "in place", marks=pytest.mark.sweep),
        pytest.param("zero3", "wrapped", marks=pytest.mark.sweep),
        pytest.param("hsdp", "in place", marks=pytest.mark.sweep),
    ],
)
@pytest.mark.slow
def test_compiled_blocks_are_recomputed_as_they_are(ranks: RankPool, mode: str, how: str) -> None:
    options = {"ddp": {"parallel": "ddp"}, **MODES}[mode]
    # Fresh ranks: dynamo keeps a thread, and torch's caches FSDP2's groups.
    for found in ranks.run(train_compiled, world_size=2, args=(options, how), fresh=True, deadline_s=110):
        assert all(names == [] for names in found.values()), found

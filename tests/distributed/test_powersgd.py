"""``sync=powersgd``: what its paper says, on all ranks alike, and nothing of a gradient is lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import lightning.pytorch as pl
import pytest
import torch

from lightning_dist.errors import CombinationError
from lightning_dist.gradsync.powersgd.factors import first_factor, matrix_of, orthonormal
from lightning_dist.parallel.held_state import local_of
from tests.distributed import sharded_runs
from tests.distributed.fixed_gradients import FixedGradients
from tests.distributed.lightning_runs import loader_of, strategy_of, trainer_on_pool
from tests.distributed.test_checkpoint_layouts import SaveAtEnd
from tests.support.ranks import RankPool
from tests.support.sweeps import sampled
from tests.support.tasks import RankContext

LAYOUTS: dict[str, dict[str, list[int]]] = {
    "2+2": {"a": [0, 1], "b": [2, 3]},
    "1+1": {"a": [0], "b": [1]},
    "2+1": {"a": [0, 1], "b": [2]},
}
SHAPES = {"matrix": (40, 30), "kernel": (16, 4, 3, 3), "late": (33, 29), "bias": (40,), "thin": (3, 50)}
MODES = ("ddp", "zero1", "zero2", "zero3", "hsdp")
RANK = 2
STEPS = 5
UNFROZEN_AT = 3

GradientsT = TypeVar("GradientsT", bound=FixedGradients)


def gradients_of(rank: int, step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * rank + step)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def mean_gradients(world_size: int, step: int) -> dict[str, torch.Tensor]:
    every = [gradients_of(rank, step) for rank in range(world_size)]
    return {name: torch.stack([each[name] for each in every]).mean(0) for name in SHAPES}


def fixed_gradients(kind: type[GradientsT], *, unfrozen_at: int = UNFROZEN_AT) -> GradientsT:
    return kind(SHAPES, uses=tuple(SHAPES), unfrozen_at=unfrozen_at)


def train(
    context: RankContext,
    folder: str,
    sync: dict[str, Any],
    accumulation: int = 1,
    steps: int = STEPS,
    parallel: str = "ddp",
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Weights and what this rank owes in the end, saved there; begun where another run has saved."""
    module, path = fixed_gradients(FixedGradients), Path(folder)
    saved = sorted(path.glob("*.ckpt"))
    trainer = trainer_on_pool(
        context,
        strategy_of(
            parallel=parallel,
            sync={"algorithm": "powersgd", "powersgd": {"rank": RANK}, **sync},
            checkpoint="sharded",
        ),
        accumulate_grad_batches=accumulation,
        max_epochs=len(saved) + 1,
        callbacks=[SaveAtEnd(path / f"{len(saved)}.ckpt")],
    )
    batches = [gradients_of(context.rank, step) for step in range(steps)]
    trainer.fit(module, loader_of(batches), ckpt_path=saved[-1] if saved else None)
    return {name: p.detach().clone() for name, p in module.named_parameters()}, module.owed


def reference(world_size: int, *, warmup: int = 0, warm_start: bool = True, keeps: bool = True) -> dict[str, Any]:
    """The algorithm in one process, on mean gradients: all of it is linear in them but the columns of P."""
    weights = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    owed = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    factors: dict[str, torch.Tensor] = {}
    for step in range(STEPS):
        for name, gradient in mean_gradients(world_size, step).items():
            if name == "late" and step < UNFROZEN_AT:
                continue
            shape = matrix_of(gradient.shape, RANK)
            if shape is None or step < warmup:
                weights[name] -= gradient
                continue
            values = (gradient + owed[name]).view(shape)
            factor = factors.get(name) if warm_start else None
            if factor is None:
                factor = first_factor(name, shape.columns, RANK, window=step)
            first = orthonormal(values @ factor)
            factors[name] = values.T @ first
            product = first @ factors[name].T
            weights[name] -= product.view(gradient.shape)
            if keeps:
                owed[name] = (values - product).view(gradient.shape)
    return weights


CASES: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    f"{parallel}-{layout}-{case}": (parallel, layout, options, same)
    for parallel in MODES
    for layout in LAYOUTS
    if (parallel, layout) != ("hsdp", "2+1")
    for case, (options, same) in {
        "warm": ({}, {}),
        "cold": ({"powersgd": {"rank": RANK, "warm_start": False}}, {"warm_start": False}),
        "exact first": ({"warmup_steps": 2}, {"warmup": 2}),
        "forgetful": ({"error_feedback": False}, {"keeps": False}),
        "buckets": ({"bucket_bytes": 1024, "chunk_bytes": 4096}, {}),
    }.items()
}


@pytest.mark.parametrize(
    ("parallel", "layout", "options", "same"),
    sampled(CASES, ["ddp-2+2-warm", "ddp-2+1-buckets", "ddp-1+1-cold", "ddp-1+1-exact first", "zero2-2+2-warm"]),
)
def test_it_is_the_algorithm_of_its_paper(
    ranks: RankPool, tmp_path: Path, parallel: str, layout: str, options: dict[str, Any], same: dict[str, Any]
) -> None:
    got = ranks.run(train, layout=LAYOUTS[layout], args=(str(tmp_path), options, 1, STEPS, parallel))
    expected = reference(len(got), **same)
    for weights, _ in got:
        for name, value in expected.items():
            assert torch.equal(weights[name], got[0][0][name]), "alike on all ranks, to the bit"
            # Values up to 10 in fp32, summed in another order.
            torch.testing.assert_close(weights[name], value, rtol=1e-6, atol=5e-6)


def _check_nothing_is_lost(got: list[Any], total: dict[str, torch.Tensor]) -> None:
    for name, expected in total.items():
        owed = torch.stack([of_rank[name] for _, of_rank in got]).sum(0)
        torch.testing.assert_close(owed - got[0][0][name], expected, rtol=0, atol=2e-4)
        assert bool(owed.any()) == (matrix_of(SHAPES[name], RANK) is not None)


def _applied(world_size: int, *, per: int = 1) -> dict[str, torch.Tensor]:
    total = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    for step in range(STEPS):
        for name, gradient in mean_gradients(world_size, step).items():
            if name != "late" or step >= UNFROZEN_AT:
                total[name] += gradient / per
    return total


@pytest.mark.parametrize("parallel", sampled({mode: (mode,) for mode in MODES}, ["ddp", "zero1"]))
def test_what_is_left_out_is_owed_under_accumulation(ranks: RankPool, tmp_path: Path, parallel: str) -> None:
    got = ranks.run(train, layout=LAYOUTS["1+1"], args=(str(tmp_path), {}, UNFROZEN_AT, STEPS, parallel))
    _check_nothing_is_lost(got, _applied(len(got), per=UNFROZEN_AT))


PAIRS = {
    f"{before}, {after}": (before, after)
    for before in ("ddp 1+1", "ddp 2+2", "zero2 2+2", "zero3 2+1", "hsdp 2+2")
    for after in ("ddp 2+1", "zero2 2+1", "zero1 1+1", "hsdp 2+2")
}


@pytest.mark.parametrize(
    ("before", "after"), sampled(PAIRS, ["ddp 1+1, ddp 2+1", "ddp 2+2, zero2 2+1", "hsdp 2+2, ddp 2+1"])
)
def test_others_take_over_what_is_owed(ranks: RankPool, tmp_path: Path, before: str, after: str) -> None:
    total = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    got: list[Any] = []
    for each in (before, after):
        parallel, layout = each.split()
        got = ranks.run(train, layout=LAYOUTS[layout], args=(str(tmp_path), {}, 1, STEPS, parallel))
        for name, value in _applied(len(got)).items():
            total[name] += value
    _check_nothing_is_lost(got, total)


def straight_and_resumed(context: RankContext, folder: str, parallel: str) -> list[Any]:
    """Two epochs at once, and the second one from a checkpoint between them."""
    path = Path(folder) / "half"
    options: dict[str, Any] = {
        "parallel": parallel,
        "sync": {"algorithm": "powersgd", "powersgd": {"rank": RANK}},
        "checkpoint": "sharded",
    }
    batches = [gradients_of(context.rank, step) for step in range(STEPS)]

    def run(epochs: int, ckpt_path: Path | None = None, *callbacks: pl.Callback) -> dict[str, torch.Tensor]:
        module = fixed_gradients(FixedGradients, unfrozen_at=0)
        trainer = trainer_on_pool(context, strategy_of(**options), max_epochs=epochs, callbacks=list(callbacks))
        trainer.fit(module, loader_of(batches), ckpt_path=ckpt_path)
        return {name: p.detach().clone() for name, p in module.named_parameters()}

    run(1, None, SaveAtEnd(path))
    return [run(2), run(2, path)]


@pytest.mark.parametrize(
    ("parallel", "layout"),
    sampled({f"{mode}-{name}": (mode, name) for mode in MODES for name in ("1+1", "2+2")}, ["ddp-1+1", "zero2-2+2"]),
)
def test_a_run_that_goes_on_is_the_one_that_did_not_stop(
    ranks: RankPool, tmp_path: Path, parallel: str, layout: str
) -> None:
    for straight, resumed in ranks.run(
        straight_and_resumed, layout=LAYOUTS[layout], args=(str(tmp_path), parallel), deadline_s=60
    ):
        for name, value in straight.items():
            assert torch.equal(value, resumed[name]), name


class Poisoned(FixedGradients):
    """One batch is not finite on rank 1."""

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        if batch_idx == 1 and self.global_rank == 1:
            batch = {**batch, "matrix": batch["matrix"].clone().index_fill_(0, torch.tensor([0]), torch.inf)}
        return super().training_step(batch, batch_idx)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.seen = [*getattr(self, "seen", []), bool(torch.isfinite(local_of(self.matrix.grad)).all())]
        for gradient in (local_of(parameter.grad) for parameter in self.parameters() if parameter.grad is not None):
            if not torch.isfinite(gradient).all():
                gradient.zero_()


def train_poisoned(context: RankContext, parallel: str) -> tuple[list[bool], torch.Tensor, torch.Tensor]:
    module = fixed_gradients(Poisoned)
    strategy = strategy_of(parallel=parallel, sync={"algorithm": "powersgd", "powersgd": {"rank": RANK}})
    trainer = trainer_on_pool(context, strategy)
    trainer.fit(module, loader_of([gradients_of(context.rank, step) for step in range(STEPS)]))
    return module.seen, module.matrix.detach(), module.owed["matrix"]


@pytest.mark.parametrize("parallel", sampled({mode: (mode,) for mode in MODES}, ["ddp"]))
def test_a_gradient_that_is_not_finite_is_seen_once(ranks: RankPool, parallel: str) -> None:
    got = ranks.run(train_poisoned, layout=LAYOUTS["1+1"], args=(parallel,))
    for seen, weights, owed in got:
        assert seen == [True, False, True, True, True]
        assert torch.equal(weights, got[0][1])
        assert torch.isfinite(weights).all()
        assert torch.isfinite(owed).all()


NETS = {
    f"{mode}-{name}": (mode, net, more)
    for mode in MODES[1:]
    for name, (net, more) in {
        "odd": ("odd", {}),
        "tied": ("tied", {}),
        "frozen": ("frozen", {}),
        "sometimes": ("sometimes", {}),
        "bf16": ("odd", {"precision": "bf16-mixed"}),
        "clipped": ("odd", {"gradient_clip_val": 0.1}),
    }.items()
}


@pytest.mark.parametrize(("parallel", "net", "trainer"), sampled(NETS, ["zero2-tied", "zero2-sometimes"]))
def test_shards_get_the_products_that_whole_models_get(
    ranks: RankPool, parallel: str, net: str, trainer: dict[str, Any]
) -> None:
    outcomes = []
    for mode in ("ddp", parallel):
        strategy = {
            "parallel": {"mode": mode, "find_unused_parameters": net == "sometimes"},
            "sync": {"algorithm": "powersgd", "powersgd": {"rank": 1}},
        }
        case = sharded_runs.Case(net=net, strategy=strategy, trainer=trainer)
        outcomes.append(ranks.run(sharded_runs.train, layout=LAYOUTS["2+2"], args=(case,)))
    for whole, shards in zip(*outcomes, strict=True):
        for name, value in whole.weights.items():
            # Other orders of sums; of bf16, gradients of shards are rounded where those of whole models are.
            torch.testing.assert_close(shards.weights[name], value, rtol=0, atol=1e-5)


def test_other_modes_are_refused() -> None:
    for parallel, instead in (("tensor", "write sync=bf16"), ("pipeline", "write sync=int8")):
        with pytest.raises(CombinationError, match=instead):
            strategy_of(parallel=parallel, sync={"algorithm": "powersgd"})
    with pytest.raises(CombinationError, match=r"write sync\.codec=same"):
        strategy_of(sync={"algorithm": "powersgd", "codec": "int8"})

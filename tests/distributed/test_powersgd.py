"""``sync=powersgd``: what its paper says, on all ranks alike, and nothing of a gradient is lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import lightning.pytorch as pl
import pytest
import torch

from lightning_dist.errors import CombinationError
from lightning_dist.gradsync.powersgd.factors import first_factor, matrix_of, orthonormal
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


def fixed_gradients(kind: type[GradientsT]) -> GradientsT:
    return kind(SHAPES, uses=tuple(SHAPES), unfrozen_at=UNFROZEN_AT)


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
    for parallel in ("ddp", "zero1", "zero2", "zero3", "hsdp")
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


def test_what_is_left_out_is_owed_once_a_window(ranks: RankPool, tmp_path: Path) -> None:
    got = ranks.run(train, layout=LAYOUTS["1+1"], args=(str(tmp_path), {}, STEPS))  # one window
    _check_nothing_is_lost(got, _applied(len(got), per=STEPS))


@pytest.mark.parametrize(("before", "after"), sampled({"up": ("1+1", "2+1"), "down": ("2+2", "1+1")}, ["up"]))
def test_other_ranks_take_over_what_is_owed(ranks: RankPool, tmp_path: Path, before: str, after: str) -> None:
    total = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    got: list[Any] = []
    for layout in (before, after):
        got = ranks.run(train, layout=LAYOUTS[layout], args=(str(tmp_path), {}))
        for name, value in _applied(len(got)).items():
            total[name] += value
    _check_nothing_is_lost(got, total)


def straight_and_resumed(context: RankContext, folder: str) -> list[Any]:
    """Two epochs at once, and the second one from a checkpoint between them."""
    path = Path(folder) / "half"
    options: dict[str, Any] = {"sync": {"algorithm": "powersgd", "powersgd": {"rank": RANK}}, "checkpoint": "sharded"}
    batches = [gradients_of(context.rank, step) for step in range(STEPS)]

    def run(epochs: int, ckpt_path: Path | None = None, *callbacks: pl.Callback) -> dict[str, torch.Tensor]:
        module = fixed_gradients(FixedGradients)
        trainer = trainer_on_pool(context, strategy_of(**options), max_epochs=epochs, callbacks=list(callbacks))
        trainer.fit(module, loader_of(batches), ckpt_path=ckpt_path)
        return {name: p.detach().clone() for name, p in module.named_parameters()}

    run(1, None, SaveAtEnd(path))
    return [run(2), run(2, path)]


def test_a_run_that_goes_on_is_the_one_that_did_not_stop(ranks: RankPool, tmp_path: Path) -> None:
    for straight, resumed in ranks.run(straight_and_resumed, layout=LAYOUTS["1+1"], args=(str(tmp_path),)):
        for name, value in straight.items():
            if name != "late":  # it is frozen again where a run begins
                assert torch.equal(value, resumed[name]), name


class Poisoned(FixedGradients):
    """One batch is not finite on rank 1."""

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        if batch_idx == 1 and self.global_rank == 1:
            batch = {**batch, "matrix": batch["matrix"].clone().index_fill_(0, torch.tensor([0]), torch.inf)}
        return super().training_step(batch, batch_idx)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.seen = [*getattr(self, "seen", []), bool(torch.isfinite(self.matrix.grad).all())]
        for parameter in self.parameters():
            if parameter.grad is not None and not torch.isfinite(parameter.grad).all():
                parameter.grad.zero_()


def train_poisoned(context: RankContext) -> tuple[list[bool], torch.Tensor, torch.Tensor]:
    module = fixed_gradients(Poisoned)
    trainer = trainer_on_pool(context, strategy_of(sync={"algorithm": "powersgd", "powersgd": {"rank": RANK}}))
    trainer.fit(module, loader_of([gradients_of(context.rank, step) for step in range(STEPS)]))
    return module.seen, module.matrix.detach(), module.owed["matrix"]


def test_a_gradient_that_is_not_finite_is_seen_once(ranks: RankPool) -> None:
    got = ranks.run(train_poisoned, layout=LAYOUTS["1+1"])
    for seen, weights, owed in got:
        assert seen == [True, False, True, True, True]
        assert torch.equal(weights, got[0][1])
        assert torch.isfinite(weights).all()
        assert torch.isfinite(owed).all()


def test_other_modes_are_refused() -> None:
    for parallel, instead in (("tensor", "write sync=bf16"), ("pipeline", "write sync=int8")):
        with pytest.raises(CombinationError, match=instead):
            strategy_of(parallel=parallel, sync={"algorithm": "powersgd"})
    with pytest.raises(CombinationError, match=r"write sync\.codec=same"):
        strategy_of(sync={"algorithm": "powersgd", "codec": "int8"})

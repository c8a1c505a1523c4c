"""Error feedback through Lightning: no gradient is lost, and a run that goes on is the one that did not stop."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lightning_dist import build
from lightning_dist.build.groups import GroupMaker
from lightning_dist.comm.feedback import Origin, Span
from lightning_dist.config import SyncConfig, TopologyConfig
from lightning_dist.events import EventStream
from tests.distributed.fixed_gradients import FixedGradients
from tests.distributed.lightning_runs import loader_of, strategy_of, trainer_on_pool
from tests.distributed.pipeline_runs import StageCase, StageLearner
from tests.distributed.test_checkpoint_layouts import STRATEGIES, SaveAtEnd
from tests.support.ranks import RankPool
from tests.support.sweeps import sampled
from tests.support.tasks import RankContext

LAYOUTS: dict[str, dict[str, list[int]]] = {
    "2+2": {"a": [0, 1], "b": [2, 3]},
    "1+1": {"a": [0], "b": [1]},
    "3+1": {"a": [0, 1, 2], "b": [3]},
    "2": {"a": [0, 1]},
    "1": {"a": [0]},
}
SMALL_CHUNKS = {"chunk_bytes": 4096, "bucket_bytes": 4096}  # encoded ones are not larger than a bucket
SYNCS: dict[str, dict[str, Any]] = {
    "int8": {"codec": "int8"},
    "stochastic": {"codec": "int8", "rounding": "stochastic"},
    "onebit": {"codec": "onebit", "warmup_steps": 1},
    "topk": {"codec": "topk", "ratio": 0.1},
    "flat": {"codec": "onebit", "algorithm": "flat"},
    "gathers": {"codec": "int8", "gathers": "int8"},
    "everywhere": {"codec": "topk", "ratio": 0.1, "everywhere": True},
}
SHAPES = {"first": (37, 5), "late": (300,), "never": (11,), "second": (1501,)}
STEPS = 6
UNFROZEN_AT = 4


def gradients_of(rank: int, step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * rank + step)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def fixed_gradients() -> FixedGradients:
    return FixedGradients(SHAPES, uses=("first", "second", "late"), unfrozen_at=UNFROZEN_AT)


def train_fixed(
    context: RankContext, parallel: str, sync: dict[str, Any], accumulation: int, steps: list[int], folder: str
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Weights, and what this rank owes of them in the end; saved there, and begun where another run has saved."""
    module, path = fixed_gradients(), Path(folder)
    strategy = strategy_of(
        parallel={"mode": parallel, "find_unused_parameters": True},
        sync={**SMALL_CHUNKS, **sync},
        checkpoint="sharded",
    )
    saved = sorted(path.glob("*.ckpt"))
    trainer = trainer_on_pool(
        context,
        strategy,
        accumulate_grad_batches=accumulation,
        max_epochs=len(saved) + 1,
        callbacks=[SaveAtEnd(path / f"{len(saved)}.ckpt")],
    )
    batches = [gradients_of(context.rank, step) for step in steps]
    trainer.fit(module, loader_of(batches), ckpt_path=saved[-1] if saved else None)
    return {name: p.detach().clone() for name, p in module.named_parameters()}, module.owed


def applied(world_size: int, steps: list[int], accumulation: int = 1) -> dict[str, torch.Tensor]:
    """What the exact mean gradients come to."""
    total = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    for number, step in enumerate(steps):
        for rank in range(world_size):
            for name, gradient in gradients_of(rank, step).items():
                if name in ("first", "second") or (name == "late" and number >= UNFROZEN_AT):
                    total[name] += gradient / world_size / accumulation
    return total


def check(got: list[Any], expected: dict[str, torch.Tensor], *, loses: bool = True) -> None:
    weights = got[0][0]
    for other, _ in got[1:]:
        assert all(torch.equal(other[name], weights[name]) for name in SHAPES)
    for name in SHAPES:
        owed = torch.stack([of_rank[name] for _, of_rank in got]).sum(0)
        torch.testing.assert_close(-weights[name] + owed, expected[name], rtol=0, atol=2e-4)
        assert name == "never" or bool(owed.any()) == loses, "the codec has lost something"


CASES = {
    f"{parallel}-{layout}-{sync}": (parallel, layout, SYNCS[sync], accumulation)
    for parallel in ("ddp", "zero1", "zero2", "zero3", "hsdp")
    for layout in ("2+2", "1+1" if parallel == "hsdp" else "3+1", "2")
    for sync in SYNCS
    for accumulation in (1 if sync in ("int8", "topk") else 2,)
    if layout != "2" or "everywhere" in SYNCS[sync]
}


IN_HOST = [f"{place}-everywhere" for place in ("ddp-3+1", "zero2-3+1", "hsdp-2+2", "ddp-2")]


@pytest.mark.parametrize(
    ("parallel", "layout", "sync", "accumulation"),
    sampled(
        CASES, ["ddp-3+1-onebit", "ddp-2+2-topk", "zero2-3+1-int8", "zero1-2+2-onebit", "hsdp-2+2-stochastic", *IN_HOST]
    ),
)
def test_what_is_applied_and_what_is_owed_is_the_whole_gradient(
    ranks: RankPool, tmp_path: Path, parallel: str, layout: str, sync: dict[str, Any], accumulation: int
) -> None:
    """Also of what is unfrozen on the way, what takes no part, and under accumulation."""
    steps = list(range(STEPS))
    got = ranks.run(train_fixed, layout=LAYOUTS[layout], args=(parallel, sync, accumulation, steps, str(tmp_path)))
    check(got, applied(len(got), steps, accumulation))


ONE_HOST = ("ddp", "zero1", "zero2", "zero3")
PAIRS = {
    f"{before}-{after}": (before, after)
    for before in ("ddp-2+2", "zero2-3+1", "hsdp-2+2", "zero3-1+1")
    for after in ("ddp-1+1", "zero2-2+2", "hsdp-2+2", "zero1-3+1", *(f"{mode}-{n}" for mode in ONE_HOST for n in "21"))
}


@pytest.mark.parametrize(
    ("before", "after"),
    sampled(PAIRS, ["ddp-2+2-zero1-3+1", "zero3-1+1-hsdp-2+2", "zero2-3+1-ddp-2", "ddp-2+2-zero2-1"]),
)
def test_other_ranks_take_over_all_that_is_owed(ranks: RankPool, tmp_path: Path, before: str, after: str) -> None:
    steps, sync = list(range(STEPS)), SYNCS["onebit"]
    expected = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    for each in (before, after):
        parallel, _, layout = each.partition("-")
        got = ranks.run(train_fixed, layout=LAYOUTS[layout], args=(parallel, sync, 1, steps, str(tmp_path)))
        for name, value in applied(len(got), steps).items():
            expected[name] += value
    # On one host nothing is lost, and all that was owed is paid.
    check(got, expected, loses="+" in after)


EXACT_PAIRS = {
    f"{before}-{after}-{sync}": (
        before,
        after,
        {"flat": {"algorithm": "flat"}, "bf16": {"codec": "bf16"}}.get(sync, {}),
    )
    for before in ("ddp-2+2", "zero2-3+1")
    for after in ("ddp-2+2", "ddp-3+1", "zero1-2+2", "zero3-1+1", "hsdp-2+2", "zero2-2")
    for sync in ("hierarchical", "flat", "bf16")
}


@pytest.mark.parametrize(
    ("before", "after", "sync"),
    sampled(EXACT_PAIRS, ["ddp-2+2-ddp-2+2-hierarchical", "zero2-3+1-hsdp-2+2-hierarchical", "ddp-2+2-zero3-1+1-flat"]),
)
def test_a_run_that_loses_nothing_applies_what_another_owes(
    ranks: RankPool, tmp_path: Path, before: str, after: str, sync: dict[str, Any]
) -> None:
    """With its first gradients, all of it, whatever its ranks."""
    steps, expected = list(range(STEPS)), {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    for each, how in ((before, SYNCS["onebit"]), (after, sync)):
        parallel, _, layout = each.partition("-")
        got = ranks.run(train_fixed, layout=LAYOUTS[layout], args=(parallel, how, 1, steps, str(tmp_path)))
        for name, value in applied(len(got), steps).items():
            expected[name] += value
    rounds = "codec" in sync
    for weights, owed in got:
        left = {name for name, value in owed.items() if value.any()}
        assert left <= ({"never"} if rounds else set()), "rounding leaves of what cancels out a little, not applied"
        for name in SHAPES:
            torch.testing.assert_close(-weights[name], expected[name], rtol=0, atol=0.3 if rounds else 2e-4)


def sum_and_gather(context: RankContext, sync: dict[str, Any], numel: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Means of some tensors, handed out encoded too; all that was applied, and what this rank owes in the end."""
    config = SyncConfig(timeout_s=20.0, **sync)
    run = build.open_run(TopologyConfig(), config, events=EventStream(rank=context.rank), device=torch.device("cpu"))
    scatter = GroupMaker(run, config, mode="test").scatter([range(context.world_size)], "averages")
    n, feedback = context.world_size, scatter.feedback
    assert feedback is not None
    origin = Origin("all", (Span("x", 0, numel), Span(None, 0, -numel % n)), 1 / n)
    applied, owed = torch.zeros(numel), torch.zeros(numel)
    try:
        for step in range(4):
            whole = torch.zeros(numel + -numel % n)
            whole[:numel] = torch.randn(numel, generator=torch.Generator().manual_seed(10 * context.rank + step))
            account = feedback.enter(origin, whole)
            shard, mean = torch.zeros(len(whole) // n), torch.zeros(len(whole))
            scatter.reduce_scatter(shard, whole, mean=True, account=account).wait()
            applied += scatter.all_gather(mean, shard, codec=scatter.codec, account=account).wait()[:numel]
        for low, values in feedback.owed()["x"]:
            owed[low : low + len(values)] += values
        return applied, owed
    finally:
        scatter.close()
        run.close()


@pytest.mark.parametrize(("layout", "sync"), [("3+1", "onebit"), ("2+2", "topk")])
def test_means_that_are_handed_out_encoded_are_the_same_everywhere(ranks: RankPool, layout: str, sync: str) -> None:
    numel = 5003
    got = ranks.run(sum_and_gather, layout=LAYOUTS[layout], args=({**SMALL_CHUNKS, **SYNCS[sync]}, numel))
    assert all(torch.equal(applied, got[0][0]) for applied, _ in got)
    exact = torch.zeros(numel)
    for rank in range(len(got)):
        for step in range(4):
            exact += torch.randn(numel, generator=torch.Generator().manual_seed(10 * rank + step)) / len(got)
    torch.testing.assert_close(got[0][0] + sum(owed for _, owed in got), exact, rtol=0, atol=1e-4)


# -- going on ----------------------------------------------------------------------------------------------------------


def straight_and_resumed(context: RankContext, folder: str, name: str, sync: dict[str, Any]) -> list[Any]:
    """Two epochs at once, and the second one again, from a checkpoint between them."""
    case = StageCase(model="even", optimizer="adamw")
    arguments = {**STRATEGIES[name], "sync": {**SMALL_CHUNKS, **sync}}
    settings: dict[str, Any] = {"limit_train_batches": 3, "limit_val_batches": 0}

    def run(epochs: int, path: Path | None = None, *callbacks: pl.Callback, **more: Any) -> dict[str, torch.Tensor]:
        module = StageLearner(case)
        strategy = strategy_of(**arguments, **more)
        trainer_on_pool(context, strategy, max_epochs=epochs, callbacks=list(callbacks), **settings).fit(
            module, ckpt_path=path
        )
        return {name: value.detach().clone() for name, value in module.net.state_dict().items()}

    path = Path(folder) / "half"
    run(1, None, SaveAtEnd(path), checkpoint="sharded")
    return [run(2), run(2, path)]


def save_full(context: RankContext, path: str) -> None:
    strategy = strategy_of(sync={"codec": "onebit"}, parallel={"find_unused_parameters": True})
    trainer = trainer_on_pool(context, strategy, callbacks=[SaveAtEnd(Path(path))])
    with pytest.warns(UserWarning, match="write checkpoint=sharded") if context.rank == 0 else nullcontext():
        trainer.fit(fixed_gradients(), loader_of([gradients_of(context.rank, 0)]))


def test_a_file_that_does_not_hold_what_is_owed_says_so(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(save_full, layout=LAYOUTS["1+1"], args=(str(tmp_path / "full.ckpt"),))


RESUMED = {
    f"{name}-{sync}": (name, SYNCS[sync])
    for name in STRATEGIES
    for sync in SYNCS
    if "tensor" not in name  # refused
}


@pytest.mark.parametrize(
    ("name", "sync"),
    sampled(RESUMED, ["ddp-stochastic", "zero2-onebit", "zero3-gathers", "hsdp-topk", "pipeline-int8"]),
)
def test_a_run_that_goes_on_is_the_one_that_did_not_stop(
    ranks: RankPool, tmp_path: Path, name: str, sync: dict[str, Any]
) -> None:
    for straight, resumed in ranks.run(
        straight_and_resumed, layout=LAYOUTS["2+2"], args=(str(tmp_path), name, sync), deadline_s=60
    ):
        for parameter, value in straight.items():
            assert torch.equal(value, resumed[parameter]), parameter

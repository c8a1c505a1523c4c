"""``sync=local_sgd`` in a Trainer: which weights are where, what a checkpoint holds, what hosts may differ in."""

from __future__ import annotations

import os
import signal
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import nn

from lightning_dist.errors import CollectiveError, CombinationError
from tests.distributed.fixed_gradients import FixedGradients
from tests.distributed.lightning_runs import OddModule, loader_of, make_batches, strategy_of, trainer_on_pool
from tests.distributed.local_runs import LAYOUTS, OPTIMIZERS, SaveAt, train
from tests.distributed.restarted_runs import Start, fit, prepare
from tests.support.keepers import ending_keepers
from tests.support.ranks import Died, RankPool
from tests.support.sweeps import sampled
from tests.support.tasks import RankContext

Weights = dict[str, torch.Tensor]


def local(**options: Any) -> dict[str, Any]:
    return {"algorithm": "local_sgd", "local_sgd": options}


def alike(got: list[Weights]) -> bool:
    return all(torch.equal(each[name], got[0][name]) for each in got for name in got[0])


def weights_of(module: nn.Module) -> Weights:
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


# -- one step is ddp -------------------------------------------------------------------------------------------------


def one_step_and_ddp(context: RankContext) -> tuple[Weights, Weights]:
    averaging = {"every": 1, "outer_lr": 1.0, "outer_momentum": 0.0}
    own = train(context, "ddp", averaging, "plain")
    return own, train(context, "ddp", {}, "plain", sync={"algorithm": "hierarchical"})


def test_averaging_each_step_is_ddp(ranks: RankPool) -> None:
    for own, ddp in ranks.run(one_step_and_ddp, layout=LAYOUTS["2+1"]):
        for name, value in ddp.items():
            torch.testing.assert_close(own[name], value, rtol=0, atol=1e-6)


# -- codecs ----------------------------------------------------------------------------------------------------------

SHAPES = {"first": (37, 5), "late": (300,), "never": (11,), "second": (1501,)}
UNFROZEN_AT = 4
CODECS: dict[str, dict[str, Any]] = {
    "int8": {"codec": "int8"},
    "onebit": {"codec": "onebit", "warmup_steps": 1},
    "topk": {"codec": "topk", "ratio": 0.1},
    "bf16": {"codec": "bf16"},
}


def gradients_of(rank: int, step: int) -> Weights:
    generator = torch.Generator().manual_seed(100 * rank + step)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def train_fixed(
    context: RankContext, parallel: str, sync: dict[str, Any], options: dict[str, Any], steps: int
) -> tuple[Weights, Weights]:
    module = FixedGradients(SHAPES, uses=("first", "second", "late"), unfrozen_at=UNFROZEN_AT)
    strategy = strategy_of(
        parallel={"mode": parallel, "find_unused_parameters": True},
        sync={"chunk_bytes": 4096, **local(**options), **sync},
    )
    trainer = trainer_on_pool(context, strategy)
    trainer.fit(module, loader_of([gradients_of(context.rank, step) for step in range(steps)]))
    return {name: p.detach().clone() for name, p in module.named_parameters()}, module.owed


ENCODED = {
    f"{parallel}-{layout}-{codec}": (parallel, layout, CODECS[codec])
    for parallel in ("ddp", "zero2", "zero3")
    for layout in ("2+2", "2+1")
    for codec in CODECS
    if parallel == "ddp" or layout == "2+2"
}


@pytest.mark.parametrize(
    ("parallel", "layout", "sync"), sampled(ENCODED, ["ddp-2+1-int8", "zero2-2+2-int8", "ddp-2+2-topk"])
)
def test_what_is_applied_and_what_is_owed_is_all_that_workers_have_gone(
    ranks: RankPool, parallel: str, layout: str, sync: dict[str, Any]
) -> None:
    """Of parameters that are unfrozen on the way, too; those without a gradient stay."""
    options = {"every": 2, "outer_lr": 1.0, "outer_momentum": 0.0}
    got = ranks.run(train_fixed, layout=LAYOUTS[layout], args=(parallel, sync, options, 8))
    assert alike([weights for weights, _ in got])
    for name in SHAPES:
        expected = torch.zeros(SHAPES[name])
        for step in range(8):
            if name in ("first", "second") or (name == "late" and step >= UNFROZEN_AT):
                expected -= torch.stack([gradients_of(rank, step)[name] for rank in range(len(got))]).mean(0)
        owed = torch.stack([of_rank[name] for _, of_rank in got]).sum(0)
        # Owed are outer weights minus own ones; bf16 keeps nothing of what it rounds.
        tolerance = 0.05 if sync["codec"] == "bf16" else 2e-4
        torch.testing.assert_close(got[0][0][name] - owed, expected, rtol=0, atol=tolerance)


# -- going on --------------------------------------------------------------------------------------------------------

GOING_ON: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    f"{parallel}-{layout}-{case}": (parallel, layout, options, sync)
    for parallel in ("ddp", "zero2", "zero3")
    for layout in ("2+2", "1+1")
    for case, (options, sync) in {
        "apart": ({"every": 4}, {}),
        "in flight": ({"every": 4, "fragments": 2, "overlap_steps": 3}, {"codec": "int8"}),
        "together": ({"every": 3, "warmup_steps": 7}, {}),
    }.items()
}


def straight_and_resumed(
    context: RankContext, folder: str, parallel: str, options: dict[str, Any], sync: dict[str, Any]
) -> list[Weights]:
    """Two epochs at once, and the second one from a checkpoint between them: between two synchronisations."""
    path = Path(folder) / "middle.ckpt"
    batches = make_batches(context.world_size, 5)[context.rank]

    def run(epochs: int, ckpt_path: Path | None, *callbacks: pl.Callback) -> Weights:
        module = OddModule(OPTIMIZERS["adamw"])
        strategy = strategy_of(parallel=parallel, sync={**local(**options), **sync}, checkpoint="sharded")
        trainer = trainer_on_pool(context, strategy, max_epochs=epochs, callbacks=list(callbacks))
        trainer.fit(module, loader_of(batches), ckpt_path=ckpt_path)
        return weights_of(module)

    run(1, None, SaveAt(path, 4))
    return [run(2, None), run(2, path)]


@pytest.mark.parametrize(
    ("parallel", "layout", "options", "sync"),
    sampled(GOING_ON, ["ddp-2+2-in flight", "zero2-2+2-in flight", "ddp-1+1-together", "zero2-2+2-apart"]),
)
def test_a_run_that_goes_on_is_the_one_that_did_not_stop(
    ranks: RankPool,
    tmp_path: Path,
    parallel: str,
    layout: str,
    options: dict[str, Any],
    sync: dict[str, Any],
) -> None:
    got = ranks.run(straight_and_resumed, layout=LAYOUTS[layout], args=(str(tmp_path), parallel, options, sync))
    for straight, resumed in got:
        for name, value in straight.items():
            assert torch.equal(value, resumed[name]), name


class Notes(pl.Callback):
    """What the module has when the first batch comes, and what the scheme knows then."""

    def __init__(self) -> None:
        self.first: Weights = {}
        self.step = -1
        self.momentum = 0.0

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        if not self.first:
            self.first = {name: value.clone() for name, value in pl_module.state_dict().items()}
            scheme = getattr(trainer.strategy._mode, "_local", None)  # type: ignore[attr-defined]
            if scheme is not None:
                self.step = scheme.step
                self.momentum = sum(float(value.abs().sum()) for value in scheme.weights.momentum.values())


def save_apart(context: RankContext, folder: str, parallel: str) -> tuple[Weights, Weights]:
    """Saved between two synchronisations: the outer weights, and the host's own."""
    path = Path(folder) / "middle.ckpt"
    module = OddModule(OPTIMIZERS["adamw"])
    strategy = strategy_of(parallel=parallel, sync=local(every=4), checkpoint="sharded")
    trainer = trainer_on_pool(context, strategy, callbacks=[SaveAt(path, 5)])
    outer: Weights = {}
    own: Weights = {}

    class Look(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
            if args[-1] == 3:  # just synchronised
                outer.update({name: value.clone() for name, value in pl_module.state_dict().items()})
            elif args[-1] == 5:
                own.update({name: value.clone() for name, value in pl_module.state_dict().items()})

    trainer.callbacks.insert(0, Look())  # type: ignore[attr-defined]
    trainer.fit(module, loader_of(make_batches(context.world_size, 8)[context.rank]))
    return outer, own


def go_on(context: RankContext, folder: str, parallel: str, sync: dict[str, Any]) -> tuple[Notes, Weights]:
    notes, module = Notes(), OddModule(OPTIMIZERS["adamw"])
    strategy = strategy_of(parallel=parallel, sync=sync, checkpoint="sharded")
    trainer = trainer_on_pool(context, strategy, callbacks=[notes])
    batches = make_batches(context.world_size, 8)[context.rank]
    trainer.fit(module, loader_of(batches), ckpt_path=Path(folder) / "middle.ckpt")
    return notes, weights_of(module)


RESIZED = {
    f"{before}-{layout_before}-{after}-{layout_after}": (before, layout_before, after, layout_after)
    for before, layout_before in (("ddp", "1+1"), ("zero2", "2+2"), ("ddp", "2+2"))
    for after, layout_after in (("ddp", "1+1+1"), ("zero2", "1+1"), ("ddp", "2"), ("zero3", "2+2"))
}


@pytest.mark.parametrize(
    ("before", "layout_before", "after", "layout_after"),
    sampled(RESIZED, ["zero2-2+2-ddp-1+1+1", "ddp-1+1-zero3-2+2", "ddp-2+2-ddp-2"]),
)
def test_other_hosts_begin_with_outer_weights_and_as_many_with_their_own(
    ranks: RankPool, tmp_path: Path, before: str, layout_before: str, after: str, layout_after: str
) -> None:
    saved = ranks.run(save_apart, layout=LAYOUTS[layout_before], args=(str(tmp_path), before))
    assert alike([outer for outer, _ in saved])
    layout = LAYOUTS[layout_after]
    got = ranks.run(go_on, layout=layout, args=(str(tmp_path), after, local(every=4)))
    firsts = [notes.first for notes, _ in got]
    if len(layout) == len(LAYOUTS[layout_before]):
        assert not alike(firsts)
        for host, members in layout.items():
            own = saved[LAYOUTS[layout_before][host][0]][1]
            assert alike([own, *(firsts[rank] for rank in members)])
    else:
        assert alike([saved[0][0], *firsts])
    assert alike([weights for _, weights in got])
    if len(layout) > 1:
        assert {notes.step for notes, _ in got} == {6}
        assert len({notes.momentum for notes, _ in got if after == "ddp"}) <= 1
        assert all(notes.momentum > 0 for notes, _ in got)


class SaveWarned(SaveAt):
    """Keeps the weights of the last time that workers met, and what was warned of."""

    def __init__(self, path: Path, batch_idx: int) -> None:
        super().__init__(path, batch_idx)
        self.outer: Weights = {}
        self.warned = ""

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == 3:
            self.outer = weights_of(pl_module)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        self.warned += " ".join(str(each.message) for each in caught)


def save_whole(context: RankContext, folder: str, parallel: str) -> tuple[Weights, Weights, str]:
    """Lightning's own file, written between two synchronisations: outer weights, those of the file, warnings."""
    path = Path(folder) / "whole.ckpt"
    saving = SaveWarned(path, 5)
    trainer = trainer_on_pool(context, strategy_of(parallel=parallel, sync=local(every=4)), callbacks=[saving])
    trainer.fit(OddModule(OPTIMIZERS["sgd"]), loader_of(make_batches(context.world_size, 7)[context.rank]))
    return saving.outer, torch.load(path, weights_only=True)["state_dict"], saving.warned


@pytest.mark.parametrize("parallel", ["ddp", "zero2"])
def test_a_file_for_all_has_the_outer_weights_and_says_what_it_lacks(
    ranks: RankPool, tmp_path: Path, parallel: str
) -> None:
    got = ranks.run(save_whole, layout=LAYOUTS["1+1"], args=(str(tmp_path), parallel))
    assert alike([each for outer, saved, _ in got for each in (outer, saved)])
    assert "write checkpoint=sharded" in got[0][2]


# -- elastic ----------------------------------------------------------------------------------------------------------


KILLED = {
    f"{parallel}-{then}": (parallel, then) for parallel in ("ddp", "zero2") for then in ("both hosts", "one host")
}


@pytest.mark.parametrize(("parallel", "then"), sampled(KILLED, ["zero2-both hosts", "ddp-one host"]))
def test_from_snapshots_in_memory(ranks: RankPool, tmp_path: Path, parallel: str, then: str) -> None:
    """Killed between two synchronisations, with a fragment on its way in the newest snapshot."""
    layout, sync = LAYOUTS["1+1"], local(every=3, overlap_steps=2)
    start = prepare(Start(tmp_path / "run", killed_at=5, parallel=parallel, sync=sync))
    with ending_keepers(start.checkpoints):
        died = ranks.run(fit, layout=layout, args=(start,), may_die=range(2))
        assert [type(each) for each in died] == [Died, Died]
        after = layout if then == "both hosts" else {"a": [0]}
        got = ranks.run(fit, layout=after, args=(replace(start, round=2, killed_at=None),))
    assert [first for first, _ in got] == [4] * len(after)
    if then == "one host":
        assert all(torch.isfinite(value).all() for value in got[0][1].values())
        return
    whole = prepare(Start(tmp_path / "whole", parallel=parallel, sync=sync, checkpoint="full"))
    for name, value in ranks.run(fit, layout=layout, args=(whole,))[0][1].items():
        assert torch.equal(got[0][1][name], value), name


# -- evaluation ------------------------------------------------------------------------------------------------------


class Evaluated(OddModule):
    """Keeps what it was evaluated with."""

    def on_validation_epoch_start(self) -> None:
        self.seen = [*getattr(self, "seen", []), weights_of(self)]


def fit_evaluated(context: RankContext, parallel: str, evaluates: bool) -> tuple[Weights, list[Weights]]:
    module = Evaluated(OPTIMIZERS["sgd"])
    strategy = strategy_of(parallel=parallel, sync=local(every=4, fragments=2, overlap_steps=1))
    more: dict[str, Any] = {"val_check_interval": 3} if evaluates else {"limit_val_batches": 0}
    trainer = trainer_on_pool(context, strategy, **more)
    batches = make_batches(context.world_size, 11)[context.rank]
    trainer.fit(module, loader_of(batches), loader_of(batches[: 2 + context.rank]))
    return weights_of(module), getattr(module, "seen", [])


@pytest.mark.parametrize("parallel", ["ddp", "zero2"])
def test_outer_weights_are_evaluated_and_training_goes_on_as_if_not(ranks: RankPool, parallel: str) -> None:
    got = ranks.run(fit_evaluated, layout=LAYOUTS["2+2"], args=(parallel, True))
    assert len(got[0][1]) == 3
    for moment in range(3):
        assert alike([seen[moment] for _, seen in got])
    without = ranks.run(fit_evaluated, layout=LAYOUTS["2+2"], args=(parallel, False))
    assert alike([weights for weights, _ in [*got, *without]])


# -- workers that differ ---------------------------------------------------------------------------------------------


class Poisoned(OddModule):
    """The first host's weights are lost after a step."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1 and self.global_rank == 0:
            with torch.no_grad():
                self.net[0].weight[0, 0] = torch.nan


def train_poisoned(context: RankContext) -> Weights:
    module = Poisoned(OPTIMIZERS["plain"])
    trainer = trainer_on_pool(context, strategy_of(sync=local(every=3, outer_lr=1.0, outer_momentum=0.0)))
    batches = make_batches(context.world_size, 3)[context.rank]
    if context.rank == 0:
        with pytest.warns(UserWarning, match="weights of ranks 0 are not finite"):
            trainer.fit(module, loader_of(batches))
    else:
        trainer.fit(module, loader_of(batches))
    return weights_of(module)


def test_a_host_without_finite_weights_takes_those_of_the_others(ranks: RankPool) -> None:
    got = ranks.run(train_poisoned, layout=LAYOUTS["1+1"])
    assert alike(got)
    torch.manual_seed(0)
    alone = OddModule(OPTIMIZERS["plain"])
    optimizer = alone.configure_optimizers()
    for batch in make_batches(2, 3)[1]:
        optimizer.zero_grad()
        nn.functional.mse_loss(alone.net(batch[0]), batch[1]).backward()
        optimizer.step()
    for name, value in weights_of(alone).items():
        torch.testing.assert_close(got[0][name], value, rtol=0, atol=1e-6)


class Skipping(OddModule):
    """Manual optimization; one host makes no step of its own in some batches."""

    def __init__(self) -> None:
        super().__init__(OPTIMIZERS["plain"])
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        if self.global_rank != 0 or batch_idx % 3:
            optimizer.step()
        return loss


def train_skipping(context: RankContext, parallel: str) -> Weights:
    module = Skipping()
    trainer = trainer_on_pool(context, strategy_of(parallel=parallel, sync=local(every=3, fragments=2)))
    trainer.fit(module, loader_of(make_batches(context.world_size, 7)[context.rank]))
    return weights_of(module)


@pytest.mark.parametrize("parallel", ["ddp", "zero2"])
def test_hosts_that_make_other_steps_meet_all_the_same(ranks: RankPool, parallel: str) -> None:
    assert alike(ranks.run(train_skipping, layout=LAYOUTS["1+1"], args=(parallel,)))


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(7, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))


def train_normed(context: RankContext, steps: int, every: int, parallel: str) -> tuple[Weights, Weights]:
    module = OddModule(OPTIMIZERS["plain"], normed)
    before: Weights = {}

    class Before(pl.Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            before.clear()

    original = type(module).training_step

    def training_step(self: OddModule, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = original(self, batch, batch_idx)
        before.update({name: value.clone() for name, value in self.named_buffers()})
        return loss

    module.training_step = training_step.__get__(module)  # type: ignore[method-assign]
    trainer = trainer_on_pool(context, strategy_of(parallel=parallel, sync=local(every=every)))
    trainer.fit(module, loader_of(make_batches(context.world_size, steps)[context.rank]))
    return weights_of(module), before


@pytest.mark.parametrize("parallel", ["ddp", "zero2"])
def test_statistics_are_averaged(ranks: RankPool, parallel: str) -> None:
    got = ranks.run(train_normed, layout=LAYOUTS["2+1" if parallel == "ddp" else "1+1"], args=(4, 2, parallel))
    assert alike([weights for weights, _ in got])
    for name in ("net.1.running_mean", "net.1.running_var"):
        mean = torch.stack([before[name] for _, before in got]).mean(0)
        torch.testing.assert_close(got[0][0][name], mean, rtol=0, atol=1e-6)
    assert int(got[0][0]["net.1.num_batches_tracked"]) == 4


class Dies(pl.Callback):
    """The second host's rank is gone before workers meet."""

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == 2 and trainer.global_rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)


def fit_with_the_lost(context: RankContext, parallel: str) -> str:
    trainer = trainer_on_pool(context, strategy_of(parallel=parallel, sync=local(every=3)), callbacks=[Dies()])
    with pytest.raises(CollectiveError) as caught:
        trainer.fit(OddModule(OPTIMIZERS["plain"]), loader_of(make_batches(context.world_size, 6)[context.rank]))
    return str(caught.value)


@pytest.mark.parametrize("parallel", ["ddp", pytest.param("zero2", marks=pytest.mark.sweep)])
def test_a_lost_host_is_named_by_those_who_wait_for_it(ranks: RankPool, parallel: str) -> None:
    said, died = ranks.run(fit_with_the_lost, layout=LAYOUTS["1+1"], args=(parallel,), may_die=[1])
    assert isinstance(died, Died)
    assert "rank 1 (host b)" in said


# -- what does not go ------------------------------------------------------------------------------------------------


def fit_averaged(context: RankContext) -> str:
    module = OddModule(OPTIMIZERS["plain"])
    trainer = trainer_on_pool(context, strategy_of(sync=local()), callbacks=[EMAWeightAveraging()])
    with pytest.raises(CombinationError) as caught:
        trainer.fit(module, loader_of(make_batches(context.world_size, 1)[context.rank]))
    return str(caught.value)


def test_averages_of_weights_are_refused(ranks: RankPool) -> None:
    assert all("write sync=hierarchical" in said for said in ranks.run(fit_averaged, layout=LAYOUTS["1+1"]))


@pytest.mark.parametrize("parallel", ["pipeline", "tensor", "hsdp"])
def test_other_modes_are_refused(parallel: str) -> None:
    with pytest.raises(CombinationError, match="write parallel=ddp or zero2"):
        strategy_of(parallel=parallel, sync=local())
    with pytest.raises(CombinationError, match=r"sync\.local_sgd\.workers=hosts"):
        strategy_of(parallel="zero2", sync=local(workers="ranks"))


def fit_uneven(context: RankContext) -> str:
    trainer = trainer_on_pool(context, strategy_of(parallel="zero2", sync=local()))
    with pytest.raises(Exception, match="as many ranks on each host") as caught:
        trainer.fit(OddModule(OPTIMIZERS["plain"]), loader_of(make_batches(context.world_size, 1)[context.rank]))
    return str(caught.value)


def test_shards_need_counterparts(ranks: RankPool) -> None:
    assert all("Write parallel=ddp" in said for said in ranks.run(fit_uneven, layout=LAYOUTS["2+1"]))

"""What users do with a sharded model: everything Lightning does under ddp, with the same numbers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import nn

from tests.distributed.compared import Pair, check_equal, fit_both
from tests.distributed.lightning_runs import (
    OddModule,
    adamw,
    loader_of,
    make_batches,
    mse,
    sgd,
    strategy_of,
    trainer_on_pool,
)
from tests.distributed.sharded_runs import LAYOUTS, MODES, Case, CaseModule, in_modes, in_modes_with
from tests.distributed.test_optimization import Adversaries, ByHand, OneOfSeveral, Scaled, make_scaler
from tests.support.ranks import RankPool
from tests.support.reference import assert_same
from tests.support.sweeps import sampled
from tests.support.tasks import RankContext

BATCHES = 6
TWO = LAYOUTS["1+1"]


def fit_case(
    context: RankContext,
    mode: str,
    make_module: Callable[[], pl.LightningModule],
    make_callbacks: Callable[[], list[pl.Callback]] = list,
    make_plugins: Callable[[], list[Any]] = list,
    options: dict[str, Any] | None = None,
    trainer: dict[str, Any] | None = None,
) -> Pair:
    """Under a sharding mode, and under ddp."""
    batches = make_batches(context.world_size, BATCHES)[context.rank]
    parallel = MODES[mode]["parallel"]
    config = {**({"mode": parallel} if isinstance(parallel, str) else parallel), **(options or {})}
    return fit_both(
        context,
        make_module,
        lambda: {"train_dataloaders": loader_of(batches), "val_dataloaders": loader_of(batches[:2])},
        strategy={"parallel": config},
        ddp_strategy={"find_unused_parameters": bool(options and options.get("find_unused_parameters"))},
        make_callbacks=make_callbacks,
        make_plugins=make_plugins,
        **{"max_epochs": 2, **(trainer or {})},
    )


def make_sgd() -> pl.LightningModule:
    return OddModule(sgd)


def make_adamw() -> pl.LightningModule:
    return OddModule(adamw)


def make_scaled() -> pl.LightningModule:
    return Scaled(sgd)


def ema() -> list[pl.Callback]:
    return [EMAWeightAveraging(decay=0.8)]


@in_modes("zero2", "hsdp")
def test_validation_within_fit_and_averaged_weights(ranks: RankPool, mode: str) -> None:
    check_equal(ranks.run(fit_case, layout=LAYOUTS["2+2"], args=(mode, make_sgd, ema)))


@in_modes_with(
    "trainer",
    {
        "bf16-mixed-0.1": {"precision": "bf16-mixed", "gradient_clip_val": 0.1},
        "64-true": {"precision": "64-true"},
        "4": {"accumulate_grad_batches": 4},
    },
    {"bf16-mixed-0.1": ["zero2", "hsdp"], "64-true": ["zero3"], "4": ["zero3", "hsdp"]},
)
def test_precision_and_short_windows_equal_ddp(ranks: RankPool, mode: str, trainer: dict[str, Any]) -> None:
    check_equal(ranks.run(fit_case, layout=TWO, args=(mode, make_sgd), kwargs={"trainer": trainer}))


@in_modes("zero2", "zero3")
def test_bf16_true_equals_ddp_up_to_its_rounding(ranks: RankPool, mode: str) -> None:
    """Sums of two values in bf16 are rounded once in either; a step of 2^-8 of weights below 1."""
    pairs = ranks.run(fit_case, layout=TWO, args=(mode, make_sgd), kwargs={"trainer": {"precision": "bf16-true"}})
    check_equal(pairs, atol=2**-8)


@in_modes("zero3", "hsdp")
def test_an_overflow_on_one_rank_is_skipped_by_all(ranks: RankPool, mode: str) -> None:
    pairs = ranks.run(fit_case, layout=TWO, args=(mode, make_scaled), kwargs={"make_plugins": make_scaler})
    check_equal(pairs)


@in_modes_with(
    "kind",
    {kind.__name__: kind for kind in (Adversaries, OneOfSeveral, ByHand)},
    {"Adversaries": ["zero3", "hsdp"], "OneOfSeveral": ["zero2", "hsdp"], "ByHand": ["zero3"]},
)
def test_manual_optimization_equals_ddp(ranks: RankPool, mode: str, kind: type[pl.LightningModule]) -> None:
    options = {"find_unused_parameters": kind is not ByHand}
    check_equal(ranks.run(fit_case, layout=LAYOUTS["2+2"], args=(mode, kind), kwargs={"options": options}))


class Containers(ByHand):
    """Children that cannot be called, with and without parameters; a parameter of two children, and one of none."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList([nn.Linear(3, 4), nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3))])
        self.named = nn.ModuleDict({"last": nn.Linear(4, 3), "nested": nn.ModuleList([nn.Linear(3, 3)])})
        self.losses_of = nn.ModuleDict({"l1": nn.L1Loss()})
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(3))])
        self.tied = nn.Linear(3, 3)
        self.tied.weight = self.named["nested"][0].weight  # type: ignore[index]

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        hidden = self.tied(self.named["nested"][0](self.net(batch[0]) * self.scales[0]))  # type: ignore[index]
        outputs = self.named["last"](self.heads[0](hidden)) + self.heads[1](hidden)
        loss = self.losses_of["l1"](outputs, batch[1])
        self.losses.append(float(loss.detach()))
        self.manual_backward(loss)
        self.optimizers().step()
        self.optimizers().zero_grad()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return sgd(list(self.parameters()))


@in_modes("zero2", "zero3")
def test_containers_under_manual_optimization_equal_ddp(ranks: RankPool, mode: str) -> None:
    check_equal(ranks.run(fit_case, layout=TWO, args=(mode, Containers)))


# -- checkpoints -------------------------------------------------------------------------------------------------------


def save_and_resume(
    context: RankContext, folder: str, first: dict[str, Any], then: dict[str, Any], optimizer: str = "adamw"
) -> dict[str, Any]:
    """An epoch under one strategy, saved; another under a second. And two epochs at once under the second."""
    batches = make_batches(context.world_size, 3)[context.rank]
    case, path = Case(net="tied", optimizer=optimizer), Path(folder) / "half.ckpt"
    start, resumed, straight = CaseModule(case), CaseModule(case), CaseModule(case)
    saver = trainer_on_pool(context, strategy_of(**first), max_epochs=1, callbacks=[SaveAtEnd(str(path))])
    saver.fit(start, loader_of(batches))
    trainer_on_pool(context, strategy_of(**then), max_epochs=2).fit(resumed, loader_of(batches), ckpt_path=path)
    trainer_on_pool(context, strategy_of(**then), max_epochs=2).fit(straight, loader_of(batches))
    return {
        "resumed": resumed.net.state_dict(),
        "straight": straight.net.state_dict(),
        "losses": (resumed.losses, straight.losses[3:]),
        "after three": start.net.state_dict(),
    }


class SaveAtEnd(pl.Callback):
    """Saves while the model is sharded."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        trainer.save_checkpoint(self.path)


STRATEGIES = {"ddp": {}, **MODES}


ONWARD = [
    *((mode, mode) for mode in MODES),
    ("ddp", "zero1"),
    ("ddp", "zero3"),
    ("zero2", "ddp"),
    ("zero3", "hsdp"),
    ("hsdp", "zero2"),
]


@pytest.mark.parametrize(
    ("first", "then"),
    sampled(
        {f"{first}-{then}": (first, then) for first, then in ONWARD},
        ["zero2-zero2", "zero3-zero3", "hsdp-hsdp", "ddp-zero3", "zero2-ddp", "zero3-hsdp"],
    ),
)
def test_a_checkpoint_of_one_mode_goes_on_in_another(ranks: RankPool, tmp_path: Path, first: str, then: str) -> None:
    results = ranks.run(
        save_and_resume, layout=LAYOUTS["2+2"], args=(str(tmp_path), STRATEGIES[first], STRATEGIES[then])
    )
    for result in results:
        assert_same(result["resumed"], result["straight"], atol=0 if first == then else 1e-6)
        resumed, straight = result["losses"]
        torch.testing.assert_close(torch.tensor(resumed), torch.tensor(straight), rtol=0, atol=1e-6)
    saved = torch.load(tmp_path / "half.ckpt", weights_only=False)
    assert_same(
        {name.removeprefix("net."): value for name, value in saved["state_dict"].items()},
        results[0]["after three"],
        atol=0,
    )
    assert {type(value) for value in saved["state_dict"].values()} == {torch.Tensor}
    tied = [saved["state_dict"][f"net.{name}.weight"] for name in ("embedding", "head")]
    assert tied[0].data_ptr() == tied[1].data_ptr()


@pytest.mark.parametrize(("first", "then"), [("zero2", "zero2"), ("zero3", "ddp"), ("ddp", "hsdp")])
def test_optimizer_state_of_other_shapes_goes_on(ranks: RankPool, tmp_path: Path, first: str, then: str) -> None:
    arguments = (str(tmp_path), STRATEGIES[first], STRATEGIES[then], "rows and columns")
    for result in ranks.run(save_and_resume, layout=TWO if then != "hsdp" else LAYOUTS["2+2"], args=arguments):
        assert_same(result["resumed"], result["straight"], atol=1e-6)


# -- one process, several calls ----------------------------------------------------------------------------------------


def any_order(context: RankContext, strategy: dict[str, Any]) -> dict[str, Any]:
    """validate, fit, validate, test, predict and fit again, ranks having different numbers of batches to evaluate."""
    train = make_batches(context.world_size, BATCHES)[context.rank]
    few = loader_of(make_batches(context.world_size, 3, seed=2)[context.rank][: 1 + context.rank % 2])
    module = CaseModule(Case(optimizer="adamw"))
    trainer = trainer_on_pool(context, strategy_of(**strategy), max_epochs=1)
    seen: dict[str, Any] = {}
    trainer.validate(module, few, verbose=False)
    trainer.fit(module, loader_of(train), few)
    seen["validated"] = float(trainer.validate(module, few, verbose=False)[0]["val_loss"])
    seen["predicted"] = trainer.predict(module, few)
    seen["alone"] = module.net(train[0][0]).detach()
    trainer_on_pool(context, strategy_of(**strategy), max_epochs=1).fit(module, loader_of(train))
    return {**seen, "weights": module.net.state_dict()}


@in_modes("zero2", "hsdp")
def test_any_order_in_one_process(ranks: RankPool, mode: str) -> None:
    ours = ranks.run(any_order, layout=LAYOUTS["2+2"], args=(MODES[mode],))
    ddp = ranks.run(any_order, layout=LAYOUTS["2+2"], args=({},))
    for result, expected in zip(ours, ddp, strict=True):
        assert_same(result["weights"], expected["weights"], atol=1e-6)
        assert result["validated"] == pytest.approx(expected["validated"], abs=1e-6)
        torch.testing.assert_close(result["predicted"], expected["predicted"], rtol=0, atol=1e-6)
        torch.testing.assert_close(result["alone"], expected["alone"], rtol=0, atol=1e-6)


class TorchClips(CaseModule):
    """Clips with torch's own function, whose norm of DTensors talks to the other ranks by itself."""

    def configure_gradient_clipping(self, optimizer: Any, **_: Any) -> None:  # type: ignore[override]
        nn.utils.clip_grad_norm_([p for p in self.parameters() if p.dim()], 0.05)


def fit_three_times(context: RankContext, strategy: dict[str, Any]) -> list[dict[str, torch.Tensor]]:
    """Each with groups of its own, over the same ranks."""
    batches = make_batches(context.world_size, BATCHES)[context.rank]
    weights = []
    for _ in range(3):
        module = TorchClips(Case())
        trainer_on_pool(context, strategy_of(**strategy)).fit(module, loader_of(batches))
        weights.append(module.net.state_dict())
    return weights


@in_modes("zero3", "hsdp")
def test_operations_of_torch_on_shards_find_the_groups_of_their_run(ranks: RankPool, mode: str) -> None:
    expected = ranks.run(fit_three_times, layout=LAYOUTS["2+2"], args=({},))[0][0]
    for weights in ranks.run(fit_three_times, layout=LAYOUTS["2+2"], args=(MODES[mode],)):
        for each in weights:
            assert_same(each, expected, atol=1e-6)


# -- on the meta device ------------------------------------------------------------------------------------------------


class Deferred(OddModule):
    """Makes its network on the meta device, when the strategy asks for it."""

    def __init__(self) -> None:
        super().__init__(adamw, make_model=nn.Identity)

    def configure_model(self) -> None:
        if isinstance(self.net, nn.Identity):
            with torch.device("meta"):
                self.net = nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 5), nn.Linear(5, 3))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", mse(self.net, batch), sync_dist=True)


def train_deferred(context: RankContext, strategy: dict[str, Any], folder: str) -> dict[str, Any]:
    batches = make_batches(context.world_size, BATCHES)[context.rank]
    module = Deferred()
    torch.manual_seed(5 + context.rank)  # rank 0's counts
    trainer = trainer_on_pool(context, strategy_of(**strategy), max_epochs=1)
    trainer.fit(module, loader_of(batches))
    tested = trainer.test(module, loader_of(batches[: 1 + context.rank]), verbose=False)
    trainer.save_checkpoint(Path(folder) / "deferred.ckpt")
    kinds = {type(p).__name__ for p in module.parameters()}
    return {"losses": module.losses, "tested": tested[0]["test_loss"], "kinds": kinds}


@in_modes("zero3", "hsdp")
def test_a_model_made_on_the_meta_device_is_never_whole(ranks: RankPool, tmp_path: Path, mode: str) -> None:
    results = ranks.run(train_deferred, layout=TWO, args=(MODES[mode], str(tmp_path)), fresh=True)  # it stays sharded
    torch.manual_seed(5)
    net = nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 5), nn.Linear(5, 3))
    first = make_batches(2, BATCHES)
    for rank, result in enumerate(results):
        assert result["losses"][0] == pytest.approx(float(mse(net, first[rank][0]).detach()), abs=1e-6)
        assert result["losses"][-1] < result["losses"][0] * 1.5
        assert result["kinds"] == {"DTensor"} or "Parameter" in result["kinds"]
        assert result["tested"] == pytest.approx(results[0]["tested"], abs=1e-6)
    saved = torch.load(tmp_path / "deferred.ckpt", weights_only=False)["state_dict"]
    assert {name: tuple(value.shape) for name, value in saved.items()}["net.0.weight"] == (13, 7)

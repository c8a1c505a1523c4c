"""What users do with a module whose layers are split: checkpoints, evaluation, mistakes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import nn

from lightning_dist import build
from lightning_dist.config import ParallelConfig, TensorConfig
from lightning_dist.errors import PlacementError
from lightning_dist.topology import Cluster
from tests.distributed.lightning_runs import PoolEnvironment, strategy_of, trainer_on_pool
from tests.distributed.split_models import BATCH, MODELS, loss_of, make_batches
from tests.distributed.tensor_runs import SplitCase, SplitLearner, strategy_for
from tests.distributed.test_sharded_training import SaveAtEnd
from tests.distributed.test_tensor_training import LAYOUTS, TENSOR, inside
from tests.support.ranks import RankPool
from tests.support.reference import assert_same
from tests.support.tasks import RankContext

HALF = 3

# -- checkpoints ------------------------------------------------------------------------------------------------------


def save_and_resume(context: RankContext, folder: str, first: dict[str, Any], then: dict[str, Any]) -> dict[str, Any]:
    """An epoch under one strategy, saved; another under a second. And two at once under the second."""
    cases = [SplitCase(optimizer="adamw", parallel=options, alike=first != then) for options in (first, then, then)]
    start, resumed, straight = (SplitLearner(case) for case in cases)
    path, look = Path(folder) / "half.ckpt", Look()
    for module, epochs, callbacks, ckpt_path in (
        (start, 1, [SaveAtEnd(str(path)), look], None),
        (resumed, 2, [], path),
        (straight, 2, [], None),
    ):
        trainer = trainer_on_pool(
            context,
            strategy_for(module.case),
            max_epochs=epochs,
            callbacks=callbacks,
            limit_train_batches=HALF,
            limit_val_batches=0,
        )
        trainer.fit(module, ckpt_path=ckpt_path)
    return {
        "resumed": resumed.net.state_dict(),
        "straight": straight.net.state_dict(),
        "losses": (resumed.losses, straight.losses[HALF:]),
        "half": start.net.state_dict(),
        "held": look.share_held,
    }


class Look(pl.Callback):
    """Which share of the model's values, and of its optimizer's, a rank holds while it trains."""

    share_held = 0.0

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        averages = [entries["exp_avg"] for entries in trainer.optimizers[0].state.values()]
        tensors = [*pl_module.parameters(), *averages]
        held = sum(getattr(tensor, "_local_tensor", tensor).numel() for tensor in tensors)
        self.share_held = held / sum(tensor.numel() for tensor in tensors)


@pytest.mark.parametrize(
    ("first", "then", "most_held"),
    [
        (TENSOR, TENSOR, 0.6),
        ({"mode": "ddp"}, TENSOR, 1.0),
        (inside("zero2"), inside("zero2"), 0.35),
    ],
    ids=["tensor-tensor", "ddp-tensor", "zero2-zero2"],
)
def test_a_checkpoint_is_plain_and_goes_on_in_another_mode(
    ranks: RankPool, tmp_path: Path, first: dict[str, Any], then: dict[str, Any], most_held: float
) -> None:
    results = ranks.run(save_and_resume, layout=LAYOUTS["2+2"], args=(str(tmp_path), first, then))
    atol = 0 if first == then else 1e-6
    for result in results:
        resumed, straight = result["losses"]
        assert len(resumed) == HALF
        torch.testing.assert_close(torch.tensor(resumed), torch.tensor(straight), rtol=atol, atol=atol)
        assert_same(result["resumed"], result["straight"], atol=atol)
        assert result["held"] <= most_held
    path = tmp_path / "half.ckpt"
    saved = torch.load(path, weights_only=False)["state_dict"]
    assert {type(value) for value in saved.values()} == {torch.Tensor}
    assert saved["net.tokens.weight"].data_ptr() == saved["net.head.weight"].data_ptr(), "tied"
    loaded = SplitLearner.load_from_checkpoint(path, case=SplitCase(), weights_only=False)
    assert_same(dict(loaded.net.state_dict()), results[0]["half"], atol=0)


class OnMeta(SplitLearner):
    """Makes its network on the meta device, when the strategy asks for it."""

    def __init__(self, case: SplitCase) -> None:
        super().__init__(case)
        self.net = nn.Identity()

    def configure_model(self) -> None:
        if isinstance(self.net, nn.Identity):
            with torch.device("meta"):
                self.net = nn.ModuleDict({"a": nn.Linear(7, 8), "b": nn.Linear(8, 7)})

    def loss_of(self, batch: Any) -> torch.Tensor:
        return (self.net["b"](self.net["a"](batch[0])) - batch[1]).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.loss_of(batch)
        self.losses.append(float(loss.detach()))
        return loss


def train_deferred(context: RankContext, parallel: dict[str, Any], folder: str) -> tuple[OnMeta, OnMeta]:
    plan = {"*.a": "column", "*.b": "row"}
    case = SplitCase("mlp", parallel={**parallel, "tensor": {"size": 2, "plan": plan}})
    first, second = OnMeta(case), OnMeta(case)
    path = Path(folder) / "deferred.ckpt"
    arguments: dict[str, Any] = {"limit_train_batches": HALF, "limit_val_batches": 0}
    torch.manual_seed(5 + context.rank)  # rank 0's counts
    saver = SaveAtEnd(str(path))
    trainer_on_pool(context, strategy_for(case), max_epochs=1, callbacks=[saver], **arguments).fit(first)
    trainer_on_pool(context, strategy_for(case), max_epochs=2, **arguments).fit(second, ckpt_path=path)
    for module in (first, second):
        module._trainer = None
    return first, second


@pytest.mark.parametrize("parallel", [TENSOR, inside("zero3")], ids=["tensor", "zero3"])
def test_a_model_made_on_the_meta_device_is_made_split_and_loaded(
    ranks: RankPool, tmp_path: Path, parallel: dict[str, Any]
) -> None:
    results = ranks.run(train_deferred, layout=LAYOUTS["2"], args=(parallel, str(tmp_path)))
    left = float(results[0][0].loss_of(make_batches("mlp", 1)[0]).detach())
    for first, second in results:
        assert first.losses == results[0][0].losses
        assert second.losses[0] == pytest.approx(left, rel=1e-6), "it goes on where the first one ended"
        assert_same(dict(second.net.state_dict()), dict(results[0][1].net.state_dict()), atol=0)
    saved = torch.load(tmp_path / "deferred.ckpt", weights_only=False)["state_dict"]
    assert_same({n.removeprefix("net."): v for n, v in saved.items()}, dict(results[0][0].net.state_dict()), atol=0)


# -- evaluation -------------------------------------------------------------------------------------------------------


def evaluate(context: RankContext, parallel: dict[str, Any]) -> dict[str, Any]:
    """validate, fit with validation inside, validate, predict."""
    module = SplitLearner(SplitCase(parallel=parallel))
    strategy = strategy_of(parallel=parallel)
    trainer = trainer_on_pool(context, strategy, limit_train_batches=2)
    before = trainer.validate(module, verbose=False)[0]
    trainer.fit(module)
    within = {name: float(value) for name, value in trainer.callback_metrics.items()}
    after = trainer.validate(module, verbose=False)[0]
    predicted = trainer.predict(module)
    return {"before": before, "within": within, "after": after, "predicted": predicted, "net": module.net.state_dict()}


@pytest.mark.parametrize(
    "parallel", [{**TENSOR, "tensor": {"loss_parallel": True}}, inside("zero3")], ids=["tensor", "zero3"]
)
def test_evaluation_counts_each_batch_once(ranks: RankPool, parallel: dict[str, Any]) -> None:
    results = ranks.run(evaluate, layout=LAYOUTS["2+2"], args=(parallel,))
    torch.manual_seed(0)
    net = MODELS["gpt"]()
    batches = [make_batches("gpt", 2, seed=50 + data_rank) for data_rank in (0, 1)]
    for when in ("before", "after"):
        if when == "after":
            net.load_state_dict(results[0]["net"])
        expected = sum(float(loss_of(net, batch).detach()) for part in batches for batch in part) / 4
        for result in results:
            assert result[when]["val_loss"] == pytest.approx(expected, rel=1e-6)
            assert result[when]["val_count"] == 4 * BATCH
    for rank, result in enumerate(results):
        assert result["within"]["val_loss"] == pytest.approx(result["after"]["val_loss"], rel=1e-6)
        for found, batch in zip(result["predicted"], batches[rank // 2], strict=True):
            torch.testing.assert_close(found, net(batch[0]).detach(), rtol=1e-5, atol=1e-5)


# -- what cannot be ---------------------------------------------------------------------------------------------------


class OwnLoader(SplitLearner):
    """Deals its data by global rank, as if each rank read its own."""

    @property
    def data_rank(self) -> int:
        return int(self.trainer.global_rank)


class EarlyOptimizer(SplitLearner):
    def __init__(self, case: SplitCase) -> None:
        super().__init__(case)
        self.listed = list(self.net.parameters())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.listed, lr=0.1)


class WithBatchNorm(SplitLearner):
    def __init__(self, case: SplitCase) -> None:
        super().__init__(case)
        self.norm = nn.BatchNorm1d(3)


class ByHand(SplitLearner):
    def __init__(self, case: SplitCase) -> None:
        super().__init__(case)
        self.automatic_optimization = False


class FailsLate(SplitLearner):
    """The loss of the second step cannot go backward."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss if batch_idx == 0 else loss.detach()


class Fused(SplitLearner):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.net.parameters(), fused=True)


def scaled() -> dict[str, Any]:
    return {"plugins": [PoolEnvironment(), MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))]}


def averaged() -> dict[str, Any]:
    return {"callbacks": [EMAWeightAveraging()]}


def synchronised() -> dict[str, Any]:
    return {"sync_batchnorm": True}


REFUSED: list[tuple[type[SplitLearner], dict[str, Any], Any, str]] = [
    (OwnLoader, TENSOR, dict, "ConfigError: rank 0 and rank 1 share each layer, so they must read the same batches"),
    (OwnLoader, inside("zero2"), dict, "trainer.distributed_sampler_kwargs"),
    (EarlyOptimizer, TENSOR, dict, "net.tokens.weight (and "),
    (EarlyOptimizer, inside("zero1"), dict, "net.tokens.weight (and "),
    (WithBatchNorm, TENSOR, synchronised, "CombinationError: sync_batchnorm=True"),
    (ByHand, inside("zero2"), dict, "CombinationError: manual optimization with parallel.mode=zero2"),
    (FailsLate, TENSOR, dict, "RuntimeError: element 0 of tensors does not require grad"),
    (FailsLate, inside("zero3"), dict, "RuntimeError: element 0 of tensors does not require grad"),
    (Fused, TENSOR, dict, "CombinationError: AdamW(fused=True)"),
    (SplitLearner, TENSOR, scaled, "CombinationError: precision=16-mixed"),
    (SplitLearner, TENSOR, averaged, "CombinationError: EMAWeightAveraging averages whole parameters"),
    (SplitLearner, {"mode": "tensor", "tensor": {"plan": "mlp"}}, dict, "ConfigError: plan: '*blocks.*.0'"),
]


def refusal(
    context: RankContext, kind: type[SplitLearner], parallel: dict[str, Any], make_arguments: Any = dict
) -> str:
    """What a fit that cannot be says."""
    trainer = trainer_on_pool(context, strategy_of(parallel=parallel), limit_val_batches=0, **make_arguments())
    try:
        trainer.fit(kind(SplitCase(parallel=parallel)))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def refusals(context: RankContext) -> list[str]:
    return [refusal(context, *case[:3]) for case in REFUSED]


def test_what_would_be_wrong_is_refused_on_all_ranks(ranks: RankPool) -> None:
    for said in ranks.run(refusals, layout=LAYOUTS["2"], fresh=True):
        for (kind, parallel, _, expected), text in zip(REFUSED, said, strict=True):
            assert expected in text, f"{kind.__name__} with {parallel}: {text}"


PLACED = [
    ({"a": [0, 1, 2], "b": [3]}, {"mode": "tensor"}, ["[0, 1, 2] on a; [3] on b", "parallel=ddp"]),
    ({"a": [0, 1, 2], "b": [3]}, inside("tensor"), ["tp groups cross hosts: [2, 3] on a, b", "parallel=ddp"]),
    ({"a": [0, 1, 2], "b": [3]}, inside("zero2"), ["tp groups cross hosts: [2, 3] on a, b", "zero2"]),
    ({"a": [0], "b": [1]}, {"mode": "tensor"}, ["[0] on a; [1] on b", "parallel=ddp"]),
    ({"a": [0, 1], "b": [2, 3]}, {"mode": "tensor", "tensor": {"size": 4}}, ["[0, 1, 2, 3] on a, b", "size=2"]),
    ({"a": [0, 1, 2]}, inside("tensor"), ["3 ranks (a: 3) cannot be dealt to groups of 2"]),
]


@pytest.mark.parametrize(("layout", "parallel", "expected"), PLACED)
def test_groups_that_would_cross_hosts_are_named(
    layout: dict[str, list[int]], parallel: dict[str, Any], expected: list[str]
) -> None:
    with pytest.raises(PlacementError) as caught:
        build.place_ranks(Cluster.from_hosts(layout), ParallelConfig(**{**parallel, "tensor": tensor_of(parallel)}))
    for text in expected:
        assert text in str(caught.value)


def tensor_of(parallel: dict[str, Any]) -> TensorConfig:
    return TensorConfig(**parallel.get("tensor", {}))


def test_a_placement_is_refused_before_training(ranks: RankPool) -> None:
    for said in ranks.run(refusal, layout=PLACED[0][0], args=(SplitLearner, TENSOR)):
        assert said.startswith("PlacementError: parallel=tensor shares each layer among all ranks of a host")


class Fails(SplitLearner):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if batch_idx == 1 and self.global_rank == 1:
            raise ZeroDivisionError("own")
        return super().training_step(batch, batch_idx)


def test_who_shares_layers_with_a_rank_that_fails_learns_why(ranks: RankPool) -> None:
    waiting, failing = ranks.run(refusal, layout=LAYOUTS["2"], args=(Fails, TENSOR), fresh=True)
    assert failing == "ZeroDivisionError: own"
    assert waiting.startswith("PeerLostError: rank 0 (host a)")
    assert "rank 1 (host a) ended with an error of its own: ZeroDivisionError: own" in waiting

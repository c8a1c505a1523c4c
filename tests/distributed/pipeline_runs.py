"""Trainings of models cut into stages, on the ranks of a pool, and the same in one process."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  # the name everybody uses
from torch.utils.data import DataLoader

from examples.model import GPT
from lightning_dist import PipelineLayer
from lightning_dist.parallel.pipeline.micro_batches import map_tensors
from lightning_dist.run_config import GPTConfig
from tests.distributed.lightning_runs import adamw, loader_of, sgd, strategy_of, trainer_on_pool
from tests.distributed.sharded_runs import KeepState
from tests.distributed.split_models import Decoder, spread
from tests.distributed.tensor_runs import KeepDataRank
from tests.support.reference import ReferenceStep, train_reference
from tests.support.tasks import RankContext

STEPS = 4
VOCABULARY, TIME = 11, 5


def odd_net() -> nn.Sequential:
    """Nine layers; no size divides another."""
    sizes = (7, 13, 5, 11, 3)
    act = nn.Tanh()  # one object, used four times: it holds nothing
    pairs = [(nn.Linear(a, b), act) for a, b in itertools.pairwise(sizes)]
    return nn.Sequential(*(layer for pair in pairs for layer in pair), nn.Linear(3, 3))


def tied_gpt(dropout: float = 0.0) -> GPT:
    """Four blocks; the output layer is tied to the embedding."""
    return GPT(GPTConfig(vocab_size=VOCABULARY, block_size=TIME, n_layer=4, n_head=2, n_embd=6, dropout=dropout))


def frozen_first() -> nn.Sequential:
    """The first two linear layers do not train."""
    net = odd_net()
    for layer in (net[0], net[2]):
        layer.requires_grad_(False)
    return net


def even_gpt(dropout: float = 0.0, kind: type[GPT] = GPT) -> GPT:
    """As :func:`tied_gpt`, of sizes that two ranks can share."""
    config = GPTConfig(vocab_size=VOCABULARY + 1, block_size=TIME, n_layer=4, n_head=2, n_embd=8, dropout=dropout)
    return spread(kind(config))


class SoftGPT(GPT):
    """Something follows the output layer, in a stage of its own if need be."""

    def soft(self, logits: Tensor) -> Tensor:
        return 3 * torch.tanh(logits / 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.soft(super().forward(tokens))

    def pipeline_layers(self) -> list[Any]:
        return [*super().pipeline_layers(), PipelineLayer(self.soft)]


class LayeredDecoder(Decoder):
    """Grouped attention, norms of each head, an embedding that is not tied."""

    def logits(self, x: Tensor) -> Tensor:
        return self.lm_head(self.norm(x))

    def pipeline_layers(self) -> list[Any]:
        return [self.embed_tokens, *self.layers, PipelineLayer(self.logits, self.norm, self.lm_head)]


class TwoStreams(nn.Module):
    """Between its layers travel three tensors, one of them of integers, and one of no use after the second layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 6)
        self.middle = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.last = nn.Linear(6, 3)

    def start(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.first(x), x * 2, (x > 0).long().sum(1)

    def step(self, index: int) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
        def run(a: Tensor, b: Tensor, count: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return torch.tanh(self.middle[index](a)) + count[:, None] / 7, b, count

        return run

    def end(self, a: Tensor, b: Tensor, count: Tensor) -> Tensor:
        return self.last(a) + count[:, None]

    def pipeline_layers(self) -> list[Any]:
        middle = [PipelineLayer(self.step(i), layer) for i, layer in enumerate(self.middle)]
        return [PipelineLayer(self.start, self.first), *middle, PipelineLayer(self.end, self.last)]

    def forward(self, x: Tensor) -> Tensor:
        values: Any = x
        for layer in self.pipeline_layers():
            values = layer.function(*values) if isinstance(values, tuple) else layer.function(values)
        return values


def batch_norm() -> nn.Sequential:
    return nn.Sequential(nn.Linear(7, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "odd": odd_net,
    "gpt": tied_gpt,
    "noisy": lambda: tied_gpt(0.3),
    "even": even_gpt,
    "even_noisy": lambda: even_gpt(0.3),
    "soft": lambda: even_gpt(kind=SoftGPT),
    "decoder": lambda: spread(LayeredDecoder()),
    "frozen": frozen_first,
    "streams": TwoStreams,
    "batch_norm": batch_norm,
}
TEXT = ("gpt", "noisy", "even", "even_noisy", "soft", "decoder")


def make_batches(model: str, count: int, *, seed: int, size: int) -> list[Any]:
    """``count`` batches of ``size`` samples."""
    generator = torch.Generator().manual_seed(seed)
    if model in TEXT:
        shape = (size, TIME + 1)
        return [torch.randint(VOCABULARY, shape, generator=generator) for _ in range(count)]
    return [
        (torch.randn(size, 7, generator=generator), torch.randn(size, 3, generator=generator)) for _ in range(count)
    ]


@dataclass(frozen=True)
class StageCase:
    """What is trained, and how.

    Attributes:
        model: Name in :data:`MODELS`.
        pipeline: Options of ``parallel.pipeline``.
        parallel: Further options of the group ``parallel``.
        strategy: Further arguments of the strategy.
        trainer: Arguments of the Trainer.
        optimizer: ``adamw`` or ``sgd``.
        accumulation: Micro-steps of a step.
        size: Samples of a batch; of the last one in an epoch ``last_size``.
        last_size: See ``size``.
        loss: ``mean``, ``sum`` or ``ignoring``: a mean over the targets that count, which differ in number.
    """

    model: str = "odd"
    pipeline: dict[str, Any] = field(default_factory=dict)
    parallel: dict[str, Any] = field(default_factory=dict)
    strategy: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)
    optimizer: str = "sgd"
    accumulation: int = 1
    size: int = 8
    last_size: int | None = None
    loss: str = "mean"

    def batches(self, data_rank: int) -> list[Any]:
        """Of a rank that reads this part of the data."""
        count = STEPS * self.accumulation
        batches = make_batches(self.model, count, seed=data_rank, size=self.size)
        if self.last_size is not None:
            batches[-1] = make_batches(self.model, 1, seed=100 + data_rank, size=self.last_size)[0]
        return batches

    @property
    def reduction(self) -> str:
        return "sum" if self.loss == "sum" else "mean"

    @property
    def is_double(self) -> bool:
        """Whether all is computed in fp64, by the reference too."""
        return self.trainer.get("precision") == "64-true"


def targets_of(case: StageCase, batch: Any) -> Tensor:
    """Of a batch; where some are to be ignored, about half of the first samples' and none of the others'."""
    if case.model not in TEXT:
        return batch[1]
    targets = batch[:, 1:].clone()
    if case.loss == "ignoring":
        targets[batch[:, :-1] < batch[:, -1:] * 2 % VOCABULARY] = -100
    return targets


def input_of(case: StageCase, batch: Any) -> Tensor:
    return batch[:, :-1] if case.model in TEXT else batch[0]


def loss_of(case: StageCase, output: Tensor, batch: Any) -> Tensor:
    targets = targets_of(case, batch)
    if case.model in TEXT:
        return F.cross_entropy(output.flatten(0, 1), targets.flatten(), reduction=case.reduction)
    return F.mse_loss(output, targets, reduction=case.reduction)


class StageLearner(pl.LightningModule):
    """Trains one of :data:`MODELS`; takes the part of the data that the strategy gives it."""

    def __init__(self, case: StageCase) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = MODELS[case.model]()
        self.case = case
        self.seen: list[dict[str, float]] = []
        if case.loss == "ignoring":
            self.pipeline_weight = lambda batch: (targets_of(case, batch) != -100).sum()

    def pipeline_layers(self) -> Any:
        own = getattr(self.net, "pipeline_layers", None)
        return self.net if own is None else own()

    def pipeline_input(self, batch: Any) -> Tensor:
        return input_of(self.case, batch)

    def train_dataloader(self) -> DataLoader[Any]:
        return loader_of(self.case.batches(int(self.trainer.distributed_sampler_kwargs["rank"])))

    def val_dataloader(self) -> DataLoader[Any]:
        rank = int(self.trainer.distributed_sampler_kwargs["rank"])
        return loader_of(make_batches(self.case.model, 2, seed=50 + rank, size=3))

    predict_dataloader = test_dataloader = val_dataloader

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = loss_of(self.case, self.net(self.pipeline_input(batch)), batch)
        self.log("train_loss", loss, batch_size=len(batch) if isinstance(batch, Tensor) else len(batch[0]))
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        whole = float(outputs["loss"]) * self.case.accumulation  # Lightning has divided it
        self.seen.append({"loss": whole, "logged": float(self.trainer.callback_metrics["train_loss"])})

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss = loss_of(self.case, self.net(self.pipeline_input(batch)), batch)
        self.log("val_loss", loss, sync_dist=True, batch_size=3)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.validation_step(batch, batch_idx)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(self.pipeline_input(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        make = adamw if self.case.optimizer == "adamw" else sgd
        return make(list(self.net.parameters()))


@dataclass(frozen=True)
class StageOutcome:
    """What a fit left on a rank.

    Attributes:
        weights: The net's ``state_dict()``, after the fit.
        losses: Of each micro-step, as Lightning was given them, in full.
        logged: What the step logged, of each micro-step.
        data_rank: Which part of the data the rank read.
        optimizer_state: Parameter name -> entries, as a checkpoint holds them; values on rank 0 only.
        kinds: Names of the types of the parameters after the fit.
        val_loss: Of the last validation; NaN without one.
    """

    weights: dict[str, Tensor]
    losses: list[float]
    logged: list[float]
    data_rank: int
    optimizer_state: dict[str, dict[str, Any]]
    kinds: set[str]
    val_loss: float


def strategy_for(case: StageCase) -> Any:
    pipeline = {"loss_reduction": case.reduction, **case.pipeline}
    return strategy_of(parallel={"mode": "pipeline", "pipeline": pipeline, **case.parallel}, **case.strategy)


def train(context: RankContext, case: StageCase) -> StageOutcome:
    """Train on this rank."""
    module, keep, data_rank = StageLearner(case), KeepState(), KeepDataRank()
    arguments: dict[str, Any] = {"limit_val_batches": 0, **case.trainer}
    trainer = trainer_on_pool(
        context,
        strategy_for(case),
        callbacks=[keep, data_rank],
        accumulate_grad_batches=case.accumulation,
        **arguments,
    )
    trainer.fit(module)
    names = [name for name, _ in module.net.named_parameters()]
    states = {names[index]: dict(entries) for index, entries in keep.states.items()} if context.rank == 0 else {}
    return StageOutcome(
        {name: value.detach().clone() for name, value in module.net.state_dict().items()},
        [each["loss"] for each in module.seen],
        [each["logged"] for each in module.seen],
        data_rank.rank,
        states,
        {type(p).__name__ for p in module.net.parameters()},
        float(trainer.callback_metrics.get("val_loss", float("nan"))),
    )


def reference(case: StageCase, data_ranks: int) -> list[ReferenceStep]:
    """The same in one process. Where targets are ignored, the batches of all ranks are one: the mean is over tokens."""
    batches = [case.batches(rank) for rank in range(data_ranks)]
    make_model = MODELS[case.model]
    if case.is_double:
        batches = [[map_tensors(batch, _doubled) for batch in each] for each in batches]
    if case.loss == "ignoring":
        batches = [[torch.cat(parts) for parts in zip(*batches, strict=True)]]
    clip = case.trainer.get("gradient_clip_val")
    by_value = case.trainer.get("gradient_clip_algorithm") == "value"
    make = adamw if case.optimizer == "adamw" else sgd
    return train_reference(
        make_model=(lambda: make_model().double()) if case.is_double else make_model,
        make_optimizer=lambda parameters: make(parameters),
        batches=batches,
        loss_of=lambda model, batch: loss_of(case, model(input_of(case, batch)), batch),
        accumulation=case.accumulation,
        clip_norm=None if by_value else clip,
        clip_value=clip if by_value else None,
    )


def _doubled(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor

"""What each rank holds of the state: the parts of all ranks together are the state that a checkpoint has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist

from lightning_dist.parallel.held_state import HeldTensor, Stored, TensorToFill
from tests.distributed import pipeline_runs, sharded_runs, tensor_runs
from tests.distributed.lightning_runs import loader_of, make_batches, strategy_of, trainer_on_pool
from tests.distributed.sharded_runs import LAYOUTS, MODES, Case
from tests.support.ranks import RankPool
from tests.support.sweeps import sampled
from tests.support.tasks import RankContext

State = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Seen:
    """Of one rank: what it holds, and, on rank 0, the whole."""

    model: list[HeldTensor]
    optimizer: list[HeldTensor]
    whole_model: State
    whole_optimizer: State
    reloaded_model: State
    reloaded_optimizer: State


class KeepHeld(pl.Callback):
    """Looks at the end of training."""

    seen: Seen | None = None

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        strategy: Any = trainer.strategy
        mode, optimizer = strategy._mode, trainer.optimizers[0]
        held = mode.held_state()
        with mode.as_held():
            model = list(held.of_model(pl_module.state_dict()))
        parts = list(held.of_optimizer(optimizer, optimizer.state_dict()))
        names = [name for name, _ in pl_module.named_parameters()]
        owners = {id(p): name for name, p in pl_module.named_parameters()}
        listed = [owners[id(p)] for group in optimizer.param_groups for p in group["params"]]
        assert set(listed) <= set(names)

        def whole() -> tuple[State, State]:
            states = strategy.optimizer_state(optimizer)["state"]
            return {n: v.clone() for n, v in strategy.lightning_module_state_dict().items()}, {
                f"{listed[index]}.{entry}": value.clone()
                for index, entries in states.items()
                for entry, value in entries.items()
                if isinstance(value, torch.Tensor)
            }

        held_parts = [_copied(each) for each in model], [_copied(each) for each in parts]
        before = whole()
        model_state, optimizer_state = (_from_rank_0(state) for state in before)
        with torch.no_grad():
            for parameter in pl_module.parameters():
                parameter.zero_()
        filled = {each.name: _filled(each, model_state) for each in held.model_to_fill(_stored(model_state))}
        pl_module.load_state_dict(filled)
        entries: dict[int, dict[str, Any]] = {}
        for each in held.optimizer_to_fill(optimizer, _stored(optimizer_state)):
            name, _, entry = each.name.rpartition(".")
            entries.setdefault(listed.index(name), {})[entry] = _filled(each, optimizer_state)
        optimizer.load_state_dict({**optimizer.state_dict(), "state": entries})
        self.seen = Seen(*held_parts, *before, *whole())


def _from_rank_0(state: State) -> State:
    """Whole values, which only rank 0 has got."""
    shared = [state]
    dist.broadcast_object_list(shared, 0)
    return shared[0]


def _stored(state: State) -> dict[str, Stored]:
    return {name: Stored(tuple(value.shape), value.dtype) for name, value in state.items()}


def _filled(to_fill: TensorToFill, whole: State) -> torch.Tensor:
    """As a reader does it, which has the whole."""
    if to_fill.part is not None:
        to_fill.part.fill_(3)
        for box in to_fill.spread.boxes:
            to_fill.part[box.in_part] = whole[to_fill.name][box.in_whole]
    return to_fill.value()


def _copied(held: HeldTensor) -> HeldTensor:
    return HeldTensor(held.names, held.local.clone(), held.spread, held.holders)


def hold(context: RankContext, case: Any) -> Seen:
    """Train, and say what this rank holds at the end."""
    keep = KeepHeld()
    if isinstance(case, Case):
        module: Any = sharded_runs.CaseModule(case)
        strategy = strategy_of(**case.strategy)
        data = {"train_dataloaders": loader_of(make_batches(context.world_size, 3)[context.rank])}
    else:
        runs = tensor_runs if isinstance(case, tensor_runs.SplitCase) else pipeline_runs
        learner = tensor_runs.SplitLearner if runs is tensor_runs else pipeline_runs.StageLearner
        module, strategy, data = learner(case), runs.strategy_for(case), {}
    trainer_on_pool(context, strategy, callbacks=[keep], max_epochs=1, limit_train_batches=3, limit_val_batches=0).fit(
        module, **data
    )
    assert keep.seen is not None
    dist.barrier()
    return keep.seen


def assemble(parts: dict[int, list[HeldTensor]]) -> State:
    """Whole tensors from the parts of all ranks. Each value must be held, and alike by those who say they hold it."""
    whole: State = {}
    seen: dict[str, torch.Tensor] = {}
    holders: dict[tuple[str, Any], tuple[int, ...]] = {}
    for rank, held in parts.items():
        for each in held:
            assert rank in each.holders
            key = each.names[0], each.spread.boxes
            if each.spread.boxes:  # rows may be fewer than ranks
                assert set(holders.setdefault(key, each.holders)) == set(each.holders)
            for name in each.names:
                values = whole.setdefault(name, torch.full(each.spread.shape, 7, dtype=each.local.dtype))
                known = seen.setdefault(name, torch.zeros(each.spread.shape, dtype=torch.int64))
                for box in each.spread.boxes:
                    if rank == min(each.holders):
                        values[box.in_whole] = each.local[box.in_part]
                        known[box.in_whole] += 1
    for held in parts.values():
        for each in held:
            for box in each.spread.boxes:
                assert torch.equal(whole[each.names[0]][box.in_whole], each.local[box.in_part]), each.names
    for name, known in seen.items():
        assert bool((known == 1).all()), name
    return whole


def check(ranks: RankPool, case: Any, layout: dict[str, list[int]]) -> list[Seen]:
    """Run, and hold the parts against the whole."""
    seen: list[Seen] = ranks.run(hold, layout=layout, args=(case,))
    for parts, expected in (
        ({rank: each.model for rank, each in enumerate(seen)}, seen[0].whole_model),
        ({rank: each.optimizer for rank, each in enumerate(seen)}, seen[0].whole_optimizer),
    ):
        whole = assemble(parts)
        assert whole.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(whole[name], value), name
    for reloaded, expected in (
        (seen[0].reloaded_model, seen[0].whole_model),
        (seen[0].reloaded_optimizer, seen[0].whole_optimizer),
    ):
        assert reloaded.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(reloaded[name], value), name
    return seen


@pytest.mark.parametrize(
    ("mode", "layout", "net"),
    sampled(
        {
            f"{mode}-{layout}-{net}": (mode, layout, net)
            for mode in ("ddp", *MODES)
            for layout in ("2+2", "3+1", "cyclic", "3")
            for net in ("odd", "tied", "frozen")
            if layout != "3+1" or mode not in ("hsdp", "hpz")  # which want as many ranks on each host
        },
        always=["ddp-3+1-tied", "zero2-3+1-odd", "zero3-cyclic-frozen", "hsdp-cyclic-tied", "zero1-3-tied"],
    ),
)
def test_data_parallel_and_sharded(ranks: RankPool, mode: str, layout: str, net: str) -> None:
    strategy = MODES.get(mode, {"parallel": "ddp"})
    seen = check(ranks, Case(net=net, optimizer="adamw", strategy=strategy), LAYOUTS[layout])
    if net == "tied":
        (names,) = [each.names for each in seen[0].model if len(each.names) > 1]
        assert names == ("net.embedding.weight", "net.head.weight")
    if mode == "ddp":
        assert {each.holders for each in seen[0].model} == {tuple(range(len(seen)))}


def test_optimizer_state_of_other_shapes(ranks: RankPool) -> None:
    check(ranks, Case(net="tied", optimizer="rows and columns", strategy=MODES["zero2"]), LAYOUTS["2"])


@pytest.mark.parametrize("mode", ["tensor", "zero2", pytest.param("hsdp", marks=pytest.mark.sweep)])
@pytest.mark.parametrize("model", ["gpt", "huggingface"])
def test_split_layers(ranks: RankPool, mode: str, model: str) -> None:
    case = tensor_runs.SplitCase(model=model, optimizer="adamw", parallel={"mode": mode, "tensor": {"size": 2}})
    check(ranks, case, LAYOUTS["2+2"])


@pytest.mark.parametrize("mode", ["pipeline", "zero2"])
@pytest.mark.parametrize("model", ["gpt", "odd"])
def test_stages(ranks: RankPool, mode: str, model: str) -> None:
    parallel = {"mode": mode} if mode != "pipeline" else {}
    case = pipeline_runs.StageCase(model=model, optimizer="adamw", pipeline={"size": 2}, parallel=parallel)
    check(ranks, case, LAYOUTS["2+2"])


def test_split_stages(ranks: RankPool) -> None:
    parallel = {"tensor": {"size": 2}}
    check(ranks, pipeline_runs.StageCase(model="even", pipeline={"size": 2}, parallel=parallel), LAYOUTS["2+2"])

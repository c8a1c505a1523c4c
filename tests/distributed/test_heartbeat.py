"""Training that is well is never taken for hung, whatever it is about; and every phase is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy

from lightning_dist import AsyncShardedCheckpoint, ClusterMonitor, Heartbeat
from lightning_dist.config.elastic import ElasticConfig
from lightning_dist.elastic.detect.phases import Phase
from lightning_dist.elastic.detect.pulse import Pulse
from lightning_dist.heartbeat import pulse_of
from lightning_dist.monitor.record import Sample
from tests.distributed.lightning_runs import OddModule, loader_of, make_batches, sgd, strategy_of, trainer_on_pool
from tests.support.lookout import Lookout
from tests.support.ranks import RankContext, RankPool

STRICT = ElasticConfig(hang_floor_s=10, hang_factor=10, start_s=60, save_s=20, validation_s=20)
EVERY_PHASE = [
    "JOINING",
    "LOADING",
    "VALIDATION",  # the check before training
    "BETWEEN",
    "FIRST_STEP",
    "TRAINING",
    "SAVING",
    "TRAINING",
    "VALIDATION",
    "BETWEEN",
    "ENDING",
    "DONE",
]


def fit(context: RankContext, folder: str, strategy: str, num_steps: int, interval: int) -> list[str]:
    """Train, with validation and saves each so many steps; which phases there were, each change."""
    phases: list[str] = []
    write = Pulse._write

    def note(pulse: Pulse, *, phase: Phase, **more: Any) -> None:
        if not phases or phases[-1] != phase.name:
            phases.append(phase.name)
        write(pulse, phase=phase, **more)

    Pulse._write = note  # type: ignore[method-assign]
    try:
        made: Any = DDPStrategy(process_group_backend="gloo") if strategy == "ddp" else strategy_of()
        saving = AsyncShardedCheckpoint if strategy == "sharded" else ModelCheckpoint
        trainer = trainer_on_pool(
            context,
            made,
            callbacks=[
                saving(folder, every_n_train_steps=interval, save_top_k=1, monitor=None),
                *([Heartbeat()] if strategy == "ddp" else []),
            ],
            enable_checkpointing=True,
            max_epochs=2,
            num_sanity_val_steps=1,
            val_check_interval=interval,
        )
        batches = make_batches(context.world_size, num_steps // 2)[context.rank]
        trainer.fit(OddModule(sgd), loader_of(batches), loader_of(batches[:3]))
        assert pulse_of(trainer) is None  # the board is let go
    finally:
        Pulse._write = write  # type: ignore[method-assign]
    return phases


def run(ranks: RankPool, tmp_path: Path, strategy: str, num_steps: int, interval: int, deadline_s: float) -> list[str]:
    """Two ranks under an agent that looks; the phases of the first."""
    agent = tmp_path / "agent"
    with Lookout([agent], STRICT, num_ranks=2, frees=False) as lookout:
        phases = ranks.run(
            fit,
            world_size=2,
            args=(str(tmp_path / "saved"), strategy, num_steps, interval),
            env={"HIERDIST_AGENT": str(agent)},
            deadline_s=deadline_s,
        )
    assert lookout.hangs == []
    (progress,) = lookout.progress if strategy != "ddp" else [None]
    if progress is not None:  # whose waits are known
        assert progress.step == num_steps
        assert all(own_s >= 0 for own_s in progress.own_s)
    assert phases[0] == phases[1]
    return list(phases[0])


@pytest.mark.parametrize("strategy", ["hierdist", "ddp", pytest.param("sharded", marks=pytest.mark.sweep)])
def test_every_phase_is_told_and_none_is_taken_for_a_hang(ranks: RankPool, tmp_path: Path, strategy: str) -> None:
    phases = run(ranks, tmp_path, strategy, 8, 2, 60)
    expected = EVERY_PHASE[1:] if strategy == "ddp" else EVERY_PHASE
    assert _in_order(expected, phases), phases
    assert phases[-1] == "DONE"


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.timeout(600)
@pytest.mark.parametrize("strategy", ["hierdist", "sharded", "ddp"])
def test_two_thousand_healthy_steps_with_saves_and_validation(ranks: RankPool, tmp_path: Path, strategy: str) -> None:
    run(ranks, tmp_path, strategy, 2000, 50, 500)


def _in_order(expected: list[str], found: list[str]) -> bool:
    """Whether all are found, one after the other; others may be between them."""
    rest = iter(found)
    return all(name in rest for name in expected)


def count_timeouts(context: RankContext, folder: str) -> list[float]:
    """Train under a monitor; what it samples of the sixth metric on this rank."""
    found: list[float] = []

    def take(sample: Sample) -> None:
        if sample.metric == "heartbeat_timeouts":
            found.append(sample.value)

    monitor = ClusterMonitor(folder)
    monitor.on_sample(take)
    trainer = trainer_on_pool(context, strategy_of(), callbacks=[monitor])
    trainer.fit(OddModule(sgd), loader_of(make_batches(context.world_size, 4)[context.rank]))
    return found


def test_hangs_that_the_agent_has_found_are_in_the_record(ranks: RankPool, tmp_path: Path) -> None:
    with Lookout([tmp_path / host for host in "ab"], STRICT, frees=False) as lookout:
        lookout.count_timeouts(host=1, found=3)
        first, second = ranks.run(
            count_timeouts,
            layout={"a": [0], "b": [1]},
            args=(str(tmp_path / "monitor"),),
            env_per_rank=[{"HIERDIST_AGENT": str(tmp_path / host)} for host in "ab"],
        )
    assert first
    assert second
    assert (first[-1], second[-1]) == (0, 3)


def begin_and_end(context: RankContext) -> list[bool]:
    """Whether a Trainer's calls beat one after the other, under an agent."""
    module, batches = OddModule(sgd), make_batches(1, 2)[0]
    found = []

    class Ask(pl.Callback):
        def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            found.append(pulse_of(trainer) is not None)

    trainer = trainer_on_pool(context, strategy_of(), callbacks=[Ask()], max_epochs=1)
    trainer.validate(module, loader_of(batches), verbose=False)
    trainer.fit(module, loader_of(batches), loader_of(batches))
    trainer.validate(module, loader_of(batches), verbose=False)
    assert sum(isinstance(each, Heartbeat) for each in trainer.callbacks) == 1  # type: ignore[attr-defined]
    return found


def test_each_call_of_a_trainer_beats(ranks: RankPool, tmp_path: Path) -> None:
    with Lookout([tmp_path / "agent"], STRICT, frees=False):
        (found,) = ranks.run(begin_and_end, world_size=1, env={"HIERDIST_AGENT": str(tmp_path / "agent")})
    assert found == [True, True, True]
    (found,) = ranks.run(_without_an_agent, world_size=1)
    assert found == [0, None]


def _without_an_agent(context: RankContext) -> list[Any]:
    trainer = trainer_on_pool(context, strategy_of(), max_epochs=1)
    trainer.fit(OddModule(sgd), loader_of(make_batches(1, 2)[0]))
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return [sum(isinstance(each, Heartbeat) for each in callbacks), pulse_of(trainer)]

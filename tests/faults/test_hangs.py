"""A rank that is stopped in the middle of training: it is named, and the others leave their collective when told to.

The deadline of the operations themselves is a minute and more: whoever comes back sooner was freed.
"""

from __future__ import annotations

import json
import os
import signal
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy

from lightning_dist import Heartbeat
from lightning_dist.config.elastic import ElasticConfig
from tests.distributed.lightning_runs import (
    OddModule,
    loader_of,
    make_batches,
    sgd,
    strategy_of,
    trainer_on_pool,
)
from tests.support.lookout import WHY, Lookout
from tests.support.ranks import Died, RankContext, RankPool

CONFIG = ElasticConfig(hang_floor_s=2, hang_factor=2, start_s=60)
OPERATION_S = 300.0
STOP_AT = 4


@dataclass(frozen=True)
class Ending:
    """How a rank's training ended.

    Attributes:
        error: Class of what was raised.
        text: Its message and notes.
    """

    error: str
    text: str


class Stopping(OddModule):
    """Its last rank stops itself."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if batch_idx == STOP_AT and self.global_rank == self.trainer.world_size - 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        return super().training_step(batch, batch_idx)


def fit_until_freed(context: RankContext, strategy: str, options: dict[str, Any]) -> Ending:
    """Train; what ends it is returned."""
    if strategy == "ddp":
        made: Any = DDPStrategy(process_group_backend="gloo", timeout=timedelta(seconds=OPERATION_S))
    else:
        made = strategy_of(sync={"timeout_s": OPERATION_S, **options.pop("sync", {})}, **options)
    trainer = trainer_on_pool(context, made, callbacks=[Heartbeat()] if strategy == "ddp" else [])
    batches = make_batches(context.world_size, 50)[context.rank]
    try:
        trainer.fit(Stopping(sgd), loader_of(batches))
    except Exception as error:
        return Ending(type(error).__name__, "\n".join([str(error), *getattr(error, "__notes__", [])]))
    raise AssertionError("training went on without the other rank")


@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        ("hierdist", {}),
        ("ddp", {}),
        pytest.param("hierdist", {"sync": {"algorithm": "flat"}}, marks=pytest.mark.sweep),
        pytest.param("hierdist", {"parallel": "zero2"}, marks=pytest.mark.sweep),
        pytest.param("hierdist", {"parallel": "zero3"}, marks=pytest.mark.sweep),
    ],
    ids=str,
)
@pytest.mark.parametrize("hosts", [{"a": [0, 1]}, {"a": [0], "b": [1]}], ids=["1x2", "2x1"])
def test_a_stopped_rank_is_named_and_the_other_is_freed(
    ranks: RankPool, tmp_path: Path, hosts: dict[str, list[int]], strategy: str, options: dict[str, Any]
) -> None:
    folders = [tmp_path / host for host in hosts]
    env = [{"HIERDIST_AGENT": str(tmp_path / host)} for host, on_host in hosts.items() for _ in on_host]
    with Lookout(folders, CONFIG, num_ranks=len(hosts["a"])) as lookout:
        ending, stopped = ranks.run(
            fit_until_freed,
            layout=hosts,
            args=(strategy, options),
            env_per_rank=env,
            init_group=False,
            may_die=[1],
            deadline_s=90,
        )
    assert stopped == Died(-signal.SIGKILL)
    last = (len(folders) - 1, len(hosts["a"]) - 1)
    stopped_hang = next(hang for host, hang in lookout.hangs if (host, hang.local_rank) == last)
    assert "its process is stopped" in stopped_hang.detail
    assert WHY in ending.text
    assert "gloo:" in ending.text
    if strategy == "hierdist":
        assert [(host, hang.local_rank) for host, hang in lookout.hangs] == [last]
        assert ending.error == "PeerLostError"
        assert "rank 0 (host a)" in ending.text
        assert "on group" in ending.text
    words = json.loads((folders[0] / "words.0.json").read_text())
    assert WHY in words["error"]
    assert "gloo:" in words["last_collective"]
    if strategy == "hierdist":
        assert words["last_collective"].startswith("waits in ")

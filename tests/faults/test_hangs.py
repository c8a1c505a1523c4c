"""A rank that hangs in the middle of training: it is named, and the others leave their collective when told to.

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

CONFIG = ElasticConfig(hang_floor_s=4, hang_factor=4, stopped_s=2, start_s=60)
OPERATION_S = 300.0
HANG_AT = 4


@dataclass(frozen=True)
class Ending:
    """How a rank's training ended.

    Attributes:
        error: Class of what was raised.
        text: Its message and notes.
    """

    error: str
    text: str


class Hanging(OddModule):
    """Its last rank stops itself, or computes for ever."""

    def __init__(self, way: str) -> None:
        super().__init__(sgd)
        self._way = way

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if batch_idx == HANG_AT and self.global_rank == self.trainer.world_size - 1:
            if self._way == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            while True:
                batch[0].sum()
        return super().training_step(batch, batch_idx)


def fit_until_freed(context: RankContext, way: str, strategy: str, options: dict[str, Any]) -> Ending:
    """Train; what ends it is returned."""
    if strategy == "ddp":
        made: Any = DDPStrategy(process_group_backend="gloo", timeout=timedelta(seconds=OPERATION_S))
    else:
        made = strategy_of(sync={"timeout_s": OPERATION_S, **options.pop("sync", {})}, **options)
    trainer = trainer_on_pool(context, made, callbacks=[Heartbeat()] if strategy == "ddp" else [])
    batches = make_batches(context.world_size, 50)[context.rank]
    try:
        trainer.fit(Hanging(way), loader_of(batches))
    except Exception as error:
        return Ending(type(error).__name__, "\n".join([str(error), *getattr(error, "__notes__", [])]))
    raise AssertionError("training went on without the other rank")


ONE_HOST, TWO_HOSTS = {"a": [0, 1]}, {"a": [0], "b": [1]}
FLAT, ZERO2, ZERO3 = {"sync": {"algorithm": "flat"}}, {"parallel": "zero2"}, {"parallel": "zero3"}


@pytest.mark.parametrize(
    ("hosts", "way", "strategy", "options"),
    [
        pytest.param(ONE_HOST, "stop", "hierdist", {}, id="hierdist"),
        pytest.param(TWO_HOSTS, "stop", "ddp", {}, id="ddp"),
        pytest.param(TWO_HOSTS, "compute", "hierdist", {}, id="computes"),
        *(
            pytest.param(hosts, way, "hierdist", options, id=f"{name}-{len(hosts)}-{way}", marks=pytest.mark.sweep)
            for name, options in {"plain": {}, "flat": FLAT, "zero2": ZERO2, "zero3": ZERO3}.items()
            for hosts in (ONE_HOST, TWO_HOSTS)
            for way in ("stop", "compute")
        ),
    ],
)
def test_a_rank_that_hangs_is_named_and_the_other_is_freed(
    ranks: RankPool, tmp_path: Path, hosts: dict[str, list[int]], way: str, strategy: str, options: dict[str, Any]
) -> None:
    folders = [tmp_path / host for host in hosts]
    env = [{"HIERDIST_AGENT": str(tmp_path / host)} for host, on_host in hosts.items() for _ in on_host]
    with Lookout(folders, CONFIG, num_ranks=len(hosts["a"])) as lookout:
        ending, hung = ranks.run(
            fit_until_freed,
            layout=hosts,
            args=(way, strategy, options),
            env_per_rank=env,
            init_group=False,
            may_die=[1],
            deadline_s=90,
        )
    assert hung == Died(-signal.SIGKILL), (ending, lookout.hangs)
    last = (len(folders) - 1, len(hosts["a"]) - 1)
    (detail,) = [hang.detail for host, hang in lookout.hangs if (host, hang.local_rank) == last]
    assert ("its process is stopped" in detail) is (way == "stop")
    words = json.loads((folders[0] / "words.0.json").read_text())
    if strategy == "hierdist":
        # Who was freed waits for nobody any more, and on a busy machine it takes a while to end.
        assert next((host, hang.local_rank) for host, hang in lookout.hangs) == last, lookout.hangs
        assert ending.error == "PeerLostError", ending
        assert "rank 0 (host a)" in ending.text
        assert "on group" in ending.text
    if way == "compute" and WHY not in ending.text:  # who hangs was freed a moment before, and closed its connections
        assert f"Waited for: rank 1 (host {list(hosts)[-1]})" in ending.text, ending
    else:
        assert WHY in ending.text, ending
        assert "gloo:" in ending.text, ending
        assert WHY in words["error"]
        assert "gloo:" in words["last_collective"]
        assert words["last_collective"].startswith("waits in ") is (strategy == "hierdist")
    if way == "compute":  # it is freed, too, and says where it is
        assert "is at test_hangs.py:" in json.loads((folders[-1] / f"words.{last[1]}.json").read_text())["error"]

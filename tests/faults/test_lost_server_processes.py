"""A server process is killed while ranks train with it: with a copy nothing is lost, without one the run ends."""

from __future__ import annotations

import os
import re
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import psutil
import pytest
import torch

from tests.distributed.lightning_runs import loader_of, strategy_of, trainer_on_pool
from tests.distributed.test_parameter_server import SERVED, STEPS, Words, ids_of
from tests.faults.fits import ending_of_fit
from tests.support.faults import wait_for_end
from tests.support.ranks import Died, RankPool
from tests.support.sweeps import sampled
from tests.support.tasks import RankContext

HOSTS = {"a": [0, 1], "b": [2]}
STRUCK_AT = 3
DEADLINE_S = 60.0


def server_processes() -> list[int]:
    """Of this rank, which is the first of its host."""
    children = psutil.Process().children(recursive=True)
    return [child.pid for child in children if any("parameter_server/processes" in part for part in child.cmdline())]


class Kills(pl.Callback):
    """Rank 0 kills a process: the server of its host, or itself.

    Args:
        when: ``forward``: before the look-ups of a step; ``step``: between its gradients and the optimizer's step.
        whom: ``server``, ``both servers`` or ``rank``.
        folder: The server's process is written there.
    """

    def __init__(self, when: str, whom: str, folder: Path) -> None:
        self.when = when
        self.whom = whom
        self.folder = folder

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self.strike(trainer, "forward")

    def on_before_optimizer_step(self, trainer: pl.Trainer, *_: Any) -> None:
        self.strike(trainer, "step")

    def strike(self, trainer: pl.Trainer, moment: str) -> None:
        if (trainer.global_rank, trainer.global_step, moment) != (0, STRUCK_AT, self.when):
            return
        servers = server_processes()
        (self.folder / "server").write_text(str(servers[0]))
        for victim in {"server": servers[:1], "both servers": servers, "rank": [os.getpid()]}[self.whom]:
            os.kill(victim, signal.SIGKILL)


@dataclass
class Ended:
    """How a rank's fit has ended.

    Attributes:
        ending: See :func:`~tests.faults.fits.ending_of_fit`.
        weights: Whole.
    """

    ending: dict[str, Any]
    weights: dict[str, torch.Tensor]


def fit(context: RankContext, options: dict[str, Any], folder: Path, when: str | None, whom: str = "server") -> Ended:
    strategy = strategy_of(sync={**SERVED, "timeout_s": DEADLINE_S, "parameter_server": options})
    callbacks = [] if when is None else [Kills(when, whom, folder)]
    trainer = trainer_on_pool(context, strategy, callbacks=callbacks, max_steps=STEPS)
    module = Words("SparseAdam", has_layer=False)
    batches = [ids_of(step, context.rank) for step in range(STEPS)]
    ending = ending_of_fit(trainer, module, loader_of(batches))
    has_ended = not ending["text"]  # else the rows may be nowhere
    return Ended(ending, {name: value.clone() for name, value in module.state_dict().items()} if has_ended else {})


CASES = {
    "before look-ups": ("forward", HOSTS, {"replicas": 1}),
    "before the step": ("step", HOSTS, {"replicas": 1}),
    "on one host": ("step", {"a": [0, 1, 2]}, {"replicas": 1, "servers_per_host": 2}),
}


@pytest.mark.parametrize(("when", "hosts", "options"), sampled(CASES, ["before the step"]))
def test_with_a_copy_the_run_goes_on_and_nothing_is_different(
    ranks: RankPool, tmp_path: Path, when: str, hosts: dict[str, list[int]], options: dict[str, Any]
) -> None:
    options = {"servers": "processes", **options}
    expected: list[Ended] = ranks.run(fit, layout=hosts, args=({}, tmp_path, None), deadline_s=120)
    struck: list[Ended] = ranks.run(fit, layout=hosts, args=(options, tmp_path, when), fresh=True, deadline_s=120)
    for one, other in zip(struck, expected, strict=True):
        assert one.ending["text"] == ""
        for name, value in other.weights.items():
            assert torch.equal(one.weights[name], value), name


@pytest.mark.sweep
def test_without_a_copy_all_ranks_say_which_server_is_gone(ranks: RankPool, tmp_path: Path) -> None:
    options = {"servers": "processes"}
    for ended in ranks.run(fit, layout=HOSTS, args=(options, tmp_path, "forward"), fresh=True, deadline_s=120):
        assert ended.ending["is_ours"], ended.ending
        assert "parameter server 0 of host a" in ended.ending["trace"], ended.ending["trace"]


@pytest.mark.sweep
def test_a_copy_that_is_lost_as_well_is_not_waited_for_in_vain(ranks: RankPool, tmp_path: Path) -> None:
    options = {"servers": "processes", "servers_per_host": 2, "replicas": 1}
    arguments = (options, tmp_path, "forward", "both servers")
    for ended in ranks.run(fit, layout={"a": [0, 1]}, args=arguments, fresh=True, deadline_s=180):
        assert ended.ending["is_ours"], ended.ending
        # On a busy machine a new process may take longer than the ranks wait.
        assert re.search(
            r"server \d of host a (is gone|did not answer)|server of rows did not answer", ended.ending["trace"]
        )


def test_servers_end_with_the_rank_that_started_them(ranks: RankPool, tmp_path: Path) -> None:
    """It is killed, so that nobody tells them."""
    options = {"servers": "processes", "replicas": 1}
    endings = ranks.run(
        fit, layout=HOSTS, args=(options, tmp_path, "forward", "rank"), fresh=True, may_die=[0], deadline_s=120
    )
    assert isinstance(endings[0], Died)
    for ended in endings[1:]:
        assert ended.ending["is_ours"], ended.ending
    wait_for_end(int((tmp_path / "server").read_text()), deadline_s=10)

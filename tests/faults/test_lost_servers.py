"""A rank that serves rows dies or stops, or fails by itself: all others say who, and end."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest

from tests.distributed.lightning_runs import loader_of, strategy_of, trainer_on_pool
from tests.distributed.test_parameter_server import SERVED, Words, ids_of
from tests.faults.fits import ending_of_fit
from tests.support.fresh import run_script
from tests.support.ranks import Died, RankPool
from tests.support.sweeps import sampled
from tests.support.tasks import RankContext

HOSTS = {"a": [0, 1], "b": [2]}
LOST = 1


class Struck(pl.Callback):
    """Something happens to rank 1 after some steps, before its backward: the others wait for its rows."""

    def __init__(self, kind: str, pid_file: Path) -> None:
        self.kind = kind
        self.pid_file = pid_file

    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Any) -> None:
        if trainer.global_rank != LOST or trainer.global_step != 3:
            return
        if self.kind == "error":
            raise ArithmeticError("a mistake of the user's")
        self.pid_file.write_text(str(os.getpid()))
        os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[self.kind])


def fit(context: RankContext, kind: str, has_layer: bool, staleness: int | None) -> dict[str, Any]:
    sync = {**SERVED, "parameter_server": {"staleness": staleness}, "timeout_s": 8.0}
    strategy = strategy_of(sync=sync)
    pid_file = context.tmp_path / "pid"
    trainer = trainer_on_pool(context, strategy, callbacks=[Struck(kind, pid_file)])
    module = Words("SGD", has_layer=has_layer)
    ending = ending_of_fit(trainer, module, loader_of([ids_of(step, context.rank) for step in range(6)]))
    (context.tmp_path / f"done{context.rank}").touch()
    if kind == "stop" and len(list(context.tmp_path.glob("done*"))) == context.world_size - 1:
        with contextlib.suppress(ProcessLookupError):  # both may come last
            os.kill(int(pid_file.read_text()), signal.SIGKILL)
    return ending


CASES = {
    "killed": ("kill", False, 0),
    "killed beside a layer": ("kill", True, 0),
    "stopped": ("stop", False, 0),
    "its own error": ("error", False, 0),
    "killed, look-ups 2 steps old": ("kill", False, 2),
    "stopped, look-ups 2 steps old": ("stop", False, 2),
    "its own error, look-ups 2 steps old": ("error", False, 2),
    "killed, asynchronous": ("kill", False, None),
    "stopped, asynchronous": ("stop", True, None),
}


@pytest.mark.parametrize(
    ("kind", "has_layer", "staleness"), sampled(CASES, ["killed", "stopped", "killed, look-ups 2 steps old"])
)
def test_all_others_say_who_is_lost(ranks: RankPool, kind: str, has_layer: bool, staleness: int | None) -> None:
    may_die = [] if kind == "error" else [LOST]
    endings = ranks.run(
        fit, layout=HOSTS, args=(kind, has_layer, staleness), fresh=True, may_die=may_die, deadline_s=60
    )
    lost = endings.pop(LOST)
    assert isinstance(lost, Died) or "a mistake of the user's" in lost["text"]
    for ending in endings:
        assert ending["is_ours"], ending
        assert "rank 1 (host a)" in ending["text"], ending["text"]


@pytest.mark.sweep
def test_under_an_agent_the_run_goes_on_with_the_rows_of_its_checkpoint(tmp_path: Path) -> None:
    script = Path(__file__).parent / "scripts" / "served.py"
    command = [
        "-m",
        "lightning_dist.cli",
        "launch",
        "--host=h",
        "--ranks-per-host=2",
        "--",
        sys.executable,
        str(script),
    ]
    result = run_script([*command, str(tmp_path / "checkpoints")], deadline_s=150).check()
    began = re.findall(r"rank (\d) begins at step (\d+) with (\d+) rows", result.stdout)
    assert sorted((int(rank), int(step)) for rank, step, _ in began) == [(0, 0), (0, 10), (1, 0), (1, 10)]
    assert sum(int(rows) for *_, rows in began) == 2 * 200
    ends = re.findall(r"rank (\d) ends, sum (\S+)", result.stdout)
    assert sorted(rank for rank, _ in ends) == ["0", "1"]
    assert len({total for _, total in ends}) == 1

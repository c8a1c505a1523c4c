"""The example under Ray Train: a rank that is killed costs the steps since the newest checkpoint, and no hand."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lightning_dist.monitor.goodput import goodput
from lightning_dist.monitor.whole_run import read_whole
from tests.support.fresh import Command, FreshRanks

pytest.importorskip("ray.train", reason="needs Ray: pip install 'lightning-dist[ray]'", exc_type=ImportError)
pytestmark = [pytest.mark.sweep, pytest.mark.slow, pytest.mark.timeout(400)]

SCRIPT = Path(__file__).parents[2] / "examples" / "ray_train.py"
DEADLINE_S = 300  # Ray's own start takes 20 s, and as long again after a failure
EPOCHS = 60


@pytest.fixture
def ray_home() -> Iterator[Path]:
    """Where Ray keeps what it writes; the names of its sockets must be short."""
    folder = Path(tempfile.mkdtemp(prefix="ray-"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def pid_of_rank(folder: Path, rank: int) -> int | None:
    """As it says itself at the head of its file; ``None``: not yet."""
    path = folder / "monitor" / f"steps-{rank:05d}.jsonl"
    head, end, _ = path.read_text().partition("\n") if path.exists() else ("", "", "")
    return int(json.loads(head)["pid"]) if end else None


def test_a_killed_rank_is_started_again_and_goes_on_from_the_newest_checkpoint(tmp_path: Path, ray_home: Path) -> None:
    environment = {"HOME": str(ray_home), "RAY_TMPDIR": str(ray_home), "RAY_USAGE_STATS_ENABLED": "0"}
    argv = [SCRIPT, "--epochs", str(EPOCHS), "--folder", str(tmp_path)]
    with FreshRanks([Command(argv, environment)]) as driver:
        deadline = time.monotonic() + DEADLINE_S
        poll = threading.Event()
        while not list(tmp_path.glob("checkpoints/*/COMMITTED")) or pid_of_rank(tmp_path, 1) is None:
            assert time.monotonic() < deadline, driver.output(0)
            poll.wait(0.05)
        pid = pid_of_rank(tmp_path, 1)
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        (ended,) = driver.wait(deadline_s=DEADLINE_S)
    assert ended.returncode == 0, ended.output
    assert "Restored all states from the checkpoint" in ended.output
    assert re.search(rf"2 ranks, step {EPOCHS * 32}: loss 0\.0", ended.output), ended.output
    assert sorted(path.name for path in (tmp_path / "starts").iterdir()) == ["1", "2"]
    whole = read_whole(tmp_path / "monitor")
    assert [record.facts.round for record in whole.rounds] == [1, 2]
    steps = [step.step for step in whole.rounds[1].ranks[0].steps]
    assert steps[0] > 0, "it did not begin anew"
    assert steps[0] % 32 == 0, "checkpoints are at the ends of epochs"
    assert steps == list(range(steps[0], EPOCHS * 32))
    assert goodput(whole).steps == EPOCHS * 32

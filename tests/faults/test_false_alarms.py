"""Two thousand healthy steps under ``hierdist launch``, with saves, validation and pauses of ten seconds: no alarm."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from lightning_dist import incidents
from tests.support.fresh import run_script

SCRIPT = str(Path(__file__).parent / "scripts" / "healthy.py")
NUM_STEPS = 2000
PAUSE_S = 10.0  # of the user's code, three times


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.timeout(600)
@pytest.mark.parametrize("strategy", ["hierdist", "ddp"])
def test_healthy_training_is_left_alone(tmp_path: Path, strategy: str) -> None:
    record = tmp_path / "record"
    command = ["-m", "lightning_dist.cli", "launch", "--ranks-per-host=2", "--elastic=restart", f"--record={record}"]
    script = [SCRIPT, strategy, str(tmp_path / "saved"), str(NUM_STEPS), str(PAUSE_S)]
    result = run_script([*command, "--", sys.executable, *script], deadline_s=550).check()
    assert result.stdout.count(f"did {NUM_STEPS} steps") == 2
    assert incidents.read(record) == ()
    assert "hang" not in result.stderr
    assert "is slow" not in result.stderr

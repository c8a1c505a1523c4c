"""``hierdist ab`` around the example."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.support.fresh import run_script

SCRIPT = Path(__file__).parents[2] / "examples" / "train.py"
OPTIONS = [
    *("model=mlp", "data=synthetic", "checkpoint=off", "monitor=off", "trainer=debug", "trainer.detect_anomaly=false"),
    "topology.hosts={a: [0], b: [1]}",
]


@pytest.mark.sweep
@pytest.mark.timeout(600)
def test_a_pair_of_runs_reads_the_same_and_halves_the_bytes(tmp_path: Path) -> None:
    words = ["ab", "--a", "sync=hierarchical", "--b", "sync=bf16", "--seeds", "1", "--steps", "4", "--output", "out"]
    command = [sys.executable, str(SCRIPT), *OPTIONS]
    result = run_script(["-m", "lightning_dist.cli", *words, "--", *command], cwd=tmp_path, deadline_s=580)
    assert result.returncode == 3, result.output  # one pair is not enough
    values = json.loads((tmp_path / "out" / "result.json").read_text())
    assert values["steps"] == 4
    assert values["notes"] == [], "the same samples, weights and numbers of steps"
    figures = {quantity["name"]: quantity for quantity in values["quantities"]}
    payload = figures["payload to other hosts, a step, all ranks"]
    # Beside gradients, some bytes a step by which ranks agree to stop or not.
    assert payload["change"]["mean"] == pytest.approx(0.5, rel=0.02)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]

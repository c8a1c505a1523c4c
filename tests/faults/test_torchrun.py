"""Plain torchrun, with its default rendezvous: a rank that is killed costs the steps since the newest checkpoint."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.fresh import run_script
from tests.support.processes import REPO_ROOT, free_port

SCRIPT = Path(__file__).parent / "scripts" / "killed_once.py"


@pytest.mark.timeout(240)
@pytest.mark.parametrize("rendezvous", ["static", pytest.param("c10d", marks=pytest.mark.sweep)])
def test_ranks_that_are_started_again_go_on(tmp_path: Path, rendezvous: str) -> None:
    where = {"static": [f"--master-port={free_port()}"], "c10d": ["--standalone"]}[rendezvous]
    torchrun = ["-m", "torch.distributed.run", *where, "--nproc-per-node=2", "--max-restarts=1"]
    ended = run_script(
        [*torchrun, str(SCRIPT), str(tmp_path)], env={"PYTHONPATH": str(REPO_ROOT)}, deadline_s=200
    ).check()
    begun = re.findall(r"start (\d) begins at (\d+)", ended.stdout)
    assert sorted(begun) == [("0", "0"), ("0", "0"), ("1", "4"), ("1", "4")]
    assert "start 2 of this run goes on after step 4" in ended.output
    assert ended.stdout.count("ended at 8") == 2

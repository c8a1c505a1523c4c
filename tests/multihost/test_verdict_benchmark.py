"""The verdict's benchmark performs a case and judges what its monitor has left."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.verdict.cases import SETS, make_case
from benchmarks.verdict.command import judge_run
from benchmarks.verdict.performing import Hosts
from benchmarks.verdict.runs import Injected
from benchmarks.verdict.truth import shares
from tests.support.forkserver import ForkServer

pytestmark = [pytest.mark.multihost, pytest.mark.slow, pytest.mark.sweep]


def test_a_case_is_performed_and_judged(rank_server: ForkServer, tmp_path: Path) -> None:
    case = make_case(SETS["train"], list(Injected).index(Injected.CHECKPOINTS))
    case = replace(case, run=replace(case.run, save_s=1.5))  # by far the most, on a busy machine too
    with Hosts(rank_server) as hosts:
        performed = hosts.perform(case, tmp_path / str(case.seed))
    assert performed.failure is None
    # Sleep is never shorter than asked for, whatever else the machine does.
    assert performed.step_s > performed.compute_s > 0.9 * case.run.compute_s
    assert 0 < shares(performed)[Injected.CHECKPOINTS.value] < 1
    judged = judge_run(performed, tmp_path)
    assert judged.said[0] == "checkpoint"
    assert judged.is_right

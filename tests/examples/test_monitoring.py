"""The example watched: what it leaves, and that data which each rank reads whole is recognised."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_dist.monitor.history.folder import read_history
from lightning_dist.monitor.reading import reading_note
from lightning_dist.monitor.run_files import read_run
from tests.examples.test_train import train_on_pool
from tests.support.ranks import RankPool


@pytest.mark.parametrize(("data", "is_naive"), [("naive", True), ("sharded", False), ("synthetic", False)])
def test_data_that_each_rank_reads_whole_is_recognised(
    ranks: RankPool, tmp_path: Path, data: str, is_naive: bool
) -> None:
    said = train_on_pool(
        ranks, tmp_path, f"data={data}", "monitor=on", f"monitor.history={tmp_path}/history", "trainer.max_steps=6"
    )
    record = read_run(tmp_path / "monitor")
    note = reading_note(record)
    assert (note is not None) == is_naive
    if note is not None:
        assert "holds all of Windows" in note
    assert f"hierdist: the report is in {tmp_path / 'monitor' / 'report.html'}" in said
    (kept,) = read_history(tmp_path / "history").runs
    assert kept.steps == 6

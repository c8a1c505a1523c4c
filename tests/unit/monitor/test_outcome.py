"""A run's files at its end: when all ranks have written theirs, and what is made of them."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from lightning_dist.errors import RecordError
from lightning_dist.monitor import lines
from lightning_dist.monitor.history.folder import read_history
from lightning_dist.monitor.outcome import judge, size_bytes, wait_for_ranks
from lightning_dist.monitor.rank_file import rank_path
from lightning_dist.monitor.record import RunRecord, Span
from lightning_dist.monitor.run_files import write_facts
from tests.support.records import made_run


def write(folder: Path, run: RunRecord, rank: int, steps: int) -> None:
    record = run.ranks[rank]
    text = [lines.header_line(record.header), *(lines.step_line(step) for step in record.steps[:steps])]
    text.append(lines.spans_line(0, [Span(0, "main", "forward", 0, 1)] * 100))
    folder.mkdir(parents=True, exist_ok=True)
    rank_path(folder, "steps", rank).write_text("\n".join([*text, '{"kind": "step", "st']))


def test_ranks_are_waited_for(tmp_path: Path) -> None:
    run = made_run([1.0] * 5)
    write(tmp_path, run, 0, 5)
    assert not wait_for_ranks(tmp_path, 2, timeout_s=0.0), "the other has no file"
    write(tmp_path, run, 1, 3)
    assert not wait_for_ranks(tmp_path, 2, timeout_s=0.0), "the other is behind"
    late = threading.Timer(0.2, write, [tmp_path, run, 1, 5])
    late.start()
    try:
        assert wait_for_ranks(tmp_path, 2, timeout_s=60.0)
    finally:
        late.join()


def test_a_last_step_with_a_long_timeline_is_found(tmp_path: Path) -> None:
    run = made_run([1.0] * 5)
    write(tmp_path, run, 0, 5)
    with rank_path(tmp_path, "steps", 0).open("a") as file:
        file.write("\n" + lines.spans_line(4, [Span(4, "main", "forward", 0, 1)] * 40_000))
    assert wait_for_ranks(tmp_path, 1, timeout_s=0.0)


def test_a_run_is_judged_and_kept(tmp_path: Path) -> None:
    run = made_run([1.0] * 40)
    write_facts(tmp_path / "run", run.facts)
    for rank in run.ranks:
        write(tmp_path / "run", run, rank, 40)
    assert size_bytes(tmp_path / "run") > 1000
    outcome = judge(tmp_path / "run", history=tmp_path / "history")
    (kept,) = read_history(tmp_path / "history").runs
    assert outcome.kept is not None
    assert outcome.kept.parent == tmp_path / "history"
    assert kept.steps == len(outcome.record.ranks[0].steps) == 40
    assert judge(tmp_path / "run", history=None).kept is None


def test_no_files_are_no_run(tmp_path: Path) -> None:
    with pytest.raises(RecordError):
        judge(tmp_path, history=None)

"""Which run a path means."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lightning_dist.errors import RecordError
from lightning_dist.monitor.record import RunFacts
from lightning_dist.monitor.run_files import write_facts
from lightning_dist.monitor.run_folders import Located, locate


def run(folder: Path, *, run_id: str = "a", age_s: int = 0) -> Path:
    write_facts(folder, RunFacts(run_id=run_id, started="2026-11-30T10:00:00+00:00", world_size=1, strategy="ddp"))
    os.utime(folder / "run.json", (10**9 - age_s, 10**9 - age_s))
    return folder


def test_the_folder_of_the_record_its_run_or_its_file(tmp_path: Path) -> None:
    folder = run(tmp_path / "out" / "monitor")
    for path in (folder, tmp_path / "out", tmp_path, folder / "run.json"):
        assert locate(path) == Located((folder,))


def test_the_newest_below_is_meant_and_the_others_are_counted(tmp_path: Path) -> None:
    run(tmp_path / "first" / "monitor", run_id="a", age_s=200)
    newest = run(tmp_path / "second" / "monitor-1", run_id="b", age_s=10)
    run(tmp_path / "second" / "monitor", run_id="c", age_s=100)
    assert locate(tmp_path) == Located((newest,), 2)


def test_parts_of_one_run_belong_together_whatever_their_order(tmp_path: Path) -> None:
    with_facts = run(tmp_path / "a" / "monitor")
    other = tmp_path / "b" / "monitor"
    other.mkdir(parents=True)
    (other / "steps-00001.jsonl").write_text("")
    assert locate(tmp_path / "a", tmp_path / "b") == Located((with_facts, other))
    assert locate(tmp_path / "b", tmp_path / "a") == Located((with_facts, other))
    run(other)
    assert locate(tmp_path / "b", tmp_path / "a") == Located((other, with_facts))


def test_two_runs_are_refused(tmp_path: Path) -> None:
    run(tmp_path / "a", run_id="one")
    run(tmp_path / "b", run_id="two")
    with pytest.raises(RecordError, match=r"different runs \(one, two\).*hierdist compare"):
        locate(tmp_path / "a", tmp_path / "b")


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(RecordError, match="no run was named"):
        locate()
    with pytest.raises(RecordError, match=r"nowhere is not there; name the folder of a run"):
        locate(tmp_path / "nowhere")
    with pytest.raises(RecordError, match=r"notes.txt is a file; name the folder of a run, or its run.json"):
        locate(tmp_path / "notes.txt")
    with pytest.raises(RecordError, match=r"there is no run.json in or below it; StepTimeline\(\)"):
        locate(tmp_path)

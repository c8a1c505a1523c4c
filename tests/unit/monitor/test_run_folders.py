"""Which run a path means."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

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


def foreign(folder: Path, content: bytes = b'{"name": "sweep-7"}') -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.json").write_bytes(content)
    return folder


@pytest.mark.parametrize("content", [b'{"name": "sweep-7"}', b"\xff\xfe", b"", b" " * 10_000])
def test_a_file_of_that_name_that_another_tool_wrote_is_no_run(tmp_path: Path, content: bytes) -> None:
    ours = run(tmp_path / "out" / "monitor", age_s=100)
    foreign(tmp_path / "out" / "sweep", content)  # newer
    foreign(tmp_path / "out", content)
    assert locate(tmp_path) == locate(tmp_path / "out") == Located((ours,))
    with pytest.raises(RecordError, match=r"there is no run.json of a run in or below it"):
        locate(tmp_path / "out" / "sweep")
    with pytest.raises(RecordError, match=r"there is no run.json of a run"):
        locate(tmp_path / "out" / "sweep" / "run.json")


def test_parts_of_a_run_may_have_foreign_files(tmp_path: Path) -> None:
    with_facts = run(tmp_path / "a")
    other = foreign(tmp_path / "b")
    (other / "steps-00001.jsonl").write_text("")
    assert locate(other, with_facts) == Located((with_facts, other))


def test_what_cannot_be_looked_into_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = run(tmp_path / "out" / "monitor")
    (tmp_path / "closed").mkdir()
    scandir = os.scandir

    def refusing(path: str) -> Any:
        if Path(path).name == "closed":
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refusing)
    located = locate(tmp_path)
    assert located.folders == (ours,)
    assert located.problems == (f"not looked into: [Errno 13] Permission denied: '{tmp_path / 'closed'}'",)
    with pytest.raises(RecordError, match=r"there is no run.json of a run .*; not looked into: .*closed"):
        locate(tmp_path / "closed")


def test_a_path_that_cannot_be_asked_for_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match=r"cannot be read: .*File name too long"):
        locate(tmp_path / ("x" * 1000))
    with pytest.raises(RecordError, match="cannot be read: embedded null"):
        locate(Path("no\0name"))


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(RecordError, match="no run was named"):
        locate()
    with pytest.raises(RecordError, match=r"nowhere is not there; name the folder of a run"):
        locate(tmp_path / "nowhere")
    with pytest.raises(RecordError, match=r"notes.txt is a file; name the folder of a run, or its run.json"):
        locate(tmp_path / "notes.txt")
    with pytest.raises(RecordError, match=r"there is no run.json of a run in or below it; StepTimeline\(\)"):
        locate(tmp_path)

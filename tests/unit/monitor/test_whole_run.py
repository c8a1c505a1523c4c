"""Which folders are the rounds of one run, and where its incidents are read."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from lightning_dist import incidents
from lightning_dist.cli import main
from lightning_dist.errors import RecordError
from lightning_dist.monitor.history.folder import read_history
from lightning_dist.monitor.outcome import judge
from lightning_dist.monitor.rank_file import RankWriter
from lightning_dist.monitor.record import RunRecord
from lightning_dist.monitor.run_files import read_facts, write_facts
from lightning_dist.monitor.run_folders import Located, locate
from lightning_dist.monitor.whole_run import read_whole, round_folders
from tests.support.rounds import KILLED, made_round


def write(folder: Path, record: RunRecord, *, ranks: Sequence[int] | None = None) -> Path:
    """Leave a round as its ranks would; only some of them, if their hosts have no folder in common."""
    if ranks is None or 0 in ranks:
        write_facts(folder, record.facts)
    for number, rank in record.ranks.items():
        if ranks is not None and number not in ranks:
            continue
        writer = RankWriter(folder, "steps", rank.header)
        for step in rank.steps:
            writer.step(step)
        writer.close()
    return folder


def numbers(folder: Path) -> list[int]:
    return [record.facts.round for record in read_whole(folder).rounds]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two rounds, and one of another run beside them."""
    folder = tmp_path / "run"
    write(folder / "monitor", made_round(1, range(10), at_s=0))
    write(folder / "monitor-1", made_round(2, range(7, 40), at_s=13, ranks=1))
    write(folder / "monitor-2", made_round(1, range(3), at_s=90, run="another"))
    (folder / incidents.FILE).write_text(incidents.to_line(KILLED) + "\n")
    return folder


def test_rounds_lie_beside_each_other_and_have_the_same_name(run: Path) -> None:
    for name in ("monitor", "monitor-1"):
        assert numbers(run / name) == [1, 2]
    whole = read_whole(run / "monitor-1")
    assert [rank.header.pid for record in whole.rounds for rank in record.ranks.values()] == [10, 10, 20]
    assert whole.incidents == (KILLED,)
    assert whole.problems == ()
    assert set(round_folders(run / "monitor")) == {run / "monitor", run / "monitor-1"}
    assert numbers(run / "monitor-2") == [1]


def test_without_a_name_a_run_has_one_round(tmp_path: Path) -> None:
    write(tmp_path / "monitor", made_round(1, range(3), at_s=0, run=""))
    write(tmp_path / "monitor-1", made_round(1, range(3), at_s=9, run=""))
    assert numbers(tmp_path / "monitor") == [1]
    assert round_folders(tmp_path / "monitor") == (tmp_path / "monitor",)


def test_the_second_fit_of_a_script_goes_with_the_second_fits(tmp_path: Path) -> None:
    for place, (number, at_s, steps) in enumerate([(1, 0, 4), (1, 10, 5), (2, 20, 6), (2, 30, 7)]):
        record = made_round(number, range(steps), at_s=at_s)
        started = dataclasses.replace(record.facts, started=f"2026-11-30T10:00:{at_s:02d}+00:00")
        write(tmp_path / f"m{place}", dataclasses.replace(record, facts=started))
    for named, steps in ((0, [4, 6]), (1, [5, 7]), (2, [4, 6]), (3, [5, 7])):
        rounds = read_whole(tmp_path / f"m{named}").rounds
        assert [len(record.ranks[0].steps) for record in rounds] == steps


def test_parts_of_hosts_with_no_folder_in_common_are_found_for_each_round(tmp_path: Path) -> None:
    first, second = made_round(1, range(4), at_s=0), made_round(2, range(3, 9), at_s=9)
    for name, record in (("monitor", first), ("monitor-1", second)):
        write(tmp_path / "a" / name, record, ranks=[0])
        write(tmp_path / "b" / name, record, ranks=[1])
    found = locate(tmp_path / "a", tmp_path / "b")
    assert len(found.folders) == 3, "the newest round of the first host, both of the second"
    whole = read_whole(tmp_path / "a" / "monitor-1", tmp_path / "b" / "monitor-1")
    assert [sorted(record.ranks) for record in whole.rounds] == [[0, 1], [0, 1]]
    assert whole.joined.problems == ()


def test_rounds_are_not_older_runs(run: Path) -> None:
    (run / "monitor-2" / "run.json").unlink()
    assert locate(run) == Located((run / "monitor-1",))
    write(run / "monitor-2", made_round(1, range(3), at_s=90, run="another"))
    assert locate(run) == Located((run / "monitor-2",), 2)


def test_a_round_that_cannot_be_read_is_a_problem_and_no_error(run: Path) -> None:
    for path in (run / "monitor").glob("*.jsonl"):
        path.unlink()
    whole = read_whole(run / "monitor-1")
    assert [record.facts.round for record in whole.rounds] == [2]
    assert "holds no steps" in whole.problems[0]
    (run / incidents.FILE).write_text("{}\n\n")
    assert "incidents cannot be read" in read_whole(run / "monitor-1").problems[1]
    with pytest.raises(RecordError):
        read_whole(run / "monitor")


def test_incidents_lie_where_the_launcher_says(tmp_path: Path) -> None:
    record = made_round(1, range(3), at_s=0)
    facts = dataclasses.replace(record.facts, record=str(tmp_path / "elsewhere"))
    write(tmp_path / "run" / "monitor", dataclasses.replace(record, facts=facts))
    assert read_whole(tmp_path / "run" / "monitor").incidents == ()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / incidents.FILE).write_text(incidents.to_line(KILLED))
    assert read_whole(tmp_path / "run" / "monitor").incidents == (KILLED,)


def test_facts_say_which_start_of_which_run_it_is(tmp_path: Path) -> None:
    facts = dataclasses.replace(made_round(3, (), at_s=0).facts, record="/records")
    write_facts(tmp_path, facts)
    assert read_facts(tmp_path) == facts
    path = tmp_path / "run.json"
    old = {
        name: value for name, value in json.loads(path.read_text()).items() if name not in ("run", "round", "record")
    }
    path.write_text(json.dumps(old))
    assert (read_facts(tmp_path).run, read_facts(tmp_path).round, read_facts(tmp_path).record) == ("", 1, None)


def test_a_run_is_judged_with_all_its_rounds(run: Path, tmp_path: Path) -> None:
    outcome = judge(run / "monitor-1", history=tmp_path / "history")
    assert (outcome.record.facts.round, len(outcome.whole.rounds)) == (2, 2)
    (kept,) = read_history(tmp_path / "history").runs
    assert (kept.run_id, kept.rounds, kept.incidents, kept.steps_lost, kept.steps) == ("run1", 2, 1, 3, 40)
    assert kept.goodput == pytest.approx(40 / 46)


def test_the_command_joins_rounds_and_shows_one_of_them(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "monitor-2" / "run.json").unlink()
    assert main(["report", str(run), "--terminal"]) == 0
    said = capsys.readouterr().out
    assert "goodput 87 %: of 46.0 s in 2 rounds, 40.0 s went into 40 steps that stand, 3.00 s into 3 steps done" in said
    assert "a rank was killed" in said
    assert main(["report", str(run), "--terminal", "--round", "2"]) == 0
    assert "goodput" not in capsys.readouterr().out
    assert main(["report", str(run), "--round", "5"]) == 2
    assert "the run has no such round; there is 1, 2" in capsys.readouterr().err
    assert main(["report", str(run), "--trace", str(run / "trace.json")]) == 0
    events = json.loads((run / "trace.json").read_text())["traceEvents"]
    marks = [event for event in events if event["ph"] == "i"]
    assert [(mark["name"], mark["ts"]) for mark in marks] == [("incident 1: a rank was killed", 10e6)]
    steps = [event["name"] for event in events if event.get("cat") == "step" and event["pid"] == 0]
    assert steps == [f"step {number}" for number in range(40)]


def test_the_history_lists_incidents_where_there_are_any(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    judge(run / "monitor-2", history=tmp_path / "history")
    assert main(["history", "--history", str(tmp_path / "history")]) == 0
    assert "goodput" not in capsys.readouterr().out
    judge(run / "monitor-1", history=tmp_path / "history")
    assert main(["history", "--history", str(tmp_path / "history"), "--all"]) == 0
    said = capsys.readouterr().out
    assert "incidents" in said
    assert "87 %" in said
    assert main(["history", "--history", str(tmp_path / "history"), "--all", "--json"]) == 0
    assert [each["rounds"] for each in json.loads(capsys.readouterr().out)["runs"]] == [1, 2]

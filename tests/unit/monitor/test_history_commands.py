"""``hierdist compare`` and ``hierdist history``."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from lightning_dist.cli import main
from lightning_dist.monitor.history.folder import write_summary
from lightning_dist.monitor.history.summary import summarise
from lightning_dist.monitor.rank_file import RankWriter
from lightning_dist.monitor.run_files import write_facts
from tests.support.records import made_run
from tests.unit.monitor.test_history import correlated

TODAY = datetime(2026, 11, 30, tzinfo=timezone.utc)


def steps(mean: float, seed: object) -> list[float]:
    return [mean * (1 + 0.05 * value) for value in correlated(300, 0.5, seed=seed)]


@pytest.fixture
def history(tmp_path: Path) -> Path:
    """Twelve days, slower since the seventh, and a run of another configuration."""
    folder = tmp_path / "history"
    for day in range(12):
        started = (TODAY - timedelta(days=11 - day)).isoformat()
        run = made_run(steps(1.0 if day < 6 else 1.5, day), run_id=f"run{day}", started=started)
        write_summary(folder, summarise(run))
    started = (TODAY - timedelta(days=20)).isoformat()
    write_summary(folder, summarise(made_run([1.0], run_id="other", started=started, config_hash="d")))
    return folder


def test_history_tells_what_slipped_since_when(history: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["history", "--history", str(history)]) == 0
    said = capsys.readouterr().out
    assert "step slipped by" in said
    assert f"since {(TODAY - timedelta(days=5)).isoformat()} (run run6" in said
    assert "1 run of other configurations" in said
    assert "samples_per_s slipped by" in said


def test_history_as_json_of_one_metric(history: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["history", "--history", str(history), "--metric", "step", "--json", "--all"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert [run["run_id"] for run in said["runs"]] == ["other", *(f"run{day}" for day in range(12))]
    (drift,) = said["drifts"]
    assert (drift["metric"], drift["run_id"], drift["is_worse"]) == ("step", "run6", True)
    assert drift["change"] == pytest.approx(0.5, abs=0.1)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--metric", "stop"], "Did you mean step"),
        (["--config", "x"], "no run has it; there are: c, d"),
        (["--config", ""], "'': no run has it; there are: c, d"),
        (["--days", "0"], "--days must be positive"),
        (["--days", "nan"], "--days must be positive"),
        (["--days", "inf"], "below 100,000"),
        (["--days", "1e-9"], "no runs of these days"),
        (["--history", "nowhere"], "nowhere is no folder"),
    ],
)
def test_history_says_what_it_cannot_do(
    history: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], says: str
) -> None:
    assert main(["history", "--history", str(history), *arguments]) == 2
    assert says in capsys.readouterr().err


def test_a_configuration_is_named_by_the_beginning_of_its_hash(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number, name in enumerate(("abc1", "abc2", "abc2", "abc")):
        write_summary(tmp_path, summarise(made_run([1.0], run_id=f"run{number}", config_hash=name)))

    def listed(config: str) -> list[str]:
        assert main(["history", "--history", str(tmp_path), "--json", "--config", config]) == 0
        return [run["run_id"] for run in json.loads(capsys.readouterr().out)["runs"]]

    assert listed("abc2") == ["run1", "run2"]
    assert listed("abc") == ["run3"]
    assert main(["history", "--history", str(tmp_path), "--config", "ab"]) == 2
    assert "--config ab: several configurations begin with it; there are: abc, abc1, abc2" in capsys.readouterr().err


def test_few_runs_are_said_to_be_few(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_summary(tmp_path, summarise(made_run([1.0] * 5)))
    assert main(["history", "--history", str(tmp_path), "--config", "c"]) == 0
    assert "1 run alike; from 8 on" in capsys.readouterr().out


def test_compare_by_id_and_by_folder(history: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = made_run(steps(1.5, "b"), run_id="here", options={"sync.codec": "bf16"})
    folder = tmp_path / "outputs" / "monitor"
    write_facts(folder, record.facts)
    for rank in record.ranks.values():
        writer = RankWriter(folder, "steps", rank.header)
        for step in rank.steps:
            writer.step(step)
        writer.close()
    assert main(["compare", "run1", str(tmp_path / "outputs"), "--history", str(history)]) == 0
    said = capsys.readouterr().out
    assert "sync.codec" in said
    step = next(line for line in said.splitlines() if "│ step " in line)
    assert "worse" in step
    assert "+4" in step or "+5" in step

    path = next(history.glob("*run2.json"))
    wanted = ["--metric", "step", "--json"]
    assert main(["compare", "run1", str(path), "--history", str(history), *wanted]) == 0
    compared = json.loads(capsys.readouterr().out)
    (difference,) = compared["differences"]
    assert difference["what"] in ("same", "usual")
    assert (compared["first"], compared["second"]) == ("run1", "run2")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["run1", "nothing"], "no such run; there are"),
        (["run", "run1"], "several runs begin with it"),
        (["run1", "run2", "--metric", "gpu_power"], "have no such metric both; they have: step"),
        (["run1", "run2", "--metric", "step", "--metric", "data_wit"], "Did you mean data_wait"),
    ],
)
def test_compare_says_what_it_cannot_do(
    history: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], says: str
) -> None:
    assert main(["compare", *arguments, "--history", str(history)]) == 2
    assert says in capsys.readouterr().err


def test_compare_without_a_history_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "a", "b", "--history", str(tmp_path / "none")]) == 2
    assert "there is no history in" in capsys.readouterr().err


def test_compare_names_what_it_cannot_read(history: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (history / "torn.json").write_text("{")
    assert main(["compare", "run1", "run2", "--history", str(history)]) == 0
    assert "torn.json cannot be read" in capsys.readouterr().err


def test_compare_says_why_it_cannot_tell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of runs one step too short, and of what an earlier release kept medians of."""
    short = summarise(made_run([1.0, 1.1] * 17, ranks=1, run_id="short"))
    assert (short.metrics["step"].count, short.metrics["step"].block_length) == (31, 4)
    medians = replace(short.metrics["data_wait"], of_means=False)
    earlier = replace(short, run_id="earlier", metrics={**short.metrics, "data_wait": medians})
    for run in (short, earlier):
        write_summary(tmp_path, run)
    assert main(["compare", "earlier", "short", "--history", str(tmp_path)]) == 0
    rows = {row.split("│")[1].strip(): row for row in capsys.readouterr().out.splitlines() if "│" in row}
    assert "too short to tell; 1.1 times as long might do" in rows["step"]
    assert "cannot be tested" in rows["data_wait"]


def test_what_options_hold_is_no_markup(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number, value in enumerate(("[/data/a]", "/data/[v1]/b")):
        write_summary(tmp_path, summarise(made_run([1.0], run_id=f"run{number}", options={"data": value})))
    assert main(["compare", "run0", "run1", "--history", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "[/data/a]" in said
    assert "/data/[v1]/b" in said


def test_it_is_said_how_many_runs_many_metrics_take(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of nine runs half of which are slower, no cut is rare enough for all metrics together."""
    for day in range(9):
        started = (TODAY - timedelta(days=9 - day)).isoformat()
        run = made_run(steps(1.0 if day < 4 else 1.5, day), run_id=f"run{day}", started=started)
        write_summary(tmp_path, summarise(run))
    assert main(["history", "--history", str(tmp_path)]) == 0
    assert "before there are 11: name one with --metric" in capsys.readouterr().out
    assert main(["history", "--history", str(tmp_path), "--metric", "step"]) == 0
    assert "step slipped by" in capsys.readouterr().out

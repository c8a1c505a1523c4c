"""``hierdist report``: what it writes and prints, and what it refuses."""

from __future__ import annotations

import dataclasses
import json
from contextlib import closing
from pathlib import Path

import pytest

from lightning_dist.cli import main
from lightning_dist.monitor.rank_file import RankWriter
from lightning_dist.monitor.record import RunRecord
from lightning_dist.monitor.run_files import write_facts
from lightning_dist.parallel.pipeline.picture import svg
from lightning_dist.parallel.pipeline.report import PipelineReport
from lightning_dist.parallel.pipeline.timeline import Action, Slot, Timeline
from tests.support import reported

PIPELINE = PipelineReport(
    schedule="1f1b",
    stages=((0,), (1,)),
    ranks=(0, 1),
    micro_batches=1,
    idle_shares=(0.25, 0.5),
    formula=0.5,
    predicted=0.4,
    batches=7,
    typical=Timeline(
        (
            (Slot(Action("forward", 0, 0), 0.0, 0.01), Slot(Action("backward", 0, 0), 0.03, 0.05)),
            (Slot(Action("forward", 1, 0), 0.01, 0.02), Slot(Action("backward", 1, 0), 0.02, 0.03)),
        ),
        0.05,
    ),
)


def write(folder: Path, record: RunRecord) -> Path:
    """Leave a record as a run would."""
    write_facts(folder, record.facts)
    for rank in record.ranks.values():
        with closing(RankWriter(folder, "steps", rank.header)) as steps:
            for step in rank.steps:
                steps.step(step)
                steps.spans(step.step, [span for span in rank.spans if span.step == step.step])
        with closing(RankWriter(folder, "samples", rank.header)) as samples:
            for sample in rank.samples:
                samples.sample(sample)
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    write(tmp_path / "out" / "monitor", reported.run(ranks=2, steps=60))
    return tmp_path / "out"


def test_a_report_is_written_into_the_run(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(run)]) == 0
    line, path = capsys.readouterr().out.splitlines()
    assert " of the step; at most " in line
    assert Path(path) == run / "monitor" / "report.html"
    assert line.split(",")[0] in Path(path).read_text()


def test_a_step_a_file_and_a_trace_are_chosen(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, trace = tmp_path / "new" / "a.html", tmp_path / "trace.json"
    assert main(["report", str(run), "-o", str(page), "--step", "50", "--trace", str(trace)]) == 0
    assert "50 (chosen, " in page.read_text()
    assert len(json.loads(trace.read_text())["traceEvents"]) > 120
    assert capsys.readouterr().out.splitlines()[1:] == [str(page), str(trace)]
    assert not (run / "monitor" / "report.html").exists()


def test_the_terminal_has_it_without_a_file(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(run), "--terminal"]) == 0
    said = capsys.readouterr().out
    assert "verdict" in said
    assert "mean step by phase" in said
    assert not (run / "monitor" / "report.html").exists()


def test_the_newest_of_several_runs_is_taken_and_said(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    newer = reported.run(ranks=1, steps=30)
    write(run / "monitor-1", dataclasses.replace(newer, facts=dataclasses.replace(newer.facts, run_id="newer")))
    assert main(["report", str(run)]) == 0
    said = capsys.readouterr()
    assert f"hierdist: {run / 'monitor-1'}, the newest run; 1 older run there is left out" in said.err
    assert "run newer" in (run / "monitor-1" / "report.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["{run}/nowhere"], "nowhere is not there; name the folder of a run"),
        (["{run}", "--step", "60"], "--step 60: the run has no such step; 0 to 59 are there"),
        (["{run}", "-o", "{run}/monitor/run.json/a.html"], "name another file (--output)"),
        (["{run}", "-o", "{run}/monitor"], "it is a folder; name a file in it (--output)"),
        (["{run}", "-o", "/"], "it is a folder; name a file in it (--output)"),
        (["{run}", "--trace", "{run}/monitor"], "monitor cannot be written: "),
        (["{run}", "--trace", "."], "it is a folder; name a file in it (--trace)"),
    ],
)
def test_mistakes_are_told(run: Path, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", *(argument.format(run=run) for argument in arguments)]) == 2
    assert said in capsys.readouterr().err


def test_the_picture_of_a_pipeline_is_in_the_report(run: Path) -> None:
    (run / "pipeline.json").write_text(json.dumps(PIPELINE.as_dict()))
    assert main(["report", str(run)]) == 0
    page = (run / "monitor" / "report.html").read_text()
    assert svg(PIPELINE) in page
    assert "Schedule 1f1b, 1 micro-batches; a typical step&#x27;s schedule of 50.0 ms." in page


def test_a_pipeline_file_that_cannot_be_read_is_told_in_the_report(run: Path) -> None:
    (run / "pipeline.json").write_text('{"typical": 1}')
    assert main(["report", str(run)]) == 0
    assert "pipeline.json cannot be read: TypeError" in (run / "monitor" / "report.html").read_text()
    (run / "pipeline.json").write_text(json.dumps({**PIPELINE.as_dict(), "micro_batches": float("inf")}))
    assert main(["report", str(run)]) == 0
    assert "pipeline.json cannot be read: OverflowError" in (run / "monitor" / "report.html").read_text()


def test_a_pipeline_report_comes_back_from_its_numbers() -> None:
    assert PipelineReport.from_dict(json.loads(json.dumps(PIPELINE.as_dict()))) == PIPELINE
    old = {key: value for key, value in PIPELINE.as_dict().items() if key != "typical"}
    assert PipelineReport.from_dict(old) is None
    bad = json.loads(json.dumps(PIPELINE.as_dict()))
    bad["typical"]["rows"][0][0][0] = "<script>"
    with pytest.raises(ValueError, match=r"a piece of work is one of forward, backward.*got '<script>'"):
        PipelineReport.from_dict(bad)
    short = json.loads(json.dumps(PIPELINE.as_dict()))
    short["typical"]["rows"].pop()
    with pytest.raises(ValueError, match="there are 2 ranks, and rows of 1"):
        PipelineReport.from_dict(short)


def test_a_path_that_is_no_text_does_not_prevent_the_report(tmp_path: Path) -> None:
    """Of bytes that are no UTF-8, Python makes halves of surrogates."""
    record = reported.run(ranks=1, steps=30)
    facts = dataclasses.replace(record.facts, options={"data": "/data/\udcff"})
    write(tmp_path, dataclasses.replace(record, facts=facts))
    assert main(["report", str(tmp_path)]) == 0
    assert "/data/?" in (tmp_path / "report.html").read_text(encoding="utf-8")

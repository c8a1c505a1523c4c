"""A run's report, written: the page of its record, with the pictures that other parts of the library made."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

from lightning_dist.errors import RecordError
from lightning_dist.monitor.record import RunRecord
from lightning_dist.monitor.report.page import Picture, html_of
from lightning_dist.monitor.rounds import WholeRun
from lightning_dist.monitor.verdict import Verdict
from lightning_dist.parallel.pipeline.picture import svg
from lightning_dist.parallel.pipeline.report import PipelineReport

REPORT_FILE = "report.html"
_PIPELINE = "pipeline.json"


def write_report(
    record: RunRecord,
    verdict: Verdict,
    path: Path,
    *,
    folder: Path,
    step: int | None = None,
    whole: WholeRun | None = None,
) -> None:
    """Write the HTML file, whole or not at all.

    Args:
        record: The run, or the round of it that the verdict is about.
        verdict: What the diagnosis says of it.
        path: Where to.
        folder: Of the run's record; pictures lie in it or beside it.
        step: The step to open the timeline at; ``None``: the average.
        whole: The run with all its rounds and incidents, if it has more than one.

    Raises:
        RecordError: The file cannot be written.
    """
    pictures, problems = _pictures(folder)
    record = dataclasses.replace(record, problems=(*record.problems, *problems))
    if whole is not None:
        whole = dataclasses.replace(whole, problems=(*whole.problems, *problems))
    page = html_of(record, verdict, step=step, pictures=pictures, whole=whole)
    if path.is_dir():
        raise RecordError(f"the report cannot be written to {path}: it is a folder; name a file in it (--output)")
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            # Half a surrogate, as of a path that is no UTF-8, cannot be written, and becomes a question mark.
            fresh.write_text(page, encoding="utf-8", errors="replace")
            fresh.replace(path)
        finally:
            fresh.unlink(missing_ok=True)
    except OSError as error:
        raise RecordError(f"the report cannot be written to {path}: {error}; name another file (--output)") from error


def _pictures(folder: Path) -> tuple[list[Picture], list[str]]:
    """That of the pipeline, if the run had one and left it; and what could not be read."""
    problems = []
    for path in (folder / _PIPELINE, folder.parent / _PIPELINE):
        if not path.is_file():
            continue
        try:
            report = PipelineReport.from_dict(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            problems.append(f"{path} cannot be read: {type(error).__name__}: {error}")
            continue
        if report is not None:
            return [_pipeline(report)], problems
    return [], problems


def _pipeline(report: PipelineReport) -> Picture:
    caption = (
        f"Schedule {report.schedule}, {report.micro_batches} micro-batches; a typical step's schedule of "
        f"{report.typical.length_s * 1e3:.1f} ms. Ranks idle {report.idle_share:.1%} of it; the formula "
        f"(P-1)/(VM+P-1) gives {report.formula:.1%}. Numbers are micro-batches, what is empty is idle."
    )
    return Picture("The pipeline", svg(report), caption)

"""The report on a terminal."""

from __future__ import annotations

import dataclasses
import io

from rich.console import Console, RenderableType

from lightning_dist.monitor.record import RankRecord, RunRecord
from lightning_dist.monitor.report.terminal import of_verdict, render, sparkline
from lightning_dist.monitor.report.words import headline
from lightning_dist.monitor.verdict import Cause, Finding, Verdict
from tests.support import reported


def printed(what: RenderableType, width: int = 150) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(what)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_verdict_phases_and_metrics_are_printed() -> None:
    said = printed(render(reported.run(), reported.FOUND))
    for words in (
        "Ranks wait for data",
        "41 % of the step; at most 1.69 times faster without it (Amdahl's law); confidence high",
        "→ Raise data.workers.",
        "not looked at: GPU utilisation: no GPU.",
        "Communication is exposed: nothing is sent while backward computes",
        "1 ◆    host-0",
        "median step 27.6 ms  samples/s 2,025  tokens/s 518,450  batches 8.30 MB/s  MFU 10 %",
        "CPU utilisation of the rank, of one core",
    ):
        assert words in said
    assert "validation" not in said, "a phase without time has no column"


def test_what_was_not_measured_says_why() -> None:
    said = printed(render(reported.run(samples=False), reported.NONE))
    assert "No verdict" in said
    assert "Only 3 steps were recorded; at least 20 are needed." in said
    assert "unavailable: no GPU" in said


def test_markup_of_a_host_name_is_text() -> None:
    said = printed(render(reported.run(hosts=["[red]a[/red]", "[/x]"]), reported.FOUND))
    assert "[red]a[/red]" in said
    assert "[/x]" in said


def test_a_run_without_steps_is_printed() -> None:
    record = reported.run(ranks=1, steps=1)
    empty = RunRecord(record.facts, {0: RankRecord(record.ranks[0].header)}, problems=("rank 1 [is] missing",))
    assert "rank 1 [is] missing" in printed(render(empty, reported.NONE))


def test_many_ranks_are_a_choice_of_them() -> None:
    said = printed(render(reported.run(ranks=40, steps=12, spans=False, samples=False), reported.FOUND), width=200)
    assert "mean step by phase; 16 of 40 ranks" in said


def test_a_sparkline_keeps_peaks() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    values = [1.0] * 1000
    values[511] = 8.0
    assert sparkline(values, 10).count("█") == 1
    assert sparkline([0.0, 0.0]) == "▁▁"
    assert sparkline([]) == ""


def test_the_verdict_in_one_line() -> None:
    assert headline(reported.FOUND) == (
        "Ranks wait for data, 41 % of the step; at most 1.69 times faster without it (Amdahl's law)"
    )
    assert headline(reported.NONE) == "No verdict: Only 3 steps were recorded; at least 20 are needed."
    good = Finding(Cause.COMPUTE_BOUND, 0.93, 0.9, "Compute is 93 % of the step.")
    assert headline(Verdict(good)) == "Bound by compute, as it should be, 93 % of the step"
    endless = dataclasses.replace(reported.DATA, share=1.0, speedup_at_most=float("inf"))
    assert "at most over 100 times faster" in headline(Verdict(endless))


def test_one_rank_that_holds_others_up_is_named() -> None:
    assert "Rank 1 holds the others up" in printed(of_verdict(Verdict(reported.STRAGGLER)))
    two = dataclasses.replace(reported.STRAGGLER, ranks=(1, 3))
    assert headline(Verdict(two)).startswith("Slow ranks hold the others up, 12 % of the step")

"""What ranks write is what is read: whole files, torn ones, foreign ones, disks that fail."""

from __future__ import annotations

import json
import math
import os
from dataclasses import replace
from pathlib import Path

import pytest

from lightning_dist.errors import RecordError
from lightning_dist.monitor.lines import facts_text, header_line, step_line
from lightning_dist.monitor.rank_file import RankWriter, rank_path
from lightning_dist.monitor.record import Phase, RankHeader, RunFacts, Sample, Span, StepRecord, Traffic
from lightning_dist.monitor.run_files import read_run, write_facts

FACTS = RunFacts("r1", "2026-01-02T03:04:05+00:00", 2, "hierdist zero2", {"parallel.mode": "zero2"}, "abc", None)


def header(rank: int = 0) -> RankHeader:
    return RankHeader(rank, rank, "a", "cpu", 1234, 10**18, 5_000, {"gpu_utilisation": "no GPU"}, {"sampler": "S"})


def step(number: int, rank: int = 0) -> StepRecord:
    return StepRecord(
        step=number,
        rank=rank,
        start_ns=10_000 + number * 1_000,
        duration_s=0.001,
        phases={Phase.FORWARD: 0.0004, Phase.BACKWARD: 0.0006, Phase.HOST_TO_DEVICE: None},
        communication=Traffic(0.0005, 0.0001, 4096, 2),
        tiers={"cross": Traffic(0.0004, 0.0001, 2048, 1)},
        micro_batches=2,
        samples=8,
        batch_bytes=64,
        counters={"data.shared_bytes": 7.0},
    )


def write_rank(folder: Path, rank: int = 0, steps: int = 3) -> None:
    writer = RankWriter(folder, "steps", header(rank))
    for number in range(steps):
        writer.step(step(number, rank))
    writer.spans(1, [Span(1, "main", "forward", 11_000, 11_400), Span(1, "hop", "comm.cross", 11_100, 11_200)])
    writer.close()
    assert writer.problem is None


def test_what_is_written_is_read(tmp_path: Path) -> None:
    write_facts(tmp_path, FACTS)
    for rank in (0, 1):
        write_rank(tmp_path, rank)
    samples = RankWriter(tmp_path, "samples", header(1))
    samples.sample(Sample("memory", 2, 10**18 + 5, 1.5e9))
    samples.close()
    samples.close()

    run = read_run(tmp_path)

    assert run.facts == FACTS
    assert run.problems == ()
    assert run.ranks[0].header == header(0)
    assert run.ranks[1].steps == tuple(step(number, 1) for number in range(3))
    assert run.ranks[1].samples == run.ranks[1].series("memory") == (Sample("memory", 2, 10**18 + 5, 1.5e9),)
    assert [span.name for span in run.ranks[0].spans] == ["forward", "comm.cross"]
    assert run.ranks[0].header.wall_ns(6_000) == 10**18 + 1_000


def test_hosts_may_have_folders_of_their_own(tmp_path: Path) -> None:
    write_facts(tmp_path / "a", FACTS)
    write_rank(tmp_path / "a", 0)
    write_rank(tmp_path / "b", 1)
    assert sorted(read_run(tmp_path / "b", tmp_path / "a").ranks) == [0, 1]
    assert "nothing of 1 of 2 ranks was found: 1" in read_run(tmp_path / "a").problems[0]


@pytest.mark.parametrize("cut", range(1, 40, 3))
def test_a_killed_rank_leaves_what_it_has_written(tmp_path: Path, cut: int) -> None:
    write_facts(tmp_path, FACTS)
    write_rank(tmp_path, 0)
    path = rank_path(tmp_path, "steps", 0)
    content = path.read_bytes().splitlines(keepends=True)[:4]
    path.write_bytes(b"".join(content)[: -min(cut, len(content[-1]))])
    run = read_run(tmp_path)
    assert [each.step for each in run.ranks[0].steps] == ([0, 1, 2] if cut == 1 else [0, 1])
    assert len(run.problems) == 1  # that rank 1 is missing; a torn last line is none


def test_what_is_not_known_is_skipped_and_what_is_broken_is_said(tmp_path: Path) -> None:
    write_facts(tmp_path, FACTS)
    later = json.loads(step_line(step(1)))
    later["phases"]["a later phase"] = 1.0
    lines = [
        header_line(header()),
        '{"kind": "of a later version"}',
        json.dumps({**later, "new": 1}),
        '{"kind": "step", "step": "x"}',
        "[" * 100_000,
        '{"kind": "sample", "metric": "memory", "step": 1, "wall_ns": 1, "value": null}',
        '{"kind": "spans", "step": 1, "spans": [["main"]]}',
        json.dumps({**later, "start_ns": 10**30}),
        json.dumps({**later, "duration_s": 1e300}),
        json.dumps({**later, "batch_bytes": 10**400}),
        "",
    ]
    rank_path(tmp_path, "steps", 0).write_text("\n".join(lines), encoding="utf-8")
    rank_path(tmp_path, "steps", 1).write_text(step_line(step(1)) + "\n", encoding="utf-8")
    run = read_run(tmp_path)
    assert run.ranks[0].steps == (step(1),)
    assert run.ranks[0].samples == ()
    assert any("6 lines could not be read" in problem for problem in run.problems)
    assert any("00001.jsonl does not say whose it is" in problem for problem in run.problems)


@pytest.mark.parametrize("given", ["1", "null", '"0"'])
def test_a_file_that_is_another_ranks_than_its_name_says_is_left_out(tmp_path: Path, given: str) -> None:
    write_facts(tmp_path, FACTS)
    write_rank(tmp_path, 0)
    path = rank_path(tmp_path, "samples", 0)
    sample = '{"kind": "sample", "metric": "memory", "step": 1, "wall_ns": 1, "value": 1.0}'
    path.write_text(header_line(header()).replace('"rank":0,', f'"rank":{given},') + f"\n{sample}\n", encoding="utf-8")
    run = read_run(tmp_path)
    assert run.ranks[0].header == header(0)
    assert len(run.ranks[0].steps) == 3
    assert run.ranks[0].samples == ()
    assert f"{path} is of rank {json.loads(given)}, as it says inside, and was left out" in run.problems[0]
    rank_path(tmp_path, "steps", 0).rename(rank_path(tmp_path, "steps", 1))
    with pytest.raises(RecordError, match=r"no steps or samples of any rank; .*steps-00001.jsonl is of rank 0"):
        read_run(tmp_path)


def test_numbers_that_are_not_finite_are_left_out(tmp_path: Path) -> None:
    write_facts(tmp_path, FACTS)
    writer = RankWriter(tmp_path, "samples", header())
    for value in (math.nan, math.inf, 1.0):
        writer.sample(Sample("memory", 0, 1, value))
    writer.close()
    assert [sample.value for sample in read_run(tmp_path).ranks[0].samples] == [1.0]


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match=r"holds no run: run\.json is not there"):
        read_run(tmp_path)
    write_facts(tmp_path, FACTS)
    with pytest.raises(RecordError, match="holds no steps or samples"):
        read_run(tmp_path)
    for content, match in [
        ("{", "cannot be read"),
        (facts_text(FACTS).replace('"version": 1', '"version": 99'), "version 99"),
        ('{"format": "other"}', "not written by"),
        (facts_text(FACTS).replace('"world_size": 2', '"world_size": 1e999'), "cannot be read: OverflowError"),
        (facts_text(FACTS).replace('"world_size": 2', '"world_size": 0'), "a run of 0 ranks"),
        (facts_text(FACTS).replace('"world_size": 2', f'"world_size": {10**15}'), "a run of 10+ ranks"),
        (facts_text(FACTS).replace('"peak_flops": null', '"peak_flops": "x"'), "could not convert"),
    ]:
        (tmp_path / "run.json").write_text(content, encoding="utf-8")
        with pytest.raises(RecordError, match=match):
            read_run(tmp_path)


def test_a_disk_that_fails_ends_the_writing_only(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    writer = RankWriter(tmp_path / "file" / "below", "steps", header(), flush_s=0.01)
    writer.close()
    assert writer.problem is not None
    assert "could not be written" in writer.problem
    writer.step(step(0))


def test_a_record_that_has_no_text_ends_the_writing_only(tmp_path: Path) -> None:
    class Wordless:
        def __str__(self) -> str:
            raise ZeroDivisionError("no words")

    writer = RankWriter(tmp_path, "steps", header(), flush_s=0.01)
    writer.step(replace(step(0), counters={"data.waits": Wordless()}))  # type: ignore[dict-item]
    writer.close()
    assert writer.problem is not None
    assert "could not be written: ZeroDivisionError: no words" in writer.problem


def test_a_disk_that_stands_still_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(rank_path(tmp_path, "steps", 0))  # opening it waits for a reader
    writer = RankWriter(tmp_path, "steps", header())
    for number in range(50_010):
        writer.step(step(number % 7))
    assert writer.lost_lines == 11  # the header is a line too
    writer.close(wait_s=0.05)
    assert writer.problem is not None
    assert "within 0.05 s" in writer.problem
    with rank_path(tmp_path, "steps", 0).open("rb"):  # lets the thread end
        writer._thread.join(10)

"""What the benchmark of failures makes of the ranks' lines."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

from benchmarks.elastic.steps import Line, LineReader, Recovery, ledger, recovery, same_samples


def round_lines(number: int, steps: range, *, world: int = 2, start_s: float = 0.0) -> list[Line]:
    """A step a second; rank r has samples 10 * step + r, and is r / 10 s later than rank 0."""
    return [
        Line(start_s + index + rank / 10, number, rank, world, step, (10 * step + rank,), float(step))
        for index, step in enumerate(steps)
        for rank in range(world)
    ]


def test_a_fault_is_over_when_all_ranks_of_a_later_round_have_done_a_step() -> None:
    before = round_lines(1, range(1, 9))  # until 7.1 s
    after = round_lines(2, range(6, 9), start_s=12.0)
    assert recovery([*before, after[0]], fault_s=7.5, round_before=1) is None
    assert recovery([*before, *after], fault_s=7.5, round_before=1) == Recovery(12.1 - 7.5, 3, 2)


def test_a_step_that_not_all_had_done_is_not_lost() -> None:
    before = round_lines(1, range(1, 9))[:-1]
    after = round_lines(2, range(8, 10), start_s=12.0)
    found = recovery([*before, *after], fault_s=7.5, round_before=1)
    assert found is not None
    assert found.steps_lost == 0


def test_a_round_that_failed_before_its_first_step_does_not_end_a_fault() -> None:
    lines = [*round_lines(1, range(1, 9)), *round_lines(2, range(6, 7), start_s=9.0)[:1]]
    lines += round_lines(3, range(6, 8), world=1, start_s=20.0)
    assert recovery(lines, fault_s=7.5, round_before=1) == Recovery(12.5, 3, 1)


def test_steps_that_were_done_again_count_once_in_the_ledger() -> None:
    straight = ledger(round_lines(1, range(1, 6)), num_samples=100)
    broken = ledger([*round_lines(1, range(1, 5)), *round_lines(2, range(3, 6))], num_samples=100)
    assert broken == straight
    assert same_samples(broken, straight)
    assert straight.repeated == 0


def test_a_sample_that_is_taken_twice_or_is_another_is_seen() -> None:
    lines = round_lines(1, range(1, 6))
    straight = ledger(lines, num_samples=100)
    twice = ledger([*lines[:-1], replace(lines[-1], samples=lines[0].samples)], num_samples=100)
    assert twice.repeated == 1
    assert not same_samples(twice, straight)


def test_lines_are_read_once_they_are_whole(tmp_path: Path) -> None:
    (tmp_path / "steps").mkdir()
    reader, lines = LineReader(tmp_path), round_lines(1, range(1, 3))
    assert reader.read() == []
    texts = [json.dumps(asdict(line)) + "\n" for line in lines]
    for rank in range(2):
        mine = "".join(text for line, text in zip(lines, texts, strict=True) if line.rank == rank)
        (tmp_path / "steps" / f"{rank}.jsonl").write_text(mine[: -10 if rank else len(mine)])
    assert reader.read() == lines[:3]
    with (tmp_path / "steps" / "1.jsonl").open("a") as file:
        file.write(texts[3][-10:])
    assert reader.read() == lines
    assert reader.read() == lines

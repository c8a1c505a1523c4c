"""Whether each rank reads the whole data set, by what is known of its loader."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lightning_dist.monitor.reading import reading_note
from tests.support.records import made_run

SHARED = {"dataset": "Text", "sampler": "DistributedSampler", "is_sharded": True, "dataset_length": 100}
STREAM = {"dataset": "Stream", "is_sharded": None, "dataset_bytes": 1000}


@pytest.mark.parametrize(
    ("facts", "says"),
    [
        ({**SHARED, "is_sharded": False, "sampler": "RandomSampler"}, "goes through all samples of Text"),
        ({**SHARED, "samples_per_epoch": 50, "held_bytes": 4000}, "holds all of Text"),
        (STREAM, "read 2.0 times"),
    ],
)
def test_naive_reading_is_named(facts: dict[str, Any], says: str) -> None:
    run = made_run([1.0] * 3, facts=facts, samples={"read_bytes": [0.0, 500.0, 500.0]})
    note = reading_note(
        replace(run, ranks={n: replace(rank, samples=run.ranks[0].samples) for n, rank in run.ranks.items()})
    )
    assert note is not None
    assert says in note
    assert "data=sharded" in note


def test_a_rank_without_samples_says_nothing() -> None:
    assert reading_note(made_run([1.0] * 3, facts=STREAM, samples={"read_bytes": [0.0, 500.0, 500.0]})) is None


@pytest.mark.parametrize(
    "facts",
    [
        {},
        {**SHARED, "samples_per_epoch": 50, "held_bytes": 0},
        {**SHARED, "samples_per_epoch": 100, "held_bytes": 4000},
        {"is_sharded": None},
        {**SHARED, "dataset_bytes": 10, "samples_per_epoch": 50},
    ],
)
def test_what_is_shared_or_unknown_is_not(facts: dict[str, Any]) -> None:
    assert reading_note(made_run([1.0] * 3, facts=facts, samples={"read_bytes": [9e9, 9e9]})) is None


def test_one_rank_reads_all_there_is() -> None:
    assert reading_note(made_run([1.0] * 3, ranks=1, facts={"is_sharded": False})) is None

"""Which checkpoints are a run's own, and which of them is the newest."""

from __future__ import annotations

import math
from typing import Any

import pytest

from lightning_dist.checkpoint.catalog import Checkpoint, Found
from lightning_dist.checkpoint.lineage import Lineage
from lightning_dist.errors import DamagedCheckpointError


class Manifest:
    def __init__(self, created_s: float, **record: Any) -> None:
        self.created_s = created_s
        self.record = record


def found(name: str, created_s: float, *, problem: bool = False, **record: Any) -> Found:
    checkpoint = Checkpoint(None, Manifest(created_s, **record))  # type: ignore[arg-type]  # neither is touched
    return Found(name, None, checkpoint, DamagedCheckpointError("torn") if problem else None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("run", "begun_s", "record", "is_own"),
    [
        ("a", 9.0, {"run": "a"}, True),  # clocks differ
        ("a", 99.0, {"run": "a"}, False),  # the name of an earlier run
        ("a", math.inf, {"run": "a"}, True),
        ("a", 0.0, {"run": "b"}, False),
        ("a", 4.0, {"run": None}, True),
        ("a", math.inf, {}, False),
        (None, 4.0, {"run": "b"}, True),
        (None, 6.0, {"run": "b"}, False),
    ],
)
def test_a_run_knows_its_own(run: str | None, begun_s: float, record: dict[str, Any], is_own: bool) -> None:
    names = [each.name for each in Lineage(run, begun_s).newest_first([found("x", 5.0, **record)])]
    assert names == (["x"] if is_own else [])


@pytest.mark.parametrize(("record", "is_own"), [({"run": "a"}, True), ({"run": "b"}, False), ({}, False)])
def test_a_name_that_no_other_run_has_is_enough(record: dict[str, Any], is_own: bool) -> None:
    lineage = Lineage("a", 99.0, owns_name=True)
    assert [each.name for each in lineage.newest_first([found("x", 5.0, **record)])] == (["x"] if is_own else [])


def test_the_newest_is_the_one_of_the_most_steps() -> None:
    lineage = Lineage("a", 0.0)
    own = [
        found("early", 30.0, run="a", step=10),
        found("torn", 50.0, run="a", step=40, problem=True),
        found("twice", 20.0, run="a", step=20),
        found("again", 21.0, run="a", step=20),
        found("foreign", 60.0, run="b", step=99),
        found("unnumbered", 70.0, run="a", step=None),
    ]
    assert [each.name for each in lineage.newest_first(own)] == ["again", "twice", "early", "unnumbered"]

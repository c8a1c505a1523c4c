"""Retention: the rules keep what they say, and never lose the newest or one in use."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_dist.checkpoint.retention import Candidate, Keep, to_delete
from lightning_dist.errors import ConfigError

CANDIDATES = st.lists(
    st.builds(
        Candidate,
        name=st.text("abcdef", min_size=1, max_size=4),
        created_s=st.integers(0, 5).map(float),
        step=st.integers(-1, 20),
        score=st.none() | st.floats(allow_nan=True),
    ),
    unique_by=lambda c: c.name,
)


@given(CANDIDATES, st.integers(1, 4), st.integers(0, 4), st.sampled_from(["min", "max"]), st.data())
def test_the_newest_and_those_in_use_stay(
    candidates: list[Candidate], last: int, best: int, mode: str, data: st.DataObject
) -> None:
    in_use = data.draw(st.sets(st.sampled_from([c.name for c in candidates]))) if candidates else set()
    deleted = to_delete(candidates, Keep(last=last, best=best, mode=mode), in_use=in_use)
    left = [c for c in candidates if c.name not in deleted]
    assert len(set(deleted)) == len(deleted)
    assert not set(deleted) & in_use
    assert len(left) >= min(last, len(candidates))
    if candidates:
        assert max(candidates, key=lambda c: (c.created_s, c.step, c.name)) in left
    assert len(left) <= last + best + len(in_use)


def test_rules_add_up() -> None:
    scores = [0.9, 0.1, 0.5, float("nan"), None, 0.2]
    found = [Candidate(f"s{i}", float(i), step=10 * i, score=score) for i, score in enumerate(scores)]
    assert to_delete(found, Keep(last=1, best=2)) == ["s0", "s2", "s3", "s4"]
    assert to_delete(found, Keep(last=2, best=1, mode="max")) == ["s1", "s2", "s3"]
    assert to_delete(found, Keep(last=1, every_n_steps=20)) == ["s1", "s3"]
    assert to_delete(found, Keep(last=1), in_use=["s0"]) == ["s1", "s2", "s3", "s4"]
    assert to_delete(found, Keep(last=None)) == []
    assert to_delete([], Keep()) == []


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"last": 0}, "newest checkpoint is always kept"),
        ({"best": -1}, "best is at least 0"),
        ({"mode": "low"}, "allowed: min, max"),
        ({"every_n_steps": 0}, "every_n_steps is at least 1"),
    ],
)
def test_wrong_rules_are_refused(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Keep(**wrong)  # type: ignore[arg-type]

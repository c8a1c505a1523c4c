"""Every pair is met, the refused ones are not, and few combinations do it."""

from __future__ import annotations

import itertools

import pytest

from tests.support.pairwise import all_pairs, cover, pair

GROUPS = {"a": ["1", "2", "3"], "b": ["1", "2", "3", "4"], "c": ["1", "2"], "d": ["1", "2", "3"]}


def met(rows: list[dict[str, str]]) -> set[frozenset[tuple[str, str]]]:
    return {pair(*options) for row in rows for options in itertools.combinations(row.items(), 2)}


def test_every_pair_is_met_by_few_combinations() -> None:
    rows = cover(GROUPS)
    assert met(rows) == set(all_pairs(GROUPS))
    assert 12 <= len(rows) <= 18  # 12 is the least: each of a with each of b; 72 would be all


def test_refused_pairs_are_not_met() -> None:
    refused = {pair(("a", "1"), ("b", "2")), pair(("c", "1"), ("d", "3"))}
    assert met(cover(GROUPS, refused)) == set(all_pairs(GROUPS)) - refused


def test_an_option_that_goes_with_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match="goes with no option of some group"):
        cover(GROUPS, {pair(("a", "1"), ("c", option)) for option in GROUPS["c"]})

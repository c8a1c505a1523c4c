"""Few combinations of many options in which each two options that may meet do meet."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence

Option = tuple[str, str]
Pair = frozenset[Option]


def pair(*options: Option) -> Pair:
    """Two options of different groups, in no order."""
    return frozenset(options)


def all_pairs(groups: Mapping[str, Sequence[str]]) -> list[Pair]:
    """Every two options of two groups."""
    return [
        pair((first, a), (second, b))
        for first, second in itertools.combinations(groups, 2)
        for a in groups[first]
        for b in groups[second]
    ]


def cover(groups: Mapping[str, Sequence[str]], refused: Collection[Pair] = ()) -> list[dict[str, str]]:
    """Combinations, one option of each group, that hold every pair but the refused ones; greedy.

    Raises:
        ValueError: A pair can be in no combination, since with it some group has no option left.
    """
    missing = [p for p in all_pairs(groups) if p not in refused]
    rows: list[dict[str, str]] = []
    while missing:
        open_pairs = set(missing)
        row = _complete(dict(missing[0]), groups, open_pairs, refused)
        if row is None:
            raise ValueError(f"{dict(missing[0])} goes with no option of some group")
        rows.append({group: row[group] for group in groups})  # in this order: that of a set differs between processes
        covered = {pair(*options) for options in itertools.combinations(row.items(), 2)}
        missing = [p for p in missing if p not in covered]
    return rows


def _complete(
    row: dict[str, str], groups: Mapping[str, Sequence[str]], wanted: set[Pair], refused: Collection[Pair]
) -> dict[str, str] | None:
    """Add an option of each group that is left, those first that add most wanted pairs; steps back where it must."""
    rest = [group for group in groups if group not in row]
    if not rest:
        return row
    group = rest[0]
    new = {option: [pair((group, option), other) for other in row.items()] for option in groups[group]}
    allowed = [option for option, pairs in new.items() if not any(p in refused for p in pairs)]
    for option in sorted(allowed, key=lambda option: -sum(p in wanted for p in new[option])):
        completed = _complete({**row, group: option}, groups, wanted, refused)
        if completed is not None:
            return completed
    return None

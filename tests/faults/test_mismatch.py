"""Ranks that ask for different things: an error on all of them, before any data is mixed up."""

from __future__ import annotations

import pytest

from tests.faults.runs import HOSTS, assert_accused, sum_of
from tests.support.ranks import RankPool

N, F = 40_000, "float32"


@pytest.mark.parametrize("sync", [{}, {"algorithm": "flat"}], ids=["hierarchical", "flat"])
@pytest.mark.parametrize(
    ("sizes", "dtypes", "odd"),
    [
        ([N, N + 1, N, N], [F, F, F, F], [1]),
        ([N, N, N + 1000, N + 1000], [F, F, F, F], [2, 3]),
        ([N, N, N, N], [F, F, "int32", "int32"], [2, 3]),
        ([N, N, N, N], [F, F, F, "float64"], [3]),
    ],
    ids=["size in a host", "size of a host", "type of a host", "type in a host"],
)
def test_other_sizes_and_types_are_refused(
    ranks: RankPool, sizes: list[int], dtypes: list[str], odd: list[int], sync: dict[str, object]
) -> None:
    endings = ranks.run(sum_of, layout=HOSTS, args=(sizes, dtypes, sync), init_group=False, fresh=True, deadline_s=60)
    for rank, ending in enumerate(endings):
        if rank in odd:
            assert ending.error == "CollectiveMismatchError"
            assert f"asks for the sum of {sizes[rank]} x {dtypes[rank]}" in ending.text
            assert f"rank 0 (host a) for the sum of {N} x {F}" in ending.text
        else:
            assert_accused(ending, odd[0] if f"rank {odd[0]}" in ending.text else odd[1], "a" if odd == [1] else "b")

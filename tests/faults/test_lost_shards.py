"""A rank that dies, stalls or fails in a leg of a reduce-scatter or all-gather: all others say who, where and in what.

Ranks sit as [[0, 1], [2, 3]] or all on one host; rank 0's process holds the store of the rendezvous.
"""

from __future__ import annotations

import pytest

from tests.faults.runs import CHUNKS, HOSTS, assert_accused, assert_closed, shard_until_failure
from tests.support.faults import Fault
from tests.support.ranks import Died, RankPool
from tests.support.sweeps import sampled

ONE_HOST = {"a": [0, 1, 2]}
SECOND = CHUNKS + 3  # in the middle of the second tensor
POINTS = {
    "sum": ("reduce_scatter", "scatter_out_host"),
    "cross": ("reduce_scatter", "scatter_top_world"),
    "gather": ("all_gather", "gather_in_host"),
    "one host": ("reduce_scatter", "scatter_top_host"),
    "one host's gather": ("all_gather", "gather_top_host"),
}
CASES = {
    f"{kind} {rank} in {point}, {memory}": (kind, rank, point, {"shared_memory": memory})
    for kind in ("kill", "stop")
    for rank, point in [(1, "sum"), (3, "cross"), (2, "gather"), (2, "one host"), (0, "one host's gather")]
    for memory in ("auto", "off")
    if (kind, memory) != ("stop", "off")
}
ALWAYS = [
    "kill 1 in sum, auto",
    "kill 2 in gather, auto",
    "stop 2 in one host, auto",
    "kill 0 in one host's gather, auto",
    "kill 1 in sum, off",
]


def hosts_of(point: str) -> dict[str, list[int]]:
    return ONE_HOST if point.startswith("one host") else HOSTS


@pytest.mark.parametrize(("kind", "rank", "point", "sync"), sampled(CASES, ALWAYS))
def test_a_lost_rank_is_named_by_all_others(
    ranks: RankPool, kind: str, rank: int, point: str, sync: dict[str, object]
) -> None:
    layout = hosts_of(point)
    fault = Fault(rank, kind, *POINTS[point], nth=SECOND)  # type: ignore[arg-type]  # one of its literals
    endings = ranks.run(
        shard_until_failure, layout=layout, args=([fault], sync), init_group=False, may_die=[rank], deadline_s=30
    )
    assert isinstance(endings.pop(rank), Died)
    for ending in endings:
        assert_accused(ending, rank, next(host for host, members in layout.items() if rank in members))
        assert_closed(ending)


@pytest.mark.parametrize("point", ["sum", "one host"])
def test_an_error_in_a_lane_is_the_ranks_own_and_told_as_such(ranks: RankPool, point: str) -> None:
    layout = hosts_of(point)
    fault = Fault(1, "raise", *POINTS[point], nth=SECOND)
    endings = ranks.run(
        shard_until_failure, layout=layout, args=([fault],), init_group=False, fresh=True, deadline_s=30
    )
    assert "InjectedError" in endings.pop(1).text
    for ending in endings:
        assert_accused(ending, 1, "a")
        assert_closed(ending)


def test_a_pause_shorter_than_the_deadline_fails_nothing(ranks: RankPool) -> None:
    fault = Fault(1, "pause", *POINTS["one host"], nth=SECOND, pause_s=1.0)
    endings = ranks.run(
        shard_until_failure, layout=ONE_HOST, args=([fault],), init_group=False, fresh=True, deadline_s=30
    )
    assert [ending.error for ending in endings] == [""] * 3

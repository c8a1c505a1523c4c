"""A rank that dies or stalls, in each leg, with labels as hosts: all others say who, where and in which operation.

Ranks sit as [[0, 1], [2, 3]]; rank 0's process holds the store of the rendezvous.
"""

from __future__ import annotations

import pytest

from tests.faults.runs import CHUNKS, HOSTS, LOAD_S, OPENING, Ending, assert_accused, assert_closed, sum_until_failure
from tests.support.faults import Fault, Kind
from tests.support.ranks import Died, RankPool

HOST_OF_RANK = {rank: host for host, ranks in HOSTS.items() for rank in ranks}
SECOND = CHUNKS + 3  # in the middle of the second tensor
POINTS = {
    "opening": (OPENING, "world", 1),
    "before": ("reduce_scatter", "reduce", 1),
    "reduce": ("reduce_scatter", "reduce", SECOND),
    "cross": ("all_reduce", "cross", SECOND),
    "gather": ("all_gather", "gather", SECOND),
    "between": ("step", "main", 3),
}


def strike(
    ranks: RankPool, kind: Kind, rank: int, point: str, *, sync: dict[str, object] | None = None
) -> list[Ending]:
    """The survivors' endings."""
    operation, group, nth = POINTS[point]
    fault = Fault(rank, kind, operation, group, nth)
    endings = ranks.run(
        sum_until_failure,
        layout=HOSTS,
        args=([fault], sync),
        init_group=False,
        may_die=[rank],
        deadline_s=60,
    )
    assert isinstance(endings.pop(rank), Died)
    return endings


@pytest.mark.parametrize(
    ("rank", "point"),
    [
        *((0, point) for point in POINTS),
        (1, "cross"),
        (1, "between"),
        (2, "reduce"),
        (3, "gather"),
        (3, "before"),
        (3, "opening"),
    ],
)
def test_a_killed_rank_is_named_by_all_others(ranks: RankPool, rank: int, point: str) -> None:
    for ending in strike(ranks, "kill", rank, point):
        assert_accused(ending, rank, HOST_OF_RANK[rank])
        assert_closed(ending)


@pytest.mark.parametrize(("rank", "point"), [(1, "reduce"), (3, "gather")])
def test_a_stopped_rank_is_named_by_all_others(ranks: RankPool, rank: int, point: str) -> None:
    for ending in strike(ranks, "stop", rank, point):
        assert_accused(ending, rank, HOST_OF_RANK[rank])
        assert_closed(ending)


def test_a_stopped_rank_that_holds_the_store_is_named(ranks: RankPool) -> None:
    """Threads that wait for the store end with the process that holds it; nothing waits for them."""
    for ending in strike(ranks, "stop", 0, "cross"):
        assert_accused(ending, 0, "a")
        assert ending.close_s < LOAD_S


@pytest.mark.parametrize(
    ("sync", "kind"),
    [({"shared_memory": "off"}, "kill"), ({"shared_memory": "off"}, "stop"), ({"codec": "bf16"}, "kill")],
    ids=["sockets-kill", "sockets-stop", "bf16-kill"],
)
def test_other_legs_name_the_lost_rank_too(ranks: RankPool, sync: dict[str, object], kind: Kind) -> None:
    for ending in strike(ranks, kind, 3, "reduce", sync=sync):
        assert_accused(ending, 3, "b")


def test_a_flat_ring_names_the_lost_rank_too(ranks: RankPool) -> None:
    for ending in strike(ranks, "kill", 2, "between", sync={"algorithm": "flat"}):
        assert_accused(ending, 2, "b")


@pytest.mark.parametrize(("rank", "point"), [(0, "cross"), (3, "reduce")])
def test_a_pause_shorter_than_the_deadline_fails_nothing(ranks: RankPool, rank: int, point: str) -> None:
    operation, group, nth = POINTS[point]
    fault = Fault(rank, "pause", operation, group, nth, pause_s=1.0)
    endings = ranks.run(sum_until_failure, layout=HOSTS, args=([fault],), init_group=False, fresh=True, deadline_s=60)
    assert [ending.error for ending in endings] == [""] * 4


def test_an_error_in_a_lane_is_the_ranks_own_and_told_as_such(ranks: RankPool) -> None:
    """What the seam does not know as a failure between ranks (a plan that raises in a lane) blames nobody else."""
    fault = Fault(1, "raise", *POINTS["reduce"][:2], nth=SECOND)
    endings = ranks.run(sum_until_failure, layout=HOSTS, args=([fault],), init_group=False, fresh=True, deadline_s=60)
    assert "InjectedError" in endings[1].text
    for rank in (0, 2, 3):
        assert_accused(endings[rank], 1, "a")

"""Which rounds a layout fits, which hosts make the largest, and what a leader does where no round fits."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_dist.config.parallel import ParallelConfig
from lightning_dist.config.resolve import from_mapping
from lightning_dist.elastic.agent_folder import tell_sizes, told_sizes
from lightning_dist.elastic.policy.actions import Say
from lightning_dist.elastic.policy.events import Cause, HostReady, RoundStopped, SizesTold
from lightning_dist.elastic.policy.situation import LastRound, State
from lightning_dist.elastic.policy.sizes import Sizes, sizes_of
from tests.unit.elastic.fleet import Fleet, running

FOURS = Sizes(multiple=4, asked="parallel.pipeline.size=4")


@given(
    ranks=st.lists(st.integers(1, 6), max_size=6),
    sizes=st.builds(
        Sizes, multiple=st.sampled_from([1, 2, 3, 4, 6]), multiple_in_host=st.sampled_from([1, 2]), alike=st.booleans()
    ),
)
def test_the_largest_round_is_found(ranks: list[int], sizes: Sizes) -> None:
    hosts = {f"h{index}": number for index, number in enumerate(ranks)}
    seated = sizes.seat(hosts, len(hosts))
    every = itertools.chain.from_iterable(itertools.combinations(hosts, count) for count in range(1, len(hosts) + 1))
    best = max((sum(hosts[h] for h in few) for few in every if sizes.fit([hosts[h] for h in few])), default=0)
    assert sum(hosts[host] for host in seated) == best
    assert list(seated) == [host for host in hosts if host in seated]
    assert not seated or sizes.fit([hosts[host] for host in seated])


def test_those_that_come_first_are_rather_taken_and_never_too_many() -> None:
    alike = {"a": 2, "b": 2, "c": 2}
    assert FOURS.seat(alike, 3) == ("a", "b")
    assert Sizes().seat(alike, 2) == ("a", "b")
    assert FOURS.seat(alike, 1) == ()
    assert Sizes(alike=True).seat({"a": 1, "b": 3, "c": 1}, 3) == ("b",)
    assert FOURS.seat({str(host): 1 + host % 3 for host in range(10_000)}, 10_000)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"mode": "ddp"}, Sizes()),
        ({"mode": "zero3"}, Sizes()),
        ({"mode": "pipeline"}, Sizes()),
        ({"mode": "pipeline", "pipeline": {"size": 4}}, Sizes(4, asked="parallel.pipeline.size=4")),
        ({"mode": "zero2", "pipeline": {"size": 2}}, Sizes(2, asked="parallel.pipeline.size=2")),
        ({"mode": "hsdp"}, Sizes(alike=True, asked="parallel=hsdp")),
        ({"mode": "tensor"}, Sizes(alike=True, asked="parallel=tensor")),
        ({"mode": "tensor", "tensor": {"size": 2}}, Sizes(2, 2, asked="parallel.tensor.size=2")),
        (
            {"mode": "zero3", "secondary_shard": "host"},
            Sizes(alike=True, asked="parallel.secondary_shard=host"),
        ),
    ],
)
def test_what_the_options_ask_for(options: dict[str, Any], expected: Sizes) -> None:
    assert sizes_of(from_mapping("parallel", options, ParallelConfig)) == expected


def test_an_agent_reads_what_a_rank_wrote(tmp_path: Path) -> None:
    assert told_sizes(tmp_path) is None
    tell_sizes(tmp_path, FOURS)
    assert told_sizes(tmp_path) == FOURS


def test_the_text_says_what_is_there_and_what_fits() -> None:
    assert FOURS.explain({"b": 2}, 2) == (
        "parallel.pipeline.size=4 does not fit the ranks that are there (b: 2); ranks in all must be a multiple of 4, "
        "so 2 hosts of 2 ranks would fit"
    )
    assert "so 4 hosts of 1 rank; 4 hosts of 3 ranks would fit" in FOURS.explain({"a": 1, "b": 3}, 2)


def test_a_lost_host_is_waited_for_where_the_others_do_not_fit() -> None:
    fleet = running(members="ab")
    fleet.tell(SizesTold(FOURS))
    fleet.lose("b")
    assert fleet.state is State.WAITING
    fleet.wait(1)
    (said,) = fleet.said(Say)
    assert "would fit. Other hosts are waited for, 60 s at most" in said.text
    fleet.come("b")
    assert (fleet.number, fleet.members) == (2, ("a", "b"))


def test_and_in_the_end_the_run_ends_with_what_fits() -> None:
    fleet = running(members="ab")
    fleet.tell(SizesTold(FOURS))
    fleet.lose("b")
    fleet.wait(fleet.policy.situation.terms.waits.patience_s)
    assert "2 or 4 hosts of 2 ranks would fit" in fleet.end.reason


def test_the_most_that_fit_go_on_and_the_others_stand_by() -> None:
    fleet = running(members="abcd")
    fleet.tell(SizesTold(FOURS))
    fleet.lose("b")
    assert (fleet.number, fleet.members) == (2, ("a", "c"))
    fleet.step()
    fleet.save()
    fleet.wait(100)
    assert fleet.state is State.RUNNING, "d alone makes the round no larger"
    fleet.come("b")
    assert (fleet.number, fleet.members) == (3, ("a", "c", "b", "d"))


def test_a_first_round_of_a_wrong_size_is_the_last() -> None:
    """The script's error is no reason to start it again, if nobody else can come."""
    fleet = Fleet(hosts=(1, 1))
    fleet.tell(HostReady("a", 3))
    fleet.tell(SizesTold(FOURS))
    fleet.fail("a", cause=Cause.EXIT, exit_code=1, detail="PlacementError: 3 ranks")
    assert fleet.number == 1
    assert fleet.end.exit_code == 1
    assert "PlacementError: 3 ranks; parallel.pipeline.size=4 does not fit" in fleet.end.reason


def test_a_host_of_another_size_does_not_join_where_all_must_be_alike() -> None:
    fleet = running(members="ab")
    fleet.tell(SizesTold(Sizes(alike=True, asked="parallel=hsdp")))
    fleet.save()
    fleet.tell(HostReady("c", 3))
    fleet.wait(100)
    assert (fleet.state, fleet.number) == (State.RUNNING, 1)
    fleet.come("d")
    assert (fleet.number, fleet.members) == (2, ("a", "b", "d"))


@pytest.mark.parametrize(("num_ranks", "state"), [((2, 2), State.RUNNING), ((1, 1), State.WAITING)])
def test_a_leader_that_takes_over_knows_how_many_ranks_train(num_ranks: tuple[int, int], state: State) -> None:
    """A host with three takes the place of two with one each, and not of two with two each."""
    fleet = Fleet(last=LastRound(4, ("a", "b"), "a", num_ranks=num_ranks))
    fleet.tell(SizesTold(Sizes(alike=True, asked="parallel=hsdp")))
    fleet.save()
    fleet.away.update("ab")
    fleet.tell(HostReady("c", 3))
    fleet.tell(*[RoundStopped(host, 4) for host in "ab" if state is State.WAITING])
    assert fleet.state is state

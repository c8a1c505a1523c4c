"""The seam: what becomes of a backend's errors, and where faults may strike."""

from __future__ import annotations

import datetime
from typing import Any

import pytest
import torch.distributed as dist

from lightning_dist.comm.collectives import Collectives, Pending, RankGroup
from lightning_dist.errors import CollectiveError, CollectiveMismatchError, CollectiveTimeoutError, PeerLostError
from lightning_dist.events import EventStream

CROSS = RankGroup((1, 3), 0, None, "cross", "world")


def make(**arguments: Any) -> Collectives:
    return Collectives(
        events=EventStream(rank=1), timeout_s=2.0, rank=1, host_of_rank=["a", "a", "b", "b"], **arguments
    )


class BackendWork:
    """An operation that ends after some waits, or never."""

    def __init__(self, *outcomes: str) -> None:
        self.outcomes = list(outcomes)
        self.timeouts: list[float] = []

    def wait(self, timeout: datetime.timedelta = datetime.timedelta(0)) -> None:
        self.timeouts.append(timeout.total_seconds())
        if self.outcomes:
            raise RuntimeError(self.outcomes.pop(0))


class Alarmed:
    """Stands for the testimony."""

    def __init__(self, alarm: str | None = None) -> None:
        self.said = alarm
        self.posted: list[tuple[str, bool]] = []

    def alarm(self, waited_s: float) -> str | None:
        return self.said

    def post(self, statement: str, *, own_fault: bool = False) -> None:
        self.posted.append((statement, own_fault))

    def verdict(self, statement: str, where: Any) -> str:
        return "Lost: rank 3 (host b)."


@pytest.mark.parametrize(
    ("raised", "kind", "what"),
    [
        (
            RuntimeError("[gloo/pair.cc] Connection closed by peer [10.0.0.1]. This is typically"),
            PeerLostError,
            "closed",
        ),
        (RuntimeError("[gloo/buffer.cc] Timed out waiting 2000ms for recv"), CollectiveTimeoutError, "within 2 s"),
        (dist.DistNetworkError("recv got 0 bytes"), PeerLostError, "closed"),
        (ConnectionResetError(104, "Connection reset"), PeerLostError, "closed"),
        (CollectiveMismatchError("rank 0 is elsewhere"), CollectiveMismatchError, "rank 0 is elsewhere"),
    ],
)
def test_errors_name_rank_host_operation_and_the_lost(raised: Exception, kind: type[Exception], what: str) -> None:
    collectives = make(testimony=Alarmed())
    with pytest.raises(kind) as caught, collectives.translated("all_reduce", CROSS):
        raise raised
    text = str(caught.value)
    assert text.startswith("rank 1 (host a): all_reduce on group 'cross' failed: ")
    assert what in text
    assert "Lost: rank 3 (host b)." in text
    assert "This is typically" not in text
    assert caught.value.__cause__ is raised
    assert collectives.failure is caught.value


def test_an_error_is_named_once() -> None:
    collectives = make()
    outer = collectives.translated("all_gather", CROSS)
    with pytest.raises(PeerLostError) as caught, outer, collectives.translated("all_reduce", CROSS):
        raise OSError("reset")
    assert str(caught.value).count("failed:") == 1


def test_what_is_no_failure_between_ranks_is_this_ranks_own() -> None:
    said = Alarmed()
    collectives = make(testimony=said)
    named = "all_reduce on group 'cross' failed: RuntimeError: out of memory"
    with pytest.raises(CollectiveError, match=named), collectives.translated("all_reduce", CROSS):
        raise RuntimeError("out of memory")
    assert [own_fault for _, own_fault in said.posted] == [True]


def test_errors_of_the_user_pass_through() -> None:
    with pytest.raises(ValueError, match="user"), make().translated("all_reduce", CROSS):
        raise ValueError("user")


def test_opening_lets_pass_what_is_not_between_ranks() -> None:
    collectives = make()
    with pytest.raises(RuntimeError, match=r"^no parameters$"), collectives.opening("wrapping the model", CROSS):
        raise RuntimeError("no parameters")
    named = "wrapping the model on group 'cross'"
    with pytest.raises(PeerLostError, match=named), collectives.opening("wrapping the model", CROSS):
        raise RuntimeError("[gloo] Connection closed by peer")
    assert collectives.failure is not None


@pytest.mark.parametrize(
    "said", ["skip connection: shapes differ", "the data server timed out", "no socket left", "peer review of batch 3"]
)
def test_a_users_error_may_speak_of_peers_and_connections(said: str) -> None:
    collectives = make()
    with pytest.raises(RuntimeError, match=f"^{said}$") as caught, collectives.opening("training_step", CROSS):
        raise RuntimeError(said)
    assert type(caught.value) is RuntimeError
    assert collectives.failure is None


def test_the_first_failure_is_kept() -> None:
    collectives = make()
    for text in ("first", "second"):
        with pytest.raises(PeerLostError), collectives.translated("all_reduce", CROSS):
            raise OSError(text)
    assert "first" in str(collectives.failure)


def test_a_long_wait_goes_on_until_the_operation_ends() -> None:
    work = BackendWork("Operation timed out!", "Operation timed out!")
    collectives = make(testimony=Alarmed())
    Pending(collectives, [work], "all_reduce", CROSS, 8, may_retry=True).wait(bucket=3)
    assert len(work.timeouts) == 3
    (event,) = collectives.events.snapshot()
    assert (event.name, event.lane, event.attributes["bucket"]) == ("comm.cross", "cross", 3)


def test_an_alarm_ends_a_long_wait() -> None:
    work = BackendWork(*["Operation timed out!"] * 100)
    collectives = make(testimony=Alarmed("another rank reports a failure"))
    with pytest.raises(PeerLostError, match=r"gave up: another rank reports a failure\. Lost: rank 3"):
        Pending(collectives, [work], "all_reduce", CROSS, 8, may_retry=True).wait()
    assert len(work.timeouts) == 1


def test_an_error_of_the_operation_is_not_waited_out() -> None:
    work = BackendWork("[gloo] Connection closed by peer")
    with pytest.raises(PeerLostError):
        Pending(make(testimony=Alarmed()), [work], "all_reduce", CROSS, 8, may_retry=True).wait()


def test_what_cannot_be_waited_for_twice_is_waited_for_once() -> None:
    work = BackendWork("Operation timed out!")
    with pytest.raises(CollectiveTimeoutError):
        Pending(make(testimony=Alarmed()), [work], "all_gather", CROSS, 8).wait()
    assert work.timeouts == [2.0]


def test_faults_strike_inside_the_seam() -> None:
    calls: list[tuple[str, str, int]] = []

    def strike(operation: str, group: str, rank: int) -> None:
        calls.append((operation, group, rank))
        raise OSError("injected")

    collectives = make(fault_point=strike)
    with pytest.raises(PeerLostError), collectives.operation("barrier", CROSS):
        pytest.fail("the operation began although a fault had struck")
    assert calls == [("barrier", "cross", 1)]

"""Of all that fails together, the first that had a cause of its own is to blame."""

from __future__ import annotations

import pytest

from lightning_dist.elastic.policy.blame import Blame, Failure, blame
from lightning_dist.elastic.policy.events import Cause

CONSEQUENCE = Failure(Cause.EXIT, "a", 0, "PeerLostError: rank 3", 1, is_consequence=True)
ERROR = Failure(Cause.EXIT, "a", 1, "ValueError", 1)
KILLED = Failure(Cause.SIGNAL, "b", 3, "signal 9", -9)
ABORTED = Failure(Cause.SIGNAL, "c", 4, "signal 6", -6)
LOST = Failure(Cause.HOST_LOST, "d", detail="silent for 5 s")


@pytest.mark.parametrize(
    ("failures", "expected"),
    [
        ([ERROR, ABORTED], ERROR),  # a runtime aborts because its peer has failed
        ([ABORTED], ABORTED),
        ([CONSEQUENCE, KILLED], KILLED),
        ([ERROR, KILLED], KILLED),  # its agent has looked an instant later
        ([CONSEQUENCE, ERROR, LOST], LOST),  # silence is noticed after seconds
        ([KILLED, LOST], KILLED),
        ([CONSEQUENCE, ABORTED], ABORTED),
    ],
)
def test_the_first_own_cause_is_to_blame(failures: list[Failure], expected: Failure) -> None:
    found = blame(failures)
    assert found is not None
    assert (found.host, found.cause, found.detail) == (expected.host, expected.cause, expected.detail)
    assert found.is_hosts_fault


def test_consequences_alone_count_against_no_host() -> None:
    found = blame([CONSEQUENCE])
    assert found == Blame(Cause.EXIT, "a", False, (0,), "PeerLostError: rank 3", 1)


def test_the_same_error_on_several_hosts_is_no_hosts_fault() -> None:
    other = Failure(Cause.EXIT, "b", 2, "ValueError", 1)
    found = blame([ERROR, other])
    assert found is not None
    assert not found.is_hosts_fault
    same_host = Failure(Cause.EXIT, "a", 0, "ValueError", 1)
    found = blame([ERROR, same_host])
    assert found is not None
    assert found.is_hosts_fault
    assert found.ranks == (0, 1)
    assert found.text == "ranks 0, 1 on host a ended with an error: ValueError"


@pytest.mark.parametrize(
    ("failure", "code", "text"),
    [
        (KILLED, 137, "rank 3 on host b was killed: signal 9"),
        (Failure(Cause.EXIT, "a", 0, "", 7), 7, "rank 0 on host a ended with an error"),
        (Failure(Cause.HANG, "a", 0), 1, "rank 0 on host a made no progress"),
        (Failure(Cause.PREEMPTED, "a"), 143, "host a was told to end"),
        (LOST, 1, "host d is lost: silent for 5 s"),
        (Failure(Cause.START, "a", detail="within 9 s"), 1, "host a did not come to its first step: within 9 s"),
    ],
)
def test_it_says_who_and_why_and_ends_with_a_shells_code(failure: Failure, code: int, text: str) -> None:
    found = blame([failure])
    assert found is not None
    assert (found.exit_code, found.text) == (code, text)


def test_nothing_failed() -> None:
    assert blame([]) is None

"""Trying again: what may pass is tried again with longer waits; what does not is said."""

from __future__ import annotations

import errno

import pytest

from lightning_dist.errors import StorageError, UnreadableShardError
from lightning_dist.retry import Retry, may_pass


def test_what_may_pass_is_tried_again_with_longer_waits() -> None:
    waits: list[float] = []
    failures = [ConnectionResetError("reset"), OSError(errno.EBUSY, "busy"), TimeoutError()]

    def attempt() -> str:
        if failures:
            raise failures.pop()
        return "done"

    assert Retry(first_wait_s=1, longest_wait_s=3, sleep=waits.append).call(attempt, "write x") == "done"
    assert waits == [1, 2, 3]


def test_what_does_not_pass_is_tried_so_often_or_once() -> None:
    waits: list[float] = []
    retry = Retry(attempts=3, sleep=waits.append)

    def fail(error: Exception) -> None:
        raise error

    with pytest.raises(StorageError, match=r"cannot write x after 3 tries: ConnectionResetError: reset"):
        retry.call(lambda: fail(ConnectionResetError("reset")), "write x")
    assert len(waits) == 2
    with pytest.raises(StorageError, match=r"cannot write x: PermissionError.*denied"):
        retry.call(lambda: fail(PermissionError(errno.EACCES, "denied")), "write x")
    assert len(waits) == 2


class ServerError(Exception):
    def __init__(self, status: int) -> None:
        super().__init__(f"status {status}")
        self.response = {"ResponseMetadata": {"HTTPStatusCode": status}, "Error": {"Code": str(status)}}


@pytest.mark.parametrize(("status", "passes"), [(503, True), (429, True), (500, True), (403, False), (404, False)])
def test_a_servers_answer_says_whether_it_passes(status: int, passes: bool) -> None:
    assert may_pass(ServerError(status)) is passes
    wrapped = OSError("translated")
    wrapped.__cause__ = ServerError(status)
    assert may_pass(wrapped) is passes


def test_errors_are_of_the_kind_that_is_asked_for() -> None:
    def full() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(
        UnreadableShardError, match=r"cannot read x: OSError.*; make room there \(old checkpoints: hierdist"
    ):
        Retry().call(full, "read x", refusal=UnreadableShardError)
    with pytest.raises(ValueError, match="attempts must be at least 1, got 0"):
        Retry(attempts=0).call(full, "read x")

"""Memory that ranks share and the signals between them; the ranks are threads, the store is one of this process."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from lightning_dist.comm.shared_memory import HostMemory, open_host_memory
from lightning_dist.errors import CollectiveMismatchError, CollectiveTimeoutError, PeerLostError

WINDOW_BYTES = 4096


def no_alarm(_: float) -> None:
    return None


def open_all(
    size: int,
    *,
    store: dist.Store | None = None,
    store_of: Callable[[int, dist.Store], Any] | None = None,
    windows: list[int] | None = None,
    timeout_s: float = 10.0,
    alarm: Callable[[float], str | None] = no_alarm,
    setup_timeout_s: float = 20.0,
) -> list[HostMemory | None]:
    """What each member gets."""
    shared = store or dist.HashStore()

    def member(index: int) -> HostMemory | None:
        return open_host_memory(
            store_of(index, shared) if store_of is not None else shared,
            members=range(10, 10 + size),
            index=index,
            window_bytes=windows[index] if windows is not None else WINDOW_BYTES,
            channels=2,
            describe=lambda position: f"rank {10 + position} (host a)",
            alarm=alarm,
            timeout_s=timeout_s,
            setup_timeout_s=setup_timeout_s,
        )

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(member, range(size)))


@contextmanager
def opened(size: int, **arguments: Any) -> Iterator[list[HostMemory]]:
    memories = open_all(size, **arguments)
    try:
        assert all(memory is not None for memory in memories)
        yield [memory for memory in memories if memory is not None]
    finally:
        for memory in memories:
            if memory is not None:
                memory.close()
                memory.close()


def test_what_one_writes_all_read() -> None:
    with opened(3) as memories:
        for index, memory in enumerate(memories):
            memory.windows[index].fill_(index + 1)
        for memory in memories:
            assert [int(window[17]) for window in memory.windows] == [1, 2, 3]
            assert all(window.numel() == WINDOW_BYTES for window in memory.windows)


def test_a_signal_is_heard_on_its_channel_only() -> None:
    with opened(2) as (first, second):
        first.signal(1, 1, 5, 77)
        first.signal(1, 0, 6, 78)
        second.wait(0, 0, 6, 78)
        second.wait(0, 1, 5, 77)


@pytest.mark.parametrize(("sequence", "fingerprint"), [(6, 77), (5, 78)], ids=["another chunk", "another size"])
def test_ranks_in_different_operations_are_told_so(sequence: int, fingerprint: int) -> None:
    with opened(2) as (first, second):
        first.signal(1, 0, 5, 77)
        with pytest.raises(CollectiveMismatchError, match=r"rank 10 \(host a\) is at operation 5") as raised:
            second.wait(0, 0, sequence, fingerprint)
        assert "rank 11 (host a)" in str(raised.value)


def test_a_wait_has_a_deadline_and_names_whom_it_waits_for() -> None:
    named = r"rank 11 \(host a\) waited 0\.1 s .* for rank 10 \(host a\)"
    with opened(2, timeout_s=0.1) as (_, second), pytest.raises(CollectiveTimeoutError, match=named):
        second.wait(0, 0, 0, 0)


def test_the_end_of_a_peer_is_noticed_at_once() -> None:
    with opened(2) as (first, second):
        first.close()
        with pytest.raises(PeerLostError, match=r"lost rank 10 \(host a\)"):
            second.wait(0, 0, 0, 0)
        with pytest.raises(PeerLostError, match=r"lost rank 10 \(host a\)"):
            second.signal(0, 0, 0, 0)
        second.signal(0, 0, 0, 0, may_be_gone=True)


@pytest.mark.parametrize("unread", [False, True], ids=["all read", "not all read"])
def test_the_reason_of_a_peer_that_gives_up_arrives(unread: bool) -> None:
    """A socket that is closed with something unread resets the connection, which must not hide what was sent before."""
    with opened(2) as (first, second):
        if unread:
            second.signal(0, 0, 3, 3)
        first.abort("the cross leg broke")
        first.abort("said once only")
        first.close()
        with pytest.raises(PeerLostError, match=r"rank 10 \(host a\) reports: the cross leg broke"):
            second.wait(0, 0, 0, 0)


def test_signals_of_a_peer_that_has_ended_in_good_order_are_still_heard() -> None:
    with opened(2) as (first, second):
        second.signal(0, 0, 3, 3)  # never read
        first.signal(1, 0, 7, 9)
        first.close()
        second.wait(0, 0, 7, 9)


def test_giving_up_frees_those_who_wait_in_the_same_process() -> None:
    with opened(2) as (first, _):
        errors: list[BaseException] = []

        def wait() -> None:
            try:
                first.wait(1, 1, 0, 0)
            except PeerLostError as error:
                errors.append(error)

        waiting = threading.Thread(target=wait)
        waiting.start()
        first.abort("another lane failed")
        waiting.join(20)
        assert "rank 10 (host a) gave up: another lane failed" in str(errors[0])


def test_long_reasons_are_cut() -> None:
    with opened(2) as (first, second):
        first.abort("x" * 10_000)
        with pytest.raises(PeerLostError, match=r"x{1000}"):
            second.wait(0, 0, 0, 0)


# -- where memory is not shared ----------------------------------------------------------------------------------------


class Misleading:
    """A store that gives one member an address at which nobody listens, as from another container."""

    def __init__(self, store: dist.Store, peer: int) -> None:
        self._store = store
        self._peer = peer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def get(self, key: str) -> bytes:
        value: bytes = self._store.get(key)
        if key == f"address/{self._peer}":
            return json.dumps({**json.loads(value), "name": "nobody-listens-here"}).encode()
        return value


@pytest.mark.parametrize("refused", [1, 2])
def test_all_members_do_without_if_one_cannot_reach_another(refused: int) -> None:
    memories = open_all(3, store_of=lambda index, store: Misleading(store, 0) if index == refused else store)
    assert memories == [None, None, None]


def test_windows_of_different_sizes_are_refused() -> None:
    assert open_all(2, windows=[4096, 8192]) == [None, None]


def test_without_memfd_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    assert open_all(2) == [None, None]


def test_strangers_are_not_let_in() -> None:
    """Whoever does not know the secret of the member it calls is dropped, and the handshake goes on."""
    store = dist.HashStore()

    def intrude() -> bytes:
        store.wait(["address/0"], timedelta(seconds=20))
        name = json.loads(store.get("address/0"))["name"]
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
            stranger.settimeout(20)
            stranger.connect("\0" + name)
            stranger.send(b"\0" * 24)
            return stranger.recv(16)

    class Late:
        """Lets the other member call only when the stranger has."""

        def __getattr__(self, name: str) -> Any:
            return getattr(store, name)

        def get(self, key: str) -> bytes:
            intruded.result(20)
            return store.get(key)  # type: ignore[no-any-return]

    with ThreadPoolExecutor(1) as threads:
        intruded = threads.submit(intrude)
        with opened(2, store=store, store_of=lambda index, shared: Late() if index == 1 else shared):
            assert intruded.result() == b""


def test_an_alarm_ends_a_wait_long_before_its_deadline() -> None:
    with (
        opened(2, timeout_s=600.0, alarm=lambda waited_s: "another rank reports a failure") as (first, _),
        pytest.raises(PeerLostError, match=r"waited \S+ s for rank 11 \(host a\) .* another rank reports a failure"),
    ):
        first.wait(1, 0, 0, 0)


def test_a_member_that_never_comes_is_given_up() -> None:
    with pytest.raises(RuntimeError):
        open_host_memory(
            dist.HashStore(),
            members=[0, 1],
            index=0,
            window_bytes=WINDOW_BYTES,
            channels=1,
            describe=str,
            alarm=no_alarm,
            timeout_s=1.0,
            setup_timeout_s=0.2,
        )

"""Memory that the ranks of a host share, and the signals that order their access to it.

Each rank owns a window: anonymous memory (``memfd``) whose descriptor it hands to its peers over a Unix socket. So
there is no name in the file system that a crash could leave behind, no limit of ``/dev/shm`` to run into, and being
able to connect is the proof that two ranks share memory: in different containers, or on different hosts of one name,
they cannot.

The same sockets carry the signals. Waiting for one blocks in the kernel (no polling: with more ranks than cores, a rank
that spins takes the core its peer needs), has a deadline, looks up each half second for an alarm, and ends at once
when the peer dies, because its socket closes. A rank that fails says why before it closes, so that its peers name the
rank that failed first and not the one that told them.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import json
import mmap
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lightning_dist.comm.bounded import LOOK_UP_S
from lightning_dist.errors import CollectiveMismatchError, CollectiveTimeoutError, PeerLostError

_SIGNAL = struct.Struct("<QQ")  # sequence number, fingerprint of the operation
_ABORT = (1 << 64) - 1
_HELLO = struct.Struct("<16sII")  # the group's secret, index of the caller, channel
_MAX_MESSAGE = 2048

Alarm = Callable[[float], "str | None"]


class UnsharedMemoryError(RuntimeError):
    """Ranks of what is called one host turn out not to share memory."""


class HostMemory:
    """The windows of a host's ranks, mapped into this process, with channels of signals between each two of them.

    Args:
        windows: Window of each member, as bytes; this rank's own is writable by it, all are readable.
        sockets: ``sockets[channel][member]``; ``None`` in this rank's own place.
        index: This rank's position among the members.
        describe: Turns a member's position into ``rank 3 (host b)``.
        alarm: Given the seconds waited, says why to give up, or ``None``.
        timeout_s: Deadline of each wait, in seconds.
    """

    def __init__(
        self,
        windows: Sequence[torch.Tensor],
        sockets: Sequence[Sequence[socket.socket | None]],
        *,
        index: int,
        describe: Callable[[int], str],
        alarm: Alarm,
        timeout_s: float,
    ) -> None:
        self.windows = tuple(windows)
        self.index = index
        self.size = len(windows)
        self.timeout_s = timeout_s
        self._sockets = sockets
        self._describe = describe
        self._alarm = alarm
        self._aborted: str | None = None
        for channel in sockets:
            for peer in channel:
                if peer is not None:
                    _set_deadline(peer, min(timeout_s, LOOK_UP_S))

    def signal(self, member: int, channel: int, sequence: int, fingerprint: int, *, may_be_gone: bool = False) -> None:
        """Tell a member that step ``sequence`` of an operation is reached. Does not block.

        Args:
            member: Whom to tell.
            channel: Which of the channels; each is used by one lane only.
            sequence: Number of the chunk, counted alike on all members.
            fingerprint: A number that says what the operation is; the receiver compares it with its own.
            may_be_gone: Whether the member may have ended in good order, having no need of this signal.
        """
        peer = self._socket(channel, member)
        try:
            peer.send(_SIGNAL.pack(sequence, fingerprint))
        except OSError as error:
            if not may_be_gone:
                raise self._lost(member, error) from error

    def wait(self, member: int, channel: int, sequence: int, fingerprint: int) -> None:
        """Wait for the matching :meth:`signal` of a member.

        Raises:
            CollectiveTimeoutError: It did not come within the deadline.
            PeerLostError: The member died, or failed and said why, or there was an alarm.
            CollectiveMismatchError: The member is at another operation.
        """
        message = self._receive_watchfully(self._socket(channel, member), member)
        if not message:
            raise self._lost(member, None)
        got_sequence, got_fingerprint = _SIGNAL.unpack_from(message)
        if got_sequence == _ABORT:
            raise PeerLostError(f"{self._describe(member)} reports: {message[_SIGNAL.size :].decode(errors='replace')}")
        if (got_sequence, got_fingerprint) != (sequence, fingerprint):
            raise CollectiveMismatchError(
                f"{self._describe(member)} is at operation {got_sequence} of {got_fingerprint & 0xFFFFFFFF} bytes, "
                f"{self._describe(self.index)} at operation {sequence} of {fingerprint & 0xFFFFFFFF}: the ranks' "
                "models or their order of gradients differ"
            )

    def _receive_watchfully(self, peer: socket.socket, member: int) -> bytes:
        start_s = time.monotonic()
        while True:
            try:
                return _receive(peer)
            except BlockingIOError as error:  # the socket's own deadline
                waited_s = time.monotonic() - start_s
                if waited_s >= self.timeout_s:
                    raise CollectiveTimeoutError(
                        f"{self._describe(self.index)} waited {self.timeout_s:g} s (sync.timeout_s) for "
                        f"{self._describe(member)} in shared memory; it is stuck, stopped, or in another operation"
                    ) from error
                alarm = self._alarm(waited_s)
                if alarm is not None:
                    raise PeerLostError(
                        f"{self._describe(self.index)} waited {waited_s:.1f} s for {self._describe(member)} in shared "
                        f"memory, then gave up: {alarm}"
                    ) from error
            except OSError as error:
                raise self._lost(member, error) from error

    def abort(self, reason: str) -> None:
        """Tell all members why this rank gives up, and free whoever waits in this process. Safe to call twice."""
        if self._aborted is not None:
            return
        self._aborted = reason
        message = _SIGNAL.pack(_ABORT, 0) + reason.encode()[: _MAX_MESSAGE - _SIGNAL.size]
        for channel in self._sockets:
            for peer in channel:
                if peer is not None:
                    with contextlib.suppress(OSError):
                        peer.send(message, socket.MSG_DONTWAIT)
                    with contextlib.suppress(OSError):
                        peer.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the sockets, and let the windows go: they are unmapped with their last view. Safe to call twice."""
        self._aborted = self._aborted or "closed"
        self.windows = ()
        for channel in self._sockets:
            for peer in channel:
                if peer is not None:
                    peer.close()

    def _socket(self, channel: int, member: int) -> socket.socket:
        peer = self._sockets[channel][member]
        if peer is None:
            raise ValueError("a rank does not signal itself")
        return peer

    def _lost(self, member: int, error: OSError | None) -> PeerLostError:
        if self._aborted is not None:
            return PeerLostError(f"{self._describe(self.index)} gave up: {self._aborted}")
        detail = f" ({os.strerror(error.errno)})" if error is not None and error.errno else ""
        return PeerLostError(
            f"{self._describe(self.index)} lost {self._describe(member)}: "
            f"its process ended or closed the connection{detail}"
        )


def open_host_memory(
    store: dist.Store,
    *,
    members: Sequence[int],
    index: int,
    window_bytes: int,
    channels: int,
    describe: Callable[[int], str],
    alarm: Alarm,
    timeout_s: float,
    setup_timeout_s: float = 60.0,
) -> HostMemory | None:
    """Open the shared memory of the ranks of one host; every member calls it.

    The calls in order: each member publishes an address (all); connects to every member before it and accepts every
    member after it, handing over its window (pairs); publishes whether that worked, and reads what the others say
    (all).

    Args:
        store: Shared by the members; the keys are prefixed by the caller.
        members: Global ranks of the host, in order.
        index: This process's position among them.
        window_bytes: Size of each member's window.
        channels: Number of independent channels of signals.
        describe: Turns a member's position into words.
        alarm: Given the seconds waited, says why to give up, or ``None``.
        timeout_s: Deadline of later waits, in seconds.
        setup_timeout_s: Deadline of the handshake, in seconds.

    Returns:
        The shared memory, or ``None`` if any two members do not share memory: then all members get ``None``.
    """
    opened: HostMemory | None = None
    reason = ""
    try:
        opened = _connect(
            store,
            members=members,
            index=index,
            window_bytes=window_bytes,
            channels=channels,
            describe=describe,
            alarm=alarm,
            timeout_s=timeout_s,
            setup_timeout_s=setup_timeout_s,
        )
    except (UnsharedMemoryError, OSError) as error:
        reason = str(error)
    store.set(f"result/{index}", json.dumps({"ok": opened is not None, "reason": reason}))
    store.wait([f"result/{i}" for i in range(len(members))], timedelta(seconds=setup_timeout_s))
    results = [json.loads(store.get(f"result/{i}")) for i in range(len(members))]
    if all(result["ok"] for result in results):
        return opened
    if opened is not None:
        opened.close()
    return None


def _connect(
    store: dist.Store,
    *,
    members: Sequence[int],
    index: int,
    window_bytes: int,
    channels: int,
    describe: Callable[[int], str],
    alarm: Alarm,
    timeout_s: float,
    setup_timeout_s: float,
) -> HostMemory:
    size = len(members)
    with contextlib.ExitStack() as on_failure:
        supported = hasattr(os, "memfd_create") and hasattr(socket, "AF_UNIX")
        listener: socket.socket | None = None
        if supported:
            listener = on_failure.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            name = f"hierdist-{secrets.token_hex(16)}"
            listener.bind("\0" + name)
            listener.listen(size * channels)
        secret = secrets.token_bytes(16)
        store.set(f"address/{index}", json.dumps({"name": name if listener else "", "secret": secret.hex()}))
        store.wait([f"address/{i}" for i in range(size)], timedelta(seconds=setup_timeout_s))
        addresses = [json.loads(store.get(f"address/{i}")) for i in range(size)]
        if listener is None or not all(address["name"] for address in addresses):
            raise UnsharedMemoryError("shared memory needs Linux (memfd and Unix sockets) on every rank of the host")
        give_up = time.monotonic() + setup_timeout_s
        own_fd = _make_window(window_bytes)
        on_failure.callback(os.close, own_fd)
        sockets: list[list[socket.socket | None]] = [[None] * size for _ in range(channels)]
        on_failure.callback(_close_all, sockets)
        for peer in range(
            index
        ):  # a refused connection must be known to the other side at once, hence before accepting
            for channel in range(channels):
                connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                sockets[channel][peer] = connection
                try:
                    connection.connect("\0" + addresses[peer]["name"])
                except OSError as error:
                    store.set("unreachable", describe(index))  # whoever waits for this rank stops waiting
                    raise UnsharedMemoryError(f"cannot reach {describe(peer)}: {error}") from error
                connection.send(_HELLO.pack(bytes.fromhex(addresses[peer]["secret"]), index, channel))
        missing = (size - 1 - index) * channels
        while missing:
            member, channel, connection = _accept(listener, secret, store, give_up)
            if not index < member < size or not channel < channels or sockets[channel][member] is not None:
                connection.close()
                continue
            sockets[channel][member] = connection
            missing -= 1
        windows = _exchange_windows(sockets[0], own_fd, window_bytes=window_bytes, give_up=give_up)
        on_failure.pop_all()
        listener.close()
        os.close(own_fd)
        return HostMemory(windows, sockets, index=index, describe=describe, alarm=alarm, timeout_s=timeout_s)


def _make_window(size_bytes: int) -> int:
    fd = os.memfd_create("hierdist", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size_bytes)
    # Nobody can shrink it any more, so no peer's mistake turns a read into SIGBUS.
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return fd


def _accept(
    listener: socket.socket, secret: bytes, store: dist.Store, give_up: float
) -> tuple[int, int, socket.socket]:
    """The next peer that knows the secret: (its index, the channel, the connection)."""
    while True:
        if time.monotonic() > give_up:
            raise UnsharedMemoryError("a rank of this host did not connect in time")
        listener.settimeout(0.1)
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            if store.check(["unreachable"]):
                raise UnsharedMemoryError("ranks of this host cannot reach each other") from None
            continue
        connection.settimeout(max(0.1, give_up - time.monotonic()))
        message = connection.recv(_HELLO.size + 1)
        if len(message) == _HELLO.size:
            said, member, channel = _HELLO.unpack(message)
            if secrets.compare_digest(said, secret):
                return member, channel, connection
        connection.close()


def _exchange_windows(
    peers: Sequence[socket.socket | None], own_fd: int, *, window_bytes: int, give_up: float
) -> list[torch.Tensor]:
    """Send the own window's descriptor to each peer and map each peer's."""
    for peer in peers:
        if peer is not None:
            peer.settimeout(max(0.1, give_up - time.monotonic()))
            peer.sendmsg([b"window"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [own_fd]))])
    windows: list[torch.Tensor] = []
    for position, peer in enumerate(peers):
        if peer is None:
            windows.append(_map(own_fd, window_bytes))
            continue
        fd = _receive_fd(peer)
        try:
            if os.fstat(fd).st_size != window_bytes:
                raise UnsharedMemoryError(
                    f"member {position} has a window of {os.fstat(fd).st_size} bytes, this rank {window_bytes}: "
                    "sync.chunk_bytes differs between ranks"
                )
            windows.append(_map(fd, window_bytes))
        finally:
            os.close(fd)
    return windows


def _receive_fd(peer: socket.socket) -> int:
    try:
        _, ancillary, _, _ = peer.recvmsg(16, socket.CMSG_SPACE(struct.calcsize("i")))
    except TimeoutError as error:
        raise UnsharedMemoryError("a rank of this host did not hand over its window in time") from error
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            return int(struct.unpack("i", data[: struct.calcsize("i")])[0])
    raise UnsharedMemoryError("a rank of this host closed its connection during the handshake")


def _map(fd: int, size_bytes: int) -> torch.Tensor:
    """The memory behind a descriptor as a uint8 tensor, which keeps the mapping alive."""
    buffer = mmap.mmap(fd, size_bytes)
    return torch.frombuffer(buffer, dtype=torch.uint8)


def _receive(peer: socket.socket) -> bytes:
    """The next message. A peer that closed without having read all shows first as a reset, before what it had sent."""
    try:
        return peer.recv(_MAX_MESSAGE)
    except ConnectionResetError:
        return peer.recv(_MAX_MESSAGE)


def _set_deadline(peer: socket.socket, timeout_s: float) -> None:
    """One system call a wait: the kernel keeps the deadline (EAGAIN) instead of a poll before each receive."""
    peer.setblocking(True)
    seconds = int(timeout_s)
    microseconds = int((timeout_s - seconds) * 1e6)
    value = struct.pack("@ll", seconds, microseconds)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)


def _close_all(sockets: Sequence[Sequence[Any]]) -> None:
    for channel in sockets:
        for peer in channel:
            if peer is not None:
                with contextlib.suppress(OSError):
                    peer.close()

"""Answers whoever knows a secret, on an interface of the cluster: a thread a connection, strangers kept short.

Messages are JSON headers (:mod:`lightning_dist.wire`) followed by the bytes of rows. What they mean is the business of
who is handed in; here it is decided who may send them, and that nobody can hold or fill a server without a secret:

- who connects has a few seconds, in all, to prove that it knows the secret, and sends 64 bytes until then;
- of those who have not, a bounded number is waited for; when more come the oldest is let go;
- what is no request ends its connection, and no other.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_dist import wire
from lightning_dist.errors import CollectiveError

ROLES = wire.Roles(server=b"hierdist parameter server", client=b"hierdist parameter client")
HELLO_S = 10.0
MAX_STRANGERS = 64
_BACKLOG = 1024
_MISTAKES = (OSError, CollectiveError, ValueError, KeyError, IndexError, TypeError, AttributeError)

Answer = Callable[[socket.socket, dict[str, Any]], None]
"""Takes what was asked, receives what follows, and sends an answer."""


def listening(address: str) -> socket.socket:
    """A listener on an address of this host, at a port that the system chooses.

    Raises:
        ValueError: The address is that of all interfaces, among them those that lead out of the cluster.
    """
    if address in ("", "0.0.0.0", "::"):  # noqa: S104  # it is refused
        raise ValueError(f"{address!r} stands for all interfaces; give the address of the cluster's")
    return socket.create_server((address, 0), backlog=_BACKLOG)


class RowServer:
    """Serves until it is closed.

    Args:
        listener: Where; closed with the server.
        secret: What who connects must know.
        answers: Called once a connection; its answer to each request.
        ended: Called with that answer once the connection is over.
        hello_s: How long a stranger may take to prove that it is none, in seconds.
    """

    def __init__(
        self,
        listener: socket.socket,
        *,
        secret: bytes,
        answers: Callable[[], Answer],
        ended: Callable[[Any], None] = lambda answer: None,
        hello_s: float = HELLO_S,
    ) -> None:
        self._listener = listener
        self._secret = secret
        self._answers = answers
        self._ended = ended
        self._hello_s = hello_s
        self._threads: set[threading.Thread] = set()
        self._strangers: dict[socket.socket, None] = {}  # the oldest first
        self._known: set[socket.socket] = set()
        self._is_closed = threading.Event()
        self._lock = threading.Lock()
        self._accepting = threading.Thread(target=self._accept, name="hierdist-rows-accept", daemon=True)
        self._accepting.start()

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self._listener.getsockname()[1])

    def close(self, timeout_s: float = 5.0) -> None:
        """End connections and threads. Safe to call twice."""
        self._is_closed.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # frees the thread in accept
        self._listener.close()
        self._accepting.join(timeout_s)
        with self._lock:
            threads = tuple(self._threads)
            for connection in (*self._strangers, *self._known):
                _let_go(connection)
        for thread in threads:
            thread.join(timeout_s)

    def _accept(self) -> None:
        while not self._is_closed.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ECONNABORTED):
                    return
                self._is_closed.wait(0.1)  # until others close theirs
                continue
            thread = threading.Thread(target=self._serve, args=(connection,), name="hierdist-rows-serve", daemon=True)
            with self._lock:
                self._strangers[connection] = None
                if len(self._strangers) > MAX_STRANGERS:
                    _let_go(next(iter(self._strangers)))
                    self._strangers.pop(next(iter(self._strangers)))
                self._threads.add(thread)
            thread.start()

    def _serve(self, connection: socket.socket) -> None:
        """One connection, until it is closed; what is wrong with it ends it, and the other side learns of that."""
        try:
            with connection, contextlib.suppress(*_MISTAKES):
                self._admit(connection)
                answer = self._answers()
                try:
                    while True:
                        answer(connection, wire.receive(connection))
                finally:
                    self._ended(answer)
        finally:
            with self._lock:
                self._strangers.pop(connection, None)
                self._known.discard(connection)
                self._threads.discard(threading.current_thread())

    def _admit(self, connection: socket.socket) -> None:
        connection.settimeout(self._hello_s)
        wire.prove(connection, self._secret, ROLES, is_server=True, within_s=self._hello_s)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(None)  # who is known may say nothing for hours
        with self._lock:
            self._strangers.pop(connection, None)
            self._known.add(connection)
            if self._is_closed.is_set():
                _let_go(connection)


def _let_go(connection: socket.socket) -> None:
    """Have its thread see the end of it."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def send_bytes(connection: socket.socket, tensor: Tensor) -> None:
    """The memory of a CPU tensor."""
    if tensor.numel():
        connection.sendall(memoryview(tensor.contiguous().view(-1).view(torch.uint8).numpy()))  # type: ignore[arg-type]  # numpy's stubs say less than it does


def receive_bytes(connection: socket.socket, size_bytes: int) -> Tensor:
    """[size_bytes] of uint8."""
    received = torch.empty(size_bytes, dtype=torch.uint8)
    if size_bytes:
        wire.receive_into(connection, memoryview(received.numpy()))  # type: ignore[arg-type]  # as above
    return received

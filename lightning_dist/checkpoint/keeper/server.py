"""The keeper's process: answers over a Unix socket, and over TCP once it is told on which address.

It ends when it is told to, or when no rank has been attached to it for a time.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from lightning_dist import wire
from lightning_dist.checkpoint.keeper import messages
from lightning_dist.checkpoint.keeper.memory import FullError, KeptFiles

_HELLO_S = 10.0  # how long who connects may take to say who it is
_TRANSFER_S = 120.0  # how long a connection may stand still
_CONNECTIONS = 256  # at a time, of each kind
_QUEUE = 4096


class Server:
    """One keeper.

    Args:
        name: Under which it is found on this host.
        limit_bytes: Of all it holds.
        idle_s: It ends after so many seconds without a rank.
        clock: Seconds, from any start.
    """

    def __init__(
        self, name: str, *, limit_bytes: int, idle_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._name = name
        self._files = KeptFiles(limit_bytes)
        self._idle_s = idle_s
        self._clock = clock
        self._identity = secrets.token_hex(8)
        self._secret = secrets.token_bytes(messages.SECRET_BYTES)
        self._unix: socket.socket | None = None
        self._tcp: dict[str, int] = {}
        self._lock = threading.Lock()
        self._connections = 0
        self._attached = 0
        self._job = ""
        self._last_seen_s = clock()
        self._wake = threading.Event()
        self._is_ending = False

    def open(self) -> bool:
        """Take the name; ``False`` if another keeper has it."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(messages.address_of(self._name))
        except OSError as error:
            listener.close()
            if error.errno != errno.EADDRINUSE:
                raise
            return False
        listener.listen(_QUEUE)
        self._unix = listener
        return True

    def serve(self) -> None:
        """Answer until it is time to end."""
        assert self._unix is not None, "it is open"
        threading.Thread(target=self._accept, args=(self._unix, self._is_own_user), daemon=True).start()
        while True:
            self._wake.clear()  # before it looks: what happens afterwards wakes it
            if self._is_ending:
                break
            with self._lock:
                is_used = self._connections > 0
                left_s = self._idle_s - (self._clock() - self._last_seen_s)
            if not is_used and left_s <= 0:
                break
            self._wake.wait(None if is_used else left_s)

    def _accept(self, listener: socket.socket, admit: Callable[[socket.socket], bool]) -> None:
        slots = threading.Semaphore(_CONNECTIONS)  # who comes when all are taken waits in the kernel's queue
        while True:
            slots.acquire()
            try:
                connection, _ = listener.accept()
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ECONNABORTED):
                    return
                slots.release()
                time.sleep(0.1)  # until others close theirs
                continue
            with self._lock:
                self._connections += 1
            threading.Thread(target=self._converse, args=(connection, admit, slots), daemon=True).start()

    def _converse(
        self, connection: socket.socket, admit: Callable[[socket.socket], bool], slots: threading.Semaphore
    ) -> None:
        try:
            with connection, contextlib.suppress(OSError, messages.NoKeeperError):
                connection.settimeout(_HELLO_S)
                if admit(connection):
                    self._answer(connection, is_local=connection.family == socket.AF_UNIX)
        finally:
            slots.release()
            with self._lock:
                self._connections -= 1
                self._last_seen_s = self._clock()
            self._wake.set()

    def _is_own_user(self, connection: socket.socket) -> bool:
        return messages.peer_user(connection) == os.getuid()

    def _knows_secret(self, connection: socket.socket) -> bool:
        messages.prove(connection, self._secret, is_server=True)
        return True

    def _answer(self, connection: socket.socket, *, is_local: bool) -> None:
        while True:
            request = wire.receive(connection)
            connection.settimeout(_TRANSFER_S)
            operation = request.get("operation")
            try:
                if operation == "attach" and is_local:
                    self._attend(connection)
                    return
                if operation == "read":
                    self._read(connection, request)
                elif operation == "write":
                    self._write(connection, request)
                elif operation == "fill":
                    self._fill(connection, request)
                elif operation == "put" and is_local:
                    self._put(connection, request)
                else:
                    wire.send(connection, self._do(operation, request, is_local=is_local))
            except (KeyError, TypeError, ValueError) as error:
                wire.send(connection, {"error": f"{type(error).__name__}: {error}"})
                return

    def _do(self, operation: Any, request: dict[str, Any], *, is_local: bool) -> dict[str, Any]:
        if operation == "about":
            about = {
                "format": messages.FORMAT,
                "identity": self._identity,
                "process": os.getpid(),
                "used_bytes": self._files.used_bytes,
                "limit_bytes": self._files.limit_bytes,
            }
            own = {"job": self._job, "attached": self._attached, "secret": self._secret.hex()}
            return {**about, **own} if is_local else about
        if operation == "list":
            return {"files": self._files.list(str(request["folder"]))}
        if operation == "folders":
            return {"folders": list(self._files.folders())}
        if operation == "remove":
            self._files.remove(str(request["folder"]), str(request["name"]))
        elif operation == "keep":
            self._files.keep(request["folder"])
        elif operation == "limit" and is_local:
            self._files.set_limit(int(request["bytes"]))
        elif operation == "job" and is_local:
            self._job = str(request["job"])
        elif operation == "listen" and is_local:
            return {"port": self._listen(str(request["address"]))}
        elif operation == "end" and is_local:
            self._is_ending = True  # and the connection stays open until the process is gone
            self._wake.set()
        else:
            return {"error": f"operation {operation!r} is unknown, or is not for other hosts"}
        return {}

    def _attend(self, connection: socket.socket) -> None:
        """A rank is there for as long as it holds the connection; the kernel closes that of one that is killed."""
        with self._lock:
            self._attached += 1
        try:
            wire.send(connection, {})
            connection.settimeout(None)
            connection.recv(1)
        finally:
            with self._lock:
                self._attached -= 1

    def _listen(self, address: str) -> int:
        with self._lock:
            if address not in self._tcp:
                listener = socket.create_server((address, 0), backlog=_QUEUE)
                threading.Thread(target=self._accept, args=(listener, self._knows_secret), daemon=True).start()
                self._tcp[address] = listener.getsockname()[1]
            return self._tcp[address]

    def _read(self, connection: socket.socket, request: dict[str, Any]) -> None:
        with self._files.reading(str(request["folder"]), str(request["name"])) as opened:
            if opened is None:
                wire.send(connection, {"missing": True})
                return
            descriptor, total = opened
            with open(descriptor, "rb", buffering=0, closefd=False) as file:
                start = int(request.get("start", 0))
                size = max(0, min(int(request.get("size", total)), total - start))
                wire.send(connection, {"size": size})
                if size:
                    connection.sendfile(file, start, size)

    def _write(self, connection: socket.socket, request: dict[str, Any]) -> None:
        folder, name = str(request["folder"]), str(request["name"])
        parts = messages.receive_parts(connection)
        try:
            answer: dict[str, Any] = {"size": self._files.write(folder, name, parts)}
        except FullError as error:
            for _ in parts:  # an answer is read only after all has been sent
                pass
            answer = {"error": str(error)}
        wire.send(connection, answer)

    def _fill(self, connection: socket.socket, request: dict[str, Any]) -> None:
        folder, size = str(request["folder"]), int(request["size"])
        try:
            self._files.fill(folder, str(request["name"]), size, lambda view: wire.receive_into(connection, view))
        except FullError as error:
            messages.skip(connection, size)  # an answer is read only after all has been sent
            wire.send(connection, {"error": str(error)})
            return
        if request.get("alone"):
            self._files.keep(folder)
        answer: dict[str, Any] = {"used_bytes": self._files.used_bytes}
        if request.get("lists"):
            answer["files"] = self._files.list(folder)
        wire.send(connection, answer)

    def _put(self, connection: socket.socket, request: dict[str, Any]) -> None:
        descriptor = messages.receive_descriptor(connection)
        try:
            self._files.put(str(request["folder"]), str(request["name"]), descriptor, int(request["size"]))
        except FullError as error:
            wire.send(connection, {"error": str(error)})
            return
        wire.send(connection, {"used_bytes": self._files.used_bytes})

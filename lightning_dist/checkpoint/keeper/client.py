"""The ranks' side of a keeper: find the one of this host, or start it, and call one of any host.

Each call of a :class:`Keeper` has a connection of its own, so nothing is left open between two calls, any thread may
call, and a keeper that was started anew is found again. Who calls often, from one thread, does so over a :class:`Line`.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from lightning_dist import wire
from lightning_dist.checkpoint.keeper import messages
from lightning_dist.checkpoint.keeper.messages import NoKeeperError
from lightning_dist.errors import StorageError

IDLE_S = 900.0
"""A keeper ends after so many seconds without a rank."""
_TIMEOUT_S = 60.0
_START_S = 30.0
_VARIABLES = ("LD_LIBRARY_PATH", "PATH")  # what Python itself may need
_PROGRAM = Path(__file__).with_name("__main__.py")


@dataclass(frozen=True)
class Endpoint:
    """Where a keeper is.

    Attributes:
        identity: Of this process among all keepers.
        name: Under which it is found on its host; ``None`` on others.
        address: On the cluster's network, with ``port``; ``None`` on its own host.
        port: Of TCP.
        secret: Shown by who calls over TCP; not printed.
    """

    identity: str
    name: str | None = None
    address: str | None = None
    port: int = 0
    secret: bytes = b""

    def __repr__(self) -> str:
        return f"Endpoint({self})"

    def __str__(self) -> str:
        return f"keeper {self.name}" if self.address is None else f"keeper at {self.address}:{self.port}"


class Filled(NamedTuple):
    """What a keeper says of a file that it has taken.

    Attributes:
        used_bytes: Of all that it holds.
        files: Of the folder, with their sizes, if that was asked for.
    """

    used_bytes: int
    files: dict[str, int]


class Keeper:
    """Calls a keeper.

    Args:
        endpoint: Where it is.
        timeout_s: How long a call may stand still, in seconds.
    """

    def __init__(self, endpoint: Endpoint, *, timeout_s: float = _TIMEOUT_S) -> None:
        self.endpoint = endpoint
        self._timeout_s = timeout_s

    def about(self) -> dict[str, Any]:
        """Its identity, process, bytes used and limit; on its own host its job, number of ranks and secret, too."""
        return self._call("about")

    def listen(self, address: str) -> int:
        """Let it answer other hosts on an address of this host; the port."""
        return int(self._call("listen", address=address)["port"])

    def set_limit(self, limit_bytes: int) -> None:
        """Bound its memory; the oldest folders go, until the rest fits."""
        self._call("limit", bytes=limit_bytes)

    def set_job(self, job: str) -> None:
        """Tell it whose it is, for who asks what keepers there are."""
        self._call("job", job=job)

    def write(self, folder: str, name: str, buffers: Iterable[bytes | bytearray | memoryview]) -> int:
        """Write a file; its size in bytes."""
        with self._connected("write") as connection:
            wire.send(connection, {"operation": "write", "folder": folder, "name": name})
            messages.send_parts(connection, buffers)
            return int(self._answer(connection, "write")["size"])

    def fill(self, folder: str, name: str, data: bytes, *, alone: bool = False, lists: bool = False) -> Filled:
        """Write a file of a known size.

        Args:
            folder: Of the file.
            name: Of the file.
            data: Its bytes.
            alone: Drop all other folders then.
            lists: Ask what there is in this one then.
        """
        request = {"operation": "fill", "folder": folder, "name": name, "size": len(data)}
        with self._connected("write") as connection:
            wire.send(connection, {**request, "alone": alone, "lists": lists})
            connection.sendall(data)
            answer = self._answer(connection, "write")
            return Filled(int(answer["used_bytes"]), dict(answer.get("files", {})))

    def fill_in_parts(
        self,
        folder: str,
        name: str,
        data: memoryview,
        *,
        part_bytes: int,
        pace: Callable[[int], None] = lambda size_bytes: None,
    ) -> Filled:
        """The same, with some patience for each part.

        Args:
            folder: Of the file.
            name: Of the file.
            data: Its bytes.
            part_bytes: How many at once.
            pace: Told how many are next; waits until they may be sent.
        """
        request = {"operation": "fill", "folder": folder, "name": name, "size": len(data)}
        with self._connected("write") as connection:
            wire.send(connection, request)
            for start in range(0, len(data), part_bytes):
                with data[start : start + part_bytes] as part:
                    pace(len(part))
                    connection.sendall(part)
            return Filled(int(self._answer(connection, "write")["used_bytes"]), {})

    def put(self, folder: str, name: str, descriptor: int, size: int) -> Filled:
        """Hand over memory that holds a file; on its own host only.

        Args:
            folder: Of the file.
            name: Of the file.
            descriptor: Of the memory; it may be closed afterwards.
            size: Bytes of the file, which may be fewer than those of the memory.
        """
        with self._connected("write") as connection:
            wire.send(connection, {"operation": "put", "folder": folder, "name": name, "size": size})
            messages.send_descriptor(connection, descriptor)
            return Filled(int(self._answer(connection, "write")["used_bytes"]), {})

    def read(self, folder: str, name: str) -> bytes | None:
        """All of a file; ``None`` if there is none."""
        with self._connected("read") as connection:
            size = self._ask_to_read(connection, folder, name, {})
            return None if size is None else wire.receive_exactly(connection, size)

    def read_into(self, folder: str, name: str, start: int, target: memoryview) -> int | None:
        """Fill ``target`` from byte ``start`` on, as far as the file goes; bytes filled, ``None``: no file."""
        with self._connected("read") as connection:
            size = self._ask_to_read(connection, folder, name, {"start": start, "size": len(target)})
            if size:
                wire.receive_into(connection, target[:size])
            return size

    def list(self, folder: str) -> dict[str, int]:
        """Files of a folder, with their sizes; empty if it is not there."""
        return dict(self._call("list", folder=folder)["files"])

    def folders(self) -> Sequence[str]:
        """Names of its folders, the oldest first."""
        return tuple(self._call("folders")["folders"])

    def remove(self, folder: str, name: str) -> None:
        """Drop a file, if it is there."""
        self._call("remove", folder=folder, name=name)

    def keep(self, folder: str | None) -> None:
        """Drop all folders but one."""
        self._call("keep", folder=folder)

    def end(self) -> None:
        """End the process; what it holds is gone when this returns."""
        with self._connected("end") as connection:
            wire.send(connection, {"operation": "end"})
            with contextlib.suppress(ConnectionResetError):
                while connection.recv(4096):  # until the kernel closes what the process had open
                    pass

    def attach(self) -> socket.socket:
        """A connection that keeps it from ending while it is open; the caller closes it."""
        with self._translated("attach"), contextlib.ExitStack() as on_failure:
            connection = on_failure.enter_context(self._connect())
            wire.send(connection, {"operation": "attach"})
            self._answer(connection, "attach")
            on_failure.pop_all()
            return connection

    def _ask_to_read(self, connection: socket.socket, folder: str, name: str, what: dict[str, int]) -> int | None:
        wire.send(connection, {"operation": "read", "folder": folder, "name": name, **what})
        answer = self._answer(connection, "read")
        return None if answer.get("missing") else int(answer["size"])

    def _call(self, operation: str, **arguments: Any) -> dict[str, Any]:
        with self._connected(operation) as connection:
            wire.send(connection, {"operation": operation, **arguments})
            return self._answer(connection, operation)

    def _answer(self, connection: socket.socket, operation: str) -> dict[str, Any]:
        answer = wire.receive(connection)
        if "error" in answer:
            raise StorageError(f"{self.endpoint}: {operation} failed: {answer['error']}")
        return answer

    @contextlib.contextmanager
    def _connected(self, operation: str) -> Iterator[socket.socket]:
        with self._translated(operation), self._connect() as connection:
            yield connection

    @contextlib.contextmanager
    def _translated(self, operation: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            reason = "no answer" if isinstance(error, TimeoutError) else f"{type(error).__name__}: {error}"
            raise NoKeeperError(f"{self.endpoint}: {operation} failed: {reason}") from error

    def _connect(self) -> socket.socket:
        endpoint = self.endpoint
        if endpoint.address is not None:
            connection = socket.create_connection((endpoint.address, endpoint.port), timeout=self._timeout_s)
        else:
            assert endpoint.name is not None, "one of both"
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            connection.settimeout(self._timeout_s)
        try:
            if endpoint.address is not None:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                messages.prove(connection, endpoint.secret, is_server=False)
            else:
                connection.connect(messages.address_of(endpoint.name or ""))
                if messages.peer_user(connection) != os.getuid():
                    raise NoKeeperError(f"{endpoint} is another user's process")
        except BaseException:
            connection.close()
            raise
        return connection


class Line(Keeper):
    """A keeper that one thread calls over one connection, which is opened at the first call, and anew once it is lost.

    Args:
        keeper: Which.
    """

    def __init__(self, keeper: Keeper) -> None:
        super().__init__(keeper.endpoint, timeout_s=keeper._timeout_s)
        self._open: socket.socket | None = None

    def close(self) -> None:
        """Safe to call twice."""
        connection, self._open = self._open, None
        if connection is not None:
            connection.close()

    @contextlib.contextmanager
    def _connected(self, operation: str) -> Iterator[socket.socket]:
        with self._translated(operation):
            if self._open is not None and messages.is_over(self._open):  # it has stood still for too long
                self.close()
            if self._open is None:
                self._open = self._connect()
            try:
                yield self._open
            except BaseException:  # what comes next on it is not known
                self.close()
                raise


def name_of(job: str) -> str:
    """What the keeper of a job is called.

    Args:
        job: Something that is the same when the job is started again, e.g. the folder of its checkpoints.
    """
    return hashlib.sha256(job.encode()).hexdigest()[:24]


def find(name: str) -> Keeper | None:
    """The keeper of this host; ``None`` if none runs."""
    keeper = Keeper(Endpoint("", name))
    try:
        about = keeper.about()
    except NoKeeperError:
        return None
    if about.get("format") != messages.FORMAT:
        return None
    return Keeper(Endpoint(str(about["identity"]), name, secret=bytes.fromhex(about["secret"])))


def running() -> list[Keeper]:
    """All keepers of this user on this host."""
    try:
        sockets = Path("/proc/net/unix").read_text()
    except OSError as error:
        raise StorageError(f"cannot find out which keepers run on this host: {error}") from error
    found = (find(name) for name in messages.names_in(sockets, os.getuid()))
    return [keeper for keeper in found if keeper is not None]


def start(name: str, *, limit_bytes: int, job: str = "", idle_s: float = IDLE_S) -> Keeper:
    """The keeper of this host, started if none runs.

    Args:
        name: See :func:`name_of`.
        limit_bytes: The bound on its memory.
        job: What :func:`name_of` made the name of.
        idle_s: It ends after so many seconds without a rank.

    Raises:
        NoKeeperError: It did not start.
    """
    keeper = find(name)
    if keeper is None:
        _launch(name, limit_bytes, idle_s)
        keeper = find(name)
    if keeper is None:
        raise NoKeeperError(f"a keeper was started on this host ({_PROGRAM}), and does not answer")
    keeper.set_limit(limit_bytes)
    keeper.set_job(job)
    return keeper


def _launch(name: str, limit_bytes: int, idle_s: float) -> None:
    command = [sys.executable, "-I", "-S", str(_PROGRAM), name, str(limit_bytes), str(idle_s)]
    # Nothing of the job's environment lives on in it: no secrets, and no marks by which a launcher finds its children.
    environment = {name: os.environ[name] for name in _VARIABLES if name in os.environ}
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd="/"
    ) as process:  # which forks and ends at once: the keeper is no child of this one
        try:
            printed, complaint = process.communicate(timeout=_START_S)
        except subprocess.TimeoutExpired:
            process.kill()
            raise NoKeeperError(f"a keeper did not start on this host within {_START_S:g} s ({_PROGRAM})") from None
    if b"ready" not in printed:
        said = complaint.decode(errors="replace").strip().rpartition("\n")[2]
        raise NoKeeperError(f"a keeper did not start on this host ({_PROGRAM}): {said}")

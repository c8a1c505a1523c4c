"""One experiment on several hosts, on each of which the same command was given.

Note [Words]
    The first host listens. Each other one connects, proves the secret and says ``hello``; the answer is ``welcome``, or
    ``refused``. For each run the first host says ``run``, with an arm and a seed, and both run their own command. The
    other one answers with ``curve``, pieces of the files that its ranks have written, and ``ended``. ``call_off``,
    while a run goes on, asks for its end. ``over`` is the last word. Nobody is told what to run: each has its own
    command.
"""

from __future__ import annotations

import contextlib
import json
import select
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from lightning_dist.errors import ConfigError, LaunchError
from lightning_dist.experiment.arms import ARMS, Experiment, RunName
from lightning_dist.experiment.store import Outcome
from lightning_dist.wire import Roles, prove, receive, send

ROLES = Roles(b"hierdist ab first host", b"hierdist ab other host")
GRACE_S = 5.0
"""From a failure on one host to the end of the run on the others: their own words may say more."""

END_S = 120.0
"""From the end of a run on the first host to its end on the others."""

_MESSAGE_S = 60.0  # a message that has begun
_PIECE = 1 << 18  # characters of a curve
_POLL_S = 0.2

Say = Callable[[str], None]


def terms(experiment: Experiment) -> dict[str, Any]:
    """What all hosts must have been asked alike; of their commands some words may differ."""
    asked: dict[str, Any] = json.loads(json.dumps(asdict(experiment)))  # as it comes out of a message
    return {key: value for key, value in asked.items() if key != "command"}


@dataclass
class _Other:
    """Another host, as the first one sees it."""

    name: str
    connection: socket.socket
    outcome: Outcome | None = None
    curves: dict[str, list[str]] = field(default_factory=dict)

    def hear(self) -> None:
        """Take the next message."""
        try:
            message = receive(self.connection)
            if message["say"] == "curve":
                self.curves.setdefault(Path(str(message["file"])).name, []).append(str(message["text"]))
            elif message["say"] == "ended":
                self.outcome = Outcome(
                    is_good=message["is_good"] is True,
                    why=str(message["why"]),
                    seconds=float(message["seconds"]),
                    last_words=tuple(map(str, message["last_words"])),
                )
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise LaunchError(
                f"host {self.name} has left: {error}; give the same command on all hosts again: it goes on from here"
            ) from error

    def tell(self, message: Mapping[str, Any]) -> None:
        with contextlib.suppress(OSError):  # what it says next, or its silence, tells
            send(self.connection, message)


class FirstHost:
    """Says what is run, and gathers what came of it; use it in a ``with`` statement.

    Args:
        listener: Where the others come; closed once all are there, and at the latest at the end.
        num_hosts: How many there are, with this one.
        secret: What they must know.
        experiment: What they must have been asked, too.
        say: Told who comes.
    """

    def __init__(
        self, listener: socket.socket, *, num_hosts: int, secret: bytes, experiment: Experiment, say: Say
    ) -> None:
        self._listener = listener
        self._num_hosts = num_hosts
        self._secret = secret
        self._experiment = experiment
        self._say = say
        self._others: list[_Other] = []
        self._failed_s: float | None = None

    def __enter__(self) -> FirstHost:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._listener.close()
        for other in self._others:
            other.connection.close()

    def gather(self) -> None:
        """Wait for the others, as long as it takes; who does not know the secret is turned away."""
        while len(self._others) < self._num_hosts - 1:
            connection, (address, *_) = self._listener.accept()
            try:
                self._others.append(self._admitted(connection))
                self._say(f"{self._others[-1].name} is here: {len(self._others) + 1} of {self._num_hosts} hosts")
            except (OSError, KeyError, TypeError, ValueError) as error:
                connection.close()
                self._say(f"{address} is turned away: {error}")
        self._listener.close()

    def _admitted(self, connection: socket.socket) -> _Other:
        connection.settimeout(_MESSAGE_S)
        prove(connection, self._secret, ROLES, is_server=True)
        hello = receive(connection)
        name = str(hello["host"])
        theirs, ours = dict(hello["terms"]), terms(self._experiment)
        different = [key for key in ours if theirs.get(key) != ours[key]]
        if different:
            key = different[0]
            why = f"{key} is {theirs.get(key)!r} on {name}, and {ours[key]!r} on the first host"
            send(connection, {"say": "refused", "why": why})
            raise ConfigError(why)
        _keep_alive(connection)
        send(connection, {"say": "welcome"})
        return _Other(name, connection)

    def begin(self, name: RunName) -> None:
        """Have the others begin a run."""
        self._failed_s = None
        for other in self._others:
            other.outcome = None
            other.curves.clear()
            other.tell({"say": "run", "arm": name.arm, "seed": name.seed})

    def watch(self) -> str:
        """While the run goes on here: why it is to be ended, or an empty string.

        Raises:
            LaunchError: Another host has left.
        """
        self._hear(0.0)
        failed = [other for other in self._others if other.outcome is not None and not other.outcome.is_good]
        if not failed:
            return ""
        self._failed_s = self._failed_s or time.monotonic()
        late = time.monotonic() - self._failed_s > GRACE_S
        return _why(failed[0]) if late else ""

    def end(self, outcome: Outcome, curve: Path) -> Outcome:
        """Wait for the others' end, and put what their ranks wrote beside that of the ranks here.

        Args:
            outcome: Of the run here.
            curve: Folder for what ranks write.

        Raises:
            LaunchError: Another host has left.
        """
        self._wait(END_S if outcome.is_good else GRACE_S)
        for other in self._running():
            other.tell({"say": "call_off"})
        self._wait(END_S)
        for other in self._running():
            raise LaunchError(f"host {other.name} does not end its run; end it there, and give the command again")
        for other in self._others:
            for file, pieces in other.curves.items():
                if not (curve / file).exists():  # else the folder is shared
                    (curve / file).write_text("".join(pieces), encoding="utf-8")
        failed = [other for other in self._others if other.outcome is not None and not other.outcome.is_good]
        if failed and (outcome.is_good or outcome.why == _why(failed[0])):
            assert failed[0].outcome is not None
            return replace(outcome, is_good=False, why=_why(failed[0]), last_words=failed[0].outcome.last_words)
        return outcome

    def over(self, verdict: str, status: int) -> None:
        """Let the others go."""
        for other in self._others:
            other.tell({"say": "over", "verdict": verdict, "status": status})

    def _running(self) -> list[_Other]:
        return [other for other in self._others if other.outcome is None]

    def _hear(self, seconds: float) -> bool:
        """Take all that has been said; whether there was anything."""
        connections = {other.connection: other for other in self._others}
        ready, _, _ = select.select(list(connections), [], [], seconds)
        for connection in ready:
            connections[connection].hear()
        return bool(ready)

    def _wait(self, seconds: float) -> None:
        end_s = time.monotonic() + seconds
        while self._running() and (left := end_s - time.monotonic()) > 0:
            self._hear(min(left, 1.0))


class OtherHost:
    """Runs what the first host says; use it in a ``with`` statement.

    Args:
        connection: To the first host.
        secret: What both must know.
        host: Name of this one.
        experiment: What it was asked.

    Raises:
        ConfigError: The first host was asked something else.
        LaunchError: It does not answer, or knows another secret.
    """

    def __init__(self, connection: socket.socket, *, secret: bytes, host: str, experiment: Experiment) -> None:
        self._connection = connection
        try:
            connection.settimeout(_MESSAGE_S)
            prove(connection, secret, ROLES, is_server=False)
            send(connection, {"say": "hello", "host": host, "terms": terms(experiment)})
            connection.settimeout(None)  # others may be waited for
            answer = receive(connection)
        except OSError as error:
            connection.close()
            raise LaunchError(f"the first host does not take this one: {error}") from error
        if answer.get("say") == "refused":
            connection.close()
            raise ConfigError(f"the first host was asked something else: {answer.get('why')}")
        _keep_alive(connection)

    def __enter__(self) -> OtherHost:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._connection.close()

    def next_run(self) -> RunName | tuple[str, int]:
        """What to run next; or, when all is over, the verdict and a status.

        Raises:
            LaunchError: The first host has ended.
        """
        while True:
            message = self._heard()
            if message.get("say") == "run" and message.get("arm") in ARMS:
                return RunName(str(message["arm"]), int(message["seed"]))
            if message.get("say") == "over":
                return str(message.get("verdict")), int(message.get("status", 0))

    def watch(self) -> str:
        """While a run goes on: why it is to be ended, or an empty string.

        Raises:
            LaunchError: The first host has ended.
        """
        if select.select([self._connection], [], [], 0)[0] and self._heard().get("say") == "call_off":
            return "it has failed on another host"
        return ""

    def ended(self, outcome: Outcome, curve: Path) -> None:
        """Say how a run ended, and what its ranks wrote.

        Raises:
            LaunchError: The first host has ended.
        """
        try:
            for path in sorted(curve.glob("curve-rank-*.jsonl")):
                text = path.read_text(encoding="utf-8")
                for start in range(0, len(text), _PIECE):
                    piece = text[start : start + _PIECE]
                    send(self._connection, {"say": "curve", "file": path.name, "text": piece})
            values = {key: value for key, value in asdict(outcome).items() if key != "taken_from"}
            send(self._connection, {"say": "ended", **values})
        except OSError as error:
            raise _first_is_gone(error) from error

    def _heard(self) -> dict[str, Any]:
        try:
            return receive(self._connection)
        except OSError as error:
            raise _first_is_gone(error) from error


def connected(host: str, port: int, *, wait_s: float, say: Say) -> socket.socket:
    """A connection to the first host, which may come later than this one.

    Raises:
        LaunchError: It has not come in time.
    """
    end_s = time.monotonic() + wait_s
    said = False
    while True:
        try:
            return socket.create_connection((host, port), timeout=_MESSAGE_S)
        except OSError as error:
            if time.monotonic() > end_s:
                raise LaunchError(
                    f"the first host cannot be reached at {host}:{port}: {error}; give the same command there, and "
                    "check --rendezvous"
                ) from error
        if not said:
            said = True
            say(f"waiting for the first host, {host}:{port}")
        time.sleep(_POLL_S)


def _why(other: _Other) -> str:
    assert other.outcome is not None
    return f"on {other.name} {other.outcome.why}"


def _first_is_gone(error: OSError) -> LaunchError:
    return LaunchError(f"the first host has ended: {error}; give the same command on all hosts again: it goes on")


def _keep_alive(connection: socket.socket) -> None:
    """A host that is gone without a word is found within a minute."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):  # on Linux
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

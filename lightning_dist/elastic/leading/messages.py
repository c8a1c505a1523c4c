"""Events, rounds and orders as JSON, and back: what an agent and its leader say to each other.

A message is an object whose ``kind`` names it. From a member to the leader: ``hello`` (:class:`Hello`), ``told`` (an
event). From the leader: ``welcome`` or ``refused``, ``round``, ``stop``, ``end``, ``memory`` (what the next
leader is to know). Anybody: ``status``, which is answered with one (:class:`Status`) whether one leads or not;
``load`` (see :mod:`~lightning_dist.elastic.leading.load`); ``ping``; ``parting``, the last before a connection is
closed on purpose.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar, get_args, get_type_hints

from lightning_dist.config.elastic import ElasticConfig
from lightning_dist.elastic.policy.events import Event, HostReady, OptionsTold, SizesTold
from lightning_dist.elastic.policy.sizes import Sizes
from lightning_dist.elastic.rounds import Round, Seat
from lightning_dist.elastic.session import End, Stop

FORMAT = 1
_EVENTS: dict[str, type[Any]] = {kind.__name__: kind for kind in get_args(Event)}
T = TypeVar("T")


@dataclass(frozen=True)
class Status:
    """What an endpoint says of itself.

    Attributes:
        host: Its name.
        is_leading: Whether it leads.
        term: How many leaders there were, this one included; 0: it never heard of one.
        round: The newest round it knows.
    """

    host: str
    is_leading: bool
    term: int
    round: int


@dataclass(frozen=True)
class Hello:
    """What a member says first; what it told an earlier leader of the present round is in it.

    Attributes:
        host: Its name.
        address: Under which others reach it.
        instance: Tells this process from another one of the same host.
        format: :data:`FORMAT`.
        term: Of the newest leader it had.
        run: The run's name, if it knows or wants one.
        round: The newest round it was in.
        is_running: Its ranks of that round have not ended.
        ready: That it waits for a round.
        told: Events of the round, and the script's options, each with its serial number: a leader that has heard it
            already leaves it out.
        memory: The last that a leader wanted the next one to know.
        lost: The leader it lost, and whether that is known to be dead.
    """

    host: str
    address: str
    instance: str
    format: int = FORMAT
    term: int = 0
    run: str | None = None
    round: Round | None = None
    is_running: bool = False
    ready: HostReady | None = None
    told: tuple[tuple[int, Event], ...] = ()
    memory: Mapping[str, Any] = field(default_factory=dict)
    lost: tuple[str, bool] | None = None


def event_to_json(event: Event) -> dict[str, Any]:
    """As an object."""
    return {"event": type(event).__name__, **dataclasses.asdict(event)}


def event_from_json(value: Mapping[str, Any]) -> Event:
    """An event; fields that a later version has added are left out.

    Raises:
        ConnectionError: It is none.
    """
    kind = _EVENTS.get(str(value.get("event")))
    if kind is None:
        raise ConnectionError(f"what was sent is no event: {value.get('event')!r}")
    if kind is OptionsTold:
        return OptionsTold(_build(ElasticConfig, value.get("options")))
    if kind is SizesTold:
        return SizesTold(_build(Sizes, value.get("sizes")))
    event: Event = _build(kind, value)
    return event


def round_to_json(value: Round) -> dict[str, Any]:
    """As an object."""
    return dataclasses.asdict(value)


def round_from_json(value: Mapping[str, Any]) -> Round:
    """A round.

    Raises:
        ConnectionError: It is none.
    """
    try:
        seats = tuple(_build(Seat, seat) for seat in value["seats"])
    except (TypeError, KeyError) as error:
        raise ConnectionError(f"what was sent is no round: {error}") from error
    return dataclasses.replace(_build(Round, {**value, "seats": ()}), seats=seats)


def order_to_json(order: Stop | End) -> dict[str, Any]:
    """A message."""
    return {"kind": "stop" if isinstance(order, Stop) else "end", **dataclasses.asdict(order)}


def order_from_json(value: Mapping[str, Any]) -> Stop | End:
    """The order in a message."""
    return _build(Stop, value) if value["kind"] == "stop" else _build(End, value)


def status_to_json(status: Status) -> dict[str, Any]:
    """A message."""
    return {"kind": "status", **dataclasses.asdict(status)}


def status_from_json(value: Mapping[str, Any]) -> Status:
    """The status in a message."""
    return _build(Status, value)


def hello_to_json(hello: Hello) -> dict[str, Any]:
    """A message."""
    plain = {entry.name: getattr(hello, entry.name) for entry in dataclasses.fields(hello)}
    return {
        "kind": "hello",
        **plain,
        "round": None if hello.round is None else round_to_json(hello.round),
        "ready": None if hello.ready is None else event_to_json(hello.ready),
        "told": [[serial, event_to_json(event)] for serial, event in hello.told],
        "memory": dict(hello.memory),
    }


def hello_from_json(value: Mapping[str, Any]) -> Hello:
    """The hello in a message.

    Raises:
        ConnectionError: It is none, or of another version of this library.
    """
    if value.get("kind") != "hello":
        raise ConnectionError(f"a hello comes first, not {value.get('kind')!r}")
    if value.get("format") != FORMAT:
        raise ConnectionError(
            f"host {value.get('host')} speaks version {value.get('format')} of the agents' messages, this one "
            f"{FORMAT}; install the same version of lightning_dist on all hosts"
        )
    try:
        own = {
            "round": None if value["round"] is None else round_from_json(value["round"]),
            "ready": None if value["ready"] is None else _build(HostReady, value["ready"]),
            "told": tuple((int(serial), event_from_json(event)) for serial, event in value["told"]),
            "lost": None if value["lost"] is None else (str(value["lost"][0]), bool(value["lost"][1])),
        }
        hello = Hello(**{**_known(Hello, value), **own})
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise ConnectionError(f"what was sent is no hello: {error}") from error
    if not (isinstance(hello.host, str) and isinstance(hello.address, str) and isinstance(hello.memory, Mapping)):
        raise ConnectionError("what was sent is no hello")
    return hello


def _known(kind: type[Any], value: Mapping[str, Any]) -> dict[str, Any]:
    return {entry.name: value[entry.name] for entry in dataclasses.fields(kind) if entry.name in value}


def _build(kind: type[T], value: Any) -> T:
    """A dataclass of plain values, each of its declared type."""
    try:
        known = _known(kind, value)
        for name, hint in get_type_hints(kind).items():
            if isinstance(hint, type) and issubclass(hint, enum.Enum) and name in known:
                known[name] = hint(known[name])
            elif hint in (int, str, bool) and name in known and type(known[name]) is not hint:
                raise TypeError(f"{name}={known[name]!r} is no {hint.__name__}")
            elif isinstance(known.get(name), list):  # JSON knows no tuples
                known[name] = tuple(known[name])
        return kind(**known)
    except (TypeError, ValueError, KeyError) as error:
        raise ConnectionError(f"what was sent is no {kind.__name__}: {error}") from error

"""What ranks and conductors tell each other, as files in a folder that all hosts of the run share; and the record.

::

    plan.json              the plan, alike for all
    claims/NUMBER          made by whoever begins a fault, exclusively: each happens once, also after restarts
    asked/NUMBER.json      a rank asks the conductors for a fault that is theirs
    answered/NUMBER.json   what became of that
    ranks/HOST-PID.json    a rank's process
    chaos.jsonl            what has happened, a line each

A file is there whole or not at all. Lines are written at the end of the record in one call each, so that those of
several processes do not mix.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lightning_dist.elastic.chaos.host.processes import Process
from lightning_dist.elastic.chaos.plan import Fault, Plan, parse
from lightning_dist.errors import ConfigError, LaunchError

VARIABLE = "HIERDIST_CHAOS"
"""Environment variable with the folder; in ranks it lets the plan happen."""
HOST_VARIABLE = "HIERDIST_CHAOS_HOST"
"""Environment variable with the name of the host that a rank's conductor has."""
RECORD = "chaos.jsonl"
_PLAN = "plan.json"


@dataclass(frozen=True)
class Asked:
    """A rank asks for a fault.

    Attributes:
        number: Of the fault in the plan.
        step: Steps done.
        host: Of the rank.
        process: The rank's.
        master: Address and port of the ranks' store; ``None``: unknown.
        checkpoints: Folder or URL that the run saves to; ``None``: unknown.
    """

    number: int
    step: int
    host: str
    process: Process
    master: tuple[str, int] | None
    checkpoints: str | None


@dataclass(frozen=True)
class Answer:
    """What a conductor has made of it.

    Attributes:
        is_done: It has happened, or will by itself; else it was refused.
        detail: What was done, or why not.
    """

    is_done: bool
    detail: str


class ChaosFolder:
    """See the module.

    Args:
        path: Of the folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def make(self, plan: Plan) -> None:
        """Begin, or join what another host has begun.

        Raises:
            LaunchError: The folder cannot be made, or is one of another plan.
        """
        try:
            for name in ("claims", "asked", "answered", "ranks"):
                (self.path / name).mkdir(parents=True, exist_ok=True)
            text = plan.to_json()
            with contextlib.suppress(FileExistsError):
                _write_new(self.path / _PLAN, text)
            there = (self.path / _PLAN).read_text(encoding="utf-8")
        except OSError as error:
            raise LaunchError(f"the folder {self.path} cannot be used: {error}") from error
        if there != text:
            raise LaunchError(f"{self.path} belongs to another plan; name another folder with --record")

    def plan(self) -> Plan:
        """The plan.

        Raises:
            ConfigError: There is none.
        """
        try:
            return parse((self.path / _PLAN).read_text(encoding="utf-8"), name=str(self.path / _PLAN))
        except OSError as error:
            raise ConfigError(f"{VARIABLE}={self.path} is no folder of hierdist chaos: {error}") from error

    def claim(self, number: int) -> bool:
        """Whether the caller is the one who begins a fault."""
        try:
            _write_new(self.path / "claims" / str(number), str(os.getpid()))
        except FileExistsError:
            return False
        return True

    def is_claimed(self, number: int) -> bool:
        """Whether somebody has begun it."""
        return (self.path / "claims" / str(number)).exists()

    def register(self, host: str, process: Process, rank: int) -> None:
        """Say which process a rank is."""
        _write(self.path / "ranks" / f"{host}-{process.pid}.json", json.dumps({**asdict(process), "rank": rank}))

    def ranks_of(self, host: str) -> list[Process]:
        """Living processes of the ranks of a host."""
        found = []
        for path in sorted((self.path / "ranks").glob(f"{host}-*.json")):
            value = json.loads(path.read_text())
            process = Process(value["pid"], value["started"])
            if process.is_alive():
                found.append(process)
        return found

    def ask(self, asked: Asked) -> None:
        """Let the conductors know."""
        _write(self.path / "asked" / f"{asked.number}.json", json.dumps(asdict(asked)))

    def asked(self) -> list[Asked]:
        """What has no answer yet."""
        found = []
        for path in (self.path / "asked").glob("*.json"):
            if not (self.path / "answered" / path.name).exists():
                value = json.loads(path.read_text())
                master = value.pop("master")
                process = Process(**value.pop("process"))
                found.append(Asked(**value, process=process, master=tuple(master) if master else None))
        return sorted(found, key=lambda asked: asked.number)

    def answer(self, number: int, answer: Answer) -> None:
        """To :meth:`ask`; the first one counts."""
        with contextlib.suppress(FileExistsError):
            _write_new(self.path / "answered" / f"{number}.json", json.dumps(asdict(answer)))

    def answer_to(self, number: int) -> Answer | None:
        """To :meth:`ask`, if there is one by now."""
        try:
            return Answer(**json.loads((self.path / "answered" / f"{number}.json").read_text()))
        except FileNotFoundError:
            return None

    def note(self, what: str, **details: Any) -> None:
        """Write a line of the record: ``injected``, ``refused``, ``undone``, ``began``, ``ended``, with details."""
        line = json.dumps({"time": round(time.time(), 3), "what": what, **details}, allow_nan=False) + "\n"
        descriptor = os.open(self.path / RECORD, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            os.write(descriptor, line.encode())
        finally:
            os.close(descriptor)

    def record(self) -> list[dict[str, Any]]:
        """All lines so far that are whole."""
        try:
            text = (self.path / RECORD).read_text(encoding="utf-8")
        except FileNotFoundError:
            return []
        return [json.loads(line) for line in text.split("\n")[:-1] if line]


def facts_of(number: int, fault: Fault) -> dict[str, Any]:
    """What a line of the record says of a fault."""
    options = {name: value for name, value in fault.options.items() if value is not None}
    return {"fault": number, "kind": fault.kind, "options": options, "rank": fault.rank}


def _write_new(path: Path, text: str) -> None:
    """Whole, and only if nothing is there; by a link, as an exclusive file could be seen empty."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        fresh.write_text(text, encoding="utf-8")
        os.link(fresh, path)
    finally:
        fresh.unlink(missing_ok=True)


def _write(path: Path, text: str) -> None:
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    fresh.write_text(text, encoding="utf-8")
    os.replace(fresh, path)

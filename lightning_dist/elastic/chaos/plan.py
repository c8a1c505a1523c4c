"""Which faults hit a run, and when: at the first step from a given one on that a given rank begins."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from lightning_dist.config.checks import check_count
from lightning_dist.elastic.chaos.kinds import CHECKS, KINDS, REQUIRED, Kind
from lightning_dist.errors import ConfigError, unknown_key, unknown_option

_ALWAYS = ("kind", "rank", "step")


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        kind: Of :data:`~lightning_dist.elastic.chaos.kinds.KINDS`.
        rank: Global rank whose steps count; it is hit, or its host.
        step: Optimizer steps done before; it happens before the next one begins, or when the rank comes to be beyond.
        options: Of the kind, with their defaults.
    """

    kind: str
    rank: int
    step: int
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "options", MappingProxyType(dict(self.options)))

    @property
    def what(self) -> Kind:
        """Of the table."""
        return KINDS[self.kind]

    def __str__(self) -> str:
        given = "".join(f" {name}={value}" for name, value in self.options.items() if value is not None)
        return f"{self.kind}{given}"


@dataclass(frozen=True)
class Plan:
    """All faults of a run; those of the same rank and step happen in this order."""

    faults: tuple[Fault, ...]

    def of_rank(self, rank: int) -> list[tuple[int, Fault]]:
        """Number and fault of those that a rank begins, by step."""
        mine = [(number, fault) for number, fault in enumerate(self.faults) if fault.rank == rank]
        return sorted(mine, key=lambda entry: (entry[1].step, entry[0]))

    def to_json(self) -> str:
        """For :func:`parse`; the same plan gives the same text."""
        return json.dumps({"faults": self._as_values()}, indent=1)

    def to_yaml(self) -> str:
        """For a file that people read."""
        return str(yaml.safe_dump({"faults": self._as_values()}, sort_keys=False))

    def _as_values(self) -> list[dict[str, Any]]:
        return [
            {
                "kind": fault.kind,
                "rank": fault.rank,
                "step": fault.step,
                **{name: value for name, value in fault.options.items() if value is not None},
            }
            for fault in self.faults
        ]


def make_fault(kind: str, *, rank: int, step: int, where: str = "fault", **options: Any) -> Fault:
    """A checked fault, with the defaults of its kind.

    Args:
        kind: Of :data:`~lightning_dist.elastic.chaos.kinds.KINDS`.
        rank: See :class:`Fault`.
        step: See :class:`Fault`.
        where: What it is called in messages.
        **options: Of the kind.

    Raises:
        ConfigError: An option is missing, none of the kind's, or has a value that it cannot have.
    """
    if kind not in KINDS:
        raise unknown_option(f"{where}.kind", kind, KINDS)
    check_count(f"{where}.rank", rank, low=0, unit="(a rank)")
    check_count(f"{where}.step", step, low=0, unit="steps")
    known = KINDS[kind].options
    for name, value in options.items():
        if name not in known:
            raise unknown_key(f"{where}.{name}", kind, [*_ALWAYS, *known])
        if value is None:
            continue
        if name in CHECKS:
            CHECKS[name](f"{where}.{name}", value)
        elif not isinstance(value, str) or not value:
            raise ConfigError(f"{where}.{name}={value!r} ({type(value).__name__}): must be text that is not empty")
    filled = {name: default if options.get(name) is None else options[name] for name, default in known.items()}
    for name, value in filled.items():
        if value is REQUIRED:
            raise ConfigError(f"{where} ({kind}) has no {name}; write it, e.g. {_EXAMPLES[name]}")
    return Fault(kind, rank, step, filled)


_EXAMPLES = {"interface": "interface: eth0", "rate_mbit": "rate_mbit: 10"}


def parse(text: str, *, name: str = "plan") -> Plan:
    """A plan from YAML or JSON: a mapping with one key, ``faults``, a list of mappings.

    Args:
        text: See above.
        name: What it is called in messages.

    Raises:
        ConfigError: It is no such thing, or a fault has a mistake; the message says which.
    """
    try:
        given = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{name} is no YAML: {error}") from error
    if not isinstance(given, dict) or set(given) != {"faults"} or not isinstance(given["faults"], list):
        raise ConfigError(
            f"{name} must be a mapping with one key, faults, that has a list, e.g.\n"
            "faults:\n  - {kind: kill, rank: 1, step: 10}"
        )
    return Plan(tuple(_fault(entry, f"{name}: faults[{number}]") for number, entry in enumerate(given["faults"])))


def read_plan(path: Path) -> Plan:
    """A plan from a file.

    Raises:
        ConfigError: It cannot be read, or is no plan.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the plan {path} cannot be read: {error}") from error
    return parse(text, name=str(path))


def kinds_of(faults: Iterable[Fault]) -> Sequence[str]:
    """Names of the kinds, each once, as in the table."""
    there = {fault.kind for fault in faults}
    return [kind for kind in KINDS if kind in there]


def _fault(entry: Any, where: str) -> Fault:
    if not isinstance(entry, dict) or not all(isinstance(key, str) for key in entry):
        raise ConfigError(f"{where} must be a mapping, e.g. {{kind: kill, rank: 1, step: 10}}, got {entry!r}")
    for name in _ALWAYS:
        if name not in entry:
            raise ConfigError(f"{where} has no {name}; write it, e.g. {{kind: kill, rank: 1, step: 10}}")
    options = {name: value for name, value in entry.items() if name not in _ALWAYS}
    if "where" in options:
        raise unknown_key(f"{where}.where", str(entry["kind"]), _ALWAYS)
    return make_fault(str(entry["kind"]), rank=entry["rank"], step=entry["step"], where=where, **options)
